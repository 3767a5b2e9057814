"""A learner's state on its way from a donor to a receiver: each side alone, in time, late, twice and forged."""

from functools import partial
from typing import Any

import pytest

from diloco_jax.protocol.effects import AdoptState, Drop, DropChunks, Effect, KeepChunk, Send, StageState, UnstageState
from diloco_jax.protocol.learner.recovery import (
    DAMAGED_MAX,
    PARTS_IN_FLIGHT_MAX,
    PARTS_IN_FLIGHT_MIN,
    PARTS_MAX,
    STATES_MAX,
    Donor,
)
from diloco_jax.protocol.messages import (
    SYNCER,
    Message,
    StateChunk,
    StateDone,
    StatePull,
    StateRefused,
    StateRequest,
    StateUnavailable,
)
from tests.protocol.recovery_inputs import Alone, H, begun, config, part, receiver


def request(number: int = 0, donor: str = "", step: int = 0, clock: int = 10) -> StateRequest:
    return StateRequest("r", 3, clock, donor, step, number)


def sent(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def asked(effects: list[Effect]) -> list[int]:
    return [message.part for message in sent(effects) if isinstance(message, StateRequest)]


def test_asks_anybody_then_the_one_who_answered() -> None:
    it = receiver()
    assert it.begin(10, 0.0) == [Send(SYNCER, request())]
    effects = it.on_part(part(0), 10, 1.0)
    assert effects == [KeepChunk(0, 9), *(Send(SYNCER, request(p, "d", 50)) for p in range(1, 5))]


@pytest.mark.parametrize(("took_s", "window"), [(1.5, PARTS_IN_FLIGHT_MIN), (0.5, PARTS_IN_FLIGHT_MAX)])
def test_more_parts_are_on_their_way_over_a_fast_link(took_s: float, window: int) -> None:
    it, now_s, most = receiver(recovery_turns=100), 0.0, 0
    it.begin(10, 0.0)
    waiting = {0: 0.0}
    while waiting:
        number, asked_s = next(iter(waiting.items()))
        now_s = max(now_s, asked_s + took_s)
        del waiting[number]
        waiting |= dict.fromkeys(asked(it.on_part(part(number, 300), 10, now_s)), now_s)
        most = max(most, len(waiting))
        assert len(waiting) <= window
    assert most == window and it.complete and not it.over and it.resend_s is None


def test_parts_in_any_order_complete_the_state() -> None:
    it = begun(part(0))
    for number in (4, 2, 3, 1):
        assert it.on_part(part(number), 10, 0.0)[0] == KeepChunk(number, 9)
    assert not it.complete
    for number in (8, 6, 7, 5):
        it.on_part(part(number), 10, 0.0)
    assert it.complete
    assert it.adopt(10, 0.0) == [AdoptState("d", 50, ())], "the parameters are the syncer's"
    assert sent(it.adopted()) == [StateDone("r", 3, "d")] and it.over


@pytest.mark.parametrize(
    "message",
    [
        part(0, 20),  # twice
        # This chunk was not requested yet.
        part(12, 20),
        part(1, 20, donor="other"),
        part(1, 20, step=51),
        part(1, 8),
        part(1, 20, receiver="somebody"),
    ],
)
def test_a_part_that_is_not_wanted_is_ignored(message: StateChunk) -> None:
    it = begun(part(0, 20))
    assert it.on_part(message, 10, 0.0) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"part": -1}, "part -1 of 9"),
        ({"part": 9}, "part 9 of 9"),
        ({"parts": 0, "part": 0}, "part 0 of 0"),
        ({"parts": PARTS_MAX + 1}, f"of {PARTS_MAX + 1}"),
    ],
)
def test_an_impossible_part_is_dropped(changed: dict[str, Any], words: str) -> None:
    it = begun()
    (drop,) = it.on_part(part(0)._replace(**changed), 10, 0.0)
    assert isinstance(drop, Drop) and words in drop.reason


def test_the_first_part_decides_not_a_later_one() -> None:
    it = begun()
    assert it.on_part(part(3), 10, 0.0) == [], "a straggler of somebody"
    assert it.donor == ""


