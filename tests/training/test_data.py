"""The corpus, its windows, and their global order."""

import os
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import WHOLE_BYTES, Source, Windows, described, load_source
from diloco_jax.training.data.order import SampleOrder, check_source, eval_batches


def numbered(num_windows: int, seq_len: int = 4) -> Source:
    """Make a source whose windows start with their number as first id."""
    ids = np.arange(num_windows * seq_len + 1, dtype=np.uint32)
    return Source(train=Windows(ids, seq_len), held_out=Windows(ids[:0], seq_len), vocab_size=10**6)


def test_windows_overlap_by_the_one_id_that_is_only_a_target() -> None:
    windows = Windows(np.arange(10, dtype=np.uint8), seq_len=3)
    assert len(windows) == 3
    np.testing.assert_array_equal(windows[1]["tokens"], [3, 4, 5, 6])
    assert windows[2]["tokens"].dtype == np.int32
    with pytest.raises(IndexError):
        windows[3]


def test_no_training_window_has_a_held_out_byte(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i + 1]) * 50)
    source = load_source(DataConfig(path=str(tmp_path), held_out_fraction=0.25, patterns=("*.txt",)), seq_len=10)
    assert len(source.train.ids) + len(source.held_out.ids) == 20 * 51
    assert len(source.held_out.ids) == 255
    held_out = np.unique(np.concatenate([batch["tokens"] for batch in eval_batches(source, 1, 1000)]))
    trained = np.unique(np.concatenate([source.train[i]["tokens"] for i in range(len(source.train))]))
    # They share only the separator between files.
    assert set(held_out) & set(trained) == {0}


def test_the_order_of_files_depends_on_names_only(tmp_path: Path) -> None:
    for folder, names in (("a", ["x.py", "y.py", "s/z.py"]), ("b", ["s/z.py", "y.py", "x.py"])):
        for name in names:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name * 30)
        (tmp_path / folder / "notes.txt").write_text("not read")
    one, other = (
        load_source(DataConfig(path=str(tmp_path / f), patterns=("*.py",), held_out_fraction=0.2), 8) for f in "ab"
    )
    np.testing.assert_array_equal(one.train.ids, other.train.ids)
    assert b"not read" not in one.train.ids.tobytes() + one.held_out.ids.tobytes()


