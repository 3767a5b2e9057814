"""Messages between learners and the syncer. effects.py has the requests of machines to their drivers.

Rules of this file
  * Messages are plain immutable values without behaviour. They never hold arrays: a payload (opaque bytes) travels
    beside its message, and only drivers read it.
  * Steps, tokens and samples are counters, times are seconds on the driver's clock, sizes are bytes.
  * `version` of a fragment is the global step whose round produced it; 0 is the initial model, -1 means "none held".
  * `epoch` numbers the processes of the syncer, from 1; `incarnation` numbers those of a learner. One epoch, or one
    incarnation, is the time from the start of such a process to its end.
  * A run has an id, which the syncer's driver draws at its start. Two runs of one config have the same name, and
    different ids.
  * `digest` is the driver's 64-bit checksum of a fragment's float32 bytes, or of a part of a state; opaque here.
  * A delta, added to the value of its base version, gives the value of the newer one. A whole value stands alone.
  * A sample is a window of data. The global order has positions 0, 1, 2, ... A learner counts the samples that it took
    from its leases, in the order of their grants.

The steady state, in the order of travel (paper, Alg. 1 and 2):

    StepReport -> (quorum, grace) -> PullRequest -> FragmentValue -> (merge) -> GlobalFragment

Named tuples rather than frozen dataclasses: the simulator builds millions (docs/decisions/0001-named-tuples.md).
"""

from typing import NamedTuple

from diloco_jax.protocol.releases import PROTOCOL

# The peer name of the syncer, which no learner may take.
SYNCER = "syncer"
NO_VERSION = -1
# Only the refusal of a process whose newer incarnation is known contains these words (also in sessions.py).
STALE = "is stale"
# Only a refusal that ends once another learner leaves contains these words.
FULL = "learners are connected, the limit"
# Only the refusal of a learner that has joined another run contains these words.
OTHER_RUN = "has joined another run"
# Name of the value in a report of metrics that holds the island's clock at sending, in seconds since 1970.
OWN_TIME = "unix_s"
# Names of the values that hold the number of the island's process, and a number of the machine that gave it.
OWN_PROCESS, OWN_MACHINE = "island_process", "island_machine"
# Values in one report of metrics, and characters of a name.
METRICS_MAX = 64
METRIC_LENGTH_MAX = 64
# Values in one Score, and characters of a name.
SCORES_MAX = 256
SCORE_LENGTH_MAX = 128
# Name of the score that answers the second part of an EvaluateWithout.
WITHOUT = "loss without"


class Adopted(NamedTuple):
    """The version of a fragment that a learner holds, and the learner's counters when it adopted that version.

    Steps since adoption are `report.local_step - adopted.local_step`, and tokens likewise. These are c_steps and
    c_tokens of the paper, without an update of P counters at every inner step.
    """

    version: int = NO_VERSION
    local_step: int = 0
    tokens: int = 0


class Hello(NamedTuple):
    """The first message on every connection: who the learner is, and what it holds."""

    learner_id: str
    # Grows with every restart of the learner, and stays the same over a reconnection.
    incarnation: int
    # Pairs (what, value) that both sides must agree on.
    fingerprint: tuple[tuple[str, str], ...]
    # Held version of each fragment, so that a reconnection moves only what is missing.
    versions: tuple[int, ...]
    # Digests of the held values, 0 where none is held: equal versions must be equal bits.
    digests: tuple[int, ...]
    # Newest epoch of the syncer that this incarnation knows, 0 for none.
    epoch: int
    # Leased samples in one inner step, 0 if the learner reads its own data.
    step_samples: int
    # Samples of the leases that have arrived.
    granted: int
    # Whether the learner can evaluate the global model.
    evaluates: bool = True
    # The protocol's number (releases.py).
    speaks: int = PROTOCOL
    # Id of the run that this incarnation has joined; "" if it has joined none, or the run has no id.
    run: str = ""
    # Name of the separate corpus whose samples it leases; "" for the corpus of the run.
    corpus: str = ""
    # Length and digest of that corpus; "" for the corpus of the run, which the fingerprint describes.
    content: str = ""
    # Training samples of its corpus in one epoch, 0 if unknown.
    corpus_samples: int = 0
    # Digest of the tokenizer that made its token ids, "" if unknown: islands with other corpora must have the same.
    tokenizer: str = ""
    # Whether it understands an EvaluateWithout, and can answer it.
    judges: bool = False


class Arrived(NamedTuple):
    """A global fragment that a learner has read, adopted or not, and how long ago: no two clocks are compared."""

    fragment_id: int
    version: int
    ago_s: float


