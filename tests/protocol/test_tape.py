"""The tape: every kind of input survives the way through a line of JSON, and leads to the same effects again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_jax.protocol.messages import Adopted, Effect, Heartbeat, Hello, LearnerMessage, Leave
from diloco_jax.protocol.syncer import Syncer
from diloco_jax.protocol.tape import TapedSyncer, replay
from tests.protocol.pair import Pair
from tests.protocol.syncer_inputs import hello, new, report, value

MESSAGES: list[LearnerMessage] = [
    hello("a", versions=(-1, 0, -1, 0)),
    Hello("a", 2, (("model", 'quotes " and ü'), ("sync_every", "24")), ()),
    report("a", 3, (Adopted(0), Adopted(7, 2, 20), Adopted(-1), Adopted(3, 1, 10)), loss=0.1 + 0.2, step_s=1e-9),
    value("a", 1, 1, 1),
    Heartbeat("a", 1),
    Leave("a", 1, "a reason\nof two lines"),
]


class Recorder(Syncer):
    """Knows what it was told."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[tuple[Any, ...]] = []

    def on_message(self, message: LearnerMessage, now_s: float) -> list[Effect]:
        self.heard.append((message, now_s))
        return []

    def on_disconnect(self, learner_id: str, incarnation: int, reason: str, now_s: float) -> list[Effect]:
        self.heard.append(("disconnect", learner_id, incarnation, reason, now_s))
        return []

    def on_merged(self, global_step: int, now_s: float) -> list[Effect]:
        self.heard.append(("merged", global_step, now_s))
        return []

    def on_tick(self, now_s: float) -> list[Effect]:
        self.heard.append(("tick", now_s))
        return []


def recorder() -> Recorder:
    return Recorder(new().config, 10)


def test_every_input_comes_back_as_it_was() -> None:
    lines: list[str] = []
    told = recorder()
    taped = TapedSyncer(told, lines.append)
    for number, message in enumerate(MESSAGES):
        taped.on_message(message, number / 3)
    taped.on_disconnect("a", 1, "connection reset", 5.5)
    taped.on_merged(7, 6.0)
    taped.on_tick(6.25)
    again = recorder()
    assert len(list(replay(lines, again))) == len(MESSAGES) + 3
    assert again.heard == told.heard
    for (message, _), (copy, _) in zip(told.heard[: len(MESSAGES)], again.heard, strict=False):
        assert type(message) is type(copy)
        assert [type(field) for field in message] == [type(field) for field in copy], "tuples stay tuples"
    (third, _) = again.heard[2]
    assert all(type(adopted) is Adopted for adopted in third.adopted)


def test_a_line_is_one_line_of_json() -> None:
    lines: list[str] = []
    taped = TapedSyncer(recorder(), lines.append)
    for message in MESSAGES:
        taped.on_message(message, 1.5)
    assert not any("\n" in line for line in lines)
    assert json.loads(lines[4]) == ["Heartbeat", 1.5, "a", 1]


def test_an_input_is_on_the_tape_before_it_is_executed() -> None:
    lines: list[str] = []
    taped = TapedSyncer(new(), lines.append)
    with pytest.raises(KeyError):
        taped.on_merged(7, 1.0)
    assert lines == ['["merged",1.0,7]'], "what broke it can be replayed"


def test_a_run_replays_to_the_same_effects() -> None:
    pair = Pair(quorum=2)
    pair.join("a", "b")
    for number in range(6):
        pair.wait(1.0)
        pair.step("a", "b")
        if number == 2:
            pair.cut("b")
            pair.wait(25.0)
            pair.connect("b")
    pair.leave("a")
    kinds = {json.loads(line)[0] for line in pair.tape}
    assert kinds == {"Hello", "StepReport", "FragmentValue", "Heartbeat", "Leave", "disconnect", "merged", "tick"}
    assert sum(map(len, pair.history)) > 50
    pair.check_replay()


def test_another_configuration_decides_otherwise() -> None:
    pair = Pair(quorum=1)
    pair.join("a", "b")
    pair.step("a", "b")
    other = Syncer(Pair(quorum=2).config, 100, (("model", "abc"), ("sync_every", "2")))
    with pytest.raises(ValueError, match=r"tape line \d+ cannot be replayed"):
        list(replay(pair.tape, other))


GOOD = '["tick",1.0]'


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "5",
        "[]",
        '["tick"]',
        '["tick","soon"]',
        '["dance",1.0]',
        '["merged",1.0]',
        '["merged",1.0,99]',
        '["disconnect",1.0,"a"]',
        '["Heartbeat",1.0]',
        '["Heartbeat",1.0,"a",1,"too much"]',
        '["StepReport",1.0,"a",1]',
        '["StepReport",1.0,"a",1,7,70,0,5,1.0,2.5]',
        '["StepReport",1.0,"a",1,7,70,0,[[0,0,0,0]],1.0,2.5]',
        '["Hello",1.0,"a",1]',
        '["Hello",1.0,"a",1,[["model"]],[0,0,0,0]]',
        '["Welcome",1.0,0,[]]',
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str) -> None:
    with pytest.raises(ValueError, match="tape line 3 cannot be replayed"):
        list(replay([GOOD, GOOD, line, GOOD], new()))
