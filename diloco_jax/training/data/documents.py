"""Documents of a text source, in an order that depends only on the names of its files.

A source is a file or a folder, on this machine or anywhere that fsspec reads. Formats are text (a file is a document),
JSONL, Parquet, Arrow as `datasets` saves it, and ArrayRecord. A source is listed as pieces, so that several processes
can read it.
"""

import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import fsspec
import xxhash
from fsspec.utils import compressions

from diloco_jax.protocol.releases import install_hint
from diloco_jax.training.data.config import LossOn

Value = TypeVar("Value")
PIECE_BYTES = 1 << 24
# Rows that are read at once.
ROWS = 1024
# The character that replaces bytes that are not UTF-8.
REPLACEMENT = "\ufffd"
# Surrogates, halves of characters, which JSON may contain.
HALVES = re.compile("[\ud800-\udfff]")
BLOCK_BYTES = 1 << 22
# The usual names of the column with the text, and of the one with the messages.
TEXT, MESSAGES = "text", "messages"
# The columns of chat data that are read, beside the one with the messages.
PROMPT, COMPLETION, TOOLS, OPTIONS = COLUMNS = ("prompt", "completion", "tools", "chat_template_kwargs")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".array_record": "arrayrecord",
    ".arrayrecord": "arrayrecord",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Archives and compressed files that would be read as garbage.
