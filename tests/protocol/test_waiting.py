"""The wait of a learner for a fragment that is on its way: when it starts, how it ends, and what it may cost."""

import random
from itertools import count
from math import inf, nan
from typing import Any

import pytest

from diloco_jax.protocol.closing import grace_window_s
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.learner.waiting import FragmentWait
from diloco_jax.protocol.messages import Advance, GlobalFragment, Lease, PullRequest, Stop, Welcome
from diloco_jax.protocol.pacing import ProtocolConfig

LIMIT_S = 0.5


def config_of(**values: Any) -> ProtocolConfig:
    return ProtocolConfig(
        **{"sync_every": 4, "num_fragments": 4, "wait_steps": LIMIT_S, "recover_from_peers": False, "heartbeat_s": 1e3}
        | {"silence_s": 1e4}
        | values
    )


def fragment(version: int, global_step: int = -1) -> GlobalFragment:
    return GlobalFragment(max(version, global_step), version % 4, version, 1, 1000 + version, 0)


def training(**values: Any) -> Learner:
    """Return a learner that has made its first step, whose length says nothing about the others."""
    config = config_of(**values)
    learner = Learner("a", 1, config, (("model", "abc"),), step_samples=2)
    learner.on_connected(0.0)
    learner.on_message(Welcome(0, (0,) * config.num_fragments, 1), 0.0)
    learner.on_message(Lease(0, 0, 10_000), 0.0)
    for fragment_id in range(config.num_fragments):
        message = GlobalFragment(0, fragment_id, 0, 1, 1, 0)
        learner.on_read(message, 0.0)
        learner.on_message(message, 0.0)
    step(learner, 90.0, step_s=90.0)
    return learner


def step(learner: Learner, now_s: float, step_s: float = 1.0) -> None:
    learner.on_step(10, step_s, 2.5, now_s, samples_end=learner.take_batch().end)


def adopt(learner: Learner, version: int, read_s: float, now_s: float) -> None:
    message = fragment(version)
    learner.on_read(message, read_s)
    learner.on_message(message, now_s)


def test_it_waits_until_the_fragment_of_the_open_round_is_adopted() -> None:
    learner = training()
    assert learner.may_step(), "the usual step is not known after the first one"
    adopt(learner, 1, 90.5, 90.5)
    step(learner, 92.0)
    assert not learner.may_step() and learner.next_deadline_s() == 92.0 + LIMIT_S
    learner.answer(PullRequest(2, 2, learner.local_step), 92.1)
    learner.on_read(fragment(2), 92.3)
    assert not learner.may_step(), "the value was read, but the step needs it adopted"
    learner.on_message(fragment(2), 92.3)
    assert learner.may_step()


def test_the_limit_is_a_share_of_its_own_usual_step_without_the_waits() -> None:
    learner = training(ema_decay=0.5)
    adopt(learner, 1, 90.5, 90.5)
    for number, now_s in ((2, 100.0), (3, 110.0)):
        step(learner, now_s, step_s=4.0 * number)
        adopt(learner, number, now_s + 0.1, now_s + 0.1)
    step(learner, 120.0, step_s=2.0)
    # 0.5 x (0.5 x (8 + 12) / 2 + 0.5 x 2)
    assert learner.next_deadline_s() == pytest.approx(120.0 + 3.0)
    learner.on_tick(122.9)
    assert not learner.may_step()
    learner.on_tick(123.0)
    assert learner.may_step() and learner.next_deadline_s() is not None


def test_a_single_long_step_does_not_make_waits_long() -> None:
    learner = training()
    adopt(learner, 1, 90.5, 90.5)
    for number, now_s, step_s in ((2, 100.0, 1.0), (3, 200.0, 3600.0)):
        step(learner, now_s, step_s=step_s)
        assert learner.next_deadline_s() == pytest.approx(now_s + LIMIT_S * (1.0 if number == 2 else 0.9 + 0.1 * 2.0))
        adopt(learner, number, now_s + 0.1, now_s + 0.1)


