"""Stores of images with texts: copies of a folder of images or of Parquet files, with random access.

images.json     counts, digest, tokenizer, and the images that were left out
images.bin      the bytes of the images' files, one after another
texts.bin       ids of the texts, uint32, each with one image token
index.bin       a row for each image (`ROW`)
names.txt       the name of each image, one per line
tokenizer.json  the tokenizer, unless a token is a byte

A run reads the copy, because a source that changes during the run would change samples that were already counted.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from diloco_jax.training.data.config import ImagesConfig
from diloco_jax.training.data.image_tokens import ImageTokenizer, open_image_tokenizer, spread
from diloco_jax.training.data.images import PATCH, POOL, cut_image
from diloco_jax.training.data.mixture import Samples
from diloco_jax.training.data.pictures import Broken, Picture, PictureSource, decode, list_pictures
from diloco_jax.training.data.sample import PATCHES, POSITIONS, SEGMENTS, TOKENS, Sample
from diloco_jax.training.data.store import WAIT_S, cache_folder, locked
from diloco_jax.training.data.tokenizer import BYTES, tokenizer_files, train_tokenizer, write_tokenizer
from diloco_jax.training.data.tokenizing import TRAIN, TRAINING_BYTES, training_size

FACTS, IMAGES, TEXTS, INDEX, NAMES = "images.json", "images.bin", "texts.bin", "index.bin", "names.txt"
# The name of a store's folder depends on this version, so that another version builds another store.
VERSION = 1
# The ends of an image's bytes and of its ids, its size, and the place of the image token in the ids.
ROW = np.dtype([("bytes", "<u8"), ("ids", "<u8"), ("height", "<u4"), ("width", "<u4"), ("place", "<u4")])
# Images that are in memory at once while a store is built.
AT_ONCE = 64
# Broken images whose names are kept.
SHOWN = 16


class ImageStore:
    """A finished store of images on this machine, memory-mapped; `facts` is the content of its images.json.

    Raises:
      ValueError: the store is damaged.
    """

    def __init__(self, folder: Path, config: ImagesConfig) -> None:
        self.folder, self.facts = folder, _read_facts(folder)
        self.tokenizer = open_image_tokenizer(BYTES if self.facts["tokenizer"] == BYTES else str(folder), config)
        count = self.facts["documents"]
        self.index = self._mapped(INDEX, ROW, count)
        last = self.index[-1] if count else np.zeros((), ROW)
        self._images = self._mapped(IMAGES, np.dtype(np.uint8), int(last["bytes"]))
        self._texts = self._mapped(TEXTS, np.dtype("<u4"), int(last["ids"]))

    def __len__(self) -> int:
        return len(self.index)

    def described(self) -> str:
        """Return the number of images and the digest of images and texts, both from images.json."""
        return f"{len(self):,} images with digest {self.facts['digest']}"

    def name(self, number: int) -> str:
        """Return the name of an image, for messages."""
        with (self.folder / NAMES).open(encoding="utf-8") as lines:
            return str(json.loads(next(islice(lines, number, None))))

    def image(self, number: int) -> np.ndarray:
        """Return an image as uint8 [height, width, 3]."""
        start, stop = self._range(number, "bytes")
        return decode(self._images[start:stop].tobytes())

    def ids(self, number: int) -> np.ndarray:
        """Return the ids of an image's text as int32, with one image token."""
        start, stop = self._range(number, "ids")
        return self._texts[start:stop].astype(np.int32)

    def _range(self, number: int, field: str) -> tuple[int, int]:
        return int(self.index[number - 1][field]) if number else 0, int(self.index[number][field])

    def _mapped(self, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
        path = self.folder / name
        if not path.exists() or path.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"{path} is missing or cut; remove the folder {self.folder}, and it is made again")
        return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """Samples start..stop-1 of a store: an image with its text, cut or padded to `seq_len` + 1 ids."""

    store: ImageStore
    seq_len: int
    soft_tokens: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        number = self.start + index
        pixels, positions, soft_tokens = cut_image(self.store.image(number), self.soft_tokens)
        place = int(self.store.index[number]["place"])
        tokens, segments = spread(self.store.ids(number), place, soft_tokens, self.seq_len + 1)
        return {TOKENS: tokens, SEGMENTS: segments, PATCHES: pixels[None], POSITIONS: positions[None]}


@dataclass(frozen=True, slots=True)
class WithoutImages:
    """Samples of text that have the arrays of an absent image, so that they fit into batches with images."""

    samples: Samples
    soft_tokens: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        return {SEGMENTS: np.ones_like(sample[TOKENS]), **sample, **no_image(self.soft_tokens)}


def no_image(soft_tokens: int) -> Sample:
    """Return the arrays of an absent image."""
    patches = soft_tokens * POOL**2
    pixels = np.zeros((1, patches, 3 * PATCH**2), np.uint8)
    return {PATCHES: pixels, POSITIONS: np.full((1, patches, 2), -1, np.int32)}


def image_samples(store: ImageStore, seq_len: int, start: int, stop: int) -> ImageTexts:
    """Return a range of a store as samples.

    Raises:
      ValueError: samples are too short for the text before an image, the image and one token of text behind it.
    """
    soft_tokens = store.tokenizer.config.soft_tokens
    places = store.index["place"][start:stop]
    # Behind the image there is its end token, and at least one token that is predicted.
    if len(places) and (need := int(places.max()) + soft_tokens + 1) > seq_len:
        raise ValueError(
            f"train.seq_len is {seq_len}, but {store.name(start + int(places.argmax()))} needs at least {need} for its "
            f"image of up to {soft_tokens} tokens and the text before it: raise train.seq_len, or lower "
            "data.images.soft_tokens"
        )
    return ImageTexts(store, seq_len, soft_tokens, start, stop)


