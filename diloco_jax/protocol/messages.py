"""Messages between learners and the syncer. effects.py has the requests of machines to their drivers.

Rules of this file
  * Plain immutable values, no behaviour. Messages never hold arrays: a payload (opaque bytes) travels beside its
    message, and only drivers look inside.
  * Steps, tokens and samples are counters, times are seconds on the driver's clock, sizes are bytes.
  * `version` of a fragment is the global step whose round produced it; 0 is the initial model, -1 means "none held".
  * `epoch` counts the lives of the syncer, from 1. `incarnation` counts those of a learner.
  * `digest` is the driver's 64-bit checksum of a fragment's float32 bytes, or of a part of a state; opaque here.
  * A step is small and leads from one version's value to the next one's; a whole value needs nothing to be read.
  * A sample is a window of data. The global order has positions 0, 1, 2, ...; a learner counts the samples that it took
    from its leases, in the order in which they were granted.

The steady state, in the order in which the messages travel (paper, Alg. 1 and 2):

    StepReport -> (quorum, grace) -> PullRequest -> FragmentValue -> (merge) -> GlobalFragment

Named tuples rather than frozen dataclasses: the simulator builds millions (docs/decisions/0001-named-tuples.md).
"""

from typing import NamedTuple

from diloco_jax.protocol.releases import PROTOCOL

SYNCER = "syncer"  # the peer name of the syncer; no learner may take it
NO_VERSION = -1
STALE = "is stale"  # in words to a process of which a newer incarnation is known (also in sessions.py), to nobody else
OWN_TIME = "unix_s"  # among the values of a report of metrics: an island's clock when it sent it, since 1970
METRICS_MAX = 64  # values in one report of metrics
METRIC_LENGTH_MAX = 64  # characters of a name
SCORES_MAX = 256  # values in one Score
SCORE_LENGTH_MAX = 128  # characters of a name


class Adopted(NamedTuple):
    """The version of a fragment that a learner holds, and its own counters when it adopted that.

    Steps since adoption are `report.local_step - adopted.local_step`, tokens likewise: c_steps and c_tokens of the
    paper without touching P counters at every inner step.
    """

    version: int = NO_VERSION
    local_step: int = 0
    tokens: int = 0


class Hello(NamedTuple):
    """First message on every connection: who I am and what I was built from."""

    learner_id: str
    incarnation: int  # grows with every restart of the learner; equal after a mere reconnection
    fingerprint: tuple[tuple[str, str], ...]  # (what, value) pairs that both sides must agree on
    versions: tuple[int, ...]  # version held of each fragment, so that a reconnection moves only what is missing
    digests: tuple[int, ...]  # of the values held, 0 where none is: equal versions must be equal bits
    epoch: int  # newest life of the syncer that this incarnation has heard of, 0 for none
    step_samples: int  # samples in one inner step
    granted: int  # samples of the leases that have arrived
    evaluates: bool = True  # can tell what the global model is worth
    speaks: int = PROTOCOL


class Arrived(NamedTuple):
    """A global fragment that a learner has read, adopted or not, and how long ago: no two clocks are compared."""

    fragment_id: int
    version: int
    ago_s: float


class StepReport(NamedTuple):
    """Metadata of one finished inner step. Sent after every step, holds no tensors, the newest replaces older ones."""

    learner_id: str
    incarnation: int
    local_step: int  # inner steps of this incarnation
    tokens: int  # tokens trained on by this incarnation
    global_step: int  # newest global step that the learner knows of (its schedule clock)
    adopted: tuple[Adopted, ...]  # per fragment
    step_s: float  # how long the step took
    loss: float  # training loss of the step, for people; no rule reads it
    samples: int  # samples of its leases that this incarnation has trained on
    granted: int  # samples of the leases that have arrived
    arrived: tuple[Arrived, ...] = ()  # since the report before, the newest of each fragment


class Metric(NamedTuple):
    """One number that an island measured: of its training, its speed or its machine."""

    name: str
    value: float


class MetricsReport(NamedTuple):
    """Means over the steps since the report before, about once per second; for people.

    No input of a machine and not on the tape: the syncer's driver tells it on. docs/metrics.md lists the names.
    """

    learner_id: str
    incarnation: int
    local_step: int  # newest step in it
    values: tuple[Metric, ...]  # at most METRICS_MAX


class FragmentValue(NamedTuple):
    """Answer to a pull: counters of the same local step as the payload (outer gradient against `base_version`)."""

    learner_id: str
    incarnation: int
    global_step: int  # the round that asked
    fragment_id: int
    local_step: int
    steps: int  # inner steps since the fragment was adopted
    tokens: int  # tokens since the fragment was adopted
    base_version: int  # version that the learner's anchor had
    samples: int  # samples trained on when the fragment was staged
    payload_bytes: int
    since: int = 0  # samples of these of which it holds nothing any more: adoption has overwritten it


class AnchorValue(NamedTuple):
    """Answer to an AnchorRequest: the exact global value that this learner adopted last (float32 payload).

    If the driver finds that a value cannot be used, it passes the message to the syncer's machine with version -1.
    """

    learner_id: str
    incarnation: int
    fragment_id: int
    version: int
    digest: int
    payload_bytes: int


