"""Readers of images with texts: a folder of images, or Parquet files with the bytes of images.

A folder has either a text file beside each image, `a.txt` beside `a.png`, or a table `metadata.jsonl` or `metadata.csv`
as Hugging Face's ImageFolder reads it. Paths may be on this machine or at any URL that fsspec reads.
"""

import csv
import io
import json
import os
import posixpath
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash
from jaxtyping import UInt8

from diloco_jax.training.data.documents import HALVES, REPLACEMENT, check_text, file_system, needs, time_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = ("metadata.jsonl", "metadata.csv")
# Pillow tries only these, because its many other readers are hardly tested against hostile files.
FORMATS = ("PNG", "JPEG", "WEBP")
# A small file may decompress to many pixels, so there are two limits. Pillow warns from 89 million pixels.
FILE_BYTES_MAX, PIXELS_MAX = 1 << 26, 1 << 26
# To shrink a longer side, Pillow would need gigabytes, or fail. JPEG and WebP have no longer ones.
SIDE_MAX = 1 << 16
# The longest text, in bytes of a file or in characters, because texts are read as a whole.
TEXT_MAX = 1 << 20
# Rows of a Parquet file, or texts of a folder, that are read at once.
ROWS = 64


class PictureSource(NamedTuple):
    """A place with images and texts: a folder, a Parquet file, or a URL."""

    path: str
    # Patterns of the names of images, or of Parquet files.
    patterns: Sequence[str] = ("*",)
    # Column or key of the text.
    field: str = "text"
    # Column of the image in Parquet.
    column: str = "image"


class Picture(NamedTuple):
    """An image that is read on demand, with its text; the text is None or "" if there is none."""

    name: str
    text: str | None
    read: Callable[[], bytes]


class Broken(Exception):
    """An image that cannot be decoded or is too large; the message says why, without the image's name."""


def decode(data: bytes) -> UInt8[np.ndarray, "height width 3"]:
    """Decode an image to RGB, turned upright as its EXIF orientation says; transparency is dropped.

    Raises:
      Broken: the bytes are not a whole PNG, JPEG or WebP of 8 bits per channel within the limits.
      ValueError: Pillow is missing.
    """
    pillow, operations = needs("PIL.Image"), needs("PIL.ImageOps")
    if len(data) > FILE_BYTES_MAX:
        raise Broken(f"it has {len(data):,} bytes, and the limit is {FILE_BYTES_MAX:,}")
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
            # Opening reads only the header, so a small file that decompresses to gigabytes is refused here.
            if (pixels := image.width * image.height) > PIXELS_MAX:
                raise Broken(f"it has {image.width} x {image.height} = {pixels:,} pixels, the limit is {PIXELS_MAX:,}")
            if max(image.size) > SIDE_MAX:
                raise Broken(f"it has {image.width} x {image.height} pixels, and the limit of a side is {SIDE_MAX:,}")
            if image.mode[0] in "IF":
                # Conversion to RGB would clip 16 bits at 255, and the image would be white.
                raise Broken(f"its pixels are of mode {image.mode}; convert it to 8 bits per channel")
            return np.asarray(operations.exif_transpose(image).convert("RGB"))
    except (Broken, MemoryError):
        raise
    except pillow.UnidentifiedImageError as error:
        # The error's own message has an address in memory, which differs between runs.
        raise Broken(f"its {len(data):,} bytes do not begin a PNG, JPEG or WebP") from error
    # Pillow's readers raise OSError, SyntaxError, ValueError, struct.error and others for damaged files.
    except Exception as error:
        raise Broken(f"it is not a whole PNG, JPEG or WebP: {type(error).__name__}: {error}") from error


