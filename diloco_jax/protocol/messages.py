"""The whole vocabulary of the protocol: messages that travel, and effects that a driver executes.

Rules of this file
  * Plain immutable values, no behaviour. Messages never hold arrays: a payload (opaque bytes) travels beside its
    message, and only drivers look inside.
  * Steps and tokens are counters, times are seconds on the driver's clock, sizes are bytes.
  * `version` of a fragment is the global step whose round produced it; 0 is the initial model, -1 means "none held".

The steady state, in the order in which the messages travel (paper, Alg. 1 and 2):

    StepReport -> (quorum, grace) -> PullRequest -> FragmentValue -> (merge) -> GlobalFragment

Named tuples rather than frozen dataclasses: the simulator builds millions (docs/decisions/0001-named-tuples.md).
"""

from __future__ import annotations

from typing import NamedTuple

SYNCER = "syncer"  # the peer name of the syncer; no learner may take it
NO_VERSION = -1


class Adopted(NamedTuple):
    """What a learner holds of one fragment, and where its own counters stood when it adopted it.

    Steps since adoption are `report.local_step - adopted.local_step`, tokens likewise: c_steps and c_tokens of the
    paper without touching P counters at every inner step.
    """

    version: int = NO_VERSION
    local_step: int = 0
    tokens: int = 0


# ---- learner -> syncer ----------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """First message on every connection: who I am and what I was built from."""

    learner_id: str
    incarnation: int  # grows with every restart of the learner; equal after a mere reconnection
    fingerprint: tuple[tuple[str, str], ...]  # (what, value) pairs that both sides must agree on
    versions: tuple[int, ...]  # version held of each fragment, so that a reconnection moves only what is missing


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
    payload_bytes: int


class Heartbeat(NamedTuple):
    """I am alive, whatever my steps do (a first compile may take minutes)."""

    learner_id: str
    incarnation: int


class Leave(NamedTuple):
    """A polite goodbye: expect nothing more from this incarnation."""

    learner_id: str
    incarnation: int
    reason: str


# ---- syncer -> learner ----------------------------------------------------------------------------------------


class Welcome(NamedTuple):
    """Accepted. One GlobalFragment follows for every fragment of which the learner holds an older version."""

    global_step: int
    versions: tuple[int, ...]


class Refuse(NamedTuple):
    """Not accepted, and why; the learner must not retry unchanged."""

    reason: str


class PullRequest(NamedTuple):
    """Send me this fragment as it was after your `local_step`."""

    global_step: int
    fragment_id: int
    local_step: int


class GlobalFragment(NamedTuple):
    """A merged fragment. `global_step` is the syncer's clock, `version` the round that made the value."""

    global_step: int
    fragment_id: int
    version: int
    payload_bytes: int


class Advance(NamedTuple):
    """A global step without a due fragment was closed."""

    global_step: int


class Stop(NamedTuple):
    """The run is complete; the learner leaves after its current step."""

    global_step: int
    reason: str


LearnerMessage = Hello | StepReport | FragmentValue | Heartbeat | Leave
SyncerMessage = Welcome | Refuse | PullRequest | GlobalFragment | Advance | Stop
Message = LearnerMessage | SyncerMessage

# ---- effects: what a machine asks its driver to do, executed in order --------------------------------------------


class Send(NamedTuple):
    """Hand `message` to the link to `peer`, with the payload that the message names."""

    peer: str
    message: Message


class Stage(NamedTuple):
    """Copy the fragment to host memory as it is now, after `local_step` (learner)."""

    fragment_id: int
    local_step: int


class Unstage(NamedTuple):
    """The staged copy is not needed any more (learner)."""

    fragment_id: int
    local_step: int


class Adopt(NamedTuple):
    """Put the global fragment that just arrived into the training state (learner)."""

    fragment_id: int
    version: int


class Part(NamedTuple):
    """One learner's share in a merge; its weight follows from tokens and steps (core/merge.py)."""

    learner_id: str
    local_step: int
    steps: int
    tokens: int
    base_version: int


class Merge(NamedTuple):
    """Merge the payloads of these parts, apply the outer update, then call on_merged (syncer)."""

    global_step: int
    fragment_id: int
    parts: tuple[Part, ...]  # sorted by learner_id: equal inputs give equal bits


class Discard(NamedTuple):
    """Free every payload that is held for this round: it ends without a merge (syncer)."""

    global_step: int


class Drop(NamedTuple):
    """The peer's message was not used; why. Its payload, if any, can be freed."""

    peer: str
    reason: str


class Note(NamedTuple):
    """A decision worth telling people, for logs and the timeline; drivers must not act on it."""

    kind: str  # "closed", "merged", "abandoned", "joined", "left", "silent", "back", "finished"
    global_step: int
    fragment_id: int  # -1 when no fragment is meant
    members: tuple[str, ...]
    reason: str


class Finish(NamedTuple):
    """The machine has nothing left to do."""

    reason: str


Effect = Send | Stage | Unstage | Adopt | Merge | Discard | Drop | Note | Finish
