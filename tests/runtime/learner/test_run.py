"""A real LearnerRun in a thread, and a syncer played by the test, message by message."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from flax import nnx

from diloco_jax.core import codec
from diloco_jax.core.layout import value_digest
from diloco_jax.protocol import messages
from diloco_jax.protocol.bans import Bans
from diloco_jax.protocol.learner.recovery import DAMAGED_MAX
from diloco_jax.protocol.leases import earlier_range
from diloco_jax.protocol.membership import other_run
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.releases import STAMP
from diloco_jax.runtime.island import adoptions, payloads
from diloco_jax.runtime.learner.effects import LinkKeeper, Signals
from diloco_jax.runtime.learner.joined import EARLIER_STEPS, Joining, island_pulse
from diloco_jax.runtime.learner.run import LearnerRun
from diloco_jax.runtime.learner.tape import learner_tape_path
from diloco_jax.runtime.records.signals import RefusedForGood
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.settings.run import IslandsConfig, RunConfig, TrainConfig
from diloco_jax.training.island import Island, StepHandle
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.whole_state.finite import UnusableState
from diloco_jax.training.whole_state.moving import MovingState
from diloco_jax.transport.endpoints.grpc_link import listen
from diloco_jax.transport.link import Rejected, TransportConfig
from tests.limits import HANGS_S

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("shared_programs", "quick_compiler")]

M = TypeVar("M")
# The model is wide enough for moments of several chunks.
WIDTH = 40_000


class Tiny(nnx.Module):
    """A model that compiles fast."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones((WIDTH, 4)))
        self.bias = nnx.Param(jnp.zeros((5,)))

    @classmethod
    def from_config(cls, args: Mapping[str, Any], *, rngs: nnx.Rngs) -> Tiny:
        return cls(rngs)

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        wanted = batch["tokens"].astype(jnp.float32).mean() / 256
        return jnp.mean((self.scale[...] - wanted) ** 2) + jnp.mean((self.bias[...] - wanted) ** 2), {}


CONFIG = RunConfig(
    name="scripted",
    islands=IslandsConfig(count=1, devices=8),
    train=TrainConfig(steps=1000, batch_size=8, seq_len=16),
    model=ModelConfig(module=f"{__name__}:Tiny"),
    optimizer=OptimizerConfig(warmup_steps=0),
    protocol=ProtocolConfig(sync_every=4, num_fragments=2, heartbeat_s=0.2, resend_s=0.3),
    trackers=(),
)
NAME, INCARNATION = "island-0", 7
# The id of the run.
RUN = "5eed"