def test_repeats_only_what_is_missing_each_time_later() -> None:
    it = begun(part(0))
    it.on_part(part(2), 10, 0.5)
    found = {}
    now_s = 0.5
    while now_s < 60.0:
        assert it.resend_s is not None and it.resend_s > now_s
        now_s = it.resend_s
        found[now_s] = asked(it.on_tick(10, now_s))
    assert list(found.values()) == [[1, 3, 4, 5, 6, 7]] * len(found)
    assert list(found) == [2.5, 6.5, 14.5, 30.5, 50.5, 70.5], "after 2, 4, 8, 16 s, then every lease"


def test_a_part_makes_it_as_patient_as_parts_took() -> None:
    it = begun()
    it.on_part(part(0), 10, 0.5)
    assert it.resend_s == 2.5, "at least resend_s"
    it.on_tick(10, 2.5)
    it.on_tick(10, 6.5)
    it.on_part(part(1), 10, 7.5)
    assert it.resend_s == 21.5, "twice the 7 s that it took"
    it.on_part(part(2), 10, 21.0)
    it.on_part(part(3), 10, 71.0)
    assert it.resend_s == 71.0 + 4 * 20.0, "at most four leases"


@pytest.mark.parametrize("number", [0, 3])
def test_a_donor_whose_parts_arrive_damaged_is_not_asked_forever(number: int) -> None:
    """Global steps cannot limit the attempt, because the run may wait for this learner."""
    it, attempts, now_s = begun(*[part(0)] * (number > 0), recovery_attempts=2), 1, 0.0
    while not it.over:
        for _ in range(DAMAGED_MAX):
            assert it.on_damaged(part(number), 10, now_s) == [], "the part is requested again"
        for other in (part(number, clock=9), part(number, receiver="x")):
            assert it.on_damaged(other, 10, now_s) == []
        effects = it.on_damaged(part(number), 10, now_s)
        assert any(isinstance(message, StateDone) for message in sent(effects)) == (number > 0)
        if not it.over:
            attempts, now_s = attempts + 1, it.resend_s
            assert asked(it.on_tick(10, now_s)) == [0]
            for each in [part(0)] * (number > 0):
                it.on_part(each, 10, now_s)
    assert attempts == 2


def test_waits_longer_while_payloads_arrive_unless_the_transfer_takes_too_long() -> None:
    it = begun(part(0))
    for now_s in (1.0, 2.0, 3.0):
        it.on_receiving(10, now_s)
        assert it.on_tick(10, now_s) == []
    assert it.resend_s == 5.0
    it.on_receiving(11 + config().transfer_steps_max, 4.0)
    assert it.resend_s == 5.0, "another attempt begins in time"
    assert receiver().resend_s is None


def test_what_a_narrow_link_still_carries_is_not_asked_for_twice() -> None:
    """A link that carries a part in 3 s, one after the other, with a limit of 2 s that is meant for wide ones."""
    it, asked, carried, now_s = receiver(recovery_turns=100), [0], 0, 0.0
    it.begin(clock=10, now_s=0.0)
    while not it.complete:
        # The link has not carried the oldest request before then.
        arrives_s = now_s + 3.0
        while it.resend_s is not None and it.resend_s < arrives_s:
            asked += [effect.message.part for effect in it.on_tick(10, it.resend_s)]
        now_s, number = arrives_s, asked[carried]
        carried += 1
        asked += [effect.message.part for effect in it.on_part(part(number), 10, now_s) if isinstance(effect, Send)]
    assert sorted(set(asked)) == list(range(9)) and len(asked) <= 11, asked


def test_a_repeated_request_names_the_same_clock() -> None:
    """With a newer clock the donor would copy its state again, and void the first chunk that is on its way."""
    it = begun()
    assert it.on_tick(12, 2.0) == [Send(SYNCER, request(clock=10))]
    assert it.on_connected(13.0) == [Send(SYNCER, request(clock=10))]


def test_continues_where_it_was_when_the_link_is_back() -> None:
    it = begun()
    for number in (0, 1, 3):
        it.on_part(part(number), 10, 0.0)
    assert sent(it.on_connected(5.0)) == [request(number, "d", 50) for number in (2, 4, 5, 6, 7, 8)]
    for number in (2, 4, 5, 6, 7, 8):
        it.on_part(part(number), 10, 6.0)
    assert it.complete and it.on_connected(7.0) == []


