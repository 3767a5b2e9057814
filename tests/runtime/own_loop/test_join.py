"""Loops of a user's own as islands of real runs, and what `join` refuses."""

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diloco_jax
from diloco_jax.core.fragments import FragmentConfig, take
from diloco_jax.core.kinds import Kind, canonical_of
from diloco_jax.runtime.island.evaluation import scalars
from diloco_jax.runtime.learner.joined import Joined
from diloco_jax.runtime.model.layout_text import layout_of, read_layout
from diloco_jax.runtime.model.offered import describe_run
from diloco_jax.runtime.own_loop import introduce as subject
from diloco_jax.runtime.own_loop.island import OwnIsland
from diloco_jax.runtime.own_loop.stepping import SteppedIsland
from diloco_jax.runtime.own_loop.trees import LoopState
from diloco_jax.runtime.records.checkpoint import PARAMETERS, CheckpointReader, save
from diloco_jax.settings.run import RunConfig, SyncerConfig
from diloco_jax.settings.text import dump
from diloco_jax.transport.endpoints.grpc_link import listen
from diloco_jax.transport.link import TransportConfig, TransportError
from diloco_jax.transport.session.description import Description
from tests.runtime.helpers import (
    ROOT,
    call,
    interrupted,
    island_pid,
    kill_processes,
    merged,
    notes,
    processes_of,
    run,
    start,
    status,
    wait_for,
)

LOOP = Path(__file__).with_name("loop.py")
OWN: dict[str, Any] = {
    "name": "own",
    "islands": {"count": 2, "devices": 2, "command": [sys.executable, str(LOOP)], "restart_delay_s": 0.1},
    "model": {"module": "own"},
    "train": {"steps": 120, "eval_every": 0},
    "protocol": {"sync_every": 4, "num_fragments": 3, "snapshot_every": 20},
    "trackers": [],
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(merged(OWN, changes)), encoding="utf-8")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


@pytest.mark.long
@pytest.mark.net
def test_islands_die_and_return_the_syncer_dies_and_one_is_drained(tmp_path: Path, run_dir: Path) -> None:
    process = start("train", write(tmp_path, train={"steps": 1_000_000}), "--quiet", "--run-dir", run_dir, step_s=0.04)
    wait_for(lambda: notes(run_dir, "merged", "island-1") > 3, "merges of island-1", process)
    wait_for(lambda: any((run_dir / "states" / "island-1").rglob("step_*.json")), "a saved state", process)
    pid = island_pid(run_dir, "island-1")
    assert pid in [row["process"] for row in status(run_dir)["learners"] if row["learner"] == "island-1"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: notes(run_dir, "joined", "island-1") == 2, "the return of island-1", process)
    tapes = lambda: [path.read_text() for path in (run_dir / "tapes").glob("island-1.*")]  # noqa: E731
    wait_for(lambda: any('["state",' in tape for tape in tapes()), "its whole state, or a peer's", process)
    os.kill(next(pid for pid, words in processes_of(run_dir).items() if " syncer " in words), signal.SIGKILL)
    before = status(run_dir)["global_step"]
    wait_for(
        lambda: status(run_dir).get("epoch") == 2 and status(run_dir)["global_step"] > before + 5, "failover", process
    )
    wait_for(
        lambda: call("drain", "island-0", run_dir).returncode == 0, "island-0 at the new syncer, and its drain", process
    )
    wait_for(lambda: notes(run_dir, "left", "island-0"), "the farewell of island-0", process)
    interrupted(process)
    assert "1 compiled step" in (run_dir / "logs/island-1.log").read_text()
    audit = json.loads(call("audit", run_dir, "--json").stdout)
    assert audit["violations"] == 0 and audit["merged"] > 0


