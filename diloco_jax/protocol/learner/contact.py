"""A learner's link to the syncer: what is said on it beside reports and values, and what is said again."""

from dataclasses import dataclass, field

from diloco_jax.protocol.effects import Send
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.leases import Allotment
from diloco_jax.protocol.messages import SYNCER, Heartbeat, Hello, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig


@dataclass(slots=True)
class Contact:
    """The state of the link, and the times at which to greet, to repeat or to beat the heart next."""

    learner_id: str
    incarnation: int
    fingerprint: tuple[tuple[str, str], ...]  # what both sides must agree on
    config: ProtocolConfig
    evaluates: bool  # whether it can tell what the global model is worth
    connected: bool = False  # whether the link stands
    heard_s: float = 0.0  # when a message of the syncer was last taken, or the link came to stand
    unheard_steps: int = 0  # inner steps since then
    resend_at_s: float | None = None  # when to repeat what is not answered; None if nothing is
    heartbeat_at_s: float | None = None  # when to say that one is alive
    hello_step: int = 0  # local step of the newest greeting
    report: StepReport | None = None  # the newest report, in case that the syncer lost it
    resend_wait_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.resend_wait_s = self.config.resend_s

    def connect(self, now_s: float) -> None:
        """The link stands."""
        self.connected = True
        self.heard_s, self.unheard_steps = now_s, 0
        self.resend_wait_s = self.config.resend_s
        self.heartbeat_at_s = now_s + self.config.heartbeat_s

    def fall_silent(self) -> None:
        """There is nobody to speak to, or nothing to say any more."""
        self.resend_at_s = self.heartbeat_at_s = None

    def ask_again(self, now_s: float) -> None:
        """Wait for an answer before anything is repeated."""
        self.resend_at_s = now_s + self.resend_wait_s

    def answered(self) -> None:
        """Nothing is to be repeated."""
        self.resend_at_s, self.resend_wait_s = None, self.config.resend_s

    def hello(self, anchors: Anchors, allotment: Allotment, local_step: int, now_s: float) -> Send:
        """Greet the syncer: it sends what is missing."""
        self.ask_again(now_s)
        self.hello_step = local_step
        self.resend_wait_s = min(2 * self.resend_wait_s, self.config.lease_s)  # it may be slow, and not lost
        versions, digests = anchors.versions, tuple(anchors.digests)
        data = (allotment.step_samples, allotment.granted)
        hello = Hello(self.learner_id, self.incarnation, self.fingerprint, versions, digests, anchors.epoch, *data)
        return Send(SYNCER, hello._replace(evaluates=self.evaluates))

    def lost_track(self, now_s: float) -> bool:
        """Say if the syncer has been silent for so long that it may have forgotten this learner."""
        return now_s - self.heard_s >= self.config.lease_s and self.resend_at_s is None

    def heartbeat(self, now_s: float) -> Send:
        """Say that this learner is alive."""
        self.heartbeat_at_s = now_s + self.config.heartbeat_s
        return Send(SYNCER, Heartbeat(self.learner_id, self.incarnation))