class Script:
    """The syncer's part of a conversation, with a learner in a thread."""

    def __init__(self, run_dir: Path, config: RunConfig = CONFIG, incarnation: int = INCARNATION) -> None:
        self.listener = listen(TransportConfig(), run_id=config.name, run=RUN)
        self.stop = threading.Event()
        joining = Joining(
            config, NAME, incarnation, self.listener.address, run_dir, island_pulse(config, run_dir, NAME)
        )
        self.learner = LearnerRun(joining, self.stop)
        self.reason = ""
        self.error: Exception | None = None
        self.heard: list[Any] = []
        self.path = learner_tape_path(run_dir, NAME, incarnation)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.reason = self.learner.run()
        except Exception as error:
            self.error = error

    def say(self, message: messages.SyncerMessage, payload: bytes = b"") -> None:
        self.listener.send(NAME, message, payload)

    def await_message(self, kind: type[M], payload: bool = False) -> Any:
        """Return the next message of a kind; the others are kept in `heard`."""
        ends_s = time.monotonic() + HANGS_S
        while time.monotonic() < ends_s:
            delivery = self.listener.receive(1.0)
            if delivery is None or delivery.message is None:
                continue
            self.heard.append(delivery.message)
            if isinstance(delivery.message, kind):
                return (delivery.message, bytes(delivery.payload)) if payload else delivery.message
        raise AssertionError(f"no {kind.__name__} came; heard {[type(m).__name__ for m in self.heard]}")

    def values(self, fragment_id: int, fill: float) -> bytes:
        shapes = self.learner.host.fragments[fragment_id].keys_shapes
        return codec.encode({key: np.full(shape, fill, np.float32) for key, shape in shapes}, "float32")

    def digest(self, fragment_id: int, fill: float) -> int:
        shapes = self.learner.host.fragments[fragment_id].keys_shapes
        return value_digest({key: np.full(shape, fill, np.float32) for key, shape in shapes})

    def give(self, fragment_id: int, version: int, fill: float, *, epoch: int = 1, damage: bool = False) -> None:
        payload, digest = self.values(fragment_id, fill), self.digest(fragment_id, fill)
        message = messages.GlobalFragment(version, fragment_id, version, epoch, digest, len(payload))
        self.say(message, payload[:-1] + b"\x7f" if damage else payload)

    def admit(
        self, global_step: int = 0, fill: float = 1.0, *, samples: tuple[int, int] = (100, 500), damaged: int = -1
    ) -> messages.Hello:
        """Welcome the learner, give it the model and these samples; one fragment may arrive damaged."""
        hello: messages.Hello = self.await_message(messages.Hello)
        self.say(messages.Welcome(global_step, (global_step,) * 2, 1, 0, RUN))
        for fragment_id in range(2):
            self.give(fragment_id, global_step, fill, damage=fragment_id == damaged)
        self.say(messages.Lease(0, *samples))
        return hello

    def tape(self, *kinds: str) -> list[Any]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if not kinds or line[0] in kinds]

    def end(self) -> None:
        self.stop.set()
        self._thread.join(HANGS_S)
        assert not self._thread.is_alive()
        self.listener.close(0.0)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.end()


def test_a_conversation_from_hello_to_stop_and_its_tape(script: Script) -> None:
    hello = script.admit()
    assert (hello.versions, hello.digests, hello.epoch, hello.step_samples) == ((-1, -1), (0, 0), 0, 8)
    first = script.await_message(messages.StepReport)
    assert (first.local_step, first.samples, first.granted, first.tokens) == (1, 8, 400, 8 * 16)
    script.say(messages.PullRequest(1, 1, 1))
    value, payload = script.await_message(messages.FragmentValue, payload=True)
    assert (value.fragment_id, value.base_version) == (1, 0) and len(payload) == value.payload_bytes
    script.give(1, 1, 2.0)
    while script.await_message(messages.StepReport).adopted[1].version != 1:
        pass
    script.say(messages.AnchorRequest(1, 1))
    anchor, payload = script.await_message(messages.AnchorValue, payload=True)
    assert payload == script.values(1, 2.0) and anchor.digest == script.digest(1, 2.0)
    assert anchor.payload_bytes == len(payload)
    script.say(messages.Stop(3, "the run is complete"))
    assert script.await_message(messages.Leave).reason == "the run is complete"
    script._thread.join(HANGS_S)
    assert script.reason == "the run is complete"
    tape = script.tape()
    assert tape[0] == ["begin", NAME, INCARNATION, 8, list(STAMP)]
    assert [line[1:3] for line in script.tape("adopt")] == [[0, 0], [1, 0], [1, 1]]
    steps = script.tape("step")
    assert [line[1] for line in steps] == list(range(1, len(steps) + 1))
    assert [line[3] for line in steps[:3]] == [[[100, 108]], [[108, 116]], [[116, 124]]]
    assert script.tape("sent") == [["sent", 1, 1, value.local_step]]
    assert tape[-1][:2] == ["end", "the run is complete"]
    assert tape[-1][2] == [script.digest(0, 1.0), script.digest(1, 2.0)]


def test_a_step_is_on_the_tape_before_anybody_hears_of_it(script: Script) -> None:
    script.admit()
    for _ in range(5):
        report = script.await_message(messages.StepReport)
        assert script.tape("step")[report.local_step - 1][1] == report.local_step


