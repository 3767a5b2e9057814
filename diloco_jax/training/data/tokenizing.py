"""Building of token stores from text, in parts that several processes share.

An interrupted build keeps its finished parts. Any number of processes builds the same files.
"""

import itertools
import json
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from diloco_jax.training.data import store
from diloco_jax.training.data.documents import (
    PIECE_BYTES,
    REPLACEMENT,
    SourcePiece,
    TextSource,
    list_pieces,
    read_documents,
)
from diloco_jax.training.data.store import DOCUMENTS_NAME, FLAGS_NAME, STORE_FILE, TOKENS_NAME, locked, read_facts
from diloco_jax.training.data.tokenizer import (
    BYTES,
    SIZE_MAX,
    SIZE_MIN,
    TOKENIZER_FILE,
    Tokenizer,
    has_tokenizer,
    open_tokenizer,
    tokenizer_files,
    train_tokenizer,
    write_tokenizer,
    write_whole,
)

TRAIN, PART_NAME, LOCK_NAME = "train:", "part-{:05d}.json", ".lock"
# Bytes of text that a tokenizer is trained on, spread over the source.
TRAINING_BYTES = 1 << 27
PARTS_MAX = 4096

# Reports progress: the activity, the bytes done and the bytes in all.
Tell = Callable[[str, int, int], None]


class StorePart(NamedTuple):
    """A file of a store that is to be built from pieces of the source."""

    number: int
    pieces: tuple[SourcePiece, ...]
    tokenizer: str
    out: Path

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


# Builds parts in any order, and yields the size of each one in bytes after its files are written.
Engine = Callable[[Sequence[StorePart]], Generator[int, None, None]]


def build_store(
    source: TextSource,
    tokenizer: str,
    out: Path,
    workers: int = 0,
    tell: Tell | None = None,
    engine: Engine | None = None,
) -> Path:
    """Build the token store of a source, or continue an interrupted build; return `out`.

    Args:
        tokenizer: a folder with tokenizer.json, train:SIZE, or bytes.
        workers: processes; 0 for one per core.
        tell: is called with the progress.
        engine: builds the parts instead of the processes of this machine.

    Raises:
        ValueError: the source cannot be read or has no text, or `out` has other files.
    """
    pieces, digest = list_pieces(source)
    digest += _template_digest(source, tokenizer)
    if not tokenizer.startswith(TRAIN):
        made_from = {"source": digest, "tokenizer": open_tokenizer(tokenizer).digest}
    else:
        training_size(tokenizer)
        made_from = {"source": digest, "tokenizer": tokenizer}
    _begin(out, made_from, _version(source))
    with locked(out / LOCK_NAME, 0.0):
        if read_facts(out, unfinished=True)["finished"]:
            return out
        made = _tokenizer(tokenizer, pieces, out, tell)
        name = BYTES if made.folder is None else str(out)
        parts = [StorePart(number, part, name, out) for number, part in enumerate(_parts(pieces))]
        _make(parts, engine or partial(_in_processes, workers or len(os.sched_getaffinity(0))), tell)
        files = [json.loads((out / PART_NAME.format(part.number)).read_text()) for part in parts]
        if not any(file["tokens"] for file in files):
            what = "nothing to train on: no row has an assistant's turn" if source.loss_on else "no text"
            raise ValueError(f"'{source.path}' has {what}: all its documents are empty; name another source")
        facts = {"vocab_size": made.vocab_size, "dtype": _dtype(made), "tokenizer": made.digest}
        facts |= {key: sum(file[key] for file in files) for key in ("tokens", "documents", "bytes")}
        # Parts built by an earlier version do not have these counts.
        facts |= {key: sum(file.get(key, 0) for file in files) for key in ("rows_left_out", "documents_replaced")}
        if source.loss_on:
            facts |= {"loss_on": source.loss_on, "trained": sum(file["trained"] for file in files)}
        begun = {"version": _version(source), "finished": True, "made_from": made_from}
        write_whole(out / STORE_FILE, json.dumps({**begun, **facts, "files": files}, indent=1))
        for part in parts:
            (out / PART_NAME.format(part.number)).unlink()
    return out


def training_size(tokenizer: str) -> int:
    """Return SIZE of train:SIZE; ValueError if it is out of bounds."""
    word = tokenizer.removeprefix(TRAIN)
    if not word.isdecimal() or not SIZE_MIN <= int(word) <= SIZE_MAX:
        raise ValueError(f"--tokenizer {tokenizer}: the size must be a number from {SIZE_MIN} to {SIZE_MAX}")
    return int(word)