@pytest.mark.long
@pytest.mark.net
def test_an_island_of_two_hosts_joins_and_starts_again_when_the_loop_of_one_fails(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    islands = {"count": 1, "hosts": 2, "devices": 4}
    # With this protocol every value is merged and adopted before the next step.
    protocol = {"sync_every": 3, "overlap_steps": 0}
    path = write(tmp_path, islands=islands, train={"steps": 30}, protocol=protocol)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    output = run("train", path, "--quiet", "--run-dir", run_dir)
    assert output.returncode == 0 and (tmp_path / "failed").exists(), output.stdout + output.stderr
    # The launcher restarts both of its hosts.
    assert "island-0" in output.stdout and "starting it again" in output.stdout
    logs = [(run_dir / "logs" / name).read_text() for name in ("island-0.log", "island-0.host-1.log")]
    assert all("1 compiled step" in log for log in logs), logs
    losses = {log.rpartition("loss ")[2].split()[0] for log in logs}
    # Both hosts made the same steps.
    assert len(losses) == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["learners"]["island-0"]["restarts"] == 1


@pytest.mark.nightly
@pytest.mark.net
def test_islands_with_steps_of_milliseconds_are_merged_together(tmp_path: Path, run_dir: Path) -> None:
    command = [sys.executable, str(LOOP.with_name("quick_loop.py"))]
    changes = {"islands": {"command": command}, "train": {"steps": 600}, "protocol": {"sync_every": 6}}
    ended = run("train", write(tmp_path, **changes), "--json", "--run-dir", run_dir)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["complete"], ended.stderr
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    counts = [len(record["members"]) for record in records if record["kind"] == "merged"]
    # On a busy machine one process may start seconds after the other, which then makes rounds alone.
    together = counts[counts.index(2) :]
    assert len(together) >= 20 and sum(together) >= 1.8 * len(together), (counts, ended.stderr)
    assert not {alarm["kind"] for alarm in summary["alarms"]} & {"few", "unmerged-fragments"}


def tree(devices: int = 1) -> dict[str, Any]:
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    return {"a": [jax.device_put(jnp.arange(8.0), rows)], "b": jax.device_put(jnp.ones((4, 6)), rows)}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loops_arrays_go_out_and_come_back_as_they_were(devices: int) -> None:
    given = tree(devices) if devices > 1 else {"a": [jnp.arange(8.0)], "b": jnp.ones((4, 6), jnp.bfloat16)}
    # The counter is not bound to a device.
    count = jnp.int32(3)
    state = LoopState(given, (count, given["b"]))
    assert state.shapes == {"a/0": (8,), "b": (4, 6)} and layout_of(*read_layout(layout_of(state.shapes, state.kinds)))
    island = state.exchanged("float32", False)
    whole = FragmentConfig().plan(state.shapes, state.kinds, 1).fragments[0]
    values = take({"a/0": np.full(8, 5, np.float32), "b": np.zeros((4, 6), np.float32)}, whole)
    island.adopt(whole, values)
    back = state.tree(island.state.params)
    assert np.array_equal(back["a"][0], np.full(8, 5.0)) and not np.any(back["b"])
    # the loop's own arrays are untouched, the new ones lie as they did, and a counter lies where the parameters do
    assert np.array_equal(given["b"], np.ones((4, 6))) and type(back["b"].sharding) is type(given["b"].sharding)
    assert back["b"].sharding == given["b"].sharding
    assert len(island.state.opt_state[0].sharding.device_set) == devices
    evaluated = state.placed({"a/0": np.ones(8, np.float32), "b": np.zeros((4, 6), np.float32)})
    assert evaluated["b"].sharding == given["b"].sharding and evaluated["a"][0].dtype == given["a"][0].dtype
    taken = state.taken(back, island.state.opt_state, "after_step()")
    assert taken.params["b"] is back["b"]
    with pytest.raises(ValueError, match="another structure"):
        state.taken({"a": back["a"]}, island.state.opt_state, "after_step()")
    with pytest.raises(ValueError, match="opt_state"):
        state.taken(back, None, "after_step()")
    island.state = taken
    island.adopt(whole, values)
    with pytest.raises(ValueError, match=r"params\['a/0'\] was donated"):
        state.taken(back, island.state.opt_state, "after_step()")


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_random_keys_of_a_state_are_held_as_arrays_and_come_back_as_keys(kind: str) -> None:
    given = {"keys": jax.random.split(jax.random.key(5, impl=kind), 2), "count": jnp.int32(3)}
    state = LoopState(tree(2), given)
    held = state.exchanged("float32", False)
    assert [leaf.dtype for leaf in jax.tree.leaves(held.state.opt_state)] == [jnp.int32, jnp.uint32]
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(held.state.opt_state))
    back = state.moments(held.state.opt_state)
    assert np.array_equal(jax.random.normal(back["keys"][1], 4), jax.random.normal(given["keys"][1], 4))
    layouts = jax.tree.map(lambda leaf: leaf.sharding, back)
    step = jax.jit(lambda given: given | {"keys": jax.random.split(given["keys"][0], 2)}, out_shardings=layouts)
    step(step(back))
    assert step._cache_size() == 1, "a key that comes back is laid out as one that a step returns"
    taken = state.taken(state.tree(held.state.params), back | {"count": jnp.int32(4)}, "after_step()")
    assert np.array_equal(taken.opt_state["keys"], jax.random.key_data(given["keys"]))
    assert state.moments(taken.opt_state)["count"] == 4
    for other in (jax.random.key_data(given["keys"]), jax.random.split(jax.random.key(5, impl="unsafe_rbg"), 2)):
        with pytest.raises(ValueError, match="other random keys in opt_state"):
            LoopState(tree(2), given).taken(state.tree(held.state.params), back | {"keys": other}, "after_step()")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "no arrays"),
        ({"w": np.ones(3)}, r"params\['w'\] is a NumPy array, not a JAX array; convert it first \(jnp\.asarray\)"),
        ([(np.float32(1), 2)], r"params\['0/0'\] is a number of type float32, .*jnp\.asarray"),
        ([print], r"params\['0'\] is a builtin_function_or_method, not a JAX array; take it out of the tree"),
        ({"n": jnp.arange(3)}, "only floats can be merged"),
        ({"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, "two leaves have the name 'a/b'"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(params: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoopState(params)


def test_join_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SYNCER", raising=False)
    one = {"params": {"w": jnp.ones(3)}, "samples_per_step": 1, "tokens_per_step": 1}
    nobody = TransportConfig(connect_timeout_s=0.2)
    for arguments, words in (
        ({"name": "a"}, "syncer=, or DILOCO_SYNCER"),
        ({"syncer": "127.0.0.1:1"}, "name=, or DILOCO_ISLAND"),
        ({"syncer": "127.0.0.1:1", "name": "a", "samples_per_step": 0}, "samples_per_step is 0"),
        ({"syncer": "127.0.0.1:1", "name": "a", "data": "mine"}, 'use "leased" or "own"'),
        ({"syncer": "127.0.0.1:1", "name": "a", "axes": {"v": ("vocab",)}}, "'v', which is not a parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            diloco_jax.join(**{**one, **arguments})
    with pytest.raises(ConnectionError, match="no"):
        diloco_jax.join("127.0.0.1:1", name="a", transport=nobody, **one)


def test_another_model_than_the_runs_is_refused_by_its_first_difference() -> None:
    listener = listen(TransportConfig(), run_id="own")
    try:
        theirs = LoopState({"b": jnp.ones(3), "w": jnp.ones((2, 4))})
        listener.greeter.description = describe_run(RunConfig(), layout_of(theirs.shapes, theirs.kinds))
        ours = {"b": jnp.ones(3), "w": jnp.ones((2, 3))}
        with pytest.raises(ValueError, match=r"'w' has shape \(2, 3\), matrix here and shape \(2, 4\), matrix there"):
            diloco_jax.join(listener.address, name="a", params=ours, samples_per_step=1, tokens_per_step=1)
        # The loop's parameters stay as they were.
        assert not np.any(np.isnan(ours["w"]))
    finally:
        listener.close(0.0)


def test_layouts_are_bounded() -> None:
    rows = ('{"w":[[-1],"matrix",0]}', '{"w":[[2],"cube",0]}', '{"w":[[2],"vector",2]}', '{"\\udc80":[[2],"vector",0]}')
    for bad in ("[]", "{}", "{", '{"w":3}', *rows):
        with pytest.raises(ValueError, match="describes no model"):
            read_layout(bad)
    assert SyncerConfig().parameters_max == 2_000_000_000


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["/elsewhere/w"], "'/elsewhere/w' cannot be stored"),
        (["../../elsewhere"], "cannot be stored"),
        (["a//b"], "cannot be stored"),
        (["a/"], "cannot be stored"),
        ([""], "cannot be stored"),
        (["."], "cannot be stored"),
        (["a\0b"], "cannot be stored"),
        (["a\\b"], "cannot be stored"),
        (["_METADATA"], "cannot be stored"),
        (["w.__lock"], "cannot be stored"),
        (["x" * 256], "at most 500, and 255 bytes between two slashes"),
        (["x/" * 250 + "y"], "at most 500"),
        (["a", "a/c/0"], "'a' and 'a/c/0' would have the same files"),
        (["a/b", "a/b/zarr.json"], "would have the same files"),
    ],
)
def test_a_path_that_no_checkpoint_can_hold_is_refused(paths: list[str], message: str) -> None:
    layout = layout_of({path: (3,) for path in paths}, {path: Kind("vector") for path in paths})
    with pytest.raises(ValueError, match=re.escape(message)):
        read_layout(layout)


def test_any_other_path_can_be_stored_in_a_checkpoint(tmp_path: Path) -> None:
    values = {
        path: np.full(3, index, "<f4")
        for index, path in enumerate(["a", "a/b", "größe/ 日本*?[0:1]", "c/0", "é" * 127])
    }
    read_layout(layout_of({path: (3,) for path in values}, {path: Kind("vector") for path in values}))
    kept = CheckpointReader(save(tmp_path, {PARAMETERS: values}, {"global_step": 0}))
    assert {path: kept.array(PARAMETERS, path).tolist() for path in values} == {
        p: v.tolist() for p, v in values.items()
    }


@pytest.mark.parametrize("metrics", [{"loss": 1.0, "note": "abc"}, {"loss": None}, {"loss": jnp.ones(2), 1: 2.0}])
def test_metrics_that_are_no_scalars_are_named(metrics: Any) -> None:
    with pytest.raises(ValueError, match=r"metric '(loss|note)' is not a scalar"):
        scalars(metrics)
    assert scalars({1: 2, "loss": jnp.float32(3)}) == {"1": 2.0, "loss": 3.0}


FORMS = {"w": canonical_of((3,))}
GONE = TransportError("the syncer did not answer but with UNIMPLEMENTED")


def test_a_loop_whose_model_comes_too_late_takes_that_of_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    none, model = (
        Description(dump(RunConfig()), ""),
        Description(dump(RunConfig()), layout_of({"w": (3,)}, {"w": FORMS["w"].kind})),
    )
    answers = iter([none, GONE, none, model])

    def ask(*_: object) -> Description:
        answer = next(answers)
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def offer(*_: object) -> str:
        raise GONE

    monkeypatch.setattr(subject, "ask_description", ask)
    monkeypatch.setattr(subject, "offer_model", offer)
    monkeypatch.setattr(subject, "POLL_S", 0.0)
    transport = TransportConfig(address="127.0.0.1:1")
    assert subject.introduce(transport, "b", {"w": jnp.ones(3)}, FORMS).transport.address == "127.0.0.1:1"

    answers, impatient = iter([none, *[GONE] * 3]), TransportConfig(address="127.0.0.1:1", connect_timeout_s=1e-9)
    with pytest.raises(TransportError, match=r"no model yet: .*UNIMPLEMENTED"):
        subject.introduce(impatient, "b", {"w": jnp.ones(3)}, FORMS)


def test_a_loop_brings_its_model_when_the_island_that_was_faster_dies_on_the_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config, layout = dump(RunConfig()), layout_of({"w": (3,)}, {"w": FORMS["w"].kind})
    none, coming, model = Description(config, ""), Description(config, "", coming=True), Description(config, layout)
    described, replies = iter([none, none, coming, coming, none, model]), iter([subject.BUSY, ""])
    monkeypatch.setattr(subject, "ask_description", lambda *_: next(described))
    monkeypatch.setattr(subject, "offer_model", lambda *_: next(replies))
    monkeypatch.setattr(subject, "POLL_S", 0.0)
    # A poll takes no time here, but a model that is on its way is waited for.
    transport = TransportConfig(address="127.0.0.1:1", connect_timeout_s=1e-9)
    subject.introduce(transport, "b", {"w": jnp.ones(3)}, FORMS)
    assert next(replies, None) is None
    assert "b: waiting at 127.0.0.1:1 until the syncer has the run's model" in caplog.messages


def test_a_model_that_the_run_cannot_take_is_refused_and_one_that_is_not_finite_not_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "ask_description", lambda *_: Description(dump(RunConfig()), ""))
    monkeypatch.setattr(subject, "offer_model", lambda *_: "the model has 3 parameters, the limit is 2")
    there, refused = TransportConfig(address="127.0.0.1:1"), "cannot take this loop's model: the model has 3 parameters"
    for value, words in ((1.0, refused), (jnp.nan, r"'w'.*NaN or infinite")):
        with pytest.raises(ValueError, match=words):
            subject.introduce(there, "b", {"w": jnp.array([1.0, value, 2.0])}, FORMS)