class Score(NamedTuple):
    """Answer to Evaluate: what the global values that this learner holds are worth on the held-out data."""

    learner_id: str
    incarnation: int
    number: int
    global_step: int  # newest that it knew of
    versions: tuple[int, ...]  # of the values
    loss: float  # nats per token; not finite if there is none
    bits_per_byte: float  # not finite if nobody knows the text of the tokens
    tokens: int  # that were predicted
    scores: tuple[Metric, ...]  # what else was measured, at most SCORES_MAX; not finite where there is no number
    took_s: float
    reason: str  # why there is no loss, or some of the scores; "" if all is well


class StateRequest(NamedTuple):
    """I need one part of a healthy learner's state; without a donor's name, choose one for me."""

    learner_id: str
    incarnation: int
    clock: int  # newest global step of which I hold the broadcast: the donor must have seen it too
    donor: str  # "" lets the syncer choose
    donor_step: int  # local step of the state that I already have parts of, 0 for none
    part: int  # 0, 1, ...


class StatePart(NamedTuple):
    """One part of a donor's inner optimizer state; the syncer passes it on to the receiver."""

    learner_id: str  # the donor
    incarnation: int
    receiver: str
    local_step: int  # of the donor, when the state was staged
    part: int
    parts: int  # in all
    digest: int  # of this part's bytes
    payload_bytes: int
    clock: int = 0  # newest global step that the donor had seen when the state was staged


class StateRefused(NamedTuple):
    """I cannot give this state (any more); why."""

    learner_id: str  # the donor
    incarnation: int
    receiver: str
    reason: str


class StateDone(NamedTuple):
    """All parts are here, or, without the donor's name, no more are wanted: it may free them."""

    learner_id: str
    incarnation: int
    donor: str


class Heartbeat(NamedTuple):
    """I am alive, whatever my steps do (a first compile may take minutes)."""

    learner_id: str
    incarnation: int


DRAINED, STOPPED_OUTSIDE = ON_PURPOSE = "drained", "stopped from outside"  # why a learner leaves that people stopped


class Leave(NamedTuple):
    """A polite goodbye: expect nothing more from this incarnation."""

    learner_id: str
    incarnation: int
    reason: str


class Welcome(NamedTuple):
    """Accepted. One GlobalFragment follows for every fragment of which the learner holds another value."""

    global_step: int
    versions: tuple[int, ...]
    epoch: int
    schedule_lead: int = 0  # of the learning-rate schedule before `global_step`, in steps: syncer/progress.py


class Refuse(NamedTuple):
    """Not accepted, and why; the learner must not retry unchanged."""

    reason: str


class Expel(NamedTuple):
    """This incarnation may not go on (its values were not usable); a new one may join."""

    reason: str


class Lease(NamedTuple):
    """Positions [start, stop) of the global sample order are this incarnation's, from its sample `first_sample` on."""

    first_sample: int
    start: int
    stop: int


class AnchorRequest(NamedTuple):
    """A restarted syncer lacks this version, which you hold: send it, or the newer one that you hold by now."""

    fragment_id: int
    version: int


class Evaluate(NamedTuple):
    """Evaluate the global values that you hold, between two steps, and answer with a Score."""

    number: int  # of this request: grows; repeated if no answer comes
    versions: tuple[int, ...]  # of the final model: wait until you hold it, and make no step after; else empty


class StatePull(NamedTuple):
    """Give a part of your state to `receiver`; of a new one, once you have seen `clock`, if donor_step is 0."""

    receiver: str
    clock: int
    donor_step: int
    part: int


class StateEnd(NamedTuple):
    """The receiver needs no more parts; free them."""

    receiver: str


class StateUnavailable(NamedTuple):
    """No parts will come from this donor; without a name, nobody can give a state: go on from the syncer alone."""

    donor: str
    reason: str


class PullRequest(NamedTuple):
    """Send me this fragment as it was after your `local_step`."""

    global_step: int
    fragment_id: int
    local_step: int


class GlobalFragment(NamedTuple):
    """A merged fragment. `global_step` is the syncer's clock, `version` the round that made the value.

    The payload is the whole value in float32, or, when `base` names a version, the quantised step that leads from the
    value of that version to this one. `digest` is of the value of `version` in both cases.

    `merged_round` differs by receiver: a round may leave a value out, and what rounding kept back of that value must
    then never come back. A receiver that missed versions learns here that one of them has its value in it.

    A later epoch's value replaces any of an earlier one, whatever their versions: the earlier life may have made
    versions that nobody but this learner remembers.
    """

    global_step: int
    fragment_id: int
    version: int
    epoch: int
    digest: int
    payload_bytes: int
    base: int = NO_VERSION
    merged_round: int = NO_VERSION  # newest round of this fragment that merged a value of the receiver's incarnation
    schedule_lead: int = 0


class Advance(NamedTuple):
    """A global step without a due fragment was closed."""

    global_step: int
    schedule_lead: int = 0


class Stop(NamedTuple):
    """The run is complete; the learner leaves after its current step."""

    global_step: int
    reason: str


StateMessage = StateRequest | StatePart | StateRefused | StateDone
LearnerMessage = Hello | StepReport | FragmentValue | AnchorValue | Score | StateMessage | Heartbeat | Leave
StateAnswer = StatePull | StatePart | StateEnd | StateUnavailable
SyncerAnswer = Welcome | Refuse | Expel | Lease | GlobalFragment | Advance | Stop
SyncerMessage = SyncerAnswer | PullRequest | AnchorRequest | Evaluate | StateAnswer
Message = LearnerMessage | SyncerMessage | MetricsReport
