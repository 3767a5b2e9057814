"""Tokenizers: they turn text into token ids and back, with Hugging Face's tokenizer.json or one token per byte."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash
from jaxtyping import Int
from tokenizers import decoders, models, pre_tokenizers, trainers

from diloco_jax.training.regular import check_regular

BYTES = "bytes"
TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
CHAT_FILE, SPECIAL_FILE = "chat_template.jinja", "special_tokens_map.json"
TOOL_FILE = "additional_chat_templates/tool_use.jinja"
# The files are written in this order, so that the last one marks a complete tokenizer.
TOKENIZER_FILES = (CHAT_FILE, TOOL_FILE, SPECIAL_FILE, SETTINGS_FILE, TOKENIZER_FILE)
END = "<|endoftext|>"
# The tokens that may end a document if the settings do not name one.
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# A trained tokenizer has at least an id for each byte and one for the end of a document.
SIZE_MIN, SIZE_MAX = 257, 1 << 20
# Characters of one call, because an encoding takes about a hundred times as much memory.
ENCODED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Tokenizer:
    """A mapping from text to token ids and back."""

    # The folder with tokenizer.json; None if a token is a byte.
    folder: Path | None
    # All ids are below this number.
    vocab_size: int
    # Tokenizers with equal digests give equal texts equal ids; "bytes" if a token is a byte.
    digest: str
    # The id that ends a document.
    end: int | None
    made: Any = None
    # The id that the settings name as the begin of a text; None if they name none.
    begin: int | None = None

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the ids of a text that something follows, so without the tokens that the tokenizer puts after a text.

        Args:
          text: the text.
          begin: whether the tokens that the tokenizer puts before a text are included.
        """
        own = list(self.made.encode(text, add_special_tokens=False).ids) if self.made else list(text.encode())
        return [*self.around[0], *own] if begin else own

    def encode_places(self, text: str) -> tuple[list[int], Int[np.ndarray, "n 2"]]:
        """Return the ids of a text alone, and the first and the next-after-last character of each.

        Places ascend; tokens that are bytes of one character share its place.
        """
        if not self.made:
            sizes = np.fromiter((len(one.encode()) for one in text), np.int64, len(text))
            first = np.repeat(np.arange(len(text)), sizes)
            return list(text.encode()), np.stack([first, first + 1], axis=1)
        found = self.made.encode(text, add_special_tokens=False)
        places = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        return list(found.ids), np.maximum.accumulate(places, axis=0)

    @cached_property
    def special(self) -> set[int]:
        """Return the ids of special tokens; the end of documents is one, whatever the file says."""
        added = self.made.get_added_tokens_decoder() if self.made else {}
        found = {number for number, token in added.items() if token.special}
        return found if self.end is None else found | {self.end}

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of a document and its end; a long document is encoded in pieces that end with a line."""
        first, *others = _pieces(text) or [""]
        ids = self.encode(first, begin=bool(first))
        for piece in others:
            ids += self.encode(piece, begin=False)
        ids += self.around[1] if first else []
        return self.closed(ids) if ids else ids

    def closed(self, ids: list[int]) -> list[int]:
        """Return the ids of a document with its end; a tokenizer may have put the end there itself."""
        if self.end is None or (self.made is not None and ids[-1:] == [self.end]):
            return ids
        return [*ids, self.end]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after every text."""
        if not self.made or not self.made.encode("").ids:
            return [], []
        # An empty text does not show which tokens are before it.
        for text in chain("a", self.made.get_vocab()):
            if own := self.made.encode(text, add_special_tokens=False).ids:
                break
        found = self.made.encode(text)
        start = found.special_tokens_mask.index(0)
        before, after = found.ids[:start], found.ids[start + len(own) :]
        if [*before, *own, *after] != found.ids:
            raise ValueError(
                f"{self.folder}: {TOKENIZER_FILE} changes the ids of a text where it puts special tokens around it; "
                "use a tokenizer that only puts them before and after a text"
            )
        return before, after

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of ids; bytes that are not UTF-8 become replacement characters, ids above bytes nothing."""
        numbers = [int(number) for number in ids]
        if self.made:
            return str(self.made.decode(numbers, skip_special_tokens=False))
        return bytes(number for number in numbers if number < 256).decode(errors="replace")

    @cached_property
    def _lengths(self) -> np.ndarray:
        if not self.made:
            # Ids above the bytes are special tokens.
            return (np.arange(self.vocab_size) < 256).astype(np.int32)
        by_bytes = '"ByteLevel"' in json.dumps(json.loads(self.made.to_str()).get("decoder"))
        lengths = np.zeros(self.vocab_size, np.int32)
        for text, number in self.made.get_vocab().items():
            # Such a token is a single byte that has no other token.
            one = text.startswith("<0x") and len(text) == 6
            lengths[number] = 1 if one else len(text) if by_bytes else len(text.replace("\u2581", " ").encode())
        for number, token in self.made.get_added_tokens_decoder().items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def bytes_of(self, sample: Mapping[str, np.ndarray]) -> int:
        """Count the bytes of text that a model predicts in a sample or a batch."""
        bytes_ = self._lengths[sample["tokens"][..., 1:]]
        if (segments := sample.get("segments")) is not None:
            bytes_ = bytes_ * ((segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0))
        if (weights := sample.get("weights")) is not None:
            bytes_ = bytes_ * (weights[..., 1:] > 0)
        return int(bytes_.sum())


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        stop = start + ENCODED_AT_ONCE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        pieces.append(text[start:stop])
        start = stop
    return pieces


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a folder has the file of a tokenizer, and so a complete one."""
    return (Path(folder) / TOKENIZER_FILE).exists()


