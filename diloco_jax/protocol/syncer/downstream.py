"""The newest versions of the fragments, and what of them goes to each learner: a whole value, or a step to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_jax.protocol.effects import Effect, Send
from diloco_jax.protocol.member import Held, Member, Sent
from diloco_jax.protocol.messages import NO_VERSION, GlobalFragment, Hello
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.progress import Progress

STEPS_MAX = 2  # times that a version goes out to one member as a step: who lacks it then cannot use steps


@dataclass(slots=True)
class Downstream:
    """The versions that exist, and sending them."""

    config: ProtocolConfig
    progress: Progress
    payload_bytes: Mapping[int, int]  # fragment -> size of its encoded global value
    step_bytes: Mapping[int, int]  # likewise of a step to its newest version; absent: steps are not used
    versions: list[int] = field(init=False)  # newest version of each fragment
    digests: list[int] = field(init=False)  # of these
    history: list[list[int]] = field(init=False)  # of each fragment, versions against which a value can be read
    bases: dict[int, Held] = field(default_factory=dict)  # fragment -> value from which a step leads to its newest one
    newest: GlobalFragment | None = None  # message that was sent

    def __post_init__(self) -> None:
        count = self.config.num_fragments
        self.versions, self.digests, self.history = [0] * count, [0] * count, [[0] for _ in range(count)]

    def renew(self, fragment_id: int, version: int, digest: int) -> None:
        """Take a version that was merged; a step leads to it from the one before."""
        self.bases[fragment_id] = Held(self.versions[fragment_id], self.digests[fragment_id])
        self.versions[fragment_id], self.digests[fragment_id] = version, digest
        history = self.history[fragment_id]
        history.append(version)
        del history[: -self.config.anchor_history]

    def replace(self, fragment_id: int, version: int, digest: int) -> None:
        """Go on from this version, whatever was there."""
        self.versions[fragment_id], self.digests[fragment_id] = version, digest
        self.history[fragment_id] = [version]

    def forget_steps(self) -> None:
        """The process that held steps and older versions died."""
        self.bases.clear()
        self.history = [[version] for version in self.versions]

    def missing(self, hello: Hello) -> list[int]:
        """Return the fragments of which the learner holds another value than the newest."""
        held = zip(hello.versions, hello.digests, self.versions, self.digests, strict=True)
        return [p for p, (theirs, bits, ours, our_bits) in enumerate(held) if theirs != ours or bits != our_bits]

    def send(self, member: Member, fragment_id: int, wait_steps: int = 0, broadcast_s: float | None = None) -> Send:
        """Send the newest version: as a step to a member that will hold its base by then, else whole.

        Args:
            wait_steps: after so many steps of the member without it, it is lost; 0: what the overlap allows.
            broadcast_s: when, if this is the broadcast after its merge.
        """
        down, version, digest = member.down, self.versions[fragment_id], self.digests[fragment_id]
        size, base, steps = self.payload_bytes.get(fragment_id, 0), NO_VERSION, STEPS_MAX
        if fragment_id in self.step_bytes:
            sent, will_hold = down.sent.get(fragment_id), down.will_hold[fragment_id]
            before = sent.steps if sent is not None and sent.version == version else 0
            if before < STEPS_MAX and self.bases.get(fragment_id) == will_hold:
                size, base, steps = self.step_bytes[fragment_id], will_hold.version, before + 1
            down.will_hold[fragment_id] = Held(version, digest)
        wait_steps = wait_steps or self.config.overlap_steps + 1
        down.sent[fragment_id] = Sent(version, steps, member.local_step, wait_steps, broadcast_s)
        merged_round = member.credit.merged_round.get(fragment_id, NO_VERSION)
        now = self.progress
        lead = now.schedule_lead
        value = (now.global_step, fragment_id, version, now.epoch, digest, size, base, merged_round, lead)
        message = self.newest
        if message is None or message != value:  # nearly all members of a broadcast get the same
            message = self.newest = GlobalFragment(*value)
        return Send(member.learner_id, message)

    def repair(self, member: Member, fragment_id: int, effects: list[Effect]) -> None:
        """Repeat a broadcast that was lost: its learner began a step after it was due, and still lacks it.

        A step that began before the arrival reports the old version, hence one step more than the overlap. Every
        repetition waits twice as long: on a slow link it is under way, not lost.
        """
        if not member.adopted or member.adopted[fragment_id].version >= self.versions[fragment_id]:
            return
        sent, base = member.down.sent.get(fragment_id), self.bases.get(fragment_id)
        if sent is not None and member.local_step > sent.local_step + sent.wait_steps:
            if base is not None and member.adopted[fragment_id].version == base.version:
                member.down.will_hold[fragment_id] = base  # whole values would fill a slow link for good
            effects.append(self.send(member, fragment_id, 2 * sent.wait_steps))

    def state(self) -> dict[str, Any]:
        return {
            "versions": list(self.versions),
            "digests": list(self.digests),
            "bases": [[fragment_id, *base] for fragment_id, base in self.bases.items()],
            "history": [list(history) for history in self.history],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.versions, self.digests = list(state["versions"]), list(state["digests"])
        self.bases = {fragment_id: Held(*base) for fragment_id, *base in state["bases"]}
        self.history = [list(history) for history in state["history"]]
