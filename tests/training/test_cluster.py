"""Stores that a Ray cluster tokenizes: the files of one process, also after killed drivers and workers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_jax.training.data import cluster, documents, tokenizing
from diloco_jax.training.data.cluster import on_ray
from diloco_jax.training.data.documents import SourcePiece, TextSource
from diloco_jax.training.data.tokenizing import StorePart, build_store
from tests.training.test_stores import TEXTS, WRITERS, contents, write_jsonl

pytestmark = [
    pytest.mark.extra("ray"),
    pytest.mark.long,
    pytest.mark.net,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # Ray's own
]
WAIT_S = 300.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def wait_for(what: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.05)
    return found


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


# `diloco` with smaller parts, so that a small source has many.
SMALL = """
import sys
from diloco_jax.cli.main import main
from diloco_jax.training.data import documents, tokenizing
documents.PIECE_BYTES = tokenizing.PIECE_BYTES = 2_000_000
sys.exit(main())
"""


def tokenize(source: Path, out: Path, *more: str, env: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SMALL, "tokenize", str(source), "--tokenizer", "train:400", "--out", str(out)]
    return subprocess.Popen([*command, *more], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def write_large(folder: Path) -> Path:
    folder.mkdir()
    line = json.dumps({"text": "an island sends gradients, and the syncer merges them\n" * 400})
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(f"{line}\n" * 200)
    return folder


def tasks(command: int) -> list[int]:
    """The processes that run a task for a command that started its own Ray."""
    rows = subprocess.run(["ps", "-eo", "pid,ppid,args"], text=True, capture_output=True, check=True).stdout
    table = [
        (int(pid), int(parent), args) for pid, parent, args in (row.split(None, 2) for row in rows.splitlines()[1:])
    ]
    nodes = {pid for pid, parent, _ in table if parent == command}
    return [pid for pid, parent, args in table if parent in nodes and args.startswith("ray::_encoded")]


def test_killed_workers_and_a_killed_driver_leave_the_same_store(tmp_path: Path) -> None:
    """A worker dies and Ray repeats its task; then the command dies with its cluster, and the next one resumes."""
    source, one, many = write_large(tmp_path / "texts"), tmp_path / "one", tmp_path / "many"
    local = tokenize(source, one)
    assert local.wait(WAIT_S) == 0
    first = tokenize(source, many, "--engine", "ray", "--workers", "2")
    os.kill(wait_for(lambda: tasks(first.pid))[0], signal.SIGKILL)
    wait_for(lambda: [*many.glob("part-*.json")])
    working = tasks(first.pid)
    first.kill()
    first.communicate()
    kept = sorted(path.name for path in many.glob("part-*.json"))
    assert 0 < len(kept) < len([*one.glob("tokens-*")])
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in working))
    tokens = [many / name.replace("part", "tokens").replace("json", "bin") for name in kept]
    times = [path.stat().st_mtime_ns for path in tokens]

    again = tokenize(source, many, "--engine", "ray", "--workers", "2")
    output, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, output
    assert contents(many) == contents(one)
    assert [path.stat().st_mtime_ns for path in tokens] == times


def test_an_interrupt_ends_the_cluster_of_the_command(tmp_path: Path) -> None:
    source, out = write_large(tmp_path / "texts"), tmp_path / "out"
    command = tokenize(source, out, "--engine", "ray", "--workers", "1")
    working = wait_for(lambda: tasks(command.pid))
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=WAIT_S)
    assert command.returncode == 130 and "Traceback" not in output, output
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in working))


def test_tasks_without_memory_end_the_command(tmp_path: Path) -> None:
    """Ray's monitor of memory kills every task, as on a node whose memory is full."""
    full = {**os.environ, "RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "50"}
    command = tokenize(write_large(tmp_path / "texts"), tmp_path / "out", "--engine", "ray", "--workers", "1", env=full)
    output, _ = command.communicate(timeout=WAIT_S)
    assert command.returncode == 2 and "were lost 4 times (OutOfMemoryError), perhaps because memory ran out" in output


def test_options_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = tokenize(tmp_path, tmp_path / "out", "--address", "auto")
    assert "--address is auto, but --engine is local; add --engine ray" in refused.communicate()[0]
    assert refused.returncode == 2
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is missing; in a clone run pip install -e '\.\[ray\]'"):
        on_ray("", 1)
