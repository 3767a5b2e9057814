"""A run that is complete gets higher limits, goes back to its last snapshot, and trains on; its tape says all of it."""

import json
from typing import Any

import pytest

from diloco_jax.protocol.messages import Refuse, Stop, Welcome
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS, Limits
from diloco_jax.protocol.syncer.tape import limits_before, limits_line, replay
from tests.protocol.pair import FINGERPRINT, Pair

SHORT, LONG = 6, 14


def told(steps: int) -> tuple[tuple[str, str], ...]:
    return (*FINGERPRINT, (GLOBAL_STEPS, str(steps)))


def complete(**config: Any) -> Pair:
    """A run of SHORT global steps at its end, with a snapshot of that."""
    pair = Pair(total_steps=SHORT, fingerprint=told(SHORT), quorum=2, **config)
    pair.join("a", "b", fingerprint=told(SHORT))
    pair.rounds(SHORT + 3, "a", "b")
    assert pair.syncer.finished and pair.syncer.global_step == SHORT
    pair._run_syncer(pair._taped.on_snapshot(SHORT, pair.now_s))
    pair.driver.save(SHORT, pair.syncer, len(pair.tape))
    return pair


def longer(pair: Pair, steps: int = LONG) -> None:
    """Every process ends; the limits are raised, and the run goes back to its snapshot."""
    pair.tape.append(limits_line(Limits(SHORT, 0, str(SHORT)), Limits(steps, 0, str(steps)), pair.now_s))
    pair.history.append([])
    pair._total_steps, pair._fingerprint = steps, told(steps)
    pair.rewind()


def check_replay(pair: Pair) -> None:
    """A machine that was made with the newest limits repeats the run, when it is told those of the beginning."""
    machine = pair._new_syncer()
    machine.on_limits(limits_before(pair.tape) or Limits(LONG, 0))
    assert list(replay(pair.tape, machine)) == pair.history


@pytest.mark.parametrize("config", [{}, {"overlap_steps": 0}, {"overlap_steps": 2, "snapshot_every": 2}])
def test_a_complete_run_trains_on_and_is_replayed(config: dict[str, Any]) -> None:
    pair = complete(**config)
    longer(pair)
    assert not pair.syncer.finished and pair.syncer.global_step == SHORT
    pair.join("a", fingerprint=told(SHORT), incarnation=2)
    assert isinstance(pair.sent[-1][2], Refuse), "its learning rate would end where the run ended before"
    pair.join("a", "b", fingerprint=told(LONG), incarnation=3)
    assert isinstance(pair.messages(Welcome)[-1], Welcome)
    pair.rounds(LONG + 3, "a", "b")
    assert pair.syncer.finished and pair.syncer.global_step == LONG and pair.messages(Stop, "a")
    check_replay(pair)


def test_a_syncer_that_dies_in_a_longer_run_takes_its_tape_from_any_snapshot() -> None:
    """This includes a snapshot of the short run; the tape records the length of that run."""
    pair = complete(snapshot_every=2)
    early = pair.driver.snapshots[0]
    longer(pair)
    pair.join("a", "b", fingerprint=told(LONG), incarnation=2)
    pair.rounds(3, "a", "b")
    tail, machine = pair.tape[early.tape_lines :], pair._new_syncer()
    limits = limits_before(tail)
    assert limits == Limits(SHORT, 0, str(SHORT))
    machine.on_limits(limits)
    machine.restore(json.loads(early.state))
    list(replay(tail, machine, {early.global_step: json.loads(early.state)}))
    assert json.dumps(machine.state()) == json.dumps(pair.syncer.state())
    pair.restart_syncer()
    pair.connect("a", "b")
    pair.rounds(LONG, "a", "b")
    assert pair.syncer.finished and pair.syncer.global_step == LONG
    check_replay(pair)


def test_a_complete_run_that_goes_back_with_its_own_limits_stays_complete() -> None:
    pair = complete()
    pair.rewind()
    assert pair.syncer.finished
    pair.join("a", fingerprint=told(SHORT), incarnation=2)
    assert pair.messages(Stop, "a")
    pair.check_replay()
