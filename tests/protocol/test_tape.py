"""The tape: every kind of input survives the way through a line of JSON, and leads to the same effects again."""

import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol.effects import SaveSnapshot
from diloco_jax.protocol.messages import (
    Adopted,
    AnchorValue,
    Heartbeat,
    LearnerMessage,
    Leave,
    Metric,
    Score,
    StateChunk,
    StateDone,
    StateRefused,
    StateRequest,
)
from diloco_jax.protocol.releases import PROTOCOL, RELEASE, RULES, STAMP, OtherRelease, decided_elsewhere
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import Moment, Moments, TapedSyncer, count_epochs, replay, returns, stamps
from tests.drawn import examples
from tests.protocol.pair import FINGERPRINT, Pair
from tests.protocol.steady import STEADY
from tests.protocol.syncer_inputs import hello, new, report, value
from tests.protocol.transcript import FOLDER

# JSON keeps whole numbers of any size.
DIGEST = 2**64 - 1

MESSAGES: list[LearnerMessage] = [
    hello("a", versions=(-1, 0, -1, 0)),
    hello("a", 2, fingerprint=(("model", 'quotes " and ü'), ("sync_every", "24")), digests=(DIGEST, 0, 1, 2), epoch=3),
    report("a", 3, (Adopted(0), Adopted(7, 2, 20), Adopted(-1), Adopted(3, 1, 10)), loss=0.1 + 0.2, step_s=1e-9),
    value("a", 1, 1, 1),
    AnchorValue("a", 1, 2, 7, DIGEST, 4096),
    Score("a", 1, 3, 9, (1, -1, 3, 4), 2.5, 0.1, 640, (Metric("books loss", 1.5), Metric("x", -1.0)), 0.5, "why"),
    StateRequest("a", 1, 12, "b", 40, 3),
    StateChunk("b", 2, "a", 40, 3, 7, DIGEST, 1 << 20),
    StateRefused("b", 2, "a", "no state of step 40"),
    StateDone("a", 1, "b"),
    hello("b", run="5eed"),
    Heartbeat("a", 1),
    Leave("a", 1, "a reason\nof two lines"),
]


