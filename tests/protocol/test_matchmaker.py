"""The syncer's side of recovery: matches of donors and receivers. Whole transfers: tests/sim/invariants."""

import json

from diloco_jax.protocol.effects import Drop, Note, Send
from diloco_jax.protocol.member import ACTIVE, DISCONNECTED, SILENT
from diloco_jax.protocol.membership import Membership
from diloco_jax.protocol.messages import StateEnd, StatePull, StateRefused, StateRequest, StateUnavailable
from diloco_jax.protocol.syncer.matchmaker import Matchmaker
from tests.protocol.recovery_inputs import Alone, part
from tests.protocol.syncer_inputs import FINGERPRINT, hello


def members(*active: str, receivers: tuple[str, ...] = ("r",)) -> Membership:
    membership = Membership(FINGERPRINT, 4, 8)
    for name in (*active, *receivers):
        member = membership.join(hello(name, 3 if name in receivers else 1), 0.0)
        if name in active:
            membership.set_state(member, ACTIVE, 0.0)
    return membership


def matched(*active: str, receivers: tuple[str, ...] = ("r",)) -> tuple[Membership, Alone]:
    membership = members(*active, receivers=receivers)
    return membership, Alone(Matchmaker, membership)


def of(name: str, clock: int = 10, donor: str = "", step: int = 0, number: int = 0) -> StateRequest:
    return StateRequest(name, 3, clock, donor, step, number)


def test_chooses_an_active_learner_and_says_so() -> None:
    _, it = matched("b", "a")
    assert it.on_request(of("r"), 7) == [
        Note("recovering", 7, -1, ("r", "a"), "takes its state"),
        Send("a", StatePull("r", 10, 0, 0)),
    ]
    assert it.on_request(of("r", clock=10), 8) == [Send("a", StatePull("r", 10, 0, 0))], "asked again, said once"
    assert it.donor_of("r") == "a"


def test_the_load_is_shared() -> None:
    _, it = matched("a", "b", receivers=("p", "q", "r"))
    chosen = []
    for name in ("p", "q", "r"):
        it.on_request(of(name), 7)
        chosen.append(it.donor_of(name))
    assert chosen == ["a", "b", "a"]


def test_nobody_gives_to_itself() -> None:
    _, it = matched("r", receivers=())
    (answer,) = it.on_request(of("r"), 7)
    assert isinstance(answer, Send) and isinstance(answer.message, StateUnavailable) and answer.message.donor == ""


def test_parts_are_passed_on_only_from_the_donor_to_its_receiver() -> None:
    _, it = matched("a", "b", receivers=("q", "r"))
    it.on_request(of("r"), 7)
    message = part(0, donor="a")
    assert it.on_part(message) == [Send("r", message)]
    for forged in (part(0, donor="b"), part(0, donor="a", receiver="q"), part(0, donor="a", incarnation=2)):
        (drop,) = it.on_part(forged)
        assert isinstance(drop, Drop) and "who asked for none" in drop.reason


def test_a_part_for_who_is_away_is_not_sent() -> None:
    membership, it = matched("a")
    it.on_request(of("r"), 7)
    membership.set_state(membership.members["r"], DISCONNECTED, 1.0)
    (drop,) = it.on_part(part(0, donor="a"))
    assert isinstance(drop, Drop) and "who is away" in drop.reason
    membership.join(hello("r", 3), 2.0)
    pulled = it.on_request(of("r", donor="a", step=50, number=4), 7)
    assert pulled == [Send("a", StatePull("r", 10, 50, 4))], "it is back, and continues"


def test_when_a_donor_dies_another_is_chosen() -> None:
    membership, it = matched("a", "b", receivers=("q", "r"))
    for name in ("q", "r"):
        it.on_request(of(name), 7)
    assert (it.donor_of("q"), it.donor_of("r")) == ("a", "b")
    membership.set_state(membership.members["a"], DISCONNECTED, 1.0)
    assert it.on_lost("a", "it is disconnected") == [Send("q", StateUnavailable("a", "it is disconnected"))]
    it.on_request(of("q"), 8)
    assert it.donor_of("q") == "b"


def test_a_donor_that_failed_is_the_last_choice() -> None:
    membership, it = matched("a", "b")
    it.on_request(of("r"), 7)
    assert it.on_refused(StateRefused("a", 1, "r", "busy")) == [Send("r", StateUnavailable("a", "busy"))]
    it.on_request(of("r"), 7)
    assert it.donor_of("r") == "b"
    it.on_refused(StateRefused("b", 1, "r", "busy"))
    membership.set_state(membership.members["b"], DISCONNECTED, 1.0)
    it.on_request(of("r"), 7)
    assert it.donor_of("r") == "a", "busy once is not busy forever"


def test_a_refusal_of_who_is_not_the_donor_changes_nothing() -> None:
    _, it = matched("a", "b")
    it.on_request(of("r"), 7)
    assert it.on_refused(StateRefused("b", 1, "r", "busy")) == [] and it.donor_of("r") == "a"


def test_a_silent_donor_is_replaced_and_hears_so() -> None:
    membership, it = matched("a", "b")
    it.on_request(of("r"), 7)
    membership.set_state(membership.members["a"], SILENT, 1.0)
    (answer,) = it.on_request(of("r", donor="a", step=50, number=2), 7)
    assert answer == Send("r", StateUnavailable("a", "it is not the donor any more"))
    effects = it.on_request(of("r"), 7)
    assert effects[0] == Send("a", StateEnd("r")), "it need not keep its copy when it is back"
    assert it.donor_of("r") == "b"


def test_the_end_reaches_the_donor_once() -> None:
    _, it = matched("a")
    it.on_request(of("r"), 7)
    assert it.on_done("r") == [Send("a", StateEnd("r"))]
    assert it.on_done("r") == [] and it.donor_of("r") == ""


def test_its_state_comes_back_through_json_and_is_not_changed_by_what_comes_later() -> None:
    membership, it = matched("a", "b", receivers=("q", "r"))
    for name in ("q", "r"):
        it.on_request(of(name), 7)
    it.on_refused(StateRefused("b", 1, "r", "busy"))
    taken = it.state()
    text = json.dumps(taken)
    again = Alone(Matchmaker, membership)
    again.restore(json.loads(text))
    for matchmaker in (it, again):
        matchmaker.on_request(of("r"), 7)
        assert matchmaker.donor_of("r") == matchmaker.donor_of("q") == "a", "b has failed r once"
        matchmaker.on_refused(StateRefused("a", 1, "r", "busy"))
    assert it.state() == again.state() != taken
    assert json.dumps(taken) == text