def test_a_damaged_fragment_is_dropped_and_asked_for(script: Script) -> None:
    script.admit(damaged=1)
    again = script.await_message(messages.Hello)
    # The learner may not have adopted fragment 0 yet.
    while again.versions == (-1, -1):
        again = script.await_message(messages.Hello)
    assert again.versions == (0, -1) and again.digests == (script.digest(0, 1.0), 0)
    assert script.learner.joined.inbox.damaged == 1
    assert not any(isinstance(message, messages.StepReport) for message in script.heard)
    script.give(1, 0, 1.0)
    assert script.await_message(messages.StepReport).local_step == 1


def test_of_the_values_that_came_during_a_step_only_the_newest_is_adopted(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, wait = threading.Event(), threading.Event(), Island.wait

    def wait_long(island: Island, handle: StepHandle) -> dict[str, float]:
        began.set()
        may_end.wait(HANGS_S)
        return wait(island, handle)

    monkeypatch.setattr(Island, "wait", wait_long)
    script.admit()
    while not began.is_set():
        script.await_message(messages.Heartbeat)
    for version in (1, 3, 2):
        payload, digest = script.values(0, version), script.digest(0, version)
        message = messages.GlobalFragment(version, 0, version, 1, digest, len(payload))
        # Its link thread calls this in a real run.
        script.learner.joined.inbox.take(message, payload)
    may_end.set()
    while not script.await_message(messages.StepReport).adopted[0].version:
        pass
    assert [line[2] for line in script.tape("adopt") if line[1] == 0] == [0, 3]


def test_expulsion_ends_this_incarnation_and_says_why(script: Script) -> None:
    script.admit()
    script.await_message(messages.StepReport)
    script.say(messages.Expel("three values were NaN"))
    script._thread.join(HANGS_S)
    assert isinstance(script.error, ConnectionAbortedError)
    assert "expelled this incarnation: three values were NaN" in str(script.error)
    assert script.tape()[-1][:2] == ["end", "expelled: three values were NaN"]


def test_refusal_is_wrong_input_at_first_and_bad_luck_later(script: Script, tmp_path: Path) -> None:
    script.await_message(messages.Hello)
    script.say(messages.Refuse("model layout differs"))
    script._thread.join(HANGS_S)
    assert type(script.error) is RefusedForGood and "refused this learner: model layout differs" in str(script.error)
    script.end()
    later = Script(tmp_path, incarnation=8)
    later.admit()
    later.await_message(messages.StepReport)
    later.say(messages.Refuse("the run went back to a snapshot; start the learner again"))
    later._thread.join(HANGS_S)
    later.end()
    assert isinstance(later.error, ConnectionAbortedError) and "start the learner again" in str(later.error)


@pytest.mark.parametrize("kind", [messages.Expel, messages.Refuse])
def test_a_ban_ends_a_learner_for_good_whatever_its_reason_says(
    script: Script, kind: type[messages.Expel | messages.Refuse]
) -> None:
    bans = Bans()
    # A refusal with these words is not for good.
    bans.add("island-0", f"its data {messages.STALE}")
    script.admit()
    script.await_message(messages.StepReport)
    script.say(kind(bans.refusal("island-0")))
    script._thread.join(HANGS_S)
    assert type(script.error) is RefusedForGood
    assert "refused this learner: island-0 is banned from this run: its data is stale; to let it" in str(script.error)


@pytest.mark.parametrize("told", ["at the connection", "after the greeting"])
def test_an_island_ends_where_its_run_was_replaced_by_another(script: Script, told: str) -> None:
    """The syncer was started again at the same address with the same config and a new folder."""
    script.admit()
    script.await_message(messages.StepReport)
    address = script.listener.address
    script.listener.close(0.0)
    other = listen(
        TransportConfig(address=address), run_id=CONFIG.name, epoch=1, run="cafe" if told == "at the connection" else ""
    )
    try:
        script.listener = other
        if told == "after the greeting":
            assert script.await_message(messages.Hello).run == RUN
            script.say(messages.Refuse(other_run(NAME, RUN, "cafe")))
        script._thread.join(HANGS_S)
        assert type(script.error) is RefusedForGood, script.error
        assert f"{NAME} has joined another run with the id 5eed" in str(script.error).replace("'", "")
        assert "start its process again" in str(script.error)
    finally:
        other.close(0.0)


def test_leaving_before_the_first_step_is_polite_too(script: Script) -> None:
    script.await_message(messages.Hello)
    script.stop.set()
    assert script.await_message(messages.Leave).reason == "stopped from outside"
    script.end()
    assert script.reason == "stopped from outside"
    begin, end = script.tape()
    assert begin == ["begin", NAME, INCARNATION, 8, list(STAMP)]
    chain = TapeChain()
    chain.add(json.dumps(begin, separators=(",", ":")).encode())
    assert end == ["end", "stopped from outside", [0, 0], chain.head]


def test_without_new_data_earlier_data_is_read_and_no_step_waits(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    script.admit(samples=(976, 1000))
    while (report := script.await_message(messages.StepReport)).local_step < 3 + EARLIER_STEPS:
        pass
    assert report.samples == report.granted == 24
    earlier = [list(earlier_range(NAME, INCARNATION, step, 1000, 8)) for step in range(4, 9)]
    read = [[976, 984], [984, 992], [992, 1000], *earlier]
    assert [line[3] for line in script.tape("step")[:8]] == [[each] for each in read]
    assert caplog.text.count("the leased data is used up") == 1
    script.say(messages.Lease(24, 1050, 1066))
    while script.await_message(messages.StepReport).samples < 32:
        pass
    assert [[1050, 1058]] in [line[3] for line in script.tape("step")]
    assert "new data is leased, after" in caplog.text


def test_a_state_is_given_in_parts_and_taken_by_another(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    part_bytes = adoptions.STATE_PART_BYTES // 2
    for module in (adoptions, payloads):
        monkeypatch.setattr(module, "STATE_PART_BYTES", part_bytes)
    script.admit()
    while script.await_message(messages.StepReport).local_step < 3:
        pass
    script.say(messages.StatePull("island-1", 0, 0, 0))
    parts = [script.await_message(messages.StateChunk, payload=True)]
    first = parts[0][0]
    assert first.receiver == "island-1" and first.parts >= 2
    for number in range(1, first.parts):
        script.say(messages.StatePull("island-1", 0, first.local_step, number))
        parts.append(script.await_message(messages.StateChunk, payload=True))
    assert [part.part for part, _ in parts] == list(range(first.parts))
    assert {len(payload) for _, payload in parts[:-1]} == {part_bytes}
    assert all(part.digest == codec.digest(payload) for part, payload in parts)
    assert script.tape("staged_state") == [["staged_state", first.local_step]]
    # The state has no chunk of this number.
    script.say(messages.StatePull("island-1", 0, first.local_step, first.parts))
    script.end()
    taker = Script(tmp_path / "taker", incarnation=9)
    # This is a newer version of fragment 0 than the donor had.
    taker.admit(4, fill=5.0)
    asked = taker.await_message(messages.StateRequest)
    assert (asked.donor, asked.donor_step, asked.part, asked.clock) == ("", 0, 0, 4)
    relayed = [(part._replace(receiver=NAME, learner_id="donor", clock=4), payload) for part, payload in parts]
    # The damaged chunk is requested again.
    taker.say(relayed[0][0], relayed[0][1][:-1] + b"\x55")
    assert taker.await_message(messages.StateRequest).part == 0
    for part, payload in relayed:
        taker.say(part, payload)
    assert taker.await_message(messages.StateDone).donor == "donor"
    assert "part 0 of the state of donor arrived damaged" in caplog.text
    taker.await_message(messages.StepReport)
    taker.end()
    told = caplog.text.rindex
    assert told("recovering: loads the state of donor") < told("makes its first step or compiles it")
    assert taker.tape("state") == [["state", "donor", INCARNATION, first.local_step, []]]
    lines = [line[0] for line in taker.tape()]
    assert lines.index("state") < lines.index("step")
    host = script.learner.host
    leaf = host.moving.read(b"".join(payload for _, payload in parts))
    moments = [name for name in host.island.state_layout.by_name if "/mu/" in name]
    assert moments and all(np.abs(leaf(name)).max() > 0 for name in moments)


def test_a_foreign_state_is_refused_and_training_begins_without(script: Script) -> None:
    script.admit(4)
    script.await_message(messages.StateRequest)
    payload = b"no state of this model"
    part = messages.StateChunk("donor", 3, NAME, 30, 0, 1, codec.digest(payload), len(payload), clock=4)
    script.say(part, payload)
    script.await_message(messages.StateDone)
    # Another donor may have a better state.
    script.await_message(messages.StateRequest)
    script.say(messages.StateUnavailable("", "nobody is there"))
    assert script.await_message(messages.StepReport).local_step == 1
    assert script.tape("state") == []


def test_hearts_beat_while_the_compiler_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(Island, "warm_up", lambda island, shape: may_end.wait(HANGS_S))
    script = Script(tmp_path)
    script.admit()
    for _ in range(3):
        script.await_message(messages.Heartbeat)
    assert not any(isinstance(message, messages.StepReport) for message in script.heard)
    may_end.set()
    script.await_message(messages.StepReport)
    script.end()


def test_nothing_is_compiled_for_a_complete_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(Island, "warm_up", lambda island, shape: compiled.append(shape))
    script = Script(tmp_path)
    script.await_message(messages.Hello)
    script.say(messages.Stop(1000, messages.RUN_COMPLETE))
    assert script.await_message(messages.Leave).reason == messages.RUN_COMPLETE
    script.end()
    assert script.reason == messages.RUN_COMPLETE and not compiled


def test_hearts_beat_while_a_value_is_read(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, may_end, read = threading.Event(), threading.Event(), adoptions.GlobalValues.read

    def slowly(values: adoptions.GlobalValues, *arguments: Any) -> adoptions.ArrivedValue:
        reading.set()
        assert may_end.wait(HANGS_S)
        return read(values, *arguments)

    script.admit()
    script.await_message(messages.StepReport)
    monkeypatch.setattr(adoptions.GlobalValues, "read", slowly)
    script.give(1, 1, 2.0)
    assert reading.wait(HANGS_S)
    # The link thread gives no ticks now. Heartbeats that it sent before are at most as many as its inbox holds here.
    while script.listener.receive(0.0) is not None:
        pass
    for _ in range(3):
        script.await_message(messages.Heartbeat)
    may_end.set()


def test_an_own_saved_state_is_taken_when_it_is_recent(tmp_path: Path) -> None:
    config = replace(CONFIG, protocol=replace(CONFIG.protocol, snapshot_every=2))
    first = Script(tmp_path, config)
    first.admit()
    first.await_message(messages.StepReport)
    # The value passes the marker of global step 2.
    first.give(0, 2, 3.0)
    while not first.tape("saved"):
        first.await_message(messages.StepReport)
    first.end()
    (_, local_step, global_step), *_ = first.tape("saved")
    assert global_step == 2
    second = Script(tmp_path, config, incarnation=8)
    second.admit(2, fill=3.0)
    second.await_message(messages.StepReport)
    second.end()
    assert second.tape("state") == [["state", "", INCARNATION, local_step, [0]]]
    assert not any(isinstance(message, messages.StateRequest) for message in second.heard)


def spoil(folder: Path) -> None:
    """Put NaN into the moments of the newest saved state, as an older release may have saved them."""
    record = max(folder.rglob("*.json"))
    told, content = json.loads(record.read_text()), bytearray(record.with_suffix(".shards").read_bytes())
    at = 0
    for leaf, dtype, _, spans in told["shards"]:
        size = int(np.prod([stop - start for start, stop in spans])) * np.dtype(dtype).itemsize
        if leaf.startswith("optimizer/") and dtype == "float32" and size > 4:
            content[at : at + 4] = b"\xff" * 4
        at += size
    record.with_suffix(".shards").write_bytes(content)
    record.write_text(json.dumps(told | {"checksum": xxhash.xxh3_64_intdigest(bytes(content))}))


def test_an_own_saved_state_that_is_not_finite_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = replace(CONFIG, protocol=replace(CONFIG.protocol, snapshot_every=2))
    first = Script(tmp_path, config)
    first.admit()
    first.await_message(messages.StepReport)
    first.give(0, 2, 3.0)
    while not first.tape("saved"):
        first.await_message(messages.StepReport)
    first.end()
    spoil(tmp_path / "states" / NAME)
    second = Script(tmp_path, config, incarnation=8)
    second.admit(2, fill=3.0)
    # It asks for the state of another island.
    second.await_message(messages.StateRequest)
    second.say(messages.StateUnavailable("", "nobody is there"))
    second.await_message(messages.StepReport)
    second.end()
    assert "cannot be used: it is not finite in 'optimizer/" in caplog.text
    assert second.tape("state") == [] and second.learner.joined.moments == "new"


def test_a_state_that_is_not_finite_is_not_given(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, array: Any) -> None:
        if "/mu/" in name:
            raise UnusableState(f"it is not finite in '{name}'")

    monkeypatch.setattr("diloco_jax.runtime.island.host.check_finite", refuse)
    script.admit()
    while script.await_message(messages.StepReport).local_step < 2:
        pass
    script.say(messages.StatePull("island-1", 0, 0, 0))
    refused = script.await_message(messages.StateRefused)
    assert refused.receiver == "island-1" and "is not finite" in refused.reason
    script.await_message(messages.StepReport)
    assert not script.learner.host.states, "the copy is freed"


def test_a_state_of_another_island_that_is_not_finite_is_not_loaded(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.admit(4)
    script.await_message(messages.StateRequest)
    layout, leaves = script.learner.host.moving, script.learner.host.island.state_layout.by_name

    def spoiled(name: str) -> Any:
        return np.full(leaves[name].shape, np.nan if "float" in leaves[name].dtype else 0, leaves[name].dtype)

    moving = MovingState(layout, spoiled)
    parts = moving.count(payloads.STATE_PART_BYTES)
    for number in range(parts):
        payload = b"".join(moving.part(number, payloads.STATE_PART_BYTES))
        part = messages.StateChunk("donor", 3, NAME, 30, number, parts, codec.digest(payload), len(payload), clock=4)
        script.say(part, payload)
    script.await_message(messages.StateDone)
    # Another donor may have a better state.
    script.await_message(messages.StateRequest)
    script.say(messages.StateUnavailable("", "nobody is there"))
    assert script.await_message(messages.StepReport).local_step == 1
    assert script.tape("state") == [] and "the state of donor cannot be used: it is not finite in" in caplog.text


def test_a_donor_whose_parts_arrive_damaged_is_given_up(script: Script) -> None:
    script.admit(4)
    script.await_message(messages.StateRequest)
    part = messages.StateChunk("donor", 3, NAME, 30, 0, 2, codec.digest(b"right"), 5, clock=4)
    script.say(part, b"right")
    for _ in range(DAMAGED_MAX + 1):
        script.say(part._replace(part=1), b"wrong")
    script.await_message(messages.StateDone)
    assert script.learner.joined.inbox.damaged == DAMAGED_MAX + 1
    script.say(messages.StateUnavailable("", "nobody is there"))
    assert script.await_message(messages.StepReport).local_step == 1 and script.tape("state") == []


def test_a_learner_that_is_refused_for_good_says_why() -> None:
    signals, dialler = Signals(threading.Event()), MagicMock()
    decisions = MagicMock(over=False, signals=signals)
    decisions.link.receive.return_value.kind = "disconnected"
    decisions.close_link.side_effect = lambda _: setattr(decisions, "link", None)
    decisions.ask.side_effect = lambda _: (None, decisions.link)
    dialler.connect.side_effect = Rejected("a newer process has this name")
    link: Any = LinkKeeper(decisions, MagicMock(), dialler)
    link.run()
    with pytest.raises(Rejected, match="a newer process"):
        signals.check()