def list_pictures(source: PictureSource) -> tuple[Callable[[], Iterator[Picture]], str]:
    """List the images of a source; return a function that yields them, and a digest of the source.

    The digest covers the names, sizes and times of the files. Images of a folder have the order of a hash of their
    names. This mixes the subfolders, so that the held-out end has images of all of them. Rows of Parquet keep their
    order.

    Raises:
      ValueError: there is no image, or an image has no text. The returned function raises it if a table cannot be read
        or names an image that does not exist.
    """
    fs, root = file_system(source.path)
    files: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for full, info in fs.find(root, detail=True).items():
        name = full[len(root) :].lstrip("/") or PurePosixPath(full).name
        if "/." not in f"/{name}":
            files[name] = full, info
    tables = sorted(name for name in files if _of(name, (".parquet",)) and _matches(name, source.patterns))
    images = {name for name in files if _of(name, SUFFIXES) and _matches(name, source.patterns)}
    texts = [name for name in files if PurePosixPath(name).name in TABLES or _of(name, (".txt",))]
    if not tables and not images:
        raise ValueError(
            f"'{source.path}' has no {', '.join(SUFFIXES)} and no .parquet file; correct the path, or data.patterns"
        )
    hasher = xxhash.xxh3_128(f"{source.field} {source.column}".encode("utf-8", "surrogatepass"))
    for name in tables or sorted([*images, *texts]):
        full, info = files[name]
        # A pipe would be read forever. fsspec reports links as other than files too.
        if info["type"] != "file" and not fs.isfile(full):
            raise ValueError(f"{name!r} of '{source.path}' is a broken link, a pipe or a device; remove it")
        hasher.update(os.fsencode(f"{name} {info['size']} {time_of(info)}\n"))
    paths = {name: full for name, (full, _) in files.items()}
    if tables:
        ordered = sorted(tables, key=_mixed)
        return partial(_from_parquet, fs, [(name, paths[name]) for name in ordered], source), hasher.hexdigest()
    if _has_table(files):
        return partial(_rows, fs, paths, images, source), hasher.hexdigest()
    beside = _beside(paths, images)
    for name in sorted(beside.values()):
        _check_length(files[name][1]["size"], name)
    return partial(_pairs, fs, paths, beside), hasher.hexdigest()


def _of(name: str, suffixes: Sequence[str]) -> bool:
    return PurePosixPath(name).suffix.lower() in suffixes


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(PurePosixPath(name).name, pattern) for pattern in patterns)


def _mixed(name: str) -> tuple[int, str]:
    return zlib.crc32(os.fsencode(name)), name


def _has_table(files: Mapping[str, Any]) -> bool:
    return any(PurePosixPath(name).name in TABLES for name in files)


def _read(fs: Any, path: str) -> bytes:
    """Read an image, or its beginning if it is so large that `decode` refuses it."""
    return bytes(fs.cat_file(path, end=FILE_BYTES_MAX + 1))


def _beside(paths: Mapping[str, str], images: set[str]) -> dict[str, str]:
    """Return the text file of each image; ValueError if one is missing."""
    beside = {name: str(PurePosixPath(name).with_suffix(".txt")) for name in images}
    if missing := sorted(name for name, text in beside.items() if text not in paths):
        raise ValueError(
            f"{missing[0]} has no text, like {len(missing) - 1} other images of {len(images)}: write "
            f"{beside[missing[0]]} beside it, write metadata.jsonl, or leave such images out with data.patterns"
        )
    return beside


def _pairs(fs: Any, paths: Mapping[str, str], beside: Mapping[str, str]) -> Iterator[Picture]:
    """Yield the images of a folder with the text files beside them."""
    names = iter(sorted(beside, key=_mixed))
    # A bucket answers many requests at once.
    while chosen := list(islice(names, ROWS)):
        # Unlike cat, this does not take [, ? and * in names as patterns.
        found = fs.cat_ranges([paths[beside[name]] for name in chosen], None, None)
        for name, data in zip(chosen, found, strict=True):
            if isinstance(data, Exception):
                raise data
            text = bytes(data).decode("utf-8-sig", "replace").rstrip("\r\n")
            yield Picture(name, text, partial(_read, fs, paths[name]))