def tokenizer_files(name: str) -> dict[str, str]:
    """Return the texts of a tokenizer's files by file name, in the order of writing; none for the one of bytes."""
    paths = {} if name == BYTES else {file: Path(name) / file for file in TOKENIZER_FILES}
    return {file: path.read_text(encoding="utf-8") for file, path in paths.items() if path.exists()}


def write_tokenizer(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of `tokenizer_files` into a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, text)


def open_tokenizer(name: str | Path) -> Tokenizer:
    """Open the tokenizer in a folder, or the tokenizer of bytes; ValueError if its file is missing or damaged."""
    if name == BYTES:
        return Tokenizer(None, 256, BYTES, 0)
    folder = Path(name)
    path = folder / TOKENIZER_FILE
    try:
        check_regular(path)
        made = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"'{name}' has no {TOKENIZER_FILE} that can be read ({error.strerror}); name its folder, train:SIZE, "
            f"or {BYTES}"
        ) from error
    # The library raises only this general class.
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again from its origin") from error
    content = json.loads(made.to_str())
    made.no_padding()
    made.no_truncation()
    size = max(made.get_vocab().values(), default=-1) + 1
    if not 0 < size <= 2**32:
        raise ValueError(f"{path} has ids up to {size - 1}; at most {2**32 - 1} fit a token store")
    # The digest covers only these keys, because other libraries change the rest of the file when they save it.
    decides = [content[key] for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    decides.append(made.encode("").ids)
    digest = xxhash.xxh3_128(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    begin, end = _special(made, folder / SETTINGS_FILE)
    return Tokenizer(folder, size, digest, end, made, begin)


def _special(made: Any, settings: Path) -> tuple[int | None, int | None]:
    """Return the ids of the tokens that begin a text and end a document; None for one that the tokenizer lacks."""
    try:
        if settings.exists():
            check_regular(settings)
        told = json.loads(settings.read_bytes()) if settings.exists() else {}
        begin, end = (_content(told.get(name)) for name in ("bos_token", "eos_token"))
        names = [end] if end else ENDS
        found = next((number for name in names if (number := made.token_to_id(name)) is not None), None)
        first = made.token_to_id(begin) if begin else None
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{settings} is damaged: {error!r}; copy it again from its origin") from error
    # Without the end token, documents would run into each other.
    if end and found is None:
        lost = f"the eos_token {end!r}, which {TOKENIZER_FILE} does not have"
        raise ValueError(f"{settings} names {lost}; copy both again from their origin")
    return first, found


def _content(token: Any) -> Any:
    """Return the text of a token in the settings, which is a string or an object with it."""
    return token["content"] if isinstance(token, dict) else token


def train_tokenizer(texts: Iterable[str], size: int, folder: Path, special: Sequence[str] = ()) -> None:
    """Train a byte-level BPE tokenizer with `size` ids, from SIZE_MIN to SIZE_MAX, and write it to a folder.

    Args:
        special: further special tokens beside the one that ends a document.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END, *special]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    write_whole(folder / TOKENIZER_FILE, made.to_str())


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see either the whole new text or the file as it was."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