def test_a_transfer_of_more_than_h_global_steps_starts_again() -> None:
    it = begun(part(0))
    assert it.on_part(part(1), 10 + H, 0.1)[0] == KeepChunk(1, 9), "H are allowed"
    assert it.on_part(part(2), 11 + H, 0.2) == [Send(SYNCER, StateDone("r", 3, "")), DropChunks()]
    assert it.on_part(part(3), 11 + H, 0.3) == [], "of the state that was given up"
    assert it.on_tick(12 + H, 2.1) == [], "it waits resend_s before it starts again"
    assert it.on_tick(12 + H, 2.2) == [Send(SYNCER, request(clock=12 + H))]
    assert it.on_part(part(0, step=55), 12 + H, 2.3)[0] == KeepChunk(0, 9)


def test_a_state_that_was_given_up_may_be_given_again() -> None:
    """In lockstep its donor may have no other: it waits for the round that waits for the receiver."""
    it = begun(part(0, parts=2))
    it.on_unavailable(StateUnavailable("d", "not the donor any more"), 10, 1.0)
    assert it.on_part(part(0, parts=2), 10, 2.0)[0] == KeepChunk(0, 2)
    it.on_part(part(1, parts=2), 10, 2.0)
    assert it.complete


def test_time_alone_ends_a_transfer_that_hangs() -> None:
    it = begun(part(0))
    assert it.on_tick(11 + H, 1.9) == []
    assert sent(it.on_tick(11 + H, 2.0)) == [StateDone("r", 3, "")]
    assert sent(it.on_tick(11 + H, 4.0)) == [request(clock=11 + H)]


def test_the_first_attempt_after_a_loss_is_at_once_and_later_ones_wait_longer() -> None:
    it = begun(recovery_attempts=5)
    assert sent(it.on_unavailable(StateUnavailable("d", "gone"), 11, 1.0)) == [request(clock=11)]
    waits = []
    now_s = 1.0
    for _ in range(3):
        assert it.on_unavailable(StateUnavailable("d", "gone"), 12, now_s) == []
        assert it.resend_s is not None
        waits.append(it.resend_s - now_s)
        now_s = it.resend_s
        assert sent(it.on_tick(12, now_s)) == [request(clock=12)]
    assert waits == [4.0, 8.0, 16.0]
    assert it.on_unavailable(StateUnavailable("d", "gone"), 13, now_s) == [] and it.over, "that was the fifth"


def test_after_a_wait_it_asks_with_the_clock_of_that_moment() -> None:
    """With a short step the wait alone is longer than H global steps."""
    it = begun()
    it.on_unavailable(StateUnavailable("d", "gone"), 11, 1.0)
    it.on_unavailable(StateUnavailable("d", "gone"), 12, 1.0)
    assert it.resend_s is not None
    assert it.on_connected(1.5) == [], "a new link does not shorten the wait"
    assert sent(it.on_tick(500, it.resend_s)) == [request(clock=500)]


def test_a_part_of_an_older_attempt_is_not_taken_for_the_answer_to_a_newer_one() -> None:
    """Its donor had not seen the clock; it was on its way for too long."""
    it = begun()
    it.on_tick(11 + H, 2.0)
    assert it.resend_s is not None
    assert sent(it.on_tick(11 + H, it.resend_s)) == [request(clock=11 + H)]
    assert it.on_part(part(0, clock=10 + H), 11 + H, 9.0) == [] and not it.donor
    assert KeepChunk(0, 9) in it.on_part(part(0, clock=11 + H), 11 + H, 9.1)


def test_without_a_donor_it_is_over_at_once() -> None:
    it = begun(part(0))
    assert it.on_unavailable(StateUnavailable("", "nobody"), 11, 1.0) == [DropChunks()]
    assert it.over and not it.complete and it.resend_s is None
    assert it.on_part(part(1), 11, 1.0) == [] and it.on_tick(11, 99.0) == []


def test_a_state_that_waited_too_long_for_the_global_model_is_asked_for_again() -> None:
    it = begun(part(0, parts=1))
    assert it.adopt(10 + H, 1.0) == [AdoptState("d", 50, ())]
    assert sent(it.adopt(11 + H, 1.0)) == [StateDone("r", 3, "")]
    assert not it.complete and not it.over and it.adopt(11 + H, 1.0) == []


def test_news_of_another_donor_are_not_its_own() -> None:
    it = begun(part(0))
    assert it.on_unavailable(StateUnavailable("somebody", "gone"), 11, 1.0) == [] and it.donor == "d"


def test_an_unusable_state_is_dropped_and_asked_for_again() -> None:
    it = begun(part(0, parts=1))
    it.adopt(10, 0.0)
    assert sent(it.failed(11, 1.0)) == [StateDone("r", 3, "")]
    assert not it.complete and not it.over
    assert sent(it.on_tick(12, 3.0)) == [request(clock=12)]


