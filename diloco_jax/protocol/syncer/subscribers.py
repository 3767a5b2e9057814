"""Subscribers: processes that receive the global model and give nothing (`diloco follow`).

A subscriber is not a member of the run. The syncer's machine does not know it and its messages are not on the tape, so
no quorum, round, lease, alarm or audit can count it. This part only reads the machine.

Hello is a subscriber's only message, and a request. The answer is one value or a Welcome:

    Hello(versions, digests) -> GlobalFragment, if the subscriber lacks values: one of them, always whole
                             -> Welcome, if it holds the newest value of every fragment

So at most one value is on its way to a subscriber. A slow one skips versions, because each value is the newest one at
the time of its request. The values of a subscriber take turns: a fragment comes again only after all others that it
lacked. Advance tells a subscriber that a round was closed, and Stop that the run is complete.
"""

from dataclasses import dataclass, field
from typing import Any

from diloco_jax.protocol import bounds
from diloco_jax.protocol.messages import RUN_COMPLETE, Advance, GlobalFragment, Hello, Refuse, Stop, Welcome
from diloco_jax.protocol.releases import OLDEST, PROTOCOL
from diloco_jax.protocol.syncer.machine import Syncer

# The entry of a fingerprint that a subscriber and the syncer must share.
MODEL_LAYOUT = "model layout"

Answer = Advance | GlobalFragment | Refuse | Stop | Welcome
# Each with the name of its subscriber.
Answers = list[tuple[str, Answer]]


@dataclass(slots=True)
class Subscriber:
    """One connected subscriber."""

    # The request that has no answer yet.
    asked: Hello | None = None
    # Versions that it held at its last request.
    versions: tuple[int, ...] = ()
    # The fragment whose turn is next.
    turn: int = 0
    # The newest global step that it was told of.
    global_step: int = 0
    # True once it was sent Stop.
    stopped: bool = False


@dataclass(eq=False)
class Subscribers:
    """The connected subscribers of a run, and the answers to their requests.

    Args:
        syncer: the machine of the run; nothing here changes it.
        layout: fingerprint of the fragment plan, which subscribers must share.
    """

    syncer: Syncer
    layout: str
    # By name.
    _known: dict[str, Subscriber] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether a subscriber is connected."""
        return bool(self._known)

    def on_hello(self, hello: Hello) -> Answers:
        """Take a request; the answer may come from this call, or from a later `proceed`."""
        if refusal := self._refusal(hello):
            self._known.pop(hello.learner_id, None)
            return [(hello.learner_id, Refuse(refusal))]
        subscriber = self._known.setdefault(hello.learner_id, Subscriber())
        subscriber.asked, subscriber.versions = hello, hello.versions
        return self.proceed()

    def on_disconnect(self, name: str) -> None:
        """Forget a subscriber whose connection ended."""
        self._known.pop(name, None)

    def proceed(self) -> Answers:
        """Answer requests, and tell of closed rounds and of the end. Call it whenever the machine has changed."""
        # Until then learners may bring newer values than the driver holds.
        if not self._known or self.syncer.restoring:
            return []
        return [(name, message) for name, each in self._known.items() for message in self._messages(each)]

    def state(self) -> list[dict[str, Any]]:
        """Return one row per subscriber for the status of the run: its name, and the newest values that it lacked."""
        newest, rows = self.syncer.versions, sorted(self._known.items())
        pairs = {name: zip(newest, each.versions, strict=True) for name, each in rows}
        return [{"subscriber": name, "lacks": sum(a != b for a, b in both)} for name, both in pairs.items()]

    def _refusal(self, hello: Hello) -> str:
        if wrong := bounds.objection(hello):
            return wrong
        if not OLDEST <= hello.speaks <= PROTOCOL:
            return (
                f"{hello.learner_id} speaks protocol {hello.speaks}, the syncer {OLDEST} to {PROTOCOL}: use the same "
                "release of diloco-jax on both sides"
            )
        offered, count = dict(hello.fingerprint), len(self.syncer.versions)
        if offered.get(MODEL_LAYOUT) != self.layout or not len(hello.versions) == len(hello.digests) == count:
            return f"{hello.learner_id} expects another model than that of the run: start it again"
        return ""

    def _messages(self, subscriber: Subscriber) -> list[Answer]:
        progress, down, found = self.syncer.progress, self.syncer.downstream, list[Answer]()
        if (hello := subscriber.asked) is not None:
            subscriber.asked, subscriber.global_step = None, progress.global_step
            if missing := down.missing(hello):
                number = next((each for each in missing if each >= subscriber.turn), missing[0])
                subscriber.turn = number + 1
                found.append(self._whole(number))
            else:
                now = (progress.global_step, tuple(down.versions), progress.epoch, progress.schedule_lead)
                found.append(Welcome(*now, self.syncer.run))
        elif subscriber.global_step < progress.global_step:
            subscriber.global_step = progress.global_step
            found.append(Advance(progress.global_step, progress.schedule_lead))
        if progress.finished and not subscriber.stopped:
            subscriber.stopped = True
            found.append(Stop(progress.global_step, RUN_COMPLETE))
        return found

    def _whole(self, number: int) -> GlobalFragment:
        progress, down = self.syncer.progress, self.syncer.downstream
        version, digest, size = down.versions[number], down.digests[number], down.payload_bytes.get(number, 0)
        return GlobalFragment(progress.global_step, number, version, progress.epoch, digest, size)