class StepReport(NamedTuple):
    """The counters of one finished inner step. A learner sends one after each step; a newer one replaces older ones."""

    learner_id: str
    incarnation: int
    # Inner steps of this incarnation, and the tokens that it has trained on.
    local_step: int
    tokens: int
    # Newest global step that the learner knows: its schedule clock.
    global_step: int
    # What is held of each fragment.
    adopted: tuple[Adopted, ...]
    # Duration of the step.
    step_s: float
    # Training loss of the step. It is for people; no rule reads it.
    loss: float
    # Samples of its leases that this incarnation has trained on.
    samples: int
    # Samples of the leases that have arrived.
    granted: int
    # Arrivals since the report before, the newest of each fragment.
    arrived: tuple[Arrived, ...] = ()


class Metric(NamedTuple):
    """One number that an island measured: of its training, its speed or its machine."""

    name: str
    value: float


class MetricsReport(NamedTuple):
    """Means over the steps since the report before, about once per second; for people.

    It is not an input of a machine and not on the tape. The syncer's driver forwards it. docs/metrics.md has the names.
    """

    learner_id: str
    incarnation: int
    # The newest step that the means include.
    local_step: int
    # At most METRICS_MAX.
    values: tuple[Metric, ...]


class HostBlocks(NamedTuple):
    """The blocks of every fragment that one host of a learner holds and those that it gets, in the payload.

    Each host of an island of several sends it once in each session, to the transport; it is not an input of a machine
    and not on the tape. runtime/model/cuts.py has its format.
    """

    learner_id: str
    incarnation: int


class FragmentValue(NamedTuple):
    """Answer to a pull; its counters are of the payload's local step (outer gradient against `base_version`)."""

    learner_id: str
    incarnation: int
    # The round that asked.
    global_step: int
    fragment_id: int
    local_step: int
    # Inner steps and tokens since the fragment was adopted.
    steps: int
    tokens: int
    # Version of the learner's anchor.
    base_version: int
    # Samples that were trained on when the fragment was staged.
    samples: int
    payload_bytes: int
    # The value contains nothing of the samples before this one, because adoption has overwritten their work.
    since: int = 0


class AnchorValue(NamedTuple):
    """Answer to an AnchorRequest: the exact global value that this learner adopted last (float32 payload).

    If the driver finds that a value is unusable, it passes the message to the syncer's machine with version -1.
    """

    learner_id: str
    incarnation: int
    fragment_id: int
    version: int
    digest: int
    payload_bytes: int


class Score(NamedTuple):
    """Answer to Evaluate: the result of the learner's global values on the held-out data."""

    learner_id: str
    incarnation: int
    number: int
    # Newest global step that the learner knew.
    global_step: int
    # Versions of the evaluated values.
    versions: tuple[int, ...]
    # Nats per token; not finite if there is none.
    loss: float
    # Not finite if the text of the tokens is unknown.
    bits_per_byte: float
    # Predicted tokens.
    tokens: int
    # Other results, at most SCORES_MAX; not finite where there is no number.
    scores: tuple[Metric, ...]
    took_s: float
    # Why the loss, or some of the scores, is missing; "" if none is.
    reason: str


class StateRequest(NamedTuple):
    """Request for one part of a healthy learner's state; without a donor's name the syncer chooses the donor."""

    learner_id: str
    incarnation: int
    # Newest global step whose broadcast the receiver holds. The donor must have seen it too.
    clock: int
    # "" lets the syncer choose.
    donor: str
    # Local step of the state whose first parts have arrived, 0 for none.
    donor_step: int
    # Number of the part, from 0.
    part: int


class StateChunk(NamedTuple):
    """One part of a donor's inner optimizer state; the syncer forwards it to the receiver."""

    # The donor.
    learner_id: str
    incarnation: int
    receiver: str
    # The donor's local step when the state was staged.
    local_step: int
    # Number of the part, from 0, and the number of all parts.
    part: int
    parts: int
    # Digest of this part's bytes.
    digest: int
    payload_bytes: int
    # Newest global step that the donor had seen when the state was staged.
    clock: int = 0


class StateRefused(NamedTuple):
    """The donor cannot give this state (any more), and why."""

    # The donor.
    learner_id: str
    incarnation: int
    receiver: str
    reason: str


class StateDone(NamedTuple):
    """The receiver has all parts or, without the donor's name, wants no more: the donor may free them."""

    learner_id: str
    incarnation: int
    donor: str


class Heartbeat(NamedTuple):
    """A sign of life that does not depend on steps, because a first compilation may take minutes."""

    learner_id: str
    incarnation: int


# Reasons of a Leave that an operator caused.
DRAINED, STOPPED_OUTSIDE, SYNCER_STOPPED = "drained", "stopped from outside", "the syncer was stopped"
# The reason of Stop at the end of a run.
RUN_COMPLETE = "run complete"
# A learner that says goodbye for one of these reasons has left; one that failed is disconnected, whatever it says.
ON_PURPOSE = DRAINED, STOPPED_OUTSIDE, SYNCER_STOPPED, RUN_COMPLETE


