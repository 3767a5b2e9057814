"""Merge shards as real processes, with learners that send made-up values over the real transport."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.protocol.effects import Contribution, Merge
from diloco_jax.protocol.messages import NO_VERSION, FragmentValue, GlobalFragment, Heartbeat, Hello
from diloco_jax.runtime.model import merge_shards
from diloco_jax.runtime.model.arithmetic import Arithmetic, local_arithmetic
from diloco_jax.runtime.model.global_model import GlobalModel, make_model
from diloco_jax.runtime.model.merge_shards import MergeShards
from diloco_jax.runtime.model.model_share import make_setup
from diloco_jax.runtime.model.shard_process import ShardRun
from diloco_jax.runtime.syncer.context import Results
from diloco_jax.runtime.syncer.sharded_listener import Life, ShardedListener, open_listener
from diloco_jax.settings.resolved import ResolvedRun
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import load
from diloco_jax.transport.endpoints.greeting import Description
from diloco_jax.transport.endpoints.sharded import Dialler, ShardedLink
from diloco_jax.transport.link import Delivery, Link
from tests.runtime.helpers import (
    SLOW_STEP_S,
    kill_processes,
    processes_of,
    run,
    start,
    status,
    wait_for,
    write_config,
)
from tests.runtime.models import LEAFY, LEAFY_PLAN, drawn, go_on, leafy_payload, saved

pytestmark = [pytest.mark.net, pytest.mark.timeout(500)]

FINGERPRINT = (("run", "small"),)
NAMES = ("a", "b")


class Bench:
    """A syncer's listener and shards in front of a model, and learners that say what they are told to."""

    def __init__(self, folder: Path, shards: int) -> None:
        path = write_config(folder, protocol={"sync_every": 2, "num_fragments": 2}, syncer={"shards": shards})
        self.config: RunConfig = load(path)
        self.deaths: list[Exception] = []
        run = ResolvedRun(self.config, LEAFY_PLAN)
        setup, events = make_setup(run), Results()
        self.shards = MergeShards(setup, run, path, 1, events.put, self.deaths.append)
        self.model = model(self.config, Arithmetic(setup, self.shards.shares))
        life = Life("fresh", 1, threading.Event(), FINGERPRINT, Description("", ""))
        listener = open_listener(self.config, folder, life, self.shards, events)
        assert isinstance(listener, ShardedListener)
        self.listener = listener
        self.links: dict[str, Link] = {}

    def dial_all(self) -> None:
        """Give every learner a new session, when nothing of its old one is to be heard any more."""
        for link in self.links.values():
            link.close(0.1)
        while self.links and self.listener.receive(0.5) is not None:
            pass
        self.links = {name: self.dial(name) for name in NAMES}

    def greet(self) -> None:
        """Let every learner say hello, and hear it."""
        for name, link in self.links.items():
            link.send(hello(name))
        self.hear(Hello, len(NAMES))

    def dial(self, name: str) -> Link:
        wire, setup = self.config.wire, self.model.setup
        transport = replace(self.config.transport, address=self.listener.control.address)
        dialler = Dialler(
            transport, run_id="small", learner_id=name, incarnation=1, shares=setup.shares, up=wire.up, down=wire.down
        )
        return dialler.connect(0)

    def hear(self, kind: type, count: int) -> list[Delivery]:
        """The next messages of this kind, by the names of their senders."""
        found: list[Delivery] = []
        ends_s = time.monotonic() + 60
        while len(found) < count and time.monotonic() < ends_s:
            delivery = self.listener.receive(0.2)
            if delivery is not None and isinstance(delivery.message, kind):
                found.append(delivery)
        assert len(found) == count, f"{len(found)} of {count} {kind.__name__} came"
        return sorted(found, key=lambda delivery: delivery.peer)

    def close(self) -> None:
        for link in self.links.values():
            link.close(0.1)
        self.listener.close(0.1)
        self.shards.end()


def model(config: RunConfig, arithmetic: Arithmetic) -> GlobalModel:
    return make_model(ResolvedRun(config, LEAFY_PLAN), drawn(LEAFY).items(), arithmetic)


def hello(name: str, fingerprint: tuple[tuple[str, str], ...] = FINGERPRINT) -> Hello:
    return Hello(name, 1, fingerprint, (-1, -1), (0, 0), 0, 1, 0)


def receive(link: Link) -> Delivery:
    delivery = wait_for(lambda: link.receive(0.2), "a delivery")
    assert isinstance(delivery, Delivery)
    return delivery


@pytest.fixture(scope="module", params=[2, 3])
def benches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    this = Bench(tmp_path_factory.mktemp("bench"), request.param)
    yield this
    this.close()
    assert this.deaths == []