PACKED = (".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".zst")
EXTRAS = {"gcsfs": "gs", "s3fs": "s3"}


class SourcePiece(NamedTuple):
    """A file of a source, or a range of it: bytes of JSONL, row groups of Parquet or records of ArrayRecord."""

    url: str
    # A format of SUFFIXES, or text.
    format: str
    # The field of a row that has the text, or the messages.
    field: str
    start: int
    # 0: the end of the file.
    stop: int
    size: int  # bytes
    # The tokens of conversations that have weights in the loss; None: the rows are text.
    loss_on: LossOn | None = None


class TextSource(NamedTuple):
    """A place with documents: a file, a folder or a URL."""

    path: str
    # Empty: the format follows from the names of the files.
    format: str = ""
    # Patterns of the names of a folder's files.
    patterns: Sequence[str] = ("*",)
    field: str = TEXT
    # As in `SourcePiece`.
    loss_on: LossOn | None = None


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a path or URL and the path in it; ValueError if a package for it is missing."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = next((f" (the extra '{extra}')" for name, extra in EXTRAS.items() if name in str(error)), "")
        raise ValueError(f"'{url}' needs a package that is missing: {error}{extra}") from error
    except ValueError as error:
        raise ValueError(f"'{url}' cannot be read: {error}; use a local path, gs:// or s3://") from error
    return fs, path


def needs(name: str, extra: str = "data") -> Any:
    """Import a module of an extra; ValueError if it is missing."""
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise ValueError(f"{name.split('.')[0]} is missing; {install_hint(extra)}") from error


def time_of(info: Mapping[str, Any]) -> Any:
    """Return what fsspec reports about a file that changes with its content, beside its size; "" if nothing."""
    return next((info[key] for key in ("ETag", "etag", "mtime", "LastModified", "updated") if key in info), "")


def _format(name: str) -> str:
    return SUFFIXES.get(PurePosixPath(name.removesuffix(next(filter(name.endswith, COMPRESSED), ""))).suffix, "text")


def list_pieces(source: TextSource) -> tuple[list[SourcePiece], str]:
    """List the pieces of a source; return them with a digest of the names, sizes and times of its files.

    Raises:
      ValueError: the source has no readable file, or files of several formats.
    """
    fs, root = file_system(source.path)
    found = {}
    for full, info in fs.find(root, detail=True).items():
        name = full[len(root) :].lstrip("/") or PurePosixPath(full).name
        hidden = "/." in f"/{name}"
        wanted = any(fnmatch(PurePosixPath(name).name, pattern) for pattern in source.patterns)
        if info["size"] and wanted and not hidden:
            found[name] = full, info
    # Text is not counted, because a README beside Parquet files is not a document.
    formats = {_format(name) for name in found} - {"text"}
    if not source.format and len(formats) > 1:
        raise ValueError(
            f"'{source.path}' has files of several formats ({', '.join(sorted(formats))}); name one folder"
        )
    format = source.format or next(iter(formats), "text")
    if format != "text" and list(found) != [PurePosixPath(root).name]:
        found = {name: each for name, each in found.items() if _format(name) == format}
    if not found:
        raise ValueError(f"'{source.path}' has no {format} file with content; correct the path, or patterns")
    # fsspec reads .zst only if zstandard is installed.
    readable = tuple(f".{suffix}" for suffix in compressions if suffix != "zip")
    if source.loss_on and format in ("text", "arrayrecord"):
        raise ValueError(f"'{source.path}' has no JSONL, Parquet or Arrow; conversations are rows of such files")
    if packed := [name for name in sorted(found) if name.endswith(PACKED) and not name.endswith(readable)]:
        raise ValueError(
            f"'{source.path}' has {len(packed)} packed files that cannot be read, such as {packed[0]}; unpack them, "
            "leave them out with --patterns, or for .zst install zstandard"
        )
    pieces: list[SourcePiece] = []
    chat = f" {source.loss_on}" if source.loss_on else ""
    hasher = xxhash.xxh3_128(f"{format} {source.field}{chat}".encode())
    # The order follows a hash of the name, which mixes folders, because the end of the corpus is held out.
    for name in sorted(found, key=lambda name: (zlib.crc32(os.fsencode(name)), name)):
        full, info = found[name]
        hasher.update(os.fsencode(f"{name} {info['size']} {time_of(info)}\n"))
        url = full if "file" in fs.protocol else fs.unstrip_protocol(full)
        pieces += _split(SourcePiece(url, format, source.field, 0, 0, info["size"], source.loss_on))
    return pieces, hasher.hexdigest()


def _split(piece: SourcePiece) -> Iterator[SourcePiece]:
    """Cut a large file into ranges if its format allows it."""
    many = -(-piece.size // PIECE_BYTES)
    if piece.format == "parquet" and many > 1:
        with fsspec.open(piece.url) as file:
            count = needs("pyarrow.parquet").ParquetFile(file).num_row_groups
    elif piece.format == "arrayrecord" and many > 1:
        count = _records(piece.url).num_records()
    else:
        count = piece.size if piece.format == "jsonl" and not piece.url.endswith(COMPRESSED) else 1
    many = min(many, count)
    edges = [count * number // many for number in range(many + 1)] if many > 1 else [0, 0]
    for start, stop in itertools.pairwise(edges):
        yield piece._replace(start=start, stop=stop, size=piece.size // max(1, many))


def read_documents(piece: SourcePiece) -> Iterator[str]:
    """Yield the documents of a piece, "" for a row without text; bytes that are not UTF-8 become U+FFFD."""

    def text_of(value: Any) -> str:
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        check_text(value, piece.field)
        return HALVES.sub(REPLACEMENT, value or "")

    yield from read_values(piece, text_of)


def read_values(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    """Yield a value for each row of a piece.

    Args:
      parse: takes the field of a row, or the whole row of chat data; its ValueError names what is wrong with it.
    """
    read: Callable[[SourcePiece, Callable[[Any], Value]], Iterator[Value]] = {
        "text": _text, "jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow, "arrayrecord": _array_record
    }[piece.format]  # fmt: skip
    try:
        yield from read(piece, parse)
    except (EOFError, ValueError, KeyError, OverflowError, OSError, RuntimeError, lzma.LZMAError, zlib.error) as error:
        # An error of the disk has a number, unlike errors of pyarrow and of compression.
        if isinstance(error, OSError) and error.errno:
            raise
        remedy = "" if "(--field" in str(error) or "; " in str(error) else "; correct or remove it"
        raise ValueError(f"{piece.url} cannot be read as {piece.format}: {error}{remedy}") from error


def check_text(value: Any, field: str) -> None:
    """Raise ValueError if the field of a row holds neither text nor nothing."""
    if not isinstance(value, str | None):
        kind = type(value).__name__
        raise ValueError(f"field '{field}' holds {kind}, not text; name another (--field, data.field)")


def _text(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    with fsspec.open(piece.url, "rb", compression="infer") as file:
        yield parse(file.read().decode("utf-8", errors="replace"))


def _jsonl(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    with fsspec.open(piece.url, "rb", compression="infer") as file:
        # The previous piece reads the line that starts before this one.
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        at = file.tell()
        while (not piece.stop or at < piece.stop) and (line := file.readline()):
            if line.strip():
                try:
                    value = parse(_json_of(line, "" if piece.loss_on else piece.field))
                except (ValueError, RecursionError) as error:
                    why = str(error)
                    if isinstance(error, json.JSONDecodeError):
                        why = f"{error.msg} (character {error.pos + 1} of the line)"
                    raise ValueError(f"line {_number_of(piece.url, at)}, at byte {at}: {why}") from error
                yield value
            at += len(line)


def _json_of(line: bytes, field: str) -> Any:
    """Return the field of a line of JSON, with an empty name the whole row; ValueError names what is wrong."""
    row = json.loads(line.decode("utf-8-sig", "replace"))
    if not isinstance(row, dict) or (field and field not in row):
        keys = f"it has {', '.join(row)}" if isinstance(row, dict) else "it is not an object"
        raise ValueError(f"{keys}; name the field with the text (--field, data.field)")
    return row[field] if field else row


def _number_of(url: str, at: int) -> int:
    """Return the number of the line that starts at a byte of an uncompressed file, counted from 1."""
    number = 1
    with fsspec.open(url, "rb", compression="infer") as file:
        while at and (block := file.read(min(at, BLOCK_BYTES))):
            number += block.count(b"\n")
            at -= len(block)
    return number


def _rows(
    batches: Iterator[Any], piece: SourcePiece, names: Sequence[str], parse: Callable[[Any], Value], first: int = 0
) -> Iterator[Value]:
    """Yield a value for each row of a table, from its column with the text; of chat data from the whole row.

    Args:
      first: the rows of the table before this piece.
    """
    if piece.loss_on:
        number = first
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                try:
                    value = parse(row)
                except ValueError as error:
                    raise ValueError(f"row {number}: {error}") from error
                yield value
        return
    if piece.field not in names:
        raise ValueError(f"it has columns {', '.join(names)}; name the one with the text (--field, data.field)")
    for batch in batches:
        column = batch.column(piece.field)
        try:
            rows = column.to_pylist()
        except UnicodeDecodeError:
            # Arrow does not check that written text is UTF-8.
            rows = column.cast("large_binary").to_pylist()
        yield from map(parse, rows)


def _columns(piece: SourcePiece, names: Sequence[str]) -> list[str]:
    """Return the columns of a table that are read."""
    wanted = (piece.field, *COLUMNS) if piece.loss_on else (piece.field,)
    return [name for name in names if name in wanted]


def _parquet(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    with fsspec.open(piece.url) as file:
        table = needs("pyarrow.parquet").ParquetFile(file)
        groups, names = range(piece.start, piece.stop or table.num_row_groups), table.schema_arrow.names
        batches = table.iter_batches(ROWS, row_groups=list(groups), columns=_columns(piece, names))
        first = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
        yield from _rows(batches, piece, names, parse, first)


def _arrow(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    ipc = needs("pyarrow.ipc")
    with fsspec.open(piece.url) as file:
        random_access = file.read(6) == b"ARROW1"
        file.seek(0)
        if random_access:
            table = ipc.open_file(file)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            table = ipc.open_stream(file)
            batches = iter(table)
        names = table.schema.names
        chosen = (batch.select(_columns(piece, names)) for batch in batches)
        yield from _rows(chosen, piece, names, parse)


def _records(url: str) -> Any:
    if not Path(url).exists():
        raise ValueError(f"{url} is not on this machine, where ArrayRecord is read; copy or mount it")
    reader = needs("array_record.python.array_record_module").ArrayRecordReader(url)
    if not reader.ok():
        raise ValueError(f"{url} is damaged, or not an ArrayRecord; copy it again")
    return reader


def _array_record(piece: SourcePiece, parse: Callable[[Any], Value]) -> Iterator[Value]:
    reader = _records(piece.url)
    stop = piece.stop or reader.num_records()
    for start in range(piece.start, stop, ROWS):
        yield from map(parse, reader.read(start, min(start + ROWS, stop)))