def test_longer_steps_soon_allow_longer_waits() -> None:
    wait = Rounds().wait
    for number in range(100):
        wait.on_report(False, 1.0 if number < 50 else 30.0, number + 2, 10.0 * number)
    assert wait.limit_s == pytest.approx(LIMIT_S * 30.0, rel=0.1)


def test_steps_without_a_length_are_no_error() -> None:
    rounds = Rounds(ema_decay=0.0)
    rounds.wait.on_report(False, 1.0, 2, 10.0)
    rounds.wait.on_report(False, 0.0, 3, 20.0)
    assert rounds.wait.limit_s == 0.0
    rounds.wait.on_over(3, 20.1)
    assert not rounds.wait.holds


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_inputs_a_wait_ends_at_its_limit(seed: int) -> None:
    """Draw inputs that no other learner's fault excludes, and check what a driver relies on."""
    draw, now_s, number = random.Random(seed), 0.0, 1
    config = config_of(wait_steps=draw.choice((0.01, LIMIT_S, 10.0)), ema_decay=draw.choice((0.0, 0.9)))
    wait = FragmentWait(config, config.turns)
    for turn in range(2000):
        now_s += draw.choice((0.0, 0.1, draw.expovariate(1.0)))
        heard = number + draw.randint(-3, 3)
        match draw.randrange(6):
            case 0 if not wait.holds:
                number = max(1, number + draw.randint(-1, 2))
                wait.on_report(turn == 0, draw.choice((0.0, 1.0, draw.expovariate(1.0))), number, now_s)
                assert not wait.holds or wait.deadline_s == now_s + wait.limit_s
            case 1:
                wait.on_pull(heard, now_s)
            case 2:
                wait.on_shown(heard, now_s)
            case 3:
                wait.on_over(heard, now_s)
                assert not wait.holds or heard < number
            case 4 if draw.random() < 0.1:
                wait.stop()
                assert not wait.holds
        if wait.holds and draw.random() < 0.5:
            now_s = max(now_s, wait.deadline_s)
            wait.on_tick(now_s)
            assert not wait.holds


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        (Advance(2, 0), True),
        (Advance(1, 0), False),
        (Welcome(2, (0,) * 4, 1, 0), True),
        (fragment(3), True),
        # With two rounds in flight round 2 may have closed, and its value is still on its way.
        (fragment(1, global_step=2), False),
        (Stop(1, "complete"), True),
    ],
)
def test_a_message_ends_the_wait_if_the_round_is_over(message: Any, ends: bool) -> None:
    learner = training()
    learner.on_message(Advance(1, 0), 91.0)
    step(learner, 92.0)
    assert learner.wait.holds
    learner.on_message(message, 92.1)
    assert learner.wait.holds is not ends


def test_no_link_no_wait() -> None:
    learner = training()
    learner.on_message(Advance(1, 0), 91.0)
    step(learner, 92.0)
    assert not learner.may_step()
    learner.on_disconnected(92.1)
    assert learner.may_step()
    step(learner, 93.1)
    assert learner.may_step()


def test_it_waits_once_for_a_round_and_only_for_one_with_a_fragment() -> None:
    learner = training(num_fragments=2)
    learner.on_message(Advance(1, 0), 91.0)
    step(learner, 92.0)
    learner.on_tick(92.0 + LIMIT_S)
    step(learner, 93.5)
    assert learner.may_step(), "this round has had its wait"
    learner.on_message(Advance(2, 0), 94.0)
    step(learner, 95.0)
    assert learner.may_step(), "no fragment is due at 3"
    learner.on_message(Advance(3, 0), 96.0)
    step(learner, 97.0)
    assert not learner.may_step()


def test_by_default_nobody_waits() -> None:
    learner = training(wait_steps=0.0)
    learner.on_message(Advance(1, 0), 91.0)
    step(learner, 92.0)
    assert learner.may_step() and learner.wait.limit_s == 0