class Side:
    """Protocol side of an island with its own loop; it records why it left."""

    reason = ""

    def leave(self, reason: str) -> None:
        self.reason = reason

    def check_end(self) -> None:
        pass


def own_island(side: Side) -> OwnIsland:
    """An island as its loop sees it between two steps, without a run."""
    island = SteppedIsland.__new__(SteppedIsland)
    island.name, island._side, island.going, island._several = "a", side, True, False  # type: ignore[assignment]
    island._stop, island._undo = threading.Event(), ExitStack()
    return OwnIsland(island, LoopState({"w": jnp.ones(3)}))


def test_the_loss_of_what_after_step_returned_is_named() -> None:
    used = jnp.ones(3)
    used.delete()
    side = Side()
    with pytest.raises(RuntimeError, match="deleted") as caught, own_island(side):
        jax.jit(jnp.sin)(used)
    note = caught.value.__notes__[-1]
    assert "continue with what after_step() returns" in note
    assert traceback.format_exception(caught.value)[-1].strip().endswith(note), (
        "so it is the last line of the island's log"
    )
    assert side.reason == "its loop failed: RuntimeError"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("mine"), "its loop failed: ValueError"), (KeyboardInterrupt(), "stopped from outside")],
)
def test_the_syncer_hears_that_a_loop_failed(error: BaseException, reason: str) -> None:
    side = Side()
    with pytest.raises(type(error)) as caught, own_island(side):
        raise error
    assert side.reason == reason and not getattr(caught.value, "__notes__", ())