class Recorder(Syncer):
    """Machine that records its inputs and has no effects."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *told: self.heard.append((name, *told)) or []


def recorder() -> Recorder:
    return Recorder(new().config, 10)


def test_every_input_comes_back_as_it_was() -> None:
    lines: list[str] = []
    told = recorder()
    taped = TapedSyncer(told, lines.append)
    for number, message in enumerate(MESSAGES):
        taped.on_message(message, number / 3)
    taped.on_disconnect("a", 1, "connection reset", 5.5)
    taped.on_merged(7, DIGEST, ("a", "b"), 6.0)
    taped.on_tick(6.25)
    taped.on_restart([4, 1, 2, 3], [DIGEST, 1, 2, 3], 4, 7.0)
    taped.on_begin([DIGEST, 1, 2, 3], 8.0)
    taped.on_begin([DIGEST, 1, 2, 3], 8.5, "5eed")
    again = recorder()
    assert len(list(replay(lines, again))) == len(MESSAGES) + 6
    assert again.heard == told.heard
    for (_, message, _), (_, copy, _) in zip(told.heard[: len(MESSAGES)], again.heard, strict=False):
        assert type(message) is type(copy)
        assert [type(field) for field in message] == [type(field) for field in copy], "tuples stay tuples"
    (_, third, _) = again.heard[2]
    assert all(type(adopted) is Adopted for adopted in third.adopted)


def test_a_line_is_one_line_of_json() -> None:
    lines: list[str] = []
    taped = TapedSyncer(recorder(), lines.append)
    for message in MESSAGES:
        taped.on_message(message, 1.5)
    assert not any("\n" in line for line in lines)
    assert json.loads(lines[-2]) == ["Heartbeat", 1.5, "a", 1]


def test_an_input_is_on_the_tape_before_it_is_executed() -> None:
    lines: list[str] = []
    taped = TapedSyncer(new(), lines.append)
    with pytest.raises(KeyError):
        taped.on_merged(7, 9, ("a",), 1.0)
    assert lines == ['["merged",1.0,7,9,["a"]]'], "what broke it can be replayed"


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(LearnerMessage))


def test_a_run_replays_to_the_same_effects() -> None:
    pair = Pair(quorum=2)
    pair.join("a", "b")
    for number in range(6):
        pair.rounds(1, "a", "b")
        if number == 2:
            pair.cut("b")
            pair.wait(25.0)
            pair.connect("b")
    pair.leave("a")
    kinds = {json.loads(line)[0] for line in pair.tape}
    assert kinds == {
        "begin",
        "Hello",
        "StepReport",
        "FragmentValue",
        "Heartbeat",
        "Leave",
        "disconnect",
        "merged",
        "tick",
    }
    assert sum(map(len, pair.history)) > 50
    pair.check_replay()


def test_a_refused_drain_and_a_granted_one_leave_no_trace() -> None:
    pair = Pair()
    pair.join("a")
    before = list(pair.tape)
    with pytest.raises(ValueError, match="no learner 'b' is connected; there are a"):
        pair.drain("b")
    assert pair.tape == before
    pair.drain("a")
    assert [json.loads(line)[0] for line in pair.tape[len(before) :]] == ["Leave"], "what it led to is on the tape"


def lived(rounds: int, **settings: Any) -> Pair:
    """A run of two learners with snapshots."""
    pair = Pair(quorum=2, snapshot_every=2, **settings)
    pair.join("a", "b")
    pair.rounds(rounds, "a", "b")
    return pair


def test_restarts_and_rewinds_are_inputs_like_others() -> None:
    pair = lived(5)
    pair.restart_syncer()
    pair.connect("a", "b")
    pair.rounds(1, "a", "b")
    pair.rewind()
    pair.join("a", "b", incarnation=2)
    pair.rounds(1, "a", "b")
    kinds = [json.loads(line)[0] for line in pair.tape]
    assert kinds.count("restart") == kinds.count("rewind") == 1 and count_epochs(pair.tape) == 3
    pair.check_replay()


def test_a_replay_remembers_the_snapshots_that_the_tape_goes_back_to_and_no_others() -> None:
    """The machine asks for many; the run goes back to the first one of them, twice."""
    pair = lived(20)
    taken = [effect.global_step for effect in pair.effects if isinstance(effect, SaveSnapshot)]
    assert len(taken) > 8
    tape = [*pair.tape, *(json.dumps(["rewind", 99.0, taken[0], epoch]) for epoch in (2, 3))]
    uses = returns(tape)
    assert uses == {Moment(taken[0]): 2}
    machine, kept = CountedSyncer(pair.config, 100, FINGERPRINT), 0
    for _ in replay(tape, machine, None, uses):
        kept = machine.states
    assert kept == 1 and machine.epoch == 3 and machine.global_step == taken[0]
    with pytest.raises(ValueError, match="back to its snapshot of global step 77, but no earlier line is of that"):
        list(replay([*tape, json.dumps(["rewind", 99.0, 77, 4])], pair._new_syncer()))


class CountedSyncer(Syncer):
    """Syncer that counts the requests for its state."""

    states = 0

    def state(self) -> dict[str, Any]:
        self.states += 1
        return super().state()


def test_snapshots_of_one_global_step_are_told_apart_by_their_heads() -> None:
    """The second capture of step 4 never reached the disk: the run went back to the first one."""
    pair = lived(3)
    step = pair.syncer.global_step
    first = json.dumps(pair.syncer.state(), sort_keys=True)
    tape = [*pair.tape, json.dumps(["snapshot", 50.0, step, "aa"])]
    pair.leave("b")
    tape += [*pair.tape[len(tape) - 1 :], json.dumps(["snapshot", 51.0, step, "bb"])]
    again, other = pair._new_syncer(), pair._new_syncer()
    rewind = ["rewind", 60.0, step, 2, STAMP]
    list(replay([*tape, json.dumps([*rewind, "aa"])], again))
    list(replay([*tape, json.dumps([*rewind, "bb"])], other))
    expected = pair._new_syncer()
    expected.restore(json.loads(first))
    expected.on_rewind(2, 60.0)
    assert again.state() == expected.state() != other.state()


def test_a_value_is_kept_until_it_is_used_for_the_last_time() -> None:
    one, two, none = Moment(1), Moment(1, "head"), Moment(2)
    kept: Moments[str] = Moments({one: 2, two: 1})
    for moment in (one, two, none):
        kept.keep(moment, lambda moment=moment: f"value of {moment}")  # type: ignore[misc]
    assert sorted(kept) == sorted([f"value of {one}", f"value of {two}"]) and none not in kept
    assert kept.at(two) == f"value of {two}" and two not in kept
    assert kept.at(one) == kept.at(one) and one not in kept
    with pytest.raises(ValueError, match="global step 1, but no earlier line"):
        kept.at(one)


def test_the_end_of_a_tape_goes_back_to_a_snapshot_from_before_it() -> None:
    pair = lived(4)
    snapshot = pair.driver.snapshots[-1]
    tail = [*pair.tape[snapshot.tape_lines :], json.dumps(["rewind", 99.0, snapshot.global_step, 2])]
    machine = pair._new_syncer()
    machine.restore(json.loads(snapshot.state))
    list(replay(tail, machine, {Moment(snapshot.global_step): json.loads(snapshot.state)}))
    assert (machine.epoch, machine.progress.rewound, machine.global_step) == (2, 2, snapshot.global_step)


def test_another_configuration_decides_otherwise() -> None:
    pair = Pair(quorum=1)
    pair.join("a", "b")
    pair.step("a")
    # Only one learner reports until the grace window ends.
    pair.wait(2.0)
    assert pair.merges()
    other = Syncer(Pair(quorum=2).config, 100, (("model", "abc"), ("sync_every", "2")))
    with pytest.raises(ValueError, match=r"tape line \d+ cannot be replayed"):
        list(replay(pair.tape, other))


def test_a_tape_of_other_rules_names_them() -> None:
    pair = lived(5)
    pair.restart_syncer()
    assert list(stamps(pair.tape)) == [list(STAMP)] * 2 and not decided_elsewhere(stamps(pair.tape))
    ours = json.dumps(STAMP, separators=(",", ":"))
    for theirs, words in (('[2,"0.3.0"]', "0.3.0 decided it by the rules 1"), (f'[2,"9.8.7",{RULES + 1}]', "9.8.7")):
        other = [pair.tape[0].replace(ours, theirs), *pair.tape[1:]]
        assert words in decided_elsewhere(stamps(other)) and "--rewind" in decided_elsewhere(stamps(other))
    unstamped = [line.replace(f",{ours}", "") for line in pair.tape]
    assert "0.1 decided it" in decided_elsewhere(stamps(["no line", *unstamped]))


def test_every_epoch_carries_the_stamp_of_its_release_and_one_that_is_not_read_is_refused() -> None:
    pair = lived(5)
    pair.restart_syncer()
    pair.connect("a", "b")
    pair.rounds(1, "a", "b")
    pair.rewind()
    begins = [n for n, line in enumerate(pair.tape) if json.loads(line)[-1] == list(STAMP)]
    assert [json.loads(pair.tape[n])[0] for n in begins] == ["begin", "restart", "rewind"]
    without = [line.replace(f",{json.dumps(STAMP, separators=(',', ':'))}]", "]") for line in pair.tape]
    assert list(replay(without, pair._new_syncer())) == list(replay(pair.tape, pair._new_syncer())), "an older release"
    for number in begins:
        newer = [*pair.tape]
        newer[number] = json.dumps([*json.loads(newer[number])[:-1], [PROTOCOL + 1, "9.8.7"]])
        words = f"the tape from line {number + 1} on is of diloco-jax 9.8.7, protocol 3; this is {RELEASE},"
        with pytest.raises(OtherRelease, match=rf"{words} .* continue with 9\.8\.7, or start a new run with the model"):
            list(replay(newer, pair._new_syncer()))


GOOD = '["tick",1.0]'


MALFORMED = (FOLDER / "malformed.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", [*MALFORMED, "", "[" * 100_000, f'["tick",{10**400}]'])
def test_a_malformed_line_is_named_by_its_number(line: str) -> None:
    with pytest.raises(ValueError, match="tape line 3 cannot be replayed"):
        list(replay([GOOD, GOOD, line, GOOD], new()))


@settings(STEADY, max_examples=examples(200))
@given(st.data())
def test_a_torn_or_altered_line_is_named_or_harmless(data: st.DataObject) -> None:
    """Whatever becomes of one line of a tape: the replay goes through, or says which line it is."""
    lines = list(TAPE)
    number = data.draw(st.integers(0, len(lines) - 1))
    line = lines[number]
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, len(line)))
    lines[number] = line[:start] + data.draw(st.text('0123456789[]{},."-aZé\x00', max_size=4)) + line[stop:]
    try:
        list(replay(lines, Pair(quorum=2, snapshot_every=2)._new_syncer()))
    except OtherRelease as error:
        assert "the tape from line " in str(error)
    except ValueError as error:
        assert "tape line " in str(error) and "cannot be replayed" in str(error)


TAPE = lived(3).tape
