"""Effects, the requests of a machine to its driver, executed in the order in which they are returned.

Rules of this file
  * Plain immutable values, no behaviour, no arrays. Units and words are those of messages.py.
  * An effect says who executes it: (learner), (donor), (receiver), (syncer), or nothing when both do.
"""

from typing import NamedTuple

from diloco_jax.protocol.messages import Message, Score


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


class StageState(NamedTuple):
    """Copy the inner optimizer state to host memory as it is now, after `local_step` (donor)."""

    local_step: int


class UnstageState(NamedTuple):
    """That copy is not needed any more (donor)."""

    local_step: int


class KeepPart(NamedTuple):
    """Keep the payload of the StatePart that just arrived (receiver)."""

    part: int  # 0, 1, ...
    parts: int  # in all


class DropParts(NamedTuple):
    """Forget all kept parts: they are of a state that will never be complete (receiver)."""


class AdoptState(NamedTuple):
    """Take over a state before the first step: the kept parts, or, without a donor, the own saved state.

    The inner optimizer state is taken whole. Of the parameters only `fragments` are, of an own state: of the others a
    newer global value arrived meanwhile, and is in place already.
    """

    donor: str
    donor_step: int
    fragments: tuple[int, ...]


class SaveState(NamedTuple):
    """A snapshot's marker came by: save parameters and inner optimizer state (learner)."""

    global_step: int


class EvaluateModel(NamedTuple):
    """Evaluate the global values that were adopted last, then call on_evaluated; no step meanwhile (learner)."""

    global_step: int
    final: bool  # with the batches of the evaluation at the end


class Part(NamedTuple):
    """One learner's share in a merge; its weight follows from tokens and steps (core/merge.py)."""

    learner_id: str
    local_step: int
    steps: int
    tokens: int
    base_version: int
    samples: int
    since: int = 0  # as of FragmentValue


class Merge(NamedTuple):
    """Merge the payloads of these parts, apply the outer update, then call on_merged (syncer)."""

    global_step: int
    fragment_id: int
    parts: tuple[Part, ...]  # sorted by learner_id: equal inputs give equal bits


class Restore(NamedTuple):
    """Make the payload of the AnchorValue that just arrived the newest value of its fragment (syncer)."""

    fragment_id: int
    version: int


class SaveSnapshot(NamedTuple):
    """Save the global model, the outer state and the machine's `state()`, as they are now (syncer)."""

    global_step: int


class Evaluated(NamedTuple):
    """Tell people of an evaluation of the global model (syncer)."""

    score: Score


class Discard(NamedTuple):
    """Free every payload that is held for this round: it ends without a merge (syncer)."""

    global_step: int


class Drop(NamedTuple):
    """The peer's message was not used; why. Its payload, if any, can be freed."""

    peer: str
    reason: str


class Note(NamedTuple):
    """A decision worth telling people, for logs and the timeline; drivers must not act on it."""

    kind: str  # "closed", "merged", "abandoned", "joined", "left", "silent", "back", "finished", "restarted",
    # "restored", "lost", "recovering", "recovered", "strike", "expelled", "unmerged", "released", "evaluating",
    # "unevaluated"
    global_step: int
    fragment_id: int  # -1 when no fragment is meant
    members: tuple[str, ...]
    reason: str


class Finish(NamedTuple):
    """The machine has nothing left to do."""

    reason: str


StateEffect = StageState | UnstageState | KeepPart | DropParts | AdoptState | SaveState
LearnerEffect = Stage | Unstage | Adopt | StateEffect | EvaluateModel
SyncerEffect = Merge | Restore | SaveSnapshot | Evaluated | Discard
Effect = Send | LearnerEffect | SyncerEffect | Drop | Note | Finish