def _rows(fs: Any, paths: Mapping[str, str], images: set[str], source: PictureSource) -> Iterator[Picture]:
    """Yield the images that the tables of a folder name; names are relative to the folder of their table."""
    found = list(_named(fs, paths, images, source))
    yield from sorted(found, key=lambda picture: _mixed(picture.name))


def _named(fs: Any, paths: Mapping[str, str], images: set[str], source: PictureSource) -> Iterator[Picture]:
    for table in sorted(name for name in paths if PurePosixPath(name).name in TABLES):
        text = bytes(fs.cat_file(paths[table])).decode("utf-8-sig", "replace")
        rows = _jsonl(text, table) if table.endswith(".jsonl") else _csv(text, table)
        for number, row in enumerate(rows, 1):
            where = f"{table}, row {number}"
            if not isinstance(row, dict) or not {"file_name", source.field} <= row.keys():
                have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{where} has {have}; it needs file_name and '{source.field}', or name another in data.field"
                )
            name = posixpath.normpath(posixpath.join(posixpath.dirname(table), str(row["file_name"])))
            if name not in paths:
                raise ValueError(f"{where} names {row['file_name']}, which is not there; add it, or remove the row")
            if name in images:
                yield Picture(name, _text(row[source.field], source.field, where), partial(_read, fs, paths[name]))


def _jsonl(text: str, table: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{table}, line {number} is not JSON: {error}; correct it") from error


def _csv(text: str, table: str) -> Iterator[Any]:
    rows = csv.DictReader(io.StringIO(text))
    try:
        yield from rows
    except csv.Error as error:
        raise ValueError(
            f"{table} is not CSV at line {rows.line_num}: {error}; correct it, such as a quote without its end"
        ) from error


def _check_length(length: int, where: str) -> None:
    if length > TEXT_MAX:
        raise ValueError(f"the text of {where} has a length of {length:,}, and the limit is {TEXT_MAX:,}; shorten it")


def _text(value: Any, field: str, where: str) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    try:
        check_text(value, field)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _check_length(len(value or ""), where)
    return HALVES.sub(REPLACEMENT, value) if value else None


def _from_parquet(fs: Any, tables: Sequence[tuple[str, str]], source: PictureSource) -> Iterator[Picture]:
    parquet, arrow = needs("pyarrow.parquet"), needs("pyarrow")
    for name, path in tables:
        try:
            with fs.open(path, "rb") as file:
                yield from _table(parquet.ParquetFile(file), name, source)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} has text that is not UTF-8: {error}; write it again as UTF-8") from error
        except (OSError, arrow.ArrowException) as error:
            # An error of the disk has a number, unlike errors of pyarrow.
            if getattr(error, "errno", None):
                raise
            raise ValueError(f"{name} cannot be read as Parquet: {error}; correct or remove it") from error


def _table(table: Any, name: str, source: PictureSource) -> Iterator[Picture]:
    columns = [source.column, source.field]
    if missing := {*columns} - {*table.schema_arrow.names}:
        raise ValueError(
            f"{name} has columns {', '.join(table.schema_arrow.names)}, not '{min(missing)}'; name the image's in "
            "data.images.column and the text's in data.field"
        )
    number = 0
    for batch in table.iter_batches(ROWS, columns=columns):
        for row in batch.to_pylist():
            where = f"{name}, row {number}"
            data = row[source.column]
            data = data.get("bytes") if isinstance(data, dict) else data
            if not isinstance(data, bytes):
                raise ValueError(
                    f"{where} has {type(data).__name__} as '{source.column}'; it must be the bytes of an image, or "
                    "have them under 'bytes' (with `datasets`: cast the column to Image and embed the files)"
                )
            yield Picture(where, _text(row[source.field], source.field, where), partial(bytes, data))
            number += 1
