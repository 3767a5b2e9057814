"""Bans: an operator excludes a learner by its name, and nothing but an operator ends that."""

import json
from collections.abc import Callable

import pytest

from diloco_jax.protocol import bans
from diloco_jax.protocol.bans import BANS_MAX, WHY_LENGTH_MAX, Bans, wrong_reason
from diloco_jax.protocol.effects import Drop, Note, Send
from diloco_jax.protocol.learner.machine import STOPPED
from diloco_jax.protocol.messages import Expel, Refuse, Welcome
from diloco_jax.protocol.syncer.tape import repeat_bans
from diloco_jax.protocol.watch.alarms import alarms_of
from diloco_jax.protocol.watch.health import Condition, conditions
from diloco_jax.protocol.watch.stats import RunStats
from tests.protocol.pair import Pair

TEXT = (
    "b is banned from this run: bad data; to let it return, lift the ban (`diloco admit b RUN`) and start the learner "
    "again"
)
BANNED = Note("banned", 3, -1, ("b",), "bad data")


def three(**config: object) -> Pair:
    """Return a run of three learners after three rounds."""
    pair = Pair(**{"total_steps": 60, "snapshot_every": 2} | config)  # type: ignore[arg-type]
    pair.join("a", "b", "c")
    pair.rounds(3, "a", "b", "c")
    return pair


def test_a_connected_learner_is_expelled_and_its_data_goes_to_others() -> None:
    pair = three()
    count = pair.syncer.leases.of("").holdings["b"].granted - pair.syncer.leases.of("").holdings["b"].settled
    pair.ban("b")
    assert pair.history[-1] == [
        BANNED,
        Send("b", Expel(TEXT)),
        Note("disconnected", 3, -1, ("b",), "banned"),
        Note("released", 3, -1, ("b",), f"its {count} leased samples go to others"),
    ]
    assert pair.syncer.membership.live == 2 and "b" not in pair.syncer.leases.holders
    assert pair.learners["b"].state == STOPPED
    merged = len(pair.merges())
    pair.rounds(4, "a", "c")
    assert set(pair.contributors()[merged:]) == {("a", "c")}
    pair.check_replay()


@pytest.mark.parametrize("later", [lambda _: None, Pair.restart_syncer, Pair.rewind])
def test_greetings_are_refused_until_the_learner_is_admitted(later: Callable[[Pair], None]) -> None:
    pair = three()
    pair.ban("b")
    later(pair)
    pair.join(*{"a", "c"} - pair.linked, incarnation=2)
    for incarnation in (1, 2, 7):
        before = len(pair.effects)
        pair.join("b", incarnation=incarnation)
        assert [each for each in pair.effects[before:]] == [Send("b", Refuse(TEXT)), Drop("b", TEXT)]
        assert pair.learners["b"].state == STOPPED and pair.syncer.membership.members["b"].state == "gone"
    pair.rounds(3, "a", "c")
    pair.admit("b")
    assert pair.history[-1][0].kind == "admitted"  # type: ignore[union-attr]
    pair.join("b", incarnation=8)
    assert pair.messages(Welcome, "b") and pair.learners["b"].state != STOPPED
    pair.rounds(4, "a", "b", "c")
    assert pair.contributors()[-1] == ("a", "b", "c")
    pair.check_replay()


def test_a_rewind_undoes_neither_a_ban_nor_an_admission() -> None:
    pair = three()
    pair.ban("c")
    pair.rounds(2, "a", "b")
    snapshot = json.loads(pair.driver.snapshots[-1].state)
    assert snapshot["bans"] == [["c", "bad data"]], "the snapshot holds the ban of c"
    pair.ban("b")
    pair.admit("c")
    pair.rewind()
    assert pair.syncer.membership.bans.state() == [("b", "bad data")]
    assert "b" not in pair.syncer.leases.holders, "the snapshot had leases of b"
    assert pair.history[-1][-1].kind == "released"  # type: ignore[union-attr]
    pair.join("a", "b", "c", incarnation=2)
    assert pair.linked == {"a", "c"}
    pair.restart_syncer()
    pair.rewind()
    assert pair.syncer.membership.bans.state() == [("b", "bad data")]
    pair.check_replay()


def test_the_bans_of_a_tape_are_repeated_and_a_damaged_line_is_named() -> None:
    pair = three()
    repeat_bans(['["ban",1.0,"x","why"]', '["tick",2.0]', '["ban",3.0,"y","z"]', '["admit",4.0,"x"]'], pair.syncer)
    assert pair.syncer.membership.bans.state() == [("y", "z")]
    with pytest.raises(ValueError, match="a line of the tape cannot be read"):
        repeat_bans(['["ban",1.0,"x"'], pair.syncer)


def test_an_unknown_name_is_banned_before_it_ever_joins() -> None:
    pair = three()
    pair.ban("stranger", "not of this job")
    assert pair.history[-1] == [Note("banned", 3, -1, ("stranger",), "not of this job")]
    pair.join("stranger")
    assert "stranger" not in pair.syncer.membership.members and pair.learners["stranger"].state == STOPPED
    pair.check_replay()


def test_the_tape_has_granted_requests_alone() -> None:
    pair = three()
    lines = len(pair.tape)
    for ask in (lambda: pair.ban("b", " "), lambda: pair.admit("b"), lambda: pair.ban("no/name", "x")):
        with pytest.raises(ValueError):
            ask()
    assert len(pair.tape) == lines and not pair.syncer._effects
    pair.ban("b")
    pair.admit("b")
    assert pair.tape[lines:] == ['["ban",3.0,"b","bad data"]', '["admit",3.0,"b"]']


