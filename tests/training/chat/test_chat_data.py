"""Chat data from rows to batches: stores with weights, whole conversations in samples, and the loss on them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from diloco_jax.training.chat.packing import pack_conversations
from diloco_jax.training.data import documents, tokenizing
from diloco_jax.training.data.config import DataConfig, SourceConfig
from diloco_jax.training.data.corpus import load_source, tokenizer_of
from diloco_jax.training.data.documents import TextSource
from diloco_jax.training.data.order import SampleOrder, eval_batches, example
from diloco_jax.training.data.sample import SEGMENTS, TOKENS, WEIGHTS, count_predicted, stack
from diloco_jax.training.data.store import TURN_END, Store
from diloco_jax.training.data.tokenizing import build_store
from diloco_jax.training.models.decoder import Decoder
from tests.extras import absent
from tests.training.chat.templates import LINES, said, write_tokenizer

SMALL: Mapping[str, Any] = {
    "vocab_size": 300, "dim": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_dim": 16,
    "seq_len_max": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILOCO_CACHE", str(tmp_path / "cache"))


def rows(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns, and a row without an answer."""
    made = []
    for number in range(count):
        turns = [(said("user", f"q{number}"), said("assistant", f"a{number}.")) for _ in range(1 + number % 3)]
        made.append({"messages": [message for turn in turns for message in turn]})
    return [*made, {"messages": [said("user", "no answer")]}]


def write_rows(folder: Path, given: list[dict[str, Any]]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(folder / "chat.jsonl")


def made_store(folder: Path, given: list[dict[str, Any]], loss_on: str = "completion") -> Store:
    tokenizer = write_tokenizer(folder / "tokenizer", LINES)
    source = TextSource(write_rows(folder, given), "", ("*",), "messages", loss_on)
    return Store(build_store(source, str(tokenizer), folder / f"store-{loss_on}", workers=1))


def trained(tokens: np.ndarray, weights: np.ndarray, store: Store) -> str:
    return store.tokenizer.decode(tokens[weights > 0])


def test_a_store_has_the_weights_and_the_template(tmp_path: Path) -> None:
    store = made_store(tmp_path, rows(6))
    weights = store.weights(0, len(store))
    answers = "".join(f"a{number}.<|stop|>" * (1 + number % 3) for number in range(6))
    assert trained(store.read(0, len(store)), weights, store) == answers
    assert (store.flags(0, len(store)) & TURN_END).astype(bool).sum() == 12 and store.facts["trained"] == weights.sum()
    assert store.facts["documents"] == 6 and store.facts["rows_left_out"] == 1
    assert (store.folder / "chat_template.jinja").read_text() == LINES


def test_another_template_or_another_loss_is_another_store(tmp_path: Path) -> None:
    first = made_store(tmp_path, rows(3))
    source = TextSource(str(tmp_path / "chat.jsonl"), "", ("*",), "messages", "last")
    with pytest.raises(ValueError, match="is a store of another source"):
        build_store(source, str(tmp_path / "tokenizer"), first.folder, workers=1)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(LINES + "!")
    with pytest.raises(ValueError, match="is a store of another source"):
        build_store(source._replace(loss_on="completion"), str(tmp_path / "tokenizer"), first.folder, workers=1)


def test_an_interrupted_store_becomes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents, tokenizing):
        monkeypatch.setattr(module, "PIECE_BYTES", 600)
    whole = made_store(tmp_path, rows(30)).folder
    source, out = TextSource(str(tmp_path / "chat.jsonl"), "", ("*",), "messages", "completion"), tmp_path / "out"

    def interrupt(what: str, done: int, total: int) -> None:
        if done * 2 > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(source, str(tmp_path / "tokenizer"), out, 1, interrupt)
    # A part whose flags changed on the disk is made again.
    (out / "flags-00000.bin").write_bytes(b"")
    build_store(source, str(tmp_path / "tokenizer"), out, workers=1)
    made = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    assert made == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} and len(made) > 9