def open_image_store(source: PictureSource, tokenizer: str, config: ImagesConfig) -> ImageStore:
    """Open the store of a source in this machine's cache; the first process builds it while others wait.

    Raises:
      ValueError: the source cannot be read, an image is broken and `config.broken` is refuse, or no image has a text.
    """
    pictures, digest = list_pictures(source)
    names = (config.begin_token, config.image_token, config.end_token)
    which = f"train:{training_size(tokenizer)}" if tokenizer.startswith(TRAIN) else ""
    which = which or open_image_tokenizer(tokenizer, config).tokenizer.digest
    key = xxhash.xxh3_128(json.dumps([VERSION, digest, which, names]).encode()).hexdigest()
    folder = cache_folder() / "images" / key
    with locked(folder.with_suffix(".lock"), WAIT_S):
        if not (folder / FACTS).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if tokenizer.startswith(TRAIN):
                train_tokenizer(_texts(pictures()), training_size(tokenizer), folder, names)
            else:
                write_tokenizer(folder, tokenizer_files(tokenizer))
            build(pictures(), open_image_tokenizer(BYTES if which == BYTES else str(folder), config), folder)
    store = ImageStore(folder, config)
    broken, shown = store.facts["broken"], store.facts["broken_shown"]
    if broken and config.broken == "refuse":
        raise ValueError(
            f"'{source.path}' has {broken} broken images, such as {'; '.join(shown[:3])}. Repair or remove them, or "
            "set data.images.broken to skip"
        )
    if not len(store):
        raise ValueError(
            f"'{source.path}' has no image with a text: {broken} are broken, {store.facts['rows_left_out']} have no "
            "text; correct data.path or data.field"
        )
    return store


def _texts(pictures: Iterable[Picture]) -> Iterator[str]:
    """Yield texts for the training of a tokenizer."""
    left = TRAINING_BYTES
    for picture in pictures:
        if picture.text and left > 0:
            yield picture.text
            left -= len(picture.text)


def build(pictures: Iterable[Picture], tokenizer: ImageTokenizer, folder: Path) -> None:
    """Write a store; images.json is written last, so that an interrupted store is built again.

    The function decodes every image, so that a broken one is found before the run starts and not days later. Images
    without text and broken images are left out and counted.

    Raises:
      ValueError: a text has more than one image token.
    """
    hasher, row, count, broken = xxhash.xxh3_128(), np.zeros((), ROW), 0, list[str]()
    left_out = 0
    with (
        (folder / IMAGES).open("wb") as images,
        (folder / TEXTS).open("wb") as texts,
        (folder / INDEX).open("wb") as index,
        (folder / NAMES).open("w", encoding="utf-8") as names,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        for picture, data, found in _examined(pictures, pool, tokenizer.config.image_token):
            if isinstance(found, Broken):
                broken.append(f"{picture.name}: {found}")
                continue
            if found is None:
                left_out += 1
                continue
            try:
                ids = tokenizer.encode(picture.text or "")
            except ValueError as error:
                raise ValueError(f"the text of {picture.name} cannot be used: {error}") from error
            row["bytes"] += len(data)
            row["ids"] += len(ids)
            row["height"], row["width"], row["place"] = *found, ids.index(tokenizer.image)
            for file, part in ((images, data), (texts, np.asarray(ids, "<u4").tobytes()), (index, row.tobytes())):
                hasher.update(part)
                file.write(part)
            names.write(json.dumps(picture.name) + "\n")
            count += 1
    facts = {"documents": count, "tokens": int(row["ids"]), "digest": hasher.hexdigest()}
    facts |= {"tokenizer": tokenizer.tokenizer.digest, "broken": len(broken), "broken_shown": broken[:SHOWN]}
    _finish(folder, {**facts, "rows_left_out": left_out})


def _read_facts(folder: Path) -> dict[str, Any]:
    """Read images.json; ValueError if it is damaged."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        count, _ = facts["documents"], (facts["tokenizer"], facts["digest"], facts["broken"], facts["broken_shown"])
        if not isinstance(count, int) or count < 0:
            raise ValueError("its count is not a number")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FACTS} is damaged ({error!r}); remove the folder {folder}, and it is made again"
        ) from error
    return dict(facts)


def _finish(folder: Path, facts: dict[str, Any]) -> None:
    half = folder / f"{FACTS}.half"
    half.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    half.replace(folder / FACTS)


def _examined(
    pictures: Iterable[Picture], pool: ThreadPoolExecutor, image_token: str
) -> Iterator[tuple[Picture, bytes, tuple[int, int] | Broken | None]]:
    """Read and decode images in order; yield each with its bytes and its size.

    Instead of the size there is the error of a broken image, or None if the image has no text.
    """

    def examine(picture: Picture) -> tuple[Picture, bytes, tuple[int, int] | Broken | None]:
        if not (picture.text or "").replace(image_token, "").strip():
            return picture, b"", None
        data = picture.read()
        try:
            height, width, _ = decode(data).shape
        except Broken as error:
            return picture, b"", error
        return picture, data, (height, width)

    rest = iter(pictures)
    while chosen := list(islice(rest, AT_ONCE)):
        yield from pool.map(examine, chosen)
