"""The effects of a machine: requests that its driver executes in the order of the machine's decisions.

One convention holds for both machines. Each machine owns one list, Effects, which all its parts share. A part appends
effects and returns none. A public input of the machine (`on_<event>`) drains the list at its end and returns it.

Effects are plain immutable values without behaviour and without arrays. Units and terms are those of messages.py. The
end of a docstring names in brackets who executes the effect; without a name both drivers do.
"""

from typing import NamedTuple

from diloco_jax.protocol.messages import Message, Score


class Send(NamedTuple):
    """Hand a message to the link to `peer`, with the payload that the message names."""

    peer: str
    message: Message


class Stage(NamedTuple):
    """Copy a fragment to CPU memory as it is now, after inner step `local_step` (learner)."""

    fragment_id: int
    local_step: int


class Unstage(NamedTuple):
    """Free the staged copy of a fragment, which is not needed any more (learner)."""

    fragment_id: int
    local_step: int


class Adopt(NamedTuple):
    """Put the global fragment that just arrived into the training state (learner)."""

    fragment_id: int
    version: int


class StageState(NamedTuple):
    """Copy the inner optimizer state to CPU memory as it is now, after inner step `local_step` (donor)."""

    local_step: int


class UnstageState(NamedTuple):
    """Free the copy of the inner optimizer state, which is not needed any more (donor)."""

    local_step: int


class KeepChunk(NamedTuple):
    """Keep the payload of the StateChunk that just arrived (receiver)."""

    # Number of the part, from 0, and the number of all parts.
    part: int
    parts: int


class DropChunks(NamedTuple):
    """Free all kept parts of a state that will never be complete (receiver)."""


class AdoptState(NamedTuple):
    """Load a state before the first step: the kept parts of a donor's state or, without a donor, the saved state.

    The inner optimizer state is loaded whole. Of a saved state, only the parameters of `fragments` are loaded. For each
    other fragment a newer global value has arrived meanwhile and is in place already.
    """

    donor: str
    donor_step: int
    fragments: tuple[int, ...]


class SaveState(NamedTuple):
    """Save parameters and inner optimizer state, because global step `global_step` passed a snapshot (learner)."""

    global_step: int


class EvaluateModel(NamedTuple):
    """Evaluate the newest adopted global values without a step meanwhile, then call on_evaluated (learner)."""

    # Number of the request.
    number: int
    global_step: int
    # Whether to use the batches of the evaluation at the end.
    final: bool


class Contribution(NamedTuple):
    """Contribution of one learner to a merge; its weight follows from tokens and steps (core/merge.py)."""

    learner_id: str
    local_step: int
    steps: int
    tokens: int
    base_version: int
    samples: int
    # First sample whose work the value still contains, as in FragmentValue.
    since: int = 0
    # Name of the learner's corpus, "" for the run's.
    corpus: str = ""


class Merge(NamedTuple):
    """Merge the payloads of these learners, apply the outer update, then call on_merged (syncer)."""

    global_step: int
    fragment_id: int
    # Sorted by learner_id, so that equal inputs give equal bits.
    contributions: tuple[Contribution, ...]


class Restore(NamedTuple):
    """Make the payload of the AnchorValue that just arrived the newest value of its fragment (syncer)."""

    fragment_id: int
    version: int


class SaveSnapshot(NamedTuple):
    """Save the global model, the outer state and the machine's `state()`, as they are now (syncer)."""

    global_step: int


class Evaluated(NamedTuple):
    """Record and show an evaluation of the global model (syncer)."""

    score: Score


class Discard(NamedTuple):
    """Free every payload that is held for a round, because the round ended without a merge (syncer)."""

    global_step: int


class Drop(NamedTuple):
    """Free the payload, if any, of a peer's message that the machine did not use, and log the reason.

    The message is the one that the driver handles. If `global_step` is not -1, it is the peer's value for that round,
    which may not have come.
    """

    peer: str
    reason: str
    global_step: int = -1


class Note(NamedTuple):
    """Show a decision in logs and on the timeline; a driver must not act on it."""

    # "closed", "merged", "abandoned", "joined", "left", "disconnected", "silent", "back", "finished", "restarted",
    # "restored", "lost", "recovering", "recovered", "strike", "expelled", "banned", "admitted", "unmerged",
    # "released", "evaluating" or "unevaluated".
    kind: str
    global_step: int
    # -1 if the note is not about a fragment.
    fragment_id: int
    members: tuple[str, ...]
    reason: str


class Finish(NamedTuple):
    """End the driver's loop, because the machine has nothing left to do."""

    reason: str


StateEffect = StageState | UnstageState | KeepChunk | DropChunks | AdoptState | SaveState
LearnerEffect = Stage | Unstage | Adopt | StateEffect | EvaluateModel
SyncerEffect = Merge | Restore | SaveSnapshot | Evaluated | Discard
Effect = Send | LearnerEffect | SyncerEffect | Drop | Note | Finish


class Effects(list[Effect]):
    """The effects that the present input of a machine has led to, in order; empty between two inputs."""

    def drain(self) -> list[Effect]:
        """Return the effects so far and start an empty list."""
        effects = self[:]
        self.clear()
        return effects