@pytest.mark.parametrize(
    ("name", "why", "words"),
    [
        ("b", "", "a ban needs a reason; give one with --why TEXT"),
        ("b", " ", "a ban needs a reason"),
        ("b", "x" * 201, "has 201 characters, the limit is 200; shorten it"),
        ("b", "two\nlines", r"'two\\nlines' has unprintable characters, such as a line break; give one line"),
        ("b", "\N{RIGHT-TO-LEFT OVERRIDE}", "unprintable"),
        ("syncer", "x", "the name 'syncer' is reserved"),
        ("a b", "x", "the name 'a b' is not allowed; use up to 64 letters"),
        ("d", "x", "d is banned already: was here; to change the reason, admit it first"),
    ],
)
def test_a_wrong_ban_is_refused(name: str, why: str, words: str) -> None:
    pair = three()
    pair.ban("d", "was here")
    with pytest.raises(ValueError, match=words):
        pair.ban(name, why)
    assert pair.syncer.membership.live == 3


def test_the_longest_reason_is_allowed() -> None:
    assert wrong_reason("x" * WHY_LENGTH_MAX) == "" and (WHY_LENGTH_MAX, BANS_MAX) == (200, 1024)


def test_an_admission_without_a_ban_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^'b' is not banned; `diloco status` lists the banned names$"):
        three().admit("b")


def test_the_number_of_bans_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bans, "BANS_MAX", 2)
    pair = three()
    pair.ban("d")
    pair.ban("e")
    with pytest.raises(ValueError, match=r"2 names are banned, which is the limit; admit one first"):
        pair.ban("f")
    pair.admit("d")
    pair.ban("f")


def test_the_last_live_learner_and_a_complete_run_have_no_bans() -> None:
    pair = three()
    pair.ban("b")
    pair.ban("c")
    with pytest.raises(ValueError, match=r"a is the only live learner, .* stop the run instead"):
        pair.ban("a")
    assert pair.syncer.membership.live == 1
    pair = three(total_steps=3)
    assert pair.syncer.finished
    with pytest.raises(ValueError, match="the run is complete, so b cannot be banned"):
        pair.ban("b")


def test_a_value_that_waits_for_others_is_not_merged_and_its_payload_is_freed() -> None:
    pair = Pair(total_steps=60)
    pair.join("a", "b", "c")
    pair.held = {"c:FragmentValue"}
    pair.rounds(1, "a", "b", "c")
    (this,) = [each for each in pair.syncer.rounds.flying.values() if each.phase == "pulling"]
    assert set(this.values) == {"a", "b"} and set(this.asked) == {"c"}
    pair.ban("b")
    assert Drop("b", "it was banned before the merge of its value", this.global_step) in pair.history[-1]
    pair.held = set()
    pair.deliver()
    assert pair.contributors() == [("a", "c")]
    pair.check_replay()


def test_a_round_whose_only_value_is_of_a_banned_learner_is_given_up() -> None:
    pair = Pair(total_steps=60)
    pair.join("a", "b")
    pair.held = {"a:FragmentValue"}
    pair.rounds(1, "a", "b")
    pair.ban("b")
    pair.crash("a")
    assert [note.reason for note in pair.notes("abandoned")] == ["no value arrived"] and not pair.merges()
    pair.check_replay()


def test_a_merge_that_has_started_keeps_the_value_of_a_banned_learner() -> None:
    pair = Pair(total_steps=60)
    pair.join("a", "b")
    pair.holds_merges = True
    pair.rounds(1, "a", "b")
    pair.ban("b")
    pair.merge()
    assert pair.notes("merged")[0].members == ("a", "b")
    pair.check_replay()


def test_a_learner_whose_value_was_withdrawn_gives_its_steps_again_once_it_is_admitted() -> None:
    pair = Pair(total_steps=60)
    pair.join("a", "b", "c")
    pair.held = {"c:FragmentValue"}
    pair.rounds(1, "a", "b", "c")
    member = pair.syncer.membership.members["b"]
    assert member.credit.merged_base == {1: 0}
    pair.ban("b")
    assert member.credit.merged_base == {}


def test_a_restarted_syncer_does_not_wait_for_a_banned_learner() -> None:
    pair = three(restore_s=100.0)
    pair.rounds(1, "a", "b", "c")
    pair.restart_syncer()
    restoring = pair.syncer.comeback.restoring
    assert restoring is not None and restoring.awaited == {"a", "b", "c"}
    pair.ban("c")
    assert restoring.awaited == {"a", "b"}
    pair.connect("a")
    pair.ban("b")
    assert not pair.syncer.restoring, "a has brought what the syncer lost"
    pair.rounds(2, "a")
    pair.check_replay()


def test_a_snapshot_of_an_older_release_has_no_bans() -> None:
    pair = three()
    pair.ban("b")
    state = json.loads(json.dumps(pair.syncer.state()))
    assert state.pop("bans") == [["b", "bad data"]]
    pair.syncer.restore(state)
    assert not list(pair.syncer.membership.bans)


def test_a_banned_learner_has_a_condition_and_no_alarm() -> None:
    pair = three()
    pair.ban("b")
    pair.wait(15.0)
    assert conditions(pair.syncer, pair.now_s)[1] == Condition("b", "banned", 3.0, "bad data")
    alarms = alarms_of(pair.syncer, RunStats(("a", "b", "c"), 1, pair.syncer), pair.now_s)
    assert "b" not in [alarm.who for alarm in alarms]


def test_the_text_for_a_learner_that_is_not_banned_is_empty() -> None:
    known = Bans()
    known.add("b", "bad data")
    assert (known.refusal("a"), known.why("a"), known.refusal("b"), known.why("b")) == ("", "", TEXT, "bad data")
    assert "b" in known and "a" not in known
