"""Mail that a machine is given while a step runs, and mail that waits for the gap between two steps."""

from typing import Any, cast

import pytest

from diloco_jax.protocol.effects import Adopt, AdoptState, KeepChunk, Send
from diloco_jax.protocol.learner.machine import RECOVERING, STOPPED, TRAINING, Learner
from diloco_jax.protocol.learner.mailbox import Mailbox
from diloco_jax.protocol.messages import (
    Advance,
    AnchorRequest,
    AnchorValue,
    Expel,
    FragmentValue,
    GlobalFragment,
    Lease,
    PullRequest,
    Refuse,
    StateChunk,
    StateDone,
    StateEnd,
    StatePull,
    StateUnavailable,
    Stop,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.pacing import ProtocolConfig

CONFIG = ProtocolConfig(sync_every=2, num_fragments=2)


def fragment(fragment_id: int, version: int) -> GlobalFragment:
    return GlobalFragment(version, fragment_id, version, 1, 10 * fragment_id + version, 0)


def part(number: int, clock: int) -> StateChunk:
    return StateChunk("donor", 1, "a", 9, number, 2, 7, 100, clock)


class Mail:
    """A learner's machine behind a mailbox, joining a run at this global step."""

    def __init__(self, clock: int = 0) -> None:
        self.machine = Learner("a", 1, CONFIG, (), step_samples=2)
        self.box: Mailbox[str] = Mailbox(self.machine)
        self.machine.on_connected(0.0)
        self.come(Welcome(clock, (clock, max(0, clock - 1)), 1), Lease(0, 0, 128))
        self.read(fragment(0, clock), fragment(1, max(0, clock - 1)))
        self.take()

    def come(self, *messages: SyncerMessage) -> list[Any]:
        """Let messages arrive, and return the effects that the machine has at once."""
        given = [self.box.arrive(message, "item", 1.0) for message in messages]
        return [effect for one in given if one is not None for effect in one.effects]

    def read(self, *messages: GlobalFragment) -> None:
        for message in messages:
            assert self.machine.wants(message, 1.0)
            self.box.read(message, f"values of {message.version}", 1.0)

    def take(self) -> list[tuple[SyncerMessage, str]]:
        """Reach the gap between two steps, and return the messages that the machine gets there."""
        given = []
        while (one := self.box.take(1.0)) is not None:
            given.append((one.message, one.item))
        return given


@pytest.fixture
def mail() -> Mail:
    """The mail of a learner that trains and has made a step."""
    mail = Mail()
    assert mail.machine.state == TRAINING
    mail.machine.on_step(10, 1.0, 2.5, 1.0, samples_end=mail.machine.take_batch().end)
    return mail


def test_who_asks_is_answered_at_once(mail: Mail) -> None:
    pulled, asked = mail.come(PullRequest(1, 1, 1), AnchorRequest(0, 0))
    assert isinstance(cast(Send, pulled).message, FragmentValue)
    assert isinstance(cast(Send, asked).message, AnchorValue)
    assert mail.come(StatePull("b", 0, 0, 0)) == [], "it is copied after the step"
    assert not mail.box and mail.take() == []


@pytest.mark.parametrize(
    "message",
    [
        Advance(5),
        Lease(128, 128, 256),
        Welcome(5, (5, 4), 2),
        StateEnd("b"),
        StateUnavailable("", "nobody"),
        Stop(9, "run complete"),
        Expel("useless"),
        Refuse("another model"),
    ],
)
def test_everything_else_waits_for_the_gap(mail: Mail, message: SyncerMessage) -> None:
    machine = mail.machine
    before = (machine.state, machine.global_step, machine.epoch, machine.adopted)
    assert mail.come(message) == [] and len(mail.box) == 1
    assert (machine.state, machine.global_step, machine.epoch, machine.adopted) == before
    assert mail.take() == [(message, "item")]
    stopped = isinstance(message, Stop | Expel | Refuse)
    assert (machine.state == STOPPED) == stopped
    assert stopped or machine.global_step == getattr(message, "global_step", 0)


def test_of_each_fragment_the_newest_waits_and_in_its_own_place(mail: Mail) -> None:
    mail.read(fragment(0, 2))
    mail.come(Advance(3))
    mail.read(fragment(1, 3), fragment(0, 4))
    assert len(mail.box) == 3, "the value of version 2 is let go of"
    assert mail.machine.adopted[0].version == 0
    names = [(message, item) for message, item in mail.take()]
    assert names == [(Advance(3), "item"), (fragment(1, 3), "values of 3"), (fragment(0, 4), "values of 4")]
    assert [held.version for held in mail.machine.adopted] == [4, 3]


def test_a_part_of_a_state_is_taken_at_once_while_nobody_steps_and_dropped_from_then_on(mail: Mail) -> None:
    joining = Mail(4)
    assert joining.machine.state == RECOVERING
    joining.read(fragment(1, 5))
    assert KeepChunk(0, 2) in joining.come(part(0, 4)), "it does not wait behind what is to be adopted"
    assert joining.machine.adopted[1].version == 3
    heard_s = mail.machine.contact.heard_s
    assert mail.machine.may_step() and mail.come(part(0, 4)) == []
    assert not mail.box and mail.machine.contact.heard_s == heard_s


def test_nothing_is_adopted_while_a_state_is_being_taken_over() -> None:
    """The choice of its parameters was made before: those of a fragment adopted since would replace newer ones."""
    mail = Mail(4)
    mail.come(part(0, 4))
    mail.read(fragment(1, 5))
    effects = mail.come(part(1, 4))
    assert AdoptState("donor", 9, ()) in effects and mail.machine.start.adopting
    assert mail.take() == [] and len(mail.box) == 1
    done = mail.machine.on_state_adopted(True, 2.0)
    assert done == [Send("syncer", StateDone("a", 1, "donor"))] and mail.machine.state == TRAINING
    assert mail.take() == [(fragment(1, 5), "values of 5")]
    assert mail.machine.adopted[1].version == 5


def test_the_effects_are_of_the_message_that_was_given(mail: Mail) -> None:
    mail.read(fragment(1, 3))
    given = mail.box.take(1.0)
    assert given is not None and given.effects[0] == Adopt(1, 3) and given.item == "values of 3"
    assert mail.box.take(1.0) is None
