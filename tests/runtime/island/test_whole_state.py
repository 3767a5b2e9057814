"""A learner's state off its island: parts from a donor, what is sent first, and the tape."""

import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.protocol.effects import AdoptState
from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment, StateChunk
from diloco_jax.protocol.releases import STAMP
from diloco_jax.runtime.island.adoptions import STATE_PART_BYTES, ReceivedState
from diloco_jax.runtime.island.payloads import PayloadSender
from diloco_jax.runtime.learner import tape as learner_tape
from diloco_jax.runtime.learner.tape import LearnerTape, learner_tape_path, shortest_float32
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.moving import MovingLayout, MovingState
from diloco_jax.transport.link import LinkClosed
from tests.limits import HANGS_S
from tests.runtime.helpers import json_lines


def test_parts_make_the_state_whatever_their_order() -> None:
    state = np.random.default_rng(0).bytes(2 * STATE_PART_BYTES + 5)
    received = ReceivedState(len(state))
    for part in (2, 0, 1, 1):
        start = part * STATE_PART_BYTES
        received.keep(part, 3, memoryview(state)[start : start + STATE_PART_BYTES], 7)
    assert received.donor_incarnation == 7
    assert received.take() == state
    with pytest.raises(ValueError, match="no part"):
        received.take()


@pytest.mark.parametrize(
    ("part", "parts", "size"), [(0, 4, STATE_PART_BYTES), (2, 3, 6), (0, 3, 9), (3, 3, 0), (9, 3, 5)]
)
def test_parts_of_another_state_are_refused_and_cost_no_memory(part: int, parts: int, size: int) -> None:
    received = ReceivedState(2 * STATE_PART_BYTES + 5)
    received.keep(part, parts, bytes(size), 1)
    with pytest.raises(ValueError, match=f"part {part} of {parts} has {size} bytes"):
        received.take()
    received.keep(part, parts, bytes(size), 1)
    received.drop()
    with pytest.raises(ValueError, match="no part"):
        received.take()