def test_samples_are_whole_conversations(tmp_path: Path) -> None:
    store = made_store(tmp_path, rows(9))
    ends = store.ends(0, len(store))
    samples = pack_conversations(store, 0, len(store), 60)
    tokens, weights = list[np.ndarray](), list[np.ndarray]()
    for number in range(len(samples)):
        sample = samples[number]
        assert {name: (value.shape, value.dtype.name) for name, value in sample.items()} == {
            TOKENS: ((61,), "int32"), SEGMENTS: ((61,), "int32"), WEIGHTS: ((61,), "float32")
        }  # fmt: skip
        real = sample[SEGMENTS] > 0
        assert not sample[WEIGHTS][~real].any() and (np.diff(sample[SEGMENTS][real]) >= 0).all()
        tokens.append(sample[TOKENS][real])
        weights.append(sample[WEIGHTS][real])
    # Only the conversations of three turns are too long; two of their turns fit.
    lengths = np.diff(ends, prepend=0)
    cut = int((lengths > 61).sum())
    assert (samples.cut, samples.left_out) == (cut, 0) and cut == 3
    text = store.tokenizer.decode(np.concatenate(tokens))
    assert text.count("<|begin|>assistant") == 3 * 1 + 3 * 2 + 3 * 2
    answers = "".join(f"a{number}.<|stop|>" * min(2, 1 + number % 3) for number in range(9))
    assert trained(np.concatenate(tokens), np.concatenate(weights), store) == answers


def test_conversations_whose_first_turn_does_not_fit_are_left_out(tmp_path: Path) -> None:
    given = [*rows(2)[:2], {"messages": [said("user", "x" * 70), said("assistant", "y")]}]
    samples = pack_conversations(store := made_store(tmp_path, given), 0, len(store), 60)
    assert (len(samples), samples.cut, samples.left_out) == (2, 0, 1)
    # With the loss on the last turn alone, nothing of a conversation that is cut would be trained on.
    last = made_store(tmp_path, rows(3)[2:3], "last")
    packed = pack_conversations(last, 0, len(last), 60)
    assert (len(packed), packed.cut, packed.left_out) == (0, 0, 1)
    whole = made_store(tmp_path, rows(3)[2:3], "all")
    assert (pack_conversations(whole, 0, len(whole), 60).cut, whole.weights(0, len(whole)).all()) == (1, True)


def test_a_config_reads_conversations_or_their_store(tmp_path: Path) -> None:
    store = made_store(tmp_path, rows(40))
    read = DataConfig(format="chat", path=str(tmp_path / "chat.jsonl"), tokenizer=str(tmp_path / "tokenizer"))
    ready = DataConfig(format="chat", path=str(store.folder))
    first, second = load_source(read, 60), load_source(ready, 60)
    assert first.corpus == second.corpus and len(first.train) == len(second.train) > 10
    batch = SampleOrder(second, 0).batch(((0, 4),))
    shapes = {name: (value.shape, value.dtype) for name, value in example(ready, 60).items()}
    assert {name: (value.shape[1:], value.dtype) for name, value in batch.items()} == shapes
    assert count_predicted(batch) == batch[WEIGHTS].sum() > 0
    # Only the text that is trained on counts.
    bytes_ = len(trained(batch[TOKENS], batch[WEIGHTS], store).replace("<|stop|>", ""))
    assert store.tokenizer.bytes_of(batch) == bytes_
    assert tokenizer_of(ready) is not None and tokenizer_of(ready).digest == store.tokenizer.digest


def test_a_mixture_with_text_has_weights_of_one(tmp_path: Path) -> None:
    store = made_store(tmp_path, rows(40))
    (tmp_path / "a.txt").write_text("some text " * 200)
    mixture = {
        "chat": SourceConfig(path=str(store.folder), format="chat"),
        "text": SourceConfig(path=str(tmp_path / "a.txt"), format="text"),
    }
    source = load_source(DataConfig(mixture=mixture, tokenizer=str(tmp_path / "tokenizer"), held_out_fraction=0.1), 60)
    batch = SampleOrder(source, 0).batch(((0, 6),))
    kinds = sorted(bool(weights.all()) for weights in batch[WEIGHTS])
    assert kinds == [False] * 3 + [True] * 3
    assert {*next(eval_batches(source, 1, 1, "text"))} == {TOKENS, SEGMENTS, WEIGHTS}


