"""Checkers of the steps that lead from one version of a fragment to the next."""

from collections import defaultdict

from diloco_jax.protocol.effects import Adopt, Drop, Send
from diloco_jax.protocol.messages import (
    NO_VERSION,
    GlobalFragment,
    Hello,
    LearnerMessage,
    StepReport,
    SyncerMessage,
    Welcome,
)
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.progress import STEPS_MAX
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.holdings import Value
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess

# A learner's name and incarnation, and the number of the fragment.
Fragment = tuple[str, int, int]


class DeltasApply(Checker):
    """A step is applied to its base only and leads to the value that the syncer made; nothing else is ever adopted."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Values before the newest merge.
        self._values = list(self.values)
        self._made = {(0, fragment_id, version): digest for fragment_id, (version, digest) in enumerate(self._values)}
        # Process of the syncer, fragment and version -> the value before it.
        self._bases: dict[tuple[int, int, int], Value] = {}
        # Newest value that was decoded.
        self._read: dict[Fragment, Value] = {}

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._values = list(self.values)
        for fragment_id, (version, digest) in enumerate(self._values):
            self._made[self.lineage, fragment_id, version] = digest

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        for fragment_id, (version, digest) in enumerate(self.values):
            if version == global_step:
                self._made[self.lineage, fragment_id, version] = digest
                self._bases[self.epoch, fragment_id, version] = self._values[fragment_id]

    def on_read(self, process: LearnerProcess, message: GlobalFragment, ok: bool, now_s: float) -> None:
        who = (*process.key, message.fragment_id)
        held = self._read.get(who, (NO_VERSION, 0))
        if message.base != NO_VERSION:
            base = self._bases.get((message.epoch, message.fragment_id, message.version), (NO_VERSION, 0))
            self.check(message.base == held[0] == base[0], f"{process.name} applies {message} to version {held[0]}")
            self.check(not ok or held == base, f"{process.name} applies {message} to {held}, and believes the result")
        if ok:
            made = self._made.get((self.lineages.get(message.epoch, -1), message.fragment_id, message.version))
            self.check(made == message.digest, f"{process.name} reads {message}, but made was {made}")
            self._read[who] = (message.version, message.digest)

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self._values = list(self.values)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                held = process.holdings.anchors[effect.fragment_id]
                read = self._read.get((*process.key, effect.fragment_id))
                what = f"{held} of fragment {effect.fragment_id}"
                self.check(held == read, f"{process.name} adopts {what}, newest is {read}")


class WholeWhereNeeded(Checker):
    """Only a member that will hold a version's base gets a delta to it, and only a few deltas.

    If deltas are used, a member gets a whole value only if it lacks the base or got the delta twice. A repeated
    broadcast is a delta for each member that reports to hold the base.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Values before the newest merge.
        self._values = list(self.values)
        # Bases of the newest versions in this process of the syncer.
        self._bases: dict[int, Value] = {}
        # Learner -> the values that it holds after it has received everything sent to it.
        self._will_hold: dict[str, list[Value]] = {}
        # Newest report of each learner.
        self._reported: dict[str, StepReport] = {}
        # Number of steps by learner, lineage, fragment and version.
        self._steps: dict[tuple[str, int, int, int], int] = defaultdict(int)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._values = list(self.values)
        self._bases.clear()

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        # The syncer drops reports of hostile learners.
        dropped = any(isinstance(effect, Drop) and effect.global_step < 0 for effect in effects)
        if isinstance(message, StepReport) and not dropped:
            newest = self._reported.setdefault(message.learner_id, message)
            if (message.incarnation, message.local_step) > (newest.incarnation, newest.local_step):
                self._reported[message.learner_id] = message
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Welcome) and isinstance(message, Hello):
                self._will_hold[effect.peer] = list(zip(message.versions, message.digests, strict=True))
            elif isinstance(effect, Send) and isinstance(effect.message, GlobalFragment):
                self._sends(effect.peer, effect.message)
        self._values = list(self.values)

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        for fragment_id, (version, _) in enumerate(self.values):
            if version == global_step:
                self._bases[fragment_id] = self._values[fragment_id]

    def _sends(self, peer: str, message: GlobalFragment) -> None:
        fragment_id = message.fragment_id
        held, base = self._will_hold[peer][fragment_id], self._bases.get(fragment_id)
        key = (peer, self.lineage, fragment_id, message.version)
        if message.base != NO_VERSION:
            self._steps[key] += 1
            report = self._reported.get(peer)
            repeated = report is not None and report.adopted[fragment_id].version == message.base
            self.check(base is not None and message.base == base[0], f"{message} is sent, its base is {base}")
            self.check(held == base or repeated, f"{peer} will hold {held}, and gets {message}")
            self.check(self._steps[key] <= STEPS_MAX, f"{peer} gets {message} once more")
        else:
            steps = self.cluster.scenario.delta_bytes is not None and self._steps[key] < STEPS_MAX
            self.check(not (steps and held == base), f"{peer} will hold {held}, but gets {message} whole")
            self._steps[key] = STEPS_MAX
        self._will_hold[peer][fragment_id] = (message.version, message.digest)
