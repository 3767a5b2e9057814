"""Runs of both machines continue after any troubles: dead processes, broken links and lost messages."""

import random
from typing import Any

import pytest

from tests.drawn import seeds
from tests.protocol.pair import Pair

NAMES = ("a", "b", "c")
FAULTS = ("cut", "restart", "hold", "release", "lose", "hold-merges", "merge", "poison", "break")


def commands(rng: random.Random) -> list[tuple[str, Any]]:
    """Mostly whole rounds, so that there is something to lose, and troubles in between."""
    found: list[tuple[str, Any]] = []
    for _ in range(rng.randint(20, 80)):
        kind = rng.choices(["round", "step", "wait", "die-in", "power", "fault"], [12, 12, 4, 2, 1, 8])[0]
        argument: Any = rng.choice(NAMES)
        if kind == "wait":
            argument = rng.choice([0.5, 1.0, 1.0, 3.0, 6.0])
        elif kind in ("die-in", "power"):
            argument = rng.randint(0, 9)
        elif kind == "fault":
            kind = rng.choice(FAULTS)
        found.append((kind, argument))
    return found


def execute(pair: Pair, command: str, argument: Any) -> None:
    match command:
        case "step":
            pair.step(argument)
        case "round":
            pair.rounds(1, *NAMES)
        case "wait":
            pair.wait(argument)
        case "cut":
            if argument in pair.linked:
                pair.cut(argument)
            else:
                pair.connect(argument)
        case "restart":
            pair.join(argument, incarnation=pair.learners[argument].incarnation + 1)
        case "hold":
            pair.held.add(argument)
        case "release":
            pair.held.discard(argument)
            pair.deliver()
        case "lose":
            pair.lose_wire(argument)
        case "hold-merges":
            pair.holds_merges = True
        case "merge":
            pair.holds_merges = False
            pair.merge()
        case "die-in":
            pair.dies_in = argument
        case "power":
            fail_power(pair, argument)
        case "poison" | "break":
            chosen = pair.poisoned if command == "poison" else pair.broken
            chosen.symmetric_difference_update({argument})


def fail_power(pair: Pair, lines: int) -> None:
    """The syncer's machine stops, and its disk lacks the end of the tape: since its start or a snapshot at most."""
    first = max(i for i, line in enumerate(pair.tape) if line.startswith(('["begin"', '["restart"'))) + 1
    if pair.driver.snapshots:
        first = max(first, pair.driver.snapshots[-1].tape_lines)
    pair.restart_syncer(min(lines, max(0, len(pair.tape) - first)))


@pytest.mark.parametrize("seed", seeds(40))
def test_after_any_troubles_rounds_continue(seed: int) -> None:
    rng = random.Random(seed)
    tau, quorum = rng.choice([0, 1, 2, 4]), rng.randint(1, 3)
    pair = Pair(
        total_steps=10_000,
        overlap_steps=tau,
        quorum=quorum,
        heartbeat_s=1.0,
        silence_s=4.0,
        resend_s=1.0,
        restore_s=6.0,
        pull_timeout_s=5.0,
        release_s=9.0,
        lease_ahead_steps=4,
        state_parts=rng.choice([1, 3, 7]),
        recover_from_peers=rng.random() < 0.7,
        snapshot_every=rng.choice([0, 3]),
        strikes_max=1000,
        steps=seed % 2 == 0,
    )
    pair.join(*NAMES)
    for command, argument in commands(rng):
        execute(pair, command, argument)
    pair.held.clear()  # everything heals
    pair.poisoned.clear()
    pair.dies_in = None
    pair.deliver()
    execute(pair, "merge", "")
    pair.connect(*(name for name in NAMES if name not in pair.linked))
    # Every timeout has passed after twelve of these waits.
    for _ in range(12):
        pair.wait(4.0)
        pair.step(*NAMES)
    before, merges = pair.syncer.merged_rounds, len(pair.merges())
    for _ in range(8):
        pair.rounds(1, *NAMES)
        assert tau == 0 or all(learner.may_step() for learner in pair.learners.values())
    assert pair.syncer.merged_rounds > before, pair.syncer.waiting_for(pair.now_s)
    # Lockstep has no grace window: with K = 1 the first learner to report is merged alone.
    if tau > 0 or quorum == len(NAMES):
        assert {name for names in pair.contributors()[merges:] for name in names} == set(NAMES)
    pair.check_bits()
    pair.check_replay()