@pytest.fixture
def bench(benches: Bench) -> Bench:
    """A bench whose learners have just connected, whatever the tests before did."""
    benches.dial_all()
    return benches


def test_shards_give_the_bits_of_one_process(bench: Bench) -> None:
    one = replace(bench.config, syncer=replace(bench.config.syncer, shards=1))
    alone = model(one, local_arithmetic(make_setup(ResolvedRun(one, LEAFY_PLAN))))
    assert bench.model.digests == alone.digests
    bench.greet()
    capture, initial = bench.model.capture(), alone.parameters()
    for step in range(1, 6):
        fragment_id = step % 2
        newest = alone.versions[fragment_id]
        values = {name: leafy_payload(fragment_id, 10 * step + n, "int4") for n, name in enumerate(NAMES)}
        for name, link in bench.links.items():
            value = FragmentValue(name, 1, step, fragment_id, step, 1, 64, newest, step, len(values[name]))
            link.send(value, values[name])
        came = {delivery.peer: delivery.payload for delivery in bench.hear(FragmentValue, len(NAMES))}
        order = Merge(
            step, fragment_id, tuple(Contribution(name, step, 1, 64 + n, newest, 1) for n, name in enumerate(NAMES))
        )
        merged, wanted = bench.model.merge(order, came), alone.merge(order, values)
        assert merged == wanted and merged.state is not None
        bench.model.publish(merged)
        alone.publish(wanted)
        for base in (newest, NO_VERSION):
            message = GlobalFragment(step, fragment_id, step, 1, merged.state.digest, 0, base)
            for name in NAMES:
                bench.listener.send(name, message)
            for link in bench.links.values():
                delivery = receive(link)
                assert delivery.message == message and delivery.payload == alone.payload(fragment_id, base)
    parameters = alone.parameters()
    assert all(np.array_equal(parameters[path], value) for path, value in bench.model.parameters().items())
    captured = bench.model.parameters(capture)
    assert all(np.array_equal(initial[path], value) for path, value in captured.items()), "it stays as it was"
    pieces, plain = saved(bench.model)
    expected, expected_plain = saved(alone)
    assert plain == expected_plain and pieces.keys() == expected.keys()
    assert all(np.array_equal(array, expected[key]) for key, array in pieces.items())
    sent = 2 * sum(len(leafy_payload(step % 2, step, "int4")) for step in range(1, 6))
    wait_for(lambda: bench.listener.receive(0.1) or bench.listener.traffic.received_bytes > sent, "the count of bytes")
    go_on(bench.model, (pieces, plain))
    restored = bench.model.parameters()
    assert all(np.array_equal(parameters[path], value) for path, value in restored.items())


def test_a_hello_waits_for_the_shards_and_one_of_another_config_does_not(bench: Bench) -> None:
    link = bench.links["a"]
    assert isinstance(link, ShardedLink)
    # The shards' connections behave as if they were slow.
    link.control.send(hello("a"))
    link.control.send(Heartbeat("a", 1))
    assert bench.listener.receive(0.5) is None
    link.control.send(hello("a", (("run", "other"),)))
    assert bench.hear(Hello, 1)[0].message == hello("a", (("run", "other"),))
    link.send(hello("a"))
    assert bench.hear(Hello, 1)[0].message == hello("a")


def test_values_of_which_parts_are_missing_are_bounded_and_freed_with_their_session(bench: Bench) -> None:
    link, freed = bench.links["a"], []
    link.send(hello("a"))
    bench.hear(Hello, 1)
    assert isinstance(link, ShardedLink)
    holder = bench.model.setup.shares.holders(0)[0]
    share, tell = bench.shards.shares[holder], bench.shards.shares[holder].tell

    def watched(command: Any, *arguments: Any) -> None:
        if command is ShardRun.free:
            freed.append(arguments[0])
        tell(command, *arguments)

    share.tell = watched  # type: ignore[method-assign]
    for step in range(10):
        link.links[holder].send(FragmentValue("a", 1, step, 0, 1, 1, 64, 0, 1, 10), b"0123456789")
    wait_for(lambda: bench.listener.receive(0.1) or len(freed) == 6, "the oldest to be freed")
    assert [len(each) for each in bench.listener._values.values()] == [4], "twice the rounds in flight"
    link.close(0.1)
    delivery = wait_for(lambda: bench.listener.receive(0.2), "the end of the session")
    assert delivery.kind == "disconnected" and not bench.listener._values
    assert sorted(freed) == list(range(min(freed), min(freed) + 10)), "all, and each once"
    share.tell = tell  # type: ignore[method-assign]