class Wire:
    """A link whose first message waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.sent: list[tuple[Any, bytes]] = []
        self.done = threading.Semaphore(0)
        self.closed = False

    def send(self, message: Any, payload: Any = b"") -> None:
        self.go.wait(HANGS_S)
        if self.closed:
            self.done.release()
            raise LinkClosed("gone")
        self.sent.append((message, bytes(payload) if isinstance(payload, bytes) else b"".join(payload)))
        self.done.release()

    def await_messages(self, count: int) -> None:
        for _ in range(count):
            assert self.done.acquire(timeout=HANGS_S)

    receive: Any = None
    close: Any = None


class Update:
    """A staged fragment."""

    def __init__(self, payload: bytes | Exception) -> None:
        self._payload = payload

    def encode(self) -> bytes:
        if isinstance(self._payload, Exception):
            raise self._payload
        return self._payload


def part(index: int) -> StateChunk:
    return StateChunk("x", 1, "y", 9, index, 0, 0, 0)


VALUE = FragmentValue("x", 1, 3, 0, 9, 2, 10, 1, 4, 16)
ANCHOR = {"w": np.arange(4, dtype=np.float32)}


def test_what_a_round_waits_for_goes_before_a_state() -> None:
    failures: list[Exception] = []
    refused: list[str] = []
    sender, wire, big = PayloadSender(failures.append), Wire(), big_state()
    for index in range(3):
        sender.part(wire, part(index), big, refused.append)
    sender.value(wire, VALUE, Update(b"update"))
    sender.anchor(wire, AnchorValue("x", 1, 0, 3, 99, 0), ANCHOR["w"].tobytes)
    # The state has no chunk of this number, so there is no answer.
    sender.part(wire, part(big.count(STATE_PART_BYTES)), big, refused.append)
    wire.go.set()
    wire.await_messages(5)
    kinds = [type(message).__name__ for message, _ in wire.sent]
    urgent = [kinds.index("FragmentValue"), kinds.index("AnchorValue")]
    # At most the chunk that was being made comes before them.
    assert max(urgent) <= 2, kinds
    payloads = {type(m).__name__: p for m, p in wire.sent}
    assert payloads["FragmentValue"] == b"update"
    assert payloads["AnchorValue"] == ANCHOR["w"].tobytes()
    parts = [(m, p) for m, p in wire.sent if isinstance(m, StateChunk)]
    assert b"".join(p for _, p in parts) == b"".join(big.part(0, 3 * STATE_PART_BYTES))
    for message, payload in parts:
        assert (message.parts, message.payload_bytes) == (big.count(STATE_PART_BYTES), len(payload))
        assert message.digest == codec.digest(payload)
    assert failures == [] and refused == []


def big_state() -> MovingState:
    arrays = {"optimizer/w": np.arange(STATE_PART_BYTES, dtype=np.float32)}
    return MovingState(MovingLayout(StateLayout(arrays), "float32"), arrays.__getitem__)


def test_a_lost_link_is_not_a_failure_and_a_value_that_does_not_fit_is_an_empty_answer() -> None:
    failures: list[Exception] = []
    sender, wire = PayloadSender(failures.append), Wire()
    wire.go.set()
    wire.closed = True
    sender.value(wire, VALUE, Update(b"update"))
    wire.await_messages(1)
    wire.closed = False
    sender.value(wire, VALUE, Update(codec.NotFinite("NaN")))
    wire.await_messages(1)
    assert wire.sent == [(VALUE, b"")] and failures == []
    # A fault of ours is told: taken for NaN it would end the fragment's training in silence.
    sender.value(wire, VALUE, Update(ValueError("a size is wrong")))
    sender.anchor(wire, AnchorValue("x", 1, 0, 3, 99, 0), ANCHOR["w"].tobytes)
    wire.await_messages(1)
    assert [str(error) for error in failures] == ["a size is wrong"]
    sender.close()
    sender.anchor(wire, AnchorValue("x", 1, 0, 3, 99, 0), ANCHOR["w"].tobytes)
    assert len(wire.sent) == 2


def test_the_tape_has_a_line_for_everything_at_once(tmp_path: Path) -> None:
    tape = LearnerTape(tmp_path, "island-0", 17, 8)
    path = learner_tape_path(tmp_path, "island-0", 17)
    assert path == tmp_path / "tapes" / "island-0.17.jsonl"
    tape.adopt(GlobalFragment(9, 2, 7, 1, 2**64 - 1, 100, merged_round=5))
    tape.state(AdoptState("island-1", 30, (0, 2)), 11, 30)
    tape.note("step", 1, 9, ((0, 4), (90, 94)), float("nan"))
    tape.note("staged_state", 1)
    tape.note("saved", 1, 24)
    tape.note("sent", 2, 10, 1)
    want = [
        ["begin", "island-0", 17, 8, list(STAMP)],
        ["adopt", 2, 7, 1, 2**64 - 1, 5],
        ["state", "island-1", 11, 30, [0, 2]],
        ["step", 1, 9, [[0, 4], [90, 94]], None],
        ["staged_state", 1],
        ["saved", 1, 24],
        ["sent", 2, 10, 1],
    ]
    # Nothing waits for a flush.
    assert json_lines(path) == want
    tape.end("the run is complete", [5, 6])
    assert json_lines(path) == [*want, ["end", "the run is complete", [5, 6], head_before_the_end(path)]]


def head_before_the_end(path: Path) -> str:
    """The head of all lines of a tape but the last."""
    chain = TapeChain()
    for line in path.read_bytes().splitlines()[:-1]:
        chain.add(line)
    return chain.head


@pytest.mark.parametrize("loss", [2.478455066680908, 1e-9, 0.0, -3.0, 1e300, math.inf, float(np.float32(1 / 3))])
def test_a_loss_has_the_digits_that_tell_one_float32_from_the_next(loss: float) -> None:
    short = shortest_float32(loss)
    assert len(repr(short)) <= len(repr(loss)) and len(f"{short!r}".replace("-", "")) <= 12
    with np.errstate(over="ignore"):
        assert np.float32(short) == np.float32(loss)
    assert math.isnan(shortest_float32(math.nan))


def test_a_full_disk_costs_lines_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tape = LearnerTape(tmp_path, "x", 1, 8)
    write: Callable[..., int] = os.pwrite

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        tape.note("step", 1, 0, ((0, 8),), 1.0)
        monkeypatch.setattr(os, "pwrite", full)
        for step in (2, 3, 4):
            tape.note("step", step, 0, ((0, 8),), 1.0)
        monkeypatch.setattr(os, "pwrite", write)
        tape.note("step", 5, 0, ((0, 8),), 1.0)
        tape.note("step", 6, 0, ((0, 8),), 1.0)
    found = json_lines(learner_tape_path(tmp_path, "x", 1))
    assert [line[:2] for line in found] == [["begin", "x"], ["step", 1], ["lost", 3], ["step", 5], ["step", 6]]
    assert len([r for r in caplog.records if r.name == learner_tape.__name__]) == 1


def test_a_tape_that_cannot_even_begin_does_not_stop_a_learner(tmp_path: Path) -> None:
    (tmp_path / "tapes").write_text("a file where a folder should be")
    tape = LearnerTape(tmp_path, "x", 1, 8)
    tape.note("step", 1, 0, ((0, 8),), 1.0)
    (tmp_path / "tapes").unlink()
    tape.end("stopped", [])
    path = learner_tape_path(tmp_path, "x", 1)
    assert json_lines(path) == [["lost", 2], ["end", "stopped", [], head_before_the_end(path)]]