class Rounds:
    """Rounds of one learner with steps of a second, which all end `after_s` seconds after its report."""

    def __init__(self, **values: Any) -> None:
        config = config_of(**values)
        self.wait = FragmentWait(config, config.turns)
        self.wait.on_report(True, 50.0, 1, 0.0)
        self.waited_s: list[float] = []
        self._number, self._now_s = 1, 0.0

    def run(self, rounds: int, after_s: float, *, asked_s: float = 0.01, included: bool = True) -> list[float]:
        """Return how long the learner waited for each of these rounds; each asks it `asked_s` after its report."""
        waited_s = []
        for _ in range(rounds):
            self._number += 1
            self._now_s += 10.0
            number, reported_s = self._number, self._now_s
            self.wait.on_report(False, 1.0, number, reported_s)
            held = self.wait.holds
            if included:
                self.wait.on_pull(number, reported_s + asked_s)
            if held and after_s > LIMIT_S:
                self.wait.on_tick(reported_s + LIMIT_S)
            self.wait.on_shown(number, reported_s + after_s)
            self.wait.on_over(number, reported_s + after_s)
            assert not self.wait.holds
            waited_s.append(min(after_s, LIMIT_S) if held else 0.0)
        return waited_s


def test_quick_rounds_are_always_waited_for() -> None:
    assert Rounds().run(100, 0.4) == [0.4] * 100


def test_a_link_that_takes_longer_than_the_limit_is_found_at_once() -> None:
    assert sum(Rounds().run(1000, 0.7)) == LIMIT_S


def test_what_waits_for_slow_learners_cost_falls_by_half_and_half() -> None:
    # The round trip is short, but others report late. Three waits, then pauses of 8, 16, ... 256, 256 rounds.
    expected: list[float] = []
    for pause in (min(8 << number, 256) for number in count()):
        expected += [LIMIT_S] * 3 + [0.0] * pause
        if len(expected) > 2000:
            break
    assert Rounds().run(2000, 0.9, asked_s=0.85) == expected[:2000]
    assert sum(expected[:2000]) / 2000 < 0.01


def test_rounds_that_do_not_request_its_value_are_not_worth_a_wait() -> None:
    waited_s = Rounds().run(400, 0.4, included=False)
    assert waited_s[:5] == [0.4, 0.4, 0.4, 0.4, 0.0] and sum(waited_s) < 0.03 * 400


def test_rounds_that_are_quick_every_other_time_cost_little() -> None:
    rounds, waited_s = Rounds(), 0.0
    for _ in range(500):
        waited_s += sum(rounds.run(1, 0.1) + rounds.run(1, 0.9, asked_s=0.85))
    assert waited_s < 0.03 * 1000


def test_it_finds_back_when_rounds_are_quick_again() -> None:
    rounds = Rounds()
    assert rounds.run(100, 0.9, asked_s=0.85)[-1] == 0.0
    assert rounds.run(12, 0.2) == [0.0] * 8 + [0.2] * 4
    # After a slow link the average of the way must fall first.
    rounds = Rounds()
    rounds.run(100, 3.0)
    waited_s = rounds.run(30, 0.2)
    assert waited_s[0] == 0.0 and waited_s[10:] == [0.2] * 20


def test_grace_may_use_the_time_that_learners_wait() -> None:
    config = config_of(overlap_steps=1)
    # gamma x ((1 + 0.5) x 2 - 2.4)
    assert grace_window_s(config, 2.0, 2.0, 0.4) == pytest.approx(0.9 * 0.6)
    assert grace_window_s(config_of(overlap_steps=1, wait_steps=0.0), 2.0, 2.0, 0.4) == 0.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wait_steps": -0.1}, "protocol.wait_steps is -0.1, but must be 0 to 10"),
        ({"wait_steps": nan}, "protocol.wait_steps is nan, but must be 0 to 10"),
        ({"wait_steps": inf}, "protocol.wait_steps is inf, but must be 0 to 10"),
        ({"wait_steps": 11.0}, "protocol.wait_steps is 11.0, but must be 0 to 10"),
        ({"overlap_steps": 0}, "protocol.wait_steps is 0.5, but must be 0 if overlap_steps is 0"),
    ],
)
def test_a_wrong_limit_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(**values)
