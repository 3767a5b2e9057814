"""The messages between the hosts of one island: the leader's commands, and the answers of the other hosts.

Every host obeys the leader's commands in the order of their sending. Every host answers a command with a `number` once,
by a `HostAnswer` with that number; numbers start at 1. Payloads travel beside their command, as on every other
connection of a run.
"""

from typing import NamedTuple, TypeAlias, get_args

from diloco_jax.protocol.messages import AnchorValue, FragmentValue, GlobalFragment


class SampleRange(NamedTuple):
    """Samples of the global order, from `start` up to and without `stop`."""

    start: int
    stop: int


class HostMeet(NamedTuple):
    """First command of the leader: the incarnation of all hosts, and the settings that all hosts must share."""

    island_incarnation: int
    fingerprint: tuple[tuple[str, str], ...]


class HostVerdict(NamedTuple):
    """Answer to HostMeet, and then the leader's result: why the island cannot start, or ""."""

    reason: str


class HostWarmUp(NamedTuple):
    """Request to compile the island's programs, and to answer."""

    number: int


class HostConnect(NamedTuple):
    """Request to open a separate link to the syncer in the leader's session, and to answer."""

    number: int
    epoch: int
    session: int


class HostPutBatch(NamedTuple):
    """Request to copy the samples of the next step to the devices, and to read known samples of later steps ahead."""

    ranges: tuple[SampleRange, ...]
    ahead: tuple[SampleRange, ...]


class HostStep(NamedTuple):
    """Request to make one inner step that starts at this global step."""

    clock: int


class HostStage(NamedTuple):
    """Request to queue a copy of a fragment's update."""

    fragment_id: int
    local_step: int


class HostUnstage(NamedTuple):
    """Request to drop a queued copy."""

    fragment_id: int
    local_step: int


class HostSend(NamedTuple):
    """Request to send this host's bytes of a staged copy to the syncer.

    Unless `number` is 0, the host answers with the float32 data that the leader must encode.
    """

    number: int
    value: FragmentValue


class HostShared(NamedTuple):
    """Blocks of a global fragment that both the sender and the receiver hold.

    `number` counts the versions of this session with the syncer; runtime/island/blocks.py describes the steps.
    """

    value: GlobalFragment
    session: int
    number: int
    step: int


class HostHandled(NamedTuple):
    """Notice that the leader has handled so many versions of this link; hosts read only a few versions ahead of it."""

    handled: int


class HostSupersede(NamedTuple):
    """Notice that all hosts have this value: the fragment's values that arrived before it are not needed."""

    value: GlobalFragment


class HostAdopt(NamedTuple):
    """Request to replace a fragment by this value."""

    value: GlobalFragment


class HostSendAnchor(NamedTuple):
    """Request to send the syncer this host's bytes of the value that was adopted last."""

    value: AnchorValue


class HostStageState(NamedTuple):
    """Request to queue a copy of the whole state under this name."""

    name: int


class HostUnstageState(NamedTuple):
    """Request to drop a copy of the whole state."""

    name: int


class HostLeaf(NamedTuple):
    """Request for the pieces of one leaf of a copied state that only this host has."""

    number: int
    name: int
    leaf: str


class HostEvaluate(NamedTuple):
    """Request to evaluate the global values that were adopted last, and to answer."""

    number: int
    global_step: int
    final: bool


class HostLoadState(NamedTuple):
    """Request to load this host's parts of the leader's moments (HostWant), and to answer at the end."""

    number: int


class HostHave(NamedTuple):
    """Answer to HostWant; its payload is the part."""

    leaf: str


class HostSave(NamedTuple):
    """Request to write this host's shards of the state to disk under this name, and to answer once complete."""

    number: int
    state: str  # a StateName
    # The complete state of this global step stays on disk; negative if there is none.
    kept: int


class HostSaved(NamedTuple):
    """Request for the names of the states that this host has on disk."""

    number: int


class HostRead(NamedTuple):
    """Request to read this host's shards of a state from disk, and to answer."""

    number: int
    state: str


class HostRestore(NamedTuple):
    """Request to continue from the shards that were read, of the parameters with these fragments, and to answer."""

    number: int
    fragments: tuple[int, ...]


class HostLoader(NamedTuple):
    """Request to continue this host's loader from the state with this name that was read; "": from its start."""

    state: str  # a StateName


class HostOrder(NamedTuple):
    """Request to do what this host's slice does next; `message` is in the vocabulary of the slice's hosts."""

    message: str


class HostReport(NamedTuple):
    """Notice of what this host of a slice has; `message` is in the vocabulary of the slice's hosts."""

    message: str


class HostEnd(NamedTuple):
    """Last command: every host ends with this exit status."""

    status: int


class HostAnswer(NamedTuple):
    """Answer to the command with this number; `reason` says why the command failed."""

    number: int
    reason: str = ""


class HostHas(NamedTuple):
    """Notice that this host has read and checked its blocks of a global fragment; `reason` says why it could not."""

    value: GlobalFragment
    reason: str = ""


class HostWant(NamedTuple):
    """Request for a part of one leaf of the state that is being loaded: elements `start` to `stop` - 1 of each axis."""

    leaf: str
    # One number for each axis.
    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


class HostStop(NamedTuple):
    """Notice that this host was told to end; the leader decides when the island ends."""


OfStart: TypeAlias = HostMeet | HostVerdict | HostWarmUp | HostConnect
OfSteps: TypeAlias = HostPutBatch | HostStep | HostEvaluate
OfFragments: TypeAlias = HostStage | HostUnstage | HostSend | HostAdopt | HostSendAnchor
OfVersions: TypeAlias = HostShared | HostHandled | HostSupersede
OfMoments: TypeAlias = HostStageState | HostUnstageState | HostLeaf | HostLoadState | HostHave
OfSavedStates: TypeAlias = HostSave | HostSaved | HostRead | HostRestore | HostLoader
Command: TypeAlias = OfStart | OfSteps | OfFragments | OfVersions | OfMoments | OfSavedStates | HostOrder | HostEnd
Reply: TypeAlias = HostVerdict | HostAnswer | HostHas | HostWant | HostReport | HostStop
COMMANDS: tuple[type, ...] = get_args(Command)
REPLIES: tuple[type, ...] = get_args(Reply)
