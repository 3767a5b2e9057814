"""A refusal that another start may survive does not end a learner for good."""

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.messages import Refuse
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.runtime.learner.joined import is_final
from tests.protocol.syncer_inputs import hello, running


def refusal(syncer: Syncer, name: str, incarnation: int = 1, versions: tuple[int, ...] = (0, 0, 0, 0)) -> str:
    """Return why the syncer refuses a learner."""
    effects = syncer.on_message(hello(name, incarnation, versions), 2.0)
    (reason,) = [e.message.reason for e in effects if isinstance(e, Send) and isinstance(e.message, Refuse)]
    return str(reason)


def test_only_lasting_refusals_are_final() -> None:
    full = running("a", "b", learners_max=2)
    assert not is_final(refusal(full, "c")), "a place may become free"
    returned = running("a")
    returned.on_message(hello("a", 3), 1.5)
    assert not is_final(refusal(returned, "a", 2)), "the next process of this island has a newer number"
    assert is_final(refusal(running("a"), "b", versions=(0, 0)))