def test_evaluation_batches_are_spread_over_the_held_out_part_and_repeatable() -> None:
    source = Source(train=numbered(1).train, held_out=numbered(100).train, vocab_size=10**6)
    batches = list(eval_batches(source, batch_size=4, max_batches=5))
    assert len(batches) == 5 and batches[0]["tokens"].shape == (4, 5)
    first = np.concatenate([batch["tokens"] for batch in batches])[:, 0]
    np.testing.assert_array_equal(first // 4, np.arange(0, 100, 5))
    assert len(list(eval_batches(source, batch_size=30, max_batches=50))) == 3
    (whole,) = eval_batches(source, batch_size=101, max_batches=5)
    np.testing.assert_array_equal(whole["tokens"][:, 0] // 4, np.arange(100))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_is_mapped_and_its_ids_checked(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(1000).astype(f"<{dtype[0]}{np.dtype(dtype).itemsize}").tofile(path)
    config = DataConfig(format="tokens", path=str(path), token_dtype=dtype, vocab_size=1000, held_out_fraction=0.1)
    source = load_source(config, seq_len=9)
    assert isinstance(source.train.ids, np.memmap)
    np.testing.assert_array_equal(source.train[1]["tokens"], np.arange(9, 19))
    np.testing.assert_array_equal(source.held_out[0]["tokens"], np.arange(900, 910))
    narrow = load_source(
        DataConfig(format="tokens", path=str(path), token_dtype=dtype, vocab_size=500, held_out_fraction=0.1), 9
    )
    with pytest.raises(ValueError, match=r"token id \d+, data.vocab_size is 500"):
        list(eval_batches(narrow, 1, 10))


@pytest.mark.parametrize("config", [DataConfig(), DataConfig(path=__file__, held_out_fraction=0.5)])
def test_a_corpus_is_checked_from_its_size_alone(config: DataConfig) -> None:
    check_source(config, seq_len=16, eval_batch_size=10**6)
    with pytest.raises(ValueError, match="windows of 100000000"):
        check_source(config, seq_len=10**8, eval_batch_size=4)


def test_the_standard_library_is_a_corpus_without_its_tests() -> None:
    source = load_source(DataConfig(), seq_len=256)
    text = source.train.ids[:].tobytes() + source.held_out.ids.tobytes()
    assert len(text) > 5_000_000 and source.vocab_size == 256
    assert b"class ArgumentParser(" in text and b"class TestArgumentParserPickleable" not in text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(path="/no/such/place"), "'/no/such/place' does not exist; give a file"),
        (DataConfig(path="{folder}", patterns=("*.rst",)), "no file that matches"),
        (DataConfig(path="{folder}/short.txt"), "give more text"),
        (DataConfig(path="{folder}", format="tokens"), "is not a file"),
        (DataConfig(path="{folder}/short.txt", format="tokens"), "5 bytes, not a positive multiple of 2"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_an_error_with_its_path(
    tmp_path: Path, config: DataConfig, message: str
) -> None:
    (tmp_path / "short.txt").write_text("hello")
    made = DataConfig(path=config.path.format(folder=tmp_path), format=config.format, patterns=config.patterns)
    with pytest.raises(ValueError, match=message):
        load_source(made, seq_len=16)


def test_each_epoch_has_every_window_once_in_another_order() -> None:
    order = SampleOrder(numbered(20), seed=5)
    epochs = [[order.window_id(epoch * 20 + i) for i in range(20)] for epoch in range(3)]
    assert all(sorted(ids) == list(range(20)) for ids in epochs)
    assert len({tuple(ids) for ids in [*epochs, list(range(20))]}) == 4
    again = SampleOrder(numbered(20), seed=5)
    assert [again.window_id(10**9 + i) for i in range(5)] == [order.window_id(10**9 + i) for i in range(5)]
    assert [SampleOrder(numbered(20), seed=6).window_id(i) for i in range(20)] != epochs[0]


def test_a_batch_is_the_windows_of_its_ranges_in_their_order() -> None:
    source = numbered(20)
    order = SampleOrder(source, seed=5)
    batch = order.batch(((18, 22), (3, 4)))["tokens"]
    assert batch.dtype == np.int32 and batch.shape == (5, 5)
    for row, position in zip(batch, (18, 19, 20, 21, 3), strict=True):
        np.testing.assert_array_equal(row, source.train[order.window_id(position)]["tokens"])


def test_who_trains_alone_reads_the_order_as_it_is() -> None:
    order = SampleOrder(numbered(20), seed=5)
    for start, batch in zip((0, 8, 16, 24), order.batches(8), strict=False):
        np.testing.assert_array_equal(batch["tokens"], order.batch(((start, start + 8),))["tokens"])


@pytest.mark.parametrize("ranges", [(), ((4, 4),), ((-1, 2),)])
def test_a_batch_of_no_positions_is_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="no positions from 0 on"):
        SampleOrder(numbered(20), seed=5).batch(ranges)


def test_a_corpus_is_known_by_its_contents_not_by_its_path(tmp_path: Path) -> None:
    for name, text in (("one", "a text " * 200), ("two", "a text " * 200), ("else", "a test " * 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").write_text(text, encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("one", "two", "else")]
    one, two, other = (load_source(DataConfig(path=path), 8).corpus for path in paths)
    assert one == two != other
    assert one.startswith("1,401 tokens with digest ") and other.startswith("1,401 tokens")


@pytest.mark.parametrize("size", [1000, WHOLE_BYTES, WHOLE_BYTES + 4096, 5 * WHOLE_BYTES])
def test_a_digest_sees_both_ends_and_the_length(size: int) -> None:
    ids = np.zeros(size // 2, np.uint16)
    found = [described(ids), described(ids[:-1]), described(ids + 1)]
    for place in (0, -1):
        changed = ids.copy()
        changed[place] = 1
        found.append(described(changed))
    assert len(set(found)) == 5


def test_a_huge_token_file_is_described_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.touch()
    # The file is a hole and takes no space.
    os.truncate(path, 100 * 10**9)
    ids = np.memmap(path, "<u2", mode="r")
    assert described(ids).startswith("50,000,000,000 tokens with digest ")