def test_a_complete_state_does_not_depend_on_its_donor_any_more() -> None:
    it = begun(part(0, parts=1))
    assert it.on_unavailable(StateUnavailable("d", "gone"), 11, 1.0) == [] and it.complete
    assert it.on_tick(11 + H, 99.0) == []


def pull(receiver_name: str = "r", clock: int = 10, step: int = 0, number: int = 0) -> StatePull:
    return StatePull(receiver_name, clock, step, number)


def giving() -> Alone:
    """A donor that has copied its state for r after step 50."""
    donor = Alone(Donor, "d", 1)
    donor.on_pull(pull())
    donor.serve(10, 50)
    return donor


def given(receiver_name: str, step: int, number: int, clock: int = 10) -> Send:
    return Send(SYNCER, StateChunk("d", 1, receiver_name, step, number, 0, 0, 0, clock))


def test_waits_until_it_has_seen_the_clock() -> None:
    donor = Alone(Donor, "d", 1)
    assert donor.on_pull(pull(clock=10)) == []
    assert donor.serve(9, 50) == []
    assert donor.serve(10, 51) == [StageState(51), given("r", 51, 0)]
    assert donor.serve(11, 52) == []


def test_gives_parts_of_the_state_that_was_asked_for() -> None:
    donor = giving()
    assert donor.on_pull(pull(step=50, number=3)) == [given("r", 50, 3)]
    (refusal,) = donor.on_pull(pull(step=49, number=3))
    assert refusal == Send(SYNCER, StateRefused("d", 1, "r", "no state of step 49"))
    (refusal,) = donor.on_pull(pull("other", step=50))
    assert isinstance(refusal, Send) and isinstance(refusal.message, StateRefused), "not its receiver"


def test_a_lost_first_part_is_given_again_without_another_copy() -> None:
    donor = giving()
    assert donor.on_pull(pull(clock=10)) == [given("r", 50, 0)]
    assert donor.serve(12, 52) == []


def test_a_newer_clock_needs_a_newer_copy() -> None:
    donor = giving()
    assert donor.on_pull(pull(clock=12)) == []
    assert donor.serve(12, 52) == [UnstageState(50), StageState(52), given("r", 52, 0, clock=12)]


def test_two_receivers_share_a_copy() -> None:
    donor = Alone(Donor, "d", 1)
    donor.on_pull(pull("r"))
    donor.on_pull(pull("q"))
    assert donor.serve(10, 50) == [StageState(50), given("q", 50, 0), given("r", 50, 0)]
    assert donor.on_end("q") == [], "r still needs it"
    assert donor.on_end("r") == [UnstageState(50)]
    assert donor.on_end("r") == [], "twice"


def test_copies_are_bounded() -> None:
    donor = Alone(Donor, "d", 1)
    for number in range(STATES_MAX):
        donor.on_pull(pull(f"r{number}"))
        assert StageState(50 + number) in donor.serve(10, 50 + number)
    donor.on_pull(pull("late"))
    (refusal,) = donor.serve(10, 99)
    assert refusal == Send(SYNCER, StateRefused("d", 1, "late", f"{STATES_MAX} states are being given already"))
    donor.on_end("r0")
    donor.on_pull(pull("late"))
    assert StageState(100) in donor.serve(10, 100)


def test_an_end_also_ends_the_wait() -> None:
    donor = Alone(Donor, "d", 1)
    donor.on_pull(pull())
    assert donor.on_end("r") == [] and donor.serve(10, 50) == []


def test_a_lost_link_frees_every_copy() -> None:
    donor = Alone(Donor, "d", 1)
    for number in range(STATES_MAX):
        donor.on_pull(pull(f"r{number}"))
        donor.serve(10, 50 + number)
    donor.on_pull(pull("waits", clock=99))
    assert donor.forget_all() == [UnstageState(50 + number) for number in range(STATES_MAX)]
    assert donor.forget_all() == [] and donor.serve(99, 60) == []


def test_a_run_without_recovery_from_peers_gives_no_state_to_anybody() -> None:
    donor = Alone(partial(Donor, gives=False), "d", 1)
    (refusal,) = donor.on_pull(pull())
    assert isinstance(refusal, Send) and isinstance(refusal.message, StateRefused)
    assert "stay at their islands" in refusal.message.reason
    assert donor.serve(10, 50) == []