def test_an_island_that_finds_its_run_complete_ends_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its syncer is still there, perhaps on another machine, and waits for such islands."""
    side: Any = Joined.__new__(Joined)
    left: list[str] = []
    side._decisions = SimpleNamespace(finished="run complete")
    side.begin, side.check_end, side.leave = lambda: False, lambda: None, left.append
    island = own_island(side)
    island._island.going, island._island._pulse = None, MagicMock()
    island._island._run_dir, island._island.local_step = tmp_path, 0
    with pytest.raises(diloco_jax.RunComplete) as caught, island:
        island.state()
    assert caught.value.code == 0 and left == ["stopped from outside"]
    assert "so a has nothing to do; to train longer, start its syncer again with --train.steps MORE" in caplog.text


def test_a_late_island_of_a_complete_run_ends_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one: dict[str, Any] = {"params": {"w": jnp.ones(3)}, "samples_per_step": 1, "tokens_per_step": 1, "name": "a"}
    nobody = TransportConfig(connect_timeout_s=0.2)
    for summary in ({"complete": False}, {"complete": True}):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(SystemExit if summary["complete"] else ConnectionError) as caught:
            diloco_jax.join("127.0.0.1:1", transport=nobody, run_dir=tmp_path, **one)
    assert isinstance(caught.value, diloco_jax.RunComplete) and caught.value.code == 0
    assert "the run is complete, so a has nothing to do" in caplog.text
    waits = f"; the run in {tmp_path} is complete, so without a syncer this process ends after that time"
    assert [waits in line for line in caplog.messages if "waiting up to" in line] == [False, True]


def test_an_address_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    one: dict[str, Any] = {"params": {"w": jnp.ones(3)}, "samples_per_step": 1, "tokens_per_step": 1, "name": "a"}
    nobody = TransportConfig(connect_timeout_s=0.2)
    with pytest.raises(ConnectionError, match=r"at 127\.0\.0\.1:1 within 0\.2 s \(.*\): start it, correct syncer=, or"):
        diloco_jax.join("127.0.0.1:1", transport=nobody, **one)
    monkeypatch.setenv("DILOCO_SYNCER", "127.0.0.1:1")
    with pytest.raises(ConnectionError, match=r"start it, correct DILOCO_SYNCER, or"):
        diloco_jax.join(transport=nobody, **one)