def test_an_unusable_value_is_excluded(bench: Bench) -> None:
    bench.greet()
    version = bench.model.versions[0]
    good = leafy_payload(0, 1, "int4")
    for name, data in (("a", good), ("b", b"")):
        bench.links[name].send(FragmentValue(name, 1, 1, 0, 1, 1, 64, version, 1, len(good)), data)
    came = {delivery.peer: delivery.payload for delivery in bench.hear(FragmentValue, 2)}
    merged = bench.model.merge(Merge(1, 0, tuple(Contribution(name, 1, 1, 64, version, 1) for name in NAMES)), came)
    assert merged.excluded.keys() == {"b"} and merged.state is not None


def test_the_death_of_a_shard_is_reported_and_ends_what_waits_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 2)
    bench.dial_all()
    capture = bench.model.capture()
    bench.shards.shares[1].process.kill()
    wait_for(lambda: bench.deaths, "the news")
    assert "merge shard 1" in str(bench.deaths[0])
    with pytest.raises(ConnectionError, match="merge shard 1"):
        bench.model.parameters(capture)
    for link in bench.links.values():
        delivery = receive(link)
        assert delivery.kind == "disconnected" and delivery.peer == "syncer"
    del capture
    gc.collect()
    bench.close()


def test_a_shard_that_stands_still_is_killed_and_ends_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_shards, "ANSWER_POLL_S", 0.05)
    monkeypatch.setattr(merge_shards, "STOPPED_S", 0.2)
    bench = Bench(tmp_path, 2)
    capture = bench.model.capture()
    victim = bench.shards.shares[1].process
    victim.send_signal(signal.SIGSTOP)
    with pytest.raises(ConnectionError, match=r"merge shard 1 .* was stopped \(SIGSTOP\) for 0\.2 s"):
        bench.model.parameters(capture)
    assert victim.wait(30) == -signal.SIGKILL
    assert "stopped (SIGSTOP)" in str(bench.deaths[0])
    del capture
    gc.collect()
    bench.close()


def test_the_end_does_not_wait_long_for_a_shard_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge_shards, "END_S", 0.2)
    bench = Bench(tmp_path, 2)
    victim = bench.shards.shares[0].process
    victim.send_signal(signal.SIGSTOP)
    bench.close()
    assert victim.returncode == -signal.SIGKILL
    assert "merge shard 0" in caplog.text and "was stopped (SIGSTOP): killed" in caplog.text


@pytest.mark.long
def test_a_run_ends_although_a_shard_stands_still_and_leaves_no_process(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        islands={"count": 2, "devices": 1, "restart_delay_s": 0.1},
        train={"steps": 100_000, "eval_every": 0},
        syncer={"shards": 2},
    )
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir, "--quiet", step_s=SLOW_STEP_S)
    try:
        wait_for(lambda: _reached(run_dir, 5, 1), "step 5", 300)
        os.kill(next(pid for pid, words in processes_of(run_dir).items() if "--shard 1" in words), signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        # It took 124 s when a stopped shard was not killed.
        output, _ = process.communicate(timeout=90)
        assert "was stopped (SIGSTOP)" in output + (run_dir / "logs" / "syncer.log").read_text(), output
        wait_for(lambda: not processes_of(run_dir), "the end of all processes")
    finally:
        process.kill()
        kill_processes(tmp_path)


@pytest.mark.slow
def test_a_run_with_shards_outlives_a_shard_and_its_syncer_and_can_be_replayed(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        islands={"count": 2, "devices": 1, "restart_delay_s": 0.1},
        train={"steps": 300, "eval_every": 0},
        protocol={"snapshot_every": 50, "quorum": 2},
        syncer={"shards": 2},
    )
    run_dir = tmp_path / "run"
    process = start("train", config, "--run-dir", run_dir, "--quiet")
    try:
        for epoch, victim in ((1, "--shard 1"), (2, " syncer ")):
            wait_for(lambda e=epoch: _reached(run_dir, 80 * e, e), f"step {80 * epoch} of life {epoch}", 200)
            shards = [pid for pid, words in processes_of(run_dir).items() if "--shard" in words]
            os.kill(next(pid for pid, words in processes_of(run_dir).items() if victim in words), signal.SIGKILL)
            wait_for(lambda old=shards: not set(old) & set(processes_of(run_dir)), "the end of all shards")
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "merge shard 1" in output and "syncer killed by SIGKILL" in output
    finally:
        process.kill()
        kill_processes(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["complete"] and summary["global_steps"] == 300
    replayed = run("replay", run_dir, "--json", timeout_s=200, step_s=0)
    assert json.loads(replayed.stdout)["identical"], replayed.stdout + replayed.stderr


def _reached(run_dir: Path, global_step: int, epoch: int) -> bool:
    now = status(run_dir) or {"epoch": 0, "global_step": 0}
    return now["epoch"] == epoch and now["global_step"] >= global_step and len(processes_of(run_dir)) >= 5