class Leave(NamedTuple):
    """Goodbye: the syncer can expect nothing more from this incarnation."""

    learner_id: str
    incarnation: int
    reason: str


class Welcome(NamedTuple):
    """The learner is accepted. A GlobalFragment follows for each fragment whose newest value the learner lacks."""

    global_step: int
    versions: tuple[int, ...]
    epoch: int
    # The learning-rate schedule is so many steps ahead of `global_step` (syncer/progress.py).
    schedule_lead: int = 0
    # Id of the run; "" if an older release started it.
    run: str = ""


class Refuse(NamedTuple):
    """The learner is not accepted, and why; it must not try again unchanged."""

    reason: str


class Expel(NamedTuple):
    """This incarnation must stop. If its values were unusable, a new one may join; if it is banned, none may."""

    reason: str


class Lease(NamedTuple):
    """Positions [start, stop) of the global sample order are this incarnation's, from its sample `first_sample` on."""

    first_sample: int
    start: int
    stop: int


class AnchorRequest(NamedTuple):
    """A restarted syncer lacks this version: send it, or the newer one that replaced it here."""

    fragment_id: int
    version: int


class Evaluate(NamedTuple):
    """Evaluate the held global values between two steps, and answer with a Score."""

    # Number of this request. It grows; a repeated request has the same number.
    number: int
    # Versions of the final model: wait until they are here, and make no step afterwards. Else empty.
    versions: tuple[int, ...]


class EvaluateWithout(NamedTuple):
    """Evaluate as Evaluate says, and once more with the payload added to the value of one fragment.

    The float32 payload turns the value into the one that its round would have made without one contribution. The
    message does not say whose. Only drivers handle it: a machine sees an Evaluate of the same number.
    """

    number: int
    fragment_id: int
    payload_bytes: int


class StatePull(NamedTuple):
    """Give a part of the state of `donor_step` to `receiver`; if that is 0, of a new state once `clock` was seen."""

    receiver: str
    clock: int
    donor_step: int
    part: int


class StateEnd(NamedTuple):
    """The receiver needs no more parts, so the donor frees them."""

    receiver: str


class StateUnavailable(NamedTuple):
    """No parts will come from this donor; without a name, no learner has a state to give, and none will come."""

    donor: str
    reason: str


class PullRequest(NamedTuple):
    """Send this fragment as it was after the learner's `local_step`."""

    global_step: int
    fragment_id: int
    local_step: int


class GlobalFragment(NamedTuple):
    """A merged fragment. `global_step` is the syncer's clock, `version` the round that made the value.

    The payload is the whole value in float32 or, when `base` names a version, the quantised delta from the value of
    that version to this one. `digest` is of the value of `version` in both cases.

    `merged_round` differs by receiver: it names the newest round that merged a value of the receiver. If a round
    excluded a value, the receiver must discard the residual of that value and keep the earlier one. A receiver that
    missed versions sees here that one of them contains its value.

    A value of a later epoch replaces any value of an earlier epoch, even one with a higher version. The earlier process
    of the syncer may have made versions that only this learner still knows.
    """

    global_step: int
    fragment_id: int
    version: int
    epoch: int
    digest: int
    payload_bytes: int
    base: int = NO_VERSION
    # Newest round of this fragment that merged a value of the receiver's incarnation.
    merged_round: int = NO_VERSION
    schedule_lead: int = 0


class CutFragment(NamedTuple):
    """A GlobalFragment for one host of a learner with several: the payload has only blocks that this host stated.

    `digest` is that of all blocks that the host holds, of the value of the version.
    """

    value: GlobalFragment
    digest: int


class Advance(NamedTuple):
    """A global step without a due fragment was closed."""

    global_step: int
    schedule_lead: int = 0


class Stop(NamedTuple):
    """The learner leaves after its current step, because the run is complete or an operator wants it to leave."""

    global_step: int
    reason: str


StateMessage = StateRequest | StateChunk | StateRefused | StateDone
LearnerMessage = Hello | StepReport | FragmentValue | AnchorValue | Score | StateMessage | Heartbeat | Leave
StateAnswer = StatePull | StateChunk | StateEnd | StateUnavailable
SyncerAnswer = Welcome | Refuse | Expel | Lease | GlobalFragment | Advance | Stop
SyncerMessage = SyncerAnswer | PullRequest | AnchorRequest | Evaluate | StateAnswer
# Between the transport and the hosts of an island of several.
HostMessage = HostBlocks | CutFragment
# The receiver of these messages checks a digest of what the payload contains, and requests it again if it differs.
Digested = GlobalFragment | CutFragment | AnchorValue | StateChunk
Message = LearnerMessage | SyncerMessage | MetricsReport | EvaluateWithout | HostMessage
