"""The words that pass between the hosts of one island: what the leader tells the others, and what they answer.

The leader's commands are obeyed in the order in which they were sent. A command with a `number` is answered once by
every host, by a `HostAnswer` with that number; numbers begin at 1. Payloads travel beside their command, as on every
other connection of a run.
"""

from typing import NamedTuple, TypeAlias, get_args

from diloco_jax.protocol.messages import FragmentValue, GlobalFragment


class SampleRange(NamedTuple):
    """Samples of the global order, from `start` up to, but without, `stop`."""

    start: int
    stop: int


class HostMeet(NamedTuple):
    """First command of the leader: the incarnation that all take, and the settings that all must have."""

    life: int
    fingerprint: tuple[tuple[str, str], ...]


class HostVerdict(NamedTuple):
    """Answer to HostMeet, and the leader's last word on it: the reason why the island cannot begin, or ""."""

    reason: str


class HostWarmUp(NamedTuple):
    """Compile what the island runs, and answer."""

    number: int


class HostConnect(NamedTuple):
    """Open a link of your own to the syncer, of the leader's session, and answer."""

    number: int
    epoch: int
    session: int


class HostPutBatch(NamedTuple):
    """Copy the samples of the next step to the devices, and read those of the steps after it, as far as known."""

    ranges: tuple[SampleRange, ...]
    ahead: tuple[SampleRange, ...]


class HostStep(NamedTuple):
    """Make one inner step, which begins at this global step."""

    clock: int


class HostStage(NamedTuple):
    """Queue a copy of a fragment's update."""

    fragment_id: int
    local_step: int


class HostUnstage(NamedTuple):
    """Drop a copy that was queued."""

    fragment_id: int
    local_step: int


class HostSend(NamedTuple):
    """Send your part of a staged copy; unless `number` is 0, answer with what the leader has to encode."""

    number: int
    value: FragmentValue


class HostArrival(NamedTuple):
    """A global fragment came, its payload comes along: read and check it, and answer."""

    number: int
    value: GlobalFragment


class HostSupersede(NamedTuple):
    """Drop the fragment's values that came before this arrival."""

    fragment_id: int
    arrival: int  # number of a HostArrival


class HostAdopt(NamedTuple):
    """Replace a fragment by the value that came with this arrival."""

    arrival: int
    value: GlobalFragment


class HostStageState(NamedTuple):
    """Queue a copy of the whole state under this name."""

    name: int


class HostUnstageState(NamedTuple):
    """Drop a copy of the whole state."""

    name: int


class HostLeaf(NamedTuple):
    """Answer with what only you have of one leaf of a copied state."""

    number: int
    name: int
    leaf: str


class HostEvaluate(NamedTuple):
    """Evaluate the global values that were adopted last, and answer."""

    number: int
    global_step: int
    final: bool


class HostLoadState(NamedTuple):
    """Load the moments that the leader holds, asking for their leaves one by one, and answer at the end."""

    number: int


class HostHave(NamedTuple):
    """Answer to HostWant: the leaf's bytes come along."""

    leaf: str


class HostSave(NamedTuple):
    """Write your shards of the state, as it is now, to disk under this name; answer when they are there."""

    number: int
    state: str  # a StateName
    kept: int  # global step of the complete state that stays; negative if there is none


class HostSaved(NamedTuple):
    """Answer with the names of the states that you have on disk."""

    number: int


class HostRead(NamedTuple):
    """Read your shards of this state from disk, and answer."""

    number: int
    state: str


class HostRestore(NamedTuple):
    """Go on from the shards that you have read, of the parameters with these fragments; answer at the end."""

    number: int
    fragments: tuple[int, ...]


class HostEnd(NamedTuple):
    """Last command: end with this exit status."""

    status: int


class HostAnswer(NamedTuple):
    """Answer to the command with this number, or the reason why it cannot be obeyed."""

    number: int
    reason: str = ""


class HostWant(NamedTuple):
    """Request for one leaf of the state that is being loaded."""

    leaf: str


class HostStop(NamedTuple):
    """Notice that this host shall end; the leader decides when the island does."""


OfStart: TypeAlias = HostMeet | HostVerdict | HostWarmUp | HostConnect
OfSteps: TypeAlias = HostPutBatch | HostStep | HostEvaluate
OfFragments: TypeAlias = HostStage | HostUnstage | HostSend | HostArrival | HostSupersede | HostAdopt
OfMoments: TypeAlias = HostStageState | HostUnstageState | HostLeaf | HostLoadState | HostHave
OfSavedStates: TypeAlias = HostSave | HostSaved | HostRead | HostRestore
Command: TypeAlias = OfStart | OfSteps | OfFragments | OfMoments | OfSavedStates | HostEnd
Reply: TypeAlias = HostVerdict | HostAnswer | HostWant | HostStop
COMMANDS: tuple[type, ...] = get_args(Command)
REPLIES: tuple[type, ...] = get_args(Reply)