def cached_store(source: TextSource, tokenizer: str) -> Path:
    """Return the store of a source in this machine's cache; the first process builds it while others wait."""
    digest = list_pieces(source)[1] + _template_digest(source, tokenizer)
    which = tokenizer if tokenizer.startswith(TRAIN) else open_tokenizer(tokenizer).digest
    folder = store.cache_folder() / "stores" / xxhash.xxh3_128(f"{digest} {which}".encode()).hexdigest()
    with locked(folder.with_suffix(".lock"), store.WAIT_S):
        return build_store(source, tokenizer, folder)


def _template_digest(source: TextSource, tokenizer: str) -> str:
    """Return a digest of the files that decide the text of conversations; "" for text.

    Raises:
        ValueError: conversations are to be encoded with a tokenizer that does not exist yet.
    """
    if not source.loss_on:
        return ""
    if tokenizer.startswith(TRAIN):
        raise ValueError(
            f"'{source.path}' has conversations, but the tokenizer is {tokenizer}, which has no chat template; name "
            "the folder of a tokenizer with one"
        )
    files = {name: text for name, text in tokenizer_files(tokenizer).items() if name != TOKENIZER_FILE}
    return xxhash.xxh3_128(json.dumps(files).encode()).hexdigest()


def _version(source: TextSource) -> int:
    return store.CHAT_VERSION if source.loss_on else store.VERSION


def _begin(out: Path, made_from: dict[str, str], version: int) -> None:
    if not (out / STORE_FILE).exists():
        if out.exists() and any(each.name != LOCK_NAME for each in out.iterdir()):
            raise ValueError(f"'{out}' has files but no {STORE_FILE}; name a new folder for the store")
        out.mkdir(parents=True, exist_ok=True)
        begun = {"version": version, "finished": False, "made_from": made_from, "files": []}
        write_whole(out / STORE_FILE, json.dumps(begun))
    have = read_facts(out, unfinished=True)["made_from"]
    if different := [key for key in made_from if have.get(key) != made_from[key]]:
        raise ValueError(
            f"'{out}' is a store of another {' and '.join(different)} (names, sizes or times of the source's files "
            "have changed, or the tokenizer); name a new folder, or remove this one"
        )


def _tokenizer(word: str, pieces: Sequence[SourcePiece], out: Path, tell: Tell | None) -> Tokenizer:
    """Put the tokenizer into the store: copy it, or train it."""
    if word == BYTES:
        return open_tokenizer(word)
    if not has_tokenizer(out):
        if word.startswith(TRAIN):
            train_tokenizer(_sample(pieces, tell), training_size(word), out)
        else:
            # This refuses damaged files before the store has them.
            open_tokenizer(word)
            write_tokenizer(out, tokenizer_files(word))
    return open_tokenizer(out)


