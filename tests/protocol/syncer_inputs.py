"""Short ways to write inputs of a syncer, and to read its effects."""

from collections.abc import Iterable, Sequence
from typing import Any

from diloco_jax.protocol.effects import Effect, Send
from diloco_jax.protocol.messages import (
    NO_VERSION,
    Adopted,
    FragmentValue,
    GlobalFragment,
    Hello,
    Lease,
    Message,
    StepReport,
)
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer

FINGERPRINT = (("model", "abc"),)
# The samples that a member gets when it greets; enough for every test that is not about leases.
LEASED = 1000


def new(total_steps: int = 100, sizes: Sequence[dict[int, int]] = (), **settings: Any) -> Syncer:
    """Four fragments, one due at every global step: 1, 2, 3, 0, 1, ... No grace window, so that K alone decides.

    `sizes` are those of whole values, and of steps.
    """
    small: dict[str, Any] = {"sync_every": 4, "num_fragments": 4, "grace_steps_max": 0.0}
    small |= {"silence_s": 8.0, "resend_s": 3.0, "lease_ahead_steps": LEASED}
    return Syncer(ProtocolConfig(**small | settings), total_steps, FINGERPRINT, *sizes)


def hello(name: str, incarnation: int = 1, versions: tuple[int, ...] = (0, 0, 0, 0), **changed: Any) -> Hello:
    """Return the greeting of a learner that holds the initial values, unless the arguments change it."""
    digests = tuple(0 if version < 0 else digest(p, version) for p, version in enumerate(versions))
    return Hello(name, incarnation, FINGERPRINT, versions, digests, 0, 1, 0)._replace(**changed)


def digest(fragment_id: int, version: int) -> int:
    """Return the digest of a global value; an initial value has digest 0 unless the syncer got another."""
    return 1000 * version + fragment_id if version else 0


def merged(syncer: Syncer, global_step: int, now_s: float, excluded: tuple[str, ...] = ()) -> list[Effect]:
    """Report to the syncer that the merge of a round is done, and return its effects."""
    return syncer.on_merged(
        global_step, digest(syncer.rounds.flying[global_step].fragment_id, global_step), excluded, now_s
    )


def fragment(
    global_step: int, fragment_id: int, version: int, size: int = 0, *, merged_round: int = NO_VERSION
) -> GlobalFragment:
    """A whole value; `merged_round` is the newest round that merged a value of its receiver."""
    told = GlobalFragment(global_step, fragment_id, version, 1, digest(fragment_id, version), size)
    return told._replace(merged_round=merged_round)


def report(name: str, local_step: int, adopted: tuple[Adopted, ...] = (Adopted(0),) * 4, **changed: Any) -> StepReport:
    message = StepReport(name, 1, local_step, 10 * local_step, 0, adopted, 1.0, 2.5, local_step, LEASED)
    return message._replace(**changed)


def value(name: str, global_step: int, fragment_id: int, local_step: int, **changed: Any) -> FragmentValue:
    steps = local_step
    message = FragmentValue(name, 1, global_step, fragment_id, local_step, steps, 10 * steps, 0, local_step, 0)
    return message._replace(**changed)


def running(*names: str, **settings: Any) -> Syncer:
    """Return a syncer whose members greeted and reported a step; it pulls round 1 if K is their number."""
    syncer = new(**{"quorum": len(names)} | settings)
    for name in names:
        syncer.on_message(hello(name), 0.0)
    for name in names:
        syncer.on_message(report(name, 1), 1.0)
    return syncer


def sent(effects: list[Effect], peer: str = "") -> list[Message]:
    """Return the messages to everybody or to one peer, without leases; test_leases.py covers those."""
    sends = [e for e in effects if isinstance(e, Send) and not isinstance(e.message, Lease)]
    return [e.message for e in sends if peer in ("", e.peer)]


def leases(effects: list[Effect], peer: str = "") -> list[Lease]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Lease) and peer in ("", e.peer)]


def only(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def indices(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return every index of these ranges."""
    return [index for start, stop in ranges for index in range(start, stop)]


def expand(found: Iterable[Lease]) -> dict[int, int]:
    """A learner's sample -> its index, of these leases."""
    return {lease.first_sample + i: lease.start + i for lease in found for i in range(lease.stop - lease.start)}
