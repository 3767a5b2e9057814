"""Token stores: reading text, writing stores, and the tokens of a sample."""

import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tokenizers

from diloco_jax.training.data import documents, tokenizing
from diloco_jax.training.data.config import DataConfig, SourceConfig
from diloco_jax.training.data.corpus import Source, load_source
from diloco_jax.training.data.documents import TextSource, list_pieces, read_documents
from diloco_jax.training.data.store import Store, local_store, locked
from diloco_jax.training.data.tokenizer import open_tokenizer
from diloco_jax.training.data.tokenizing import build_store
from tests.extras import absent

WITHOUT_GCSFS = pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
TEXTS = [f"{'word ' * (number * 7 % 23)}{number} ü\n" for number in range(60)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cut sources into many parts, and keep the cache of this machine out of it."""
    for module in (documents, tokenizing):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))


def lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts).encode()


def write_jsonl(folder: Path, texts: list[str] = TEXTS) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_bytes(lines(texts))
    return str(folder / "a.jsonl")


def write_gzip(folder: Path) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS)))
    return str(folder)


def write_parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason=absent("data"))
    from pyarrow import parquet

    table = pyarrow.table({"text": TEXTS, "id": [1] * len(TEXTS)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=10)
    (folder / "README.md").write_text("no document")
    return str(folder)


def write_arrow(folder: Path, *, stream: bool = True) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason=absent("data"))
    table = pyarrow.table({"text": TEXTS})
    path = str(folder / "data-00000-of-00001.arrow")
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(path, table.schema) as file:
        file.write_table(table, max_chunksize=10)
    # `datasets` leaves such a file beside the table.
    (folder / "state.json").write_text("{}")
    return str(folder)


def write_records(folder: Path) -> str:
    module = pytest.importorskip("array_record.python.array_record_module", reason=absent("data"))
    writer = module.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return str(folder)


def write_memory(folder: Path) -> str:
    fsspec.filesystem("memory").pipe(f"/{folder.name}/a.jsonl", lines(TEXTS))
    return f"memory://{folder.name}"


# format -> its writer, and the number of pieces of a large file
WRITERS: dict[str, tuple[Callable[[Path], str], int]] = {
    "jsonl": (write_jsonl, 2),
    "gzip": (write_gzip, 1),
    "parquet": (write_parquet, 1),
    "stream": (write_arrow, 1),
    "file": (lambda folder: write_arrow(folder, stream=False), 1),
    "records": (write_records, 2),
    "memory": (write_memory, 2),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_its_documents_once_in_their_order(tmp_path: Path, name: str) -> None:
    write, pieces_min = WRITERS[name]
    pieces, digest = list_pieces(TextSource(write(tmp_path)))
    assert [text for piece in pieces for text in read_documents(piece)] == TEXTS
    assert len(pieces) >= pieces_min and digest == list_pieces(TextSource(pieces[0].url.rsplit("/", 1)[0]))[1]


def test_row_groups_of_a_large_file_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextSource(write_parquet(tmp_path))
    monkeypatch.setattr(documents, "PIECE_BYTES", 300)
    pieces, _ = list_pieces(source)
    assert len(pieces) > 2 and [text for piece in pieces for text in read_documents(piece)] == TEXTS


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_store_has_each_document_and_its_end(tmp_path: Path) -> None:
    out = build_store(TextSource(write_jsonl(tmp_path)), "train:400", tmp_path / "out", workers=1)
    store, tokenizer = Store(out), open_tokenizer(out)
    ends = store.ends(0, len(store))
    assert len(ends) == len(TEXTS) and ends[-1] == len(store) and len(store.facts["files"]) > 3
    for text, start, stop in zip(TEXTS, [0, *ends], ends, strict=False):
        ids = store.read(int(start), int(stop)).tolist()
        assert tokenizer.decode(ids[:-1]) == text and ids[:-1] == tokenizer.encode(text) and ids[-1] == tokenizer.end
    everything = store.read(0, len(store))
    assert tokenizer.bytes_of({"tokens": np.insert(everything, 0, 0)}) == sum(len(text.encode()) for text in TEXTS)
    assert store.facts["bytes"] == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("damage", ["", "cut", "changed"])
def test_a_store_is_the_same_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    source = TextSource(write_jsonl(tmp_path))
    whole = build_store(source, "train:400", tmp_path / "whole", workers=1)
    make, made = tokenizing._make_part, []

    def dying(part: Any) -> int:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(part.number)
        return make(part)

    monkeypatch.setattr(tokenizing, "_make_part", dying)
    with pytest.raises(KeyboardInterrupt):
        build_store(source, "train:400", tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match="not finished; run the same diloco tokenize again"):
        Store(tmp_path / "out")
    if damage:
        raw = (tmp_path / "out" / "tokens-00001.bin").read_bytes()
        (tmp_path / "out" / "tokens-00001.bin").write_bytes(raw[:-2] + (b"" if damage == "cut" else b"\1\1"))
    # The build is not interrupted from now on.
    made.append(-1)
    build_store(source, "train:400", tmp_path / "out", workers=1)
    assert contents(tmp_path / "out") == contents(whole)
    assert (1 in made[4:]) is bool(damage) and 0 not in made[4:]


def test_a_store_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    source = TextSource(write_jsonl(tmp_path))
    told: list[tuple[str, int, int]] = []
    one, two = (
        build_store(source, "bytes", tmp_path / str(workers), workers, lambda *words: told.append(words))
        for workers in (1, 2)
    )
    assert contents(one) == contents(two)
    assert told[-1][1] == told[-1][2] == sum(piece.size for piece in list_pieces(source)[0])


def test_a_tokenizer_of_hugging_face_is_copied_with_the_end_that_its_settings_name(tmp_path: Path) -> None:
    first = build_store(TextSource(write_jsonl(tmp_path)), "train:300", tmp_path / "first", workers=1)
    (first / "tokenizer_config.json").write_text('{"eos_token": {"content": "w"}}')
    second = build_store(TextSource(write_jsonl(tmp_path)), str(first), tmp_path / "second", workers=1)
    assert contents(second)["tokenizer.json"] == contents(first)["tokenizer.json"]
    tokenizer = open_tokenizer(second)
    assert tokenizer.end == tokenizer.encode("w")[0] and Store(second).read(0, len(Store(second)))[-1] == tokenizer.end
    assert tokenizer.digest == open_tokenizer(first).digest
    (first / "tokenizer_config.json").write_text('{"eos_token": {"id": 1}}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        open_tokenizer(first)


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = build_store(TextSource(write_jsonl(tmp_path)), "train:300", tmp_path / "out", workers=1)
    monkeypatch.setattr("diloco_jax.training.data.tokenizer.ENCODED_AT_ONCE", 10)
    tokenizer, text = open_tokenizer(out), "a line\n" * 9 + "one without an end" * 3
    ids = tokenizer.encode_document(text)
    assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize(
    ("single", "before", "after"),
    [
        ("<s> $A </s>", "<s>", "</s>"),
        ("<s> $A", "<s>", "</s>"),
        ("$A </s>", "", "</s>"),
        ("<s> $A <s>", "<s>", "<s></s>"),
    ],
)
@pytest.mark.parametrize("at_once", [7, 1000])
def test_special_tokens_are_at_the_ends_of_a_document_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, single: str, before: str, after: str, at_once: int
) -> None:
    """However many pieces it is cut into; `single` is the tokenizer's template."""
    monkeypatch.setattr("diloco_jax.training.data.tokenizer.ENCODED_AT_ONCE", at_once)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["one line\n"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer, text = open_tokenizer(tmp_path), "one line\n" * 9 + "and a word without an end"
    assert tokenizer.decode(tokenizer.encode_document(text)) == f"{before}{text}{after}"
    assert tokenizer.encode_document("") == []
    # A text to continue has only the tokens before it.
    assert tokenizer.decode(tokenizer.encode(text)) == f"{before}{text}"
    assert tokenizer.decode(tokenizer.encode(text, begin=False)) == text
    assert tokenizer.decode(tokenizer.encode("")) == before


def test_rows_without_text_and_replaced_bytes_are_counted(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 become replacement characters in each format, halves of characters too."""
    good = json.dumps({"text": "good"}).encode()
    rows = [good, b"", b" \t", b'{"text": null}', b'{"text": ""}', b'{"text": "b\xe4d"}', b'{"text": "\\ud800"}', good]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(rows))
    pieces, _ = list_pieces(TextSource(str(tmp_path / "a.jsonl")))
    texts = [text for piece in pieces for text in read_documents(piece)]
    assert texts == ["good", "", "", "b\ufffdd", "\ufffd", "good"]
    store = Store(build_store(TextSource(str(tmp_path / "a.jsonl")), "bytes", tmp_path / "out", workers=1))
    assert [store.facts[key] for key in ("documents", "rows_left_out", "documents_replaced")] == [4, 2, 2]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary"])
def test_bytes_of_a_table_are_text(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason=absent("data"))
    from pyarrow import parquet

    column = pyarrow.array([b"good", b"b\xe4d", None], "binary")
    # Arrow does not check what is written.
    if kind == "string":
        column = pyarrow.Array.from_buffers(pyarrow.string(), 3, column.buffers())
    elif kind == "large_string":
        wide = column.cast("large_binary")
        column = pyarrow.Array.from_buffers(pyarrow.large_string(), 3, wide.buffers())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    pieces, _ = list_pieces(TextSource(str(tmp_path / "a.parquet")))
    assert [text for piece in pieces for text in read_documents(piece)] == ["good", "b\ufffdd", ""]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a" 1}', "Expecting ',' delimiter (character 14 of the line)"),
        (b'{"txt": "a"}', "it has txt; name the field"),
        (b'{"text": 3}', "field 'text' holds int, not text"),
        (b"[]", "it is not an object"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, why: str, packed: bool) -> None:
    """In any piece of the file; a piece does not know how many lines are before it."""
    rows = [*lines(TEXTS).splitlines(), b"", line, *lines(TEXTS).splitlines()]
    raw = b"\n".join(rows)
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    pieces, _ = list_pieces(TextSource(str(path)))
    where = f"line {len(TEXTS) + 2}, at byte {len(lines(TEXTS)) + 1}"
    with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read as jsonl: {where}: {why}")):
        [text for piece in pieces for text in read_documents(piece)]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return build_store(TextSource(write_jsonl(tmp_path)), "bytes", tmp_path / "out", workers=1)


def opened(path: Path | str, **settings: Any) -> Source:
    return load_source(DataConfig(format="store", path=str(path), held_out_fraction=0.3, **settings), seq_len=16)


def test_windows_of_a_store_know_their_documents(made: Path) -> None:
    ids = np.frombuffer(b"".join(text.encode() + b"\0" for text in TEXTS), np.uint8)
    number_of = np.repeat(np.arange(len(TEXTS)), [len(text.encode()) + 1 for text in TEXTS])
    joined, separate = opened(made), opened(made, documents="separate")
    cut = separate.train.stop
    assert number_of[cut - 1] + 1 == number_of[cut] and abs(cut - 0.7 * len(ids)) < 150
    for part, start in ((separate.train, 0), (separate.held_out, cut)):
        for number in range(len(part)):
            window = slice(start + number * 16, start + number * 16 + 17)
            np.testing.assert_array_equal(part[number]["tokens"], ids[window])
            np.testing.assert_array_equal(part[number]["segments"], number_of[window] - number_of[window.start] + 1)
    assert joined.train[3].keys() == {"tokens"} and len(joined.train) == (cut - 1) // 16


def packed(lengths: list[int], size: int) -> list[list[int]]:
    """Lengths of the pieces in each sample, by the rule that docs/data.md states."""
    rows: list[list[int]] = [[]]
    for length in lengths:
        if sum(rows[-1]) + length > size and rows[-1]:
            rows.append([])
        while length > size:
            rows[-1].append(size)
            rows.append([])
            # The next piece starts with the last id of this one.
            length -= size - 1
        rows[-1].append(length)
    return rows


def test_whole_documents_are_packed_one_after_another(made: Path) -> None:
    lengths = [len(text.encode()) + 1 for text in TEXTS]
    source = opened(made, documents="whole")
    count = next(n for n in range(len(TEXTS)) if sum(lengths[:n]) == source.train.stop)
    for part, expected in ((source.train, packed(lengths[:count], 17)), (source.held_out, packed(lengths[count:], 17))):
        found = [np.bincount(part[number]["segments"])[1:].tolist() for number in range(len(part))]
        assert found == expected
    first = source.train[0]
    said = source.tokenizer.decode(first["tokens"][first["segments"] > 0])
    assert "".join(f"{text}\0" for text in TEXTS).startswith(said) and len(said) == 5


def test_text_in_a_config_becomes_a_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(format="jsonl", path=write_jsonl(tmp_path), tokenizer="bytes", documents="separate")
    first = load_source(config, 16)
    monkeypatch.setattr(tokenizing, "_make_part", None)  # any call fails
    assert load_source(config, 16).corpus == first.corpus and first.vocab_size == 256
    write_jsonl(tmp_path, TEXTS[:30])
    with pytest.raises(TypeError):
        load_source(config, 16)


def test_who_waits_too_long_for_another_process_is_told(tmp_path: Path) -> None:
    again = pytest.raises(ValueError, match="another process has held")
    with locked(tmp_path / "lock", 0.0), again, locked(tmp_path / "lock", 0.0):
        pass
    with locked(tmp_path / "lock", 0.0):
        pass


def test_a_store_elsewhere_is_copied_once(made: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name, raw in contents(made).items():
        memory.pipe(f"/far/{name}", raw)
    assert opened("memory://far").corpus == opened(made).corpus
    memory.rm("/far/tokens-00000.bin")
    assert contents(local_store("memory://far"))["tokens-00000.bin"]


def ends(out: Path, turned: slice) -> None:
    """Reverse some ends of documents; a sum of sizes cannot show that."""
    found = np.fromfile(out / "documents-00000.bin", "<u8")
    found[turned] = found[turned][::-1]
    found.tofile(out / "documents-00000.bin")


def facts(**changes: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        (out / "store.json").write_text(json.dumps({**json.loads((out / "store.json").read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "tokens-00001.bin").unlink(), "tokens-00001.bin is missing, store.json says"),
        (lambda out: (out / "documents-00000.bin").write_bytes(b"12345678"), "has 8 bytes, store.json says"),
        (facts(version=3), "has version 3, this package reads 1 and 2"),
        (facts(finished=False), "is not finished; run the same"),
        (facts(files=[{}]), "is damaged"),
        (facts(vocab_size="256"), "a count is not a number"),
        (facts(dtype="i1,i1"), "dtype is i1,i1, not uint16 or uint32"),
        (lambda out: ends(out, slice(1, -1)), "documents-00000.bin is damaged: its ends of documents do not ascend"),
        (lambda out: ends(out, slice(None)), "documents-00000.bin is damaged: its ends of documents do not ascend"),
        (facts(tokenizer="0ff"), "no tokenizer.json that can be read"),
        (lambda out: (out / "store.json").write_text("{"), "is damaged"),
        (lambda out: (out / "store.json").unlink(), "is not a token store"),
    ],
)
def test_a_damaged_store_is_one_error(made: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(made)
    with pytest.raises(ValueError, match=message):
        opened(made, documents="whole")


def test_an_id_beyond_the_vocabulary_is_an_error(made: Path) -> None:
    from diloco_jax.training.data.order import SampleOrder

    facts(vocab_size=100)(made)
    with pytest.raises(ValueError, match="the data has token id"):
        SampleOrder(opened(made), 0).batch(((0, 8),))


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        (TextSource("{folder}/none"), "bytes", "has no text file with content"),
        (TextSource("{folder}/empty"), "bytes", "has no text file with content"),
        (TextSource("{folder}/blank.jsonl"), "bytes", "all its documents are empty"),
        (TextSource("{folder}/a.jsonl", field="body"), "bytes", "has text, id; name the field"),
        (TextSource("{folder}/a.jsonl", field="id"), "bytes", "field 'id' holds int, not text"),
        (
            TextSource("{folder}/bad.jsonl"),
            "bytes",
            "bad.jsonl cannot be read as jsonl: line 2, at byte 14: Expecting .:. delimiter .character 8 of",
        ),
        (TextSource("{folder}"), "bytes", "several formats .jsonl, parquet."),
        pytest.param(
            TextSource("gs://bucket/x"), "bytes", "needs a package .*: .*gcsfs.*extra 'gs'", marks=WITHOUT_GCSFS
        ),
        (TextSource("foo://x"), "bytes", "Protocol not known: foo"),
        (TextSource("{folder}/a.jsonl"), "{folder}", "has no tokenizer.json"),
        (TextSource("{folder}/a.jsonl"), "{folder}/tok", "is damaged"),
        (TextSource("{folder}/a.jsonl"), "train:many", "the size must be a number"),
        (TextSource("{folder}/a.jsonl"), "train:9", "a number from 257 to 1048576"),
        (TextSource("{folder}/bad.jsonl.xz"), "bytes", "bad.jsonl.xz cannot be read as jsonl: Input format"),
        (TextSource("{folder}/bad.jsonl.gz"), "bytes", "bad.jsonl.gz cannot be read as jsonl: Not a gzipped file"),
        (
            TextSource("{folder}/deep.jsonl"),
            "bytes",
            "deep.jsonl cannot be read as jsonl: line 1, at byte 0: maximum recursion",
        ),
        (TextSource("{folder}/packed"), "bytes", "1 packed files that cannot be read, such as a.zip; unpack"),
        (TextSource("{folder}/a.jsonl"), "{folder}/end", "names the eos_token 'no', which tokenizer.json does not"),
        (TextSource("{folder}/a.jsonl"), "{folder}/damaged", "tokenizer_config.json is damaged: "),
    ],
)
def test_what_cannot_become_a_store_is_one_error(
    tmp_path: Path, source: TextSource, tokenizer: str, message: str
) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    made = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    for name, settings in (("end", '{"eos_token": "no"}'), ("damaged", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(made)
        (tmp_path / name / "tokenizer_config.json").write_text(settings)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.zip").write_bytes(b"PK")
    for name in ("bad.jsonl.xz", "bad.jsonl.gz"):
        (tmp_path / name).write_bytes(b"nothing")
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * 10**5)
    (tmp_path / "blank.jsonl").write_bytes(lines(["", ""]))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text"')
    (tmp_path / "a.parquet").write_bytes(b"x")
    source = source._replace(path=source.path.format(folder=tmp_path))
    with pytest.raises(ValueError, match=message):
        build_store(source, tokenizer.format(folder=tmp_path), tmp_path / "out", workers=1)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "TOKENS_NAME", "/dev/full")
    part = tokenizing.StorePart(0, tuple(list_pieces(TextSource(write_jsonl(tmp_path)))[0]), "bytes", tmp_path)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        tokenizing._make([part], partial(tokenizing._in_processes, 1), None)


def test_a_folder_of_something_else_is_left_alone(made: Path, tmp_path: Path) -> None:
    source = TextSource(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="a store of another tokenizer"):
        build_store(source, "train:300", made)
    with pytest.raises(ValueError, match="a store of another source"):
        build_store(source._replace(field="id"), "bytes", made)
    with pytest.raises(ValueError, match=r"has files but no store\.json"):
        build_store(source, "bytes", tmp_path)


def test_sources_of_two_tokenizers_do_not_mix(made: Path, tmp_path: Path) -> None:
    other = build_store(TextSource(write_jsonl(tmp_path)), "train:300", tmp_path / "other", workers=1)
    parts = {"a": SourceConfig(path=str(made)), "b": SourceConfig(path=str(other))}
    with pytest.raises(ValueError, match="'a' and 'b' have different tokenizers"):
        load_source(DataConfig(mixture=parts, held_out_fraction=0.3), 16)