def _sample(pieces: Sequence[SourcePiece], tell: Tell | None) -> Iterator[str]:
    """Yield text from the start of each piece, together as much as a tokenizer needs."""
    limit = min(TRAINING_BYTES, sum(piece.size for piece in pieces))
    every = max(1, len(pieces) * 4096 // TRAINING_BYTES)
    chosen = pieces[::every]
    each, total = TRAINING_BYTES // len(chosen) + 1, 0
    for piece in chosen:
        left = each
        for text in read_documents(piece):
            yield text[:left]
            left -= len(text)
            total += min(len(text), each)
            if tell:
                tell("tokenizer", total, limit)
            if left <= 0:
                break


def _parts(pieces: Sequence[SourcePiece]) -> list[tuple[SourcePiece, ...]]:
    """Group the pieces by size only, so that any number of workers builds the same files."""
    limit = max(PIECE_BYTES, sum(piece.size for piece in pieces) // PARTS_MAX)
    parts: list[list[SourcePiece]] = [[]]
    size = 0
    for piece in pieces:
        if parts[-1] and size + piece.size > limit:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.size
    return [tuple(part) for part in parts]


def _make(parts: Sequence[StorePart], engine: Engine, tell: Tell | None) -> None:
    """Build the missing parts."""
    total, done, missing = sum(part.size for part in parts), 0, []
    for part in parts:
        if _is_made(part):
            done += part.size
        else:
            missing.append(part)
    # An error of `tell` ends the engine's work too.
    with closing(engine(missing)) as made:
        for size in itertools.chain((0,), made):
            done += size
            if tell:
                tell("tokens", done, total)


def _in_processes(workers: int, missing: Sequence[StorePart]) -> Generator[int, None, None]:
    """Build parts in several processes of this machine."""
    workers = min(workers, len(missing))
    with ExitStack() as stack:
        made: Iterable[int] = map(_make_part, missing)
        if workers > 1:
            pool = ProcessPoolExecutor(workers, mp.get_context("spawn"), _begin_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
            made = (future.result() for future in as_completed([pool.submit(_make_part, part) for part in missing]))
        try:
            yield from made
        except BrokenProcessPool as error:
            message = "a worker was killed, perhaps because memory ran out; run it again with fewer --workers"
            raise ValueError(message) from error


def _begin_worker() -> None:
    """Prepare a worker: ignore Ctrl-C, which the parent process handles, and exit when the parent exits."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(mp.parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _is_made(part: StorePart) -> bool:
    """Return whether an earlier process built this part, and its files still have the recorded digest."""
    try:
        facts = json.loads((part.out / PART_NAME.format(part.number)).read_text(encoding="utf-8"))
        hasher = xxhash.xxh3_64()
        names = (TOKENS_NAME, DOCUMENTS_NAME, *((FLAGS_NAME,) if part.pieces[0].loss_on else ()))
        for name in names:
            with (part.out / name.format(part.number)).open("rb") as file:
                while block := file.read(1 << 22):
                    hasher.update(block)
        return bool(hasher.hexdigest() == facts["digest"])
    except (OSError, ValueError, KeyError):
        return False


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


class EncodedPart(NamedTuple):
    """Description of a part of a store, beside its tokens."""

    # The ends of its documents as their file has them.
    ends: bytes
    # The flags of its tokens as their file has them; empty if it is text.
    flags: bytes
    # Counts, and the digest of tokens, ends and flags.
    facts: dict[str, Any]


class Document(NamedTuple):
    """A document of a store; without ids it is left out."""

    ids: list[int]
    text: str
    # The flags of the tokens of a conversation; None if it is text.
    flags: np.ndarray | None = None


def _documents(pieces: Sequence[SourcePiece], tokenizer: Tokenizer) -> Iterator[Document]:
    if not pieces[0].loss_on:
        for text in itertools.chain.from_iterable(map(read_documents, pieces)):
            yield Document(tokenizer.encode_document(text), text)
        return
    # Jinja2 takes long to import, and only conversations need it.
    from diloco_jax.training.chat.encoder import ChatEncoder

    for made in ChatEncoder(tokenizer).encode(pieces):
        flags = made and made.weights * store.TRAINED + made.ends * store.TURN_END
        yield Document(made.ids, made.text, flags) if made else Document([], "")


def encode_part(pieces: Sequence[SourcePiece], tokenizer: Tokenizer, file: BinaryIO) -> EncodedPart:
    """Write the tokens of a part's documents to a file."""
    hasher = xxhash.xxh3_64()
    dtype, ends, bytes_, tokens = np.dtype(_dtype(tokenizer)).newbyteorder("<"), [], 0, 0
    left_out = replaced = 0
    flags = list[np.ndarray]()
    for ids, text, given in _documents(pieces, tokenizer):
        raw = np.asarray(ids, dtype).tobytes()
        hasher.update(raw)
        file.write(raw)
        tokens += len(ids)
        bytes_ += len(text.encode())
        ends += [tokens] * bool(ids)
        flags += [] if given is None else [given]
        left_out += not ids
        replaced += REPLACEMENT in text
    raw, marks = np.asarray(ends, "<u8").tobytes(), b"".join(one.tobytes() for one in flags)
    hasher.update(raw)
    hasher.update(marks)
    facts = {"tokens": tokens, "documents": len(ends), "bytes": bytes_, "digest": hasher.hexdigest()}
    facts |= {"rows_left_out": left_out, "documents_replaced": replaced}
    if pieces[0].loss_on:
        facts["trained"] = sum(int((one & store.TRAINED).sum()) for one in flags)
    return EncodedPart(raw, marks, facts)


def write_part(part: StorePart, write_tokens: Callable[[BinaryIO], EncodedPart]) -> int:
    """Write the files of a part, its facts last, so that an interrupted part is made again; return its size in bytes.

    Args:
        write_tokens: writes the tokens to a file, and returns the rest of the part.
    """
    try:
        with (part.out / TOKENS_NAME.format(part.number)).open("wb") as file:
            encoded = write_tokens(file)
        (part.out / DOCUMENTS_NAME.format(part.number)).write_bytes(encoded.ends)
        if part.pieces[0].loss_on:
            (part.out / FLAGS_NAME.format(part.number)).write_bytes(encoded.flags)
        write_whole(part.out / PART_NAME.format(part.number), json.dumps(encoded.facts))
    except OSError as error:
        # For a full disk, Python does not name the file.
        raise OSError(error.errno, error.strerror, error.filename or str(part.out)) from error
    return part.size


def _make_part(part: StorePart) -> int:
    return write_part(part, partial(encode_part, part.pieces, open_tokenizer(part.tokenizer)))