def test_tables_have_null_for_what_a_row_lacks(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason=absent("data"))
    import pyarrow

    folder = write_tokenizer(tmp_path / "tokenizer", "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}")
    given = [[said("user", "a", name="N"), said("assistant", "b")], [said("user", "c"), said("assistant", "d")]]
    parquet.write_table(pyarrow.table({"messages": given, "other": [1, 2]}), tmp_path / "chat.parquet")
    source = TextSource(str(tmp_path / "chat.parquet"), "", ("*",), "messages", "completion")
    store = Store(build_store(source, str(folder), tmp_path / "store", workers=1))
    assert store.tokenizer.decode(store.read(0, len(store))) == "Nabcd"
    wrong = [*given, [{"role": "user", "content": "e", "name": "\U00100000"}, said("assistant", "f")]]
    parquet.write_table(pyarrow.table({"messages": wrong}), tmp_path / "chat.parquet", row_group_size=1)
    with pytest.raises(ValueError, match=r"chat.parquet cannot be read as parquet: row 3: a text has the character"):
        build_store(source, str(folder), tmp_path / "wrong", workers=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": "{store}", "format": "store"}, "has conversations; set data.format to chat"),
        ({"path": "{text}", "format": "chat"}, "has text; set data.format to store"),
        ({"path": "{rows}", "format": "chat"}, "is not a store, so it needs data.tokenizer"),
        ({"path": "{rows}", "format": "chat", "tokenizer": "train:300"}, "has no chat template; name the folder"),
        ({"path": "{rows}", "format": "chat", "tokenizer": "{bare}"}, "line 1, at byte 0: .*has no chat template"),
        ({"path": "{plain}", "format": "chat", "tokenizer": "{bare}"}, "has no JSONL, Parquet or Arrow"),
        ({"path": "{wrong}", "format": "chat", "tokenizer": "{bare}"}, "line 2, at byte 17: message 1 of 'messages'"),
    ],
)
def test_wrong_sources_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    store = made_store(tmp_path, rows(2))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "a.jsonl").write_text('{"messages": []}\n{"messages": [3]}\n')
    text = build_store(TextSource(str(tmp_path / "a.txt")), "bytes", tmp_path / "text", workers=1)
    names = {
        "store": store.folder, "text": text, "rows": tmp_path / "chat.jsonl", "plain": tmp_path / "a.txt",
        "bare": write_tokenizer(tmp_path / "bare", None), "wrong": tmp_path / "wrong",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        load_source(DataConfig(**{name: str(value).format(**names) for name, value in config.items()}), 16)


def test_the_loss_is_the_mean_over_the_weights() -> None:
    model = Decoder.from_config(SMALL, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, (2, 13)).astype(np.int32)
    segments = np.repeat([[1] * 6 + [2] * 5 + [0] * 2], 2, axis=0).astype(np.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (2, 13)).astype(np.float32)
    logits = np.asarray(jax.jit(model.__call__)(tokens[:, :-1], segments[:, :-1]), np.float64)
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(likelihoods, tokens[:, 1:, None], axis=-1)[..., 0]
    used = weights[:, 1:] * (segments[:, 1:] == segments[:, :-1]) * (segments[:, 1:] > 0)

    compiled = jax.jit(model.loss)

    def loss(**arrays: np.ndarray) -> tuple[float, Any]:
        found, metrics = compiled({TOKENS: tokens, **arrays})
        return float(found), metrics

    value, metrics = loss(segments=segments, weights=weights)
    assert value == pytest.approx((each * used).sum() / used.sum(), rel=1e-6)
    assert float(metrics["weight"]) == used.sum()
    # Small weights do not make the loss smaller, and a batch without any has the loss 0.
    assert loss(segments=segments, weights=weights * np.float32(0.01))[0] == pytest.approx(value, rel=1e-5)
    assert loss(segments=segments, weights=weights * 0)[0] == 0
    alone = ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(np.float64)
    ones = loss(segments=segments, weights=np.ones_like(weights))[0]
    assert ones == pytest.approx((each * alone).sum() / alone.sum(), rel=1e-6)


def test_own_samples_with_weights_are_checked() -> None:
    from diloco_jax.training.data.own import OwnSamples

    def read(weights: np.ndarray) -> Any:
        given = [{TOKENS: np.arange(5), WEIGHTS: weights}]
        return OwnSamples(given, "own:Data", 4, 10, 0, 1)[0]

    assert stack([read(np.array([0, 1, 0.5, 1, 1]))])[WEIGHTS].dtype == np.float32
    for wrong in (np.ones(4), -np.ones(5)):
        with pytest.raises(ValueError, match="as 'weights'; give a number from 0 on for each token"):
            read(wrong)
