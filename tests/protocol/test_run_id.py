"""The id of a run: an island of an earlier run with the same name is refused, and its saved states are not loaded."""

import json

import pytest

from diloco_jax.protocol.effects import AdoptState, Finish
from diloco_jax.protocol.learner.machine import STOPPED, Learner
from diloco_jax.protocol.learner.recovery import Saved
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import OTHER_RUN, GlobalFragment, Hello, Lease, Refuse, Welcome
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import TapedSyncer, replay
from tests.protocol.pair import FINGERPRINT, Pair
from tests.protocol.syncer_inputs import hello, new, only, sent

OURS, THEIRS = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
EPOCH, NEWEST = 1, 8
REMEDY = (
    "stop this island, or give it the address of the syncer of its run; to let it train in this run, start its process "
    "again"
)


def membership(run: str) -> Membership:
    members = Membership((("model", "abc"),), 4, 8)
    members.run = run
    return members


@pytest.mark.parametrize(
    ("ours", "message", "newest", "words"),
    [
        (OURS, hello("a", run=OURS, epoch=1), NEWEST, ""),
        (OURS, hello("a", run=THEIRS, epoch=1), NEWEST, f"with the id {THEIRS}, and this syncer trains the run with"),
        # Its syncer had restarted: the advice is not to stop this one.
        (OURS, hello("a", run=THEIRS, epoch=2), NEWEST, f"this syncer trains the run with the id {OURS}: {REMEDY}"),
        (OURS, hello("a", run=THEIRS, epoch=1), None, REMEDY),
        (OURS, hello("a", run=THEIRS, epoch=1, fingerprint=(("model", "xyz"),)), NEWEST, REMEDY),
        # A new process, and an island of an older release that has joined no run yet.
        (OURS, hello("a", versions=(-1,) * 4), NEWEST, ""),
        (OURS, hello("a", versions=(5, 6, 7, 8), epoch=1), NEWEST, ""),
        (
            OURS,
            hello("a", versions=(5, 6, 7, 9), epoch=1),
            NEWEST,
            "a holds version 9, and the newest round of this run",
        ),
        # A restarted syncer may have lost that version.
        (OURS, hello("a", versions=(5, 6, 7, 9), epoch=1), None, ""),
        (OURS, hello("a", versions=(5, 6, 7, 9), epoch=0), NEWEST, ""),
        (OURS, hello("a", versions=(5, 6, 7, 9), epoch=1, run=OURS), NEWEST, ""),
        # An older release started the run.
        ("", hello("a", run=THEIRS, epoch=1), NEWEST, ""),
        ("", hello("a", versions=(5, 6, 7, 9), epoch=1), NEWEST, ""),
    ],
)
def test_an_island_of_another_run_is_refused(ours: str, message: Hello, newest: int | None, words: str) -> None:
    refusal = membership(ours).refusal(message, EPOCH, 0, newest)
    assert (words in refusal and OTHER_RUN in refusal) if words else not refusal, refusal


def test_tape_and_snapshot_keep_the_id() -> None:
    lines: list[str] = []
    syncer = new()
    TapedSyncer(syncer, lines.append).on_begin([0] * 4, 0.0, OURS)
    assert json.loads(lines[0])[-1] == OURS
    from_tape, from_snapshot = new(), new()
    list(replay(lines, from_tape))
    from_snapshot.restore(json.loads(json.dumps(syncer.state())))
    for machine in (syncer, from_tape, from_snapshot):
        assert machine.run == OURS
        assert sent(machine.on_message(hello("a"), 1.0), "a")[0] == Welcome(0, (0,) * 4, 1, 0, OURS)
        refused = sent(machine.on_message(hello("b", run=THEIRS, epoch=1), 1.0), "b")
        assert len(refused) == 1 and isinstance(refused[0], Refuse) and REMEDY in refused[0].reason


@pytest.mark.parametrize("begin", [[0, 0, 0, 0], [[0, 0, 0, 0], [2, "0.3.0"]]])
def test_a_run_of_an_older_release_has_no_id_and_continues(begin: list[object]) -> None:
    arguments = begin if isinstance(begin[0], list) else [begin]
    machine = new()
    list(replay([json.dumps(["begin", 0.0, *arguments])], machine))
    state = machine.state()
    assert state.pop("run") == ""
    again = new()
    again.restore(state)
    assert again.run == ""
    assert sent(again.on_message(hello("a", versions=(0, 0, 0, 9), epoch=1), 1.0), "a")[0] == Welcome(0, (0,) * 4, 1)


def greeted(saved_run: str, run: str) -> list[object]:
    """Let a learner with a saved state join a run; return the effects once it has its model and its data."""
    config = new(num_fragments=1, sync_every=1, recover_from_peers=False).config
    learner = Learner("a", 1, config, FINGERPRINT, step_samples=2, saved=Saved(8, (78,), saved_run))
    learner.on_connected(0.0)
    learner.on_message(Welcome(8, (8,), 1, 0, run), 0.0)
    learner.on_message(Lease(0, 0, 100), 0.0)
    effects = learner.on_message(GlobalFragment(8, 0, 8, 1, 78, 0), 0.0)
    # A reconnection names the run.
    learner.on_disconnected(1.0)
    assert sent(learner.on_connected(2.0), "syncer")[0].run == run
    return list(effects)


@pytest.mark.parametrize(
    ("saved_run", "run", "loads"),
    [(OURS, OURS, True), (THEIRS, OURS, False), ("", OURS, True), (THEIRS, "", True), ("", "", True)],
)
def test_a_saved_state_of_another_run_is_not_loaded(saved_run: str, run: str, loads: bool) -> None:
    assert any(isinstance(each, AdoptState) for each in greeted(saved_run, run)) == loads


@pytest.mark.parametrize("earlier_id", [THEIRS, ""], ids=["with an id", "of an older release"])
def test_islands_of_an_earlier_run_delay_no_round(earlier_id: str) -> None:
    """A user stops the syncer, starts a new run at the same address, and the old islands reconnect."""
    earlier, alone, run = Pair(quorum=2, run=earlier_id), Pair(quorum=2, run=OURS), Pair(quorum=2, run=OURS)
    earlier.join("a", "b")
    earlier.rounds(12, "a", "b")
    earlier.cut("a", "b")
    for pair in (alone, run):
        pair.join("c", "d")
        pair.rounds(2, "c", "d")
    for name in ("a", "b"):
        run.learners[name], run.drivers[name] = earlier.learners[name], earlier.drivers[name]
    run.connect("a", "b")
    assert [run.learners[name].state for name in ("a", "b")] == [STOPPED] * 2
    for refusal in run.messages(Refuse):
        assert OTHER_RUN in refusal.reason and REMEDY in refusal.reason
    run.cut("a", "b")
    for pair in (alone, run):
        pair.rounds(8, "c", "d")
        pair.check_replay()
    assert run.contributors() == alone.contributors()
    assert run.syncer.global_step == alone.syncer.global_step > 8
    assert run.syncer.membership.members.keys() == {"c", "d"}, "their steps and tokens do not count"


def test_the_end_of_a_refused_island_names_the_reason() -> None:
    learner = Learner("a", 1, new().config, FINGERPRINT)
    learner.on_connected(0.0)
    effects = learner.on_message(Refuse("a has joined another run"), 0.0)
    assert only(effects, Finish) == [Finish("refused: a has joined another run")]


def test_a_machine_without_an_id_sends_none() -> None:
    machine: Syncer = new()
    machine.on_begin([0] * 4, 0.0)
    assert sent(machine.on_message(hello("a"), 1.0), "a")[0].run == ""  # type: ignore[union-attr]
