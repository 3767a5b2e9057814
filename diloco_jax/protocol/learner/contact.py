"""A learner's contact with the syncer: greetings, their repetition, and heartbeats."""

from dataclasses import dataclass, field

from diloco_jax.protocol import messages
from diloco_jax.protocol.corpora import OwnCorpus
from diloco_jax.protocol.effects import Effects, Send
from diloco_jax.protocol.learner.anchors import Anchors
from diloco_jax.protocol.learner.recovery import PATIENCE_SILENCES
from diloco_jax.protocol.leases import Allotment
from diloco_jax.protocol.messages import SYNCER, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig


@dataclass(slots=True)
class Contact:
    """A learner's link to the syncer, and the times of the next greeting, repetition and heartbeat."""

    effects: Effects
    learner_id: str
    incarnation: int
    # What both sides must agree on.
    fingerprint: tuple[tuple[str, str], ...]
    config: ProtocolConfig
    # Whether the driver can evaluate the global model.
    evaluates: bool
    # Whether it can evaluate it with a change as well.
    judges: bool
    # The corpus that it reads.
    corpus: OwnCorpus
    connected: bool = False
    # When the newest message of the syncer was taken, or the link was opened.
    heard_s: float = 0.0
    # Inner steps since then.
    unheard_steps: int = 0
    # When to repeat what has no answer; None if everything has one.
    resend_at_s: float | None = None
    # When the newest greeting was sent, or the newest value came that was missing.
    asked_s: float = 0.0
    heartbeat_at_s: float | None = None
    # Local step of the newest greeting.
    hello_step: int = 0
    # Id of the run that welcomed this learner; "" before, or if the run has none.
    run: str = ""
    # Whether a value has arrived damaged since then, so that only another greeting brings it.
    damaged: bool = False
    # The newest report, in case the syncer lost it.
    report: StepReport | None = None
    resend_wait_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.resend_wait_s = self.config.resend_s

    def connect(self, now_s: float) -> None:
        """Record that the link is open."""
        self.connected = True
        self.heard_s, self.unheard_steps = now_s, 0
        self.resend_wait_s = self.config.resend_s
        self.heartbeat_at_s = now_s + self.config.heartbeat_s

    def fall_silent(self) -> None:
        """Plan no repetition and no heartbeat, because there is no link or the learner has stopped."""
        self.resend_at_s = self.heartbeat_at_s = None

    def ask_again(self, now_s: float) -> None:
        """Restart the wait for an answer."""
        self.asked_s, self.resend_at_s = now_s, now_s + self.resend_wait_s

    def wait_longer(self, now_s: float) -> None:
        """Give the answer more time, within a limit, because it may be behind a payload that arrives now."""
        limit_s = PATIENCE_SILENCES * self.config.silence_s
        if self.resend_at_s is not None and not self.damaged and now_s - self.asked_s < limit_s:
            self.resend_at_s = now_s + self.resend_wait_s

    def answered(self) -> None:
        """Repeat nothing, because everything has an answer."""
        self.resend_at_s, self.resend_wait_s = None, self.config.resend_s

    def greet(self, anchors: Anchors, allotment: Allotment, local_step: int, now_s: float) -> None:
        """Greet the syncer, which answers with whatever is missing here."""
        self.ask_again(now_s)
        self.damaged = False
        self.hello_step = local_step
        # The answer may be slow, and not lost.
        self.resend_wait_s = min(2 * self.resend_wait_s, self.config.silence_s)
        versions, digests = anchors.versions, tuple(anchors.digests)
        who = (self.learner_id, self.incarnation, self.fingerprint)
        data = (allotment.step_samples, allotment.granted)
        hello = messages.Hello(*who, versions, digests, anchors.epoch, *data)
        self.effects.append(
            Send(
                SYNCER,
                hello._replace(evaluates=self.evaluates, judges=self.judges, run=self.run, **self.corpus._asdict()),
            )
        )

    def lost_track(self, now_s: float) -> bool:
        """Return whether the syncer has been silent for so long that it may have forgotten this learner."""
        return now_s - self.heard_s >= self.config.silence_s and self.resend_at_s is None

    def send_heartbeat(self, now_s: float) -> None:
        """Send a sign of life."""
        self.heartbeat_at_s = now_s + self.config.heartbeat_s
        self.effects.append(Send(SYNCER, messages.Heartbeat(self.learner_id, self.incarnation)))
