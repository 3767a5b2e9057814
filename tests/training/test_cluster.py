"""Stores that a Ray cluster tokenizes: the files of one process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_jax.training.data import cluster, documents, tokenizing
from diloco_jax.training.data.cluster import on_ray
from diloco_jax.training.data.documents import SourcePiece, TextSource
from diloco_jax.training.data.tokenizing import StorePart, build_store
from tests.runtime.helpers import call
from tests.training.test_stores import TEXTS, WRITERS, contents, write_jsonl

pytestmark = [
    pytest.mark.extra("ray"),
    pytest.mark.long,
    pytest.mark.net,
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def write_folder(folder: Path) -> str:
    for number, text in enumerate(TEXTS):
        path = folder / str(number % 7) / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text * 5)
    return str(folder)


@pytest.mark.parametrize(("name", "workers"), [("text", 1), ("jsonl", 2), ("gzip", 0), ("parquet", 0), ("records", 2)])
def test_a_cluster_writes_the_files_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, name: str, workers: int
) -> None:
    for module in (documents, tokenizing):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    (tmp_path / "texts").mkdir()
    source, told = (
        TextSource((WRITERS | {"text": (write_folder, 0)})[name][0](tmp_path / "texts")),
        list[tuple[str, int, int]](),
    )
    tokenizer = "bytes" if name == "gzip" else "train:400"
    one = build_store(source, tokenizer, tmp_path / "one", workers=1)
    engine = on_ray(address, workers)
    many = build_store(source, tokenizer, tmp_path / "many", 0, lambda *words: told.append(words), engine)
    assert contents(many) == contents(one) and len(contents(one)) > (3 if name == "gzip" else 8)
    assert told[-1][1] == told[-1][2] > 0


def test_what_a_node_cannot_read_is_named(tmp_path: Path, address: str) -> None:
    piece = SourcePiece(str(tmp_path / "lost.jsonl"), "jsonl", "text", 0, 0, 10)
    with pytest.raises(ValueError, match=r"a node of the Ray cluster cannot read .*lost\.jsonl \(No such file"):
        list(on_ray(address, 1)([StorePart(0, (piece,), "bytes", tmp_path)]))
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl cannot be read as jsonl: line 1, .*it is not an object"):
        build_store(TextSource(str(tmp_path / "bad.jsonl")), "bytes", tmp_path / "out", engine=on_ray(address, 1))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:many", "127.0.0.1:99999"])
def test_a_wrong_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match=rf"there is no Ray cluster at --address {address} \("):
        build_store(TextSource(write_jsonl(tmp_path)), "bytes", tmp_path / "out", engine=on_ray(address, 1))


def test_a_node_with_other_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(cluster, "_versions", lambda: "diloco-jax 9.9")
    with pytest.raises(
        ValueError, match=r"a node of the Ray cluster has diloco-jax .*, this process diloco-jax 9\.9; "
    ):
        build_store(TextSource(write_jsonl(tmp_path)), "bytes", tmp_path / "out", engine=on_ray(address, 1))


def test_options_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tokenize", tmp_path, "--tokenizer", "train:400", "--out", tmp_path / "out")
    refused = call(*words, "--address", "auto")
    assert "--address is auto, but --engine is local; add --engine ray" in refused.stderr
    assert refused.returncode == 2
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is missing; in a clone run pip install -e '\.\[ray\]'"):
        on_ray("", 1)
