"""Checkers of a syncer that dies and comes back."""

import json
from collections import deque
from collections.abc import Iterator
from random import Random

from diloco_jax.protocol.effects import Adopt, Effect, Note, Restore, Send
from diloco_jax.protocol.messages import NO_VERSION, AnchorValue, GlobalFragment, Hello, LearnerMessage, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.syncer.tape import replay
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants.checker import Checker, HealthyChecker
from diloco_jax.sim.node import Effects, LearnerProcess

# Mean number of inputs until another machine loads the state.
SHADOW_EVERY = 300


class TapeReplays(Checker):
    """A new syncer with the inputs of the tape takes the same decisions, over all processes of the syncer."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # The first entry stands for the start of the run, which observers do not see.
        self._effects: list[list[Effect]] = [[]]

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self._effects.append(effects)

    def end(self) -> None:
        replayed: list[list[Effect]] = []
        try:
            for effects in replay(self.cluster.syncer_node.tape, self.cluster.syncer_node.new_syncer()):
                recorded = self._effects[len(replayed)]
                replayed.append(effects)
                self.check(effects == recorded, f"line {len(replayed)} led to {recorded}, when replayed to {effects}")
        except ValueError as error:
            self.check(False, str(error))
        self.check(len(replayed) == len(self._effects), f"{len(self._effects)} inputs, {len(replayed)} lines of tape")


class StateRoundTrip(Checker):
    """A machine that was restored from another one's state has the same state, and does the same from then on.

    A shadow is made at random moments, and is fed what the tape says. A machine that comes back from its death must be
    what it was.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._random = Random(cluster.scenario.seed)
        self._shadow: Syncer | None = None
        self._fed: Iterator[list[Effect]] = iter(())
        self._queue: deque[str] = deque()
        # Number of lines on the tape so far.
        self._lines = 1
        self._died = ""

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        machine = self.cluster.syncer
        if self._shadow is not None:
            line = self.cluster.syncer_node.tape[self._lines]
            self._queue.append(line)
            theirs = next(self._fed)
            self.check(theirs == effects, f"{line} led to {effects}, in a restored machine to {theirs}")
        self._lines += 1
        if self._random.random() * SHADOW_EVERY < 1.0:
            self._compare(machine)
            plain = json.dumps(machine.state())
            self._shadow = shadow = self.cluster.syncer_node.new_syncer()
            shadow.restore(json.loads(plain))
            self._queue = queue = deque[str]()
            self._fed = replay(iter(queue.popleft, None), shadow)
            self._compare(machine)

    def _compare(self, machine: Syncer) -> None:
        if self._shadow is not None:
            ours, theirs = json.dumps(machine.state()), json.dumps(self._shadow.state())
            self.check(ours == theirs, f"the machine is {ours}, a restored one {theirs}")

    def on_syncer_died(self, machine: Syncer, now_s: float) -> None:
        self._compare(machine)
        self._died = json.dumps(machine.state())

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        if rewound_to >= 0:
            # The shadow does not have the snapshot.
            self._shadow = None
            return
        back = json.dumps(machine.state())
        self.check(back == self._died, f"the machine died as {self._died} and is back as {back}")

    def end(self) -> None:
        if self.cluster.syncer_node.process.alive:
            self._compare(self.cluster.syncer)


class AnchorsAgree(HealthyChecker):
    """A version of a fragment has the same value everywhere, and no value is lost that a learner can bring."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        values = enumerate(cluster.syncer_node.process.values)
        self._digests = {(0, fragment_id, version): digest for fragment_id, (version, digest) in values}
        # Versions that greetings to this process of the syncer offered, with their times.
        self._offers: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
        # Lineage and anchors of each learner.
        self._last: dict[str, tuple[int, dict[int, tuple[int, int]]]] = {}
        # Learner -> time until which messages to it may be lost.
        self._troubled_s: dict[str, float] = {}
        # Versions that the syncer has given up.
        self._forsaken: set[tuple[int, int, int]] = set()

    def _agree(self, lineage: int, fragment_id: int, version: int, digest: int, who: str) -> None:
        known = self._digests.setdefault((lineage, fragment_id, version), digest)
        self.check(known == digest, f"{who} has {digest} as version {version} of fragment {fragment_id}, not {known}")

    def on_fault(self, fault: Fault, now_s: float) -> None:
        if fault.kind in ("ban", "corrupt", "disconnect", "hold", "partition", "pause"):
            for name in fault.learners:
                self._troubled_s[name] = max(self._troubled_s.get(name, 0.0), now_s + fault.duration_s)

    def on_syncer_back(self, machine: Syncer, rewound_to: int, now_s: float) -> None:
        super().on_syncer_back(machine, rewound_to, now_s)
        self._offers.clear()
        for fragment_id, (version, digest) in enumerate(self.values):
            self._agree(self.lineage, fragment_id, version, digest, "the snapshot")

    def on_merged(self, global_step: int, excluded: tuple[str, ...], now_s: float) -> None:
        for fragment_id, (version, digest) in enumerate(self.values):
            if version == global_step:
                self._agree(self.lineage, fragment_id, version, digest, "a merge")

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        if isinstance(message, Hello) and message.learner_id not in self.hostile:
            self._offers.setdefault(message.learner_id, []).append((now_s, message.versions))
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, GlobalFragment):
                self._sends(effect.message)
            elif isinstance(effect, Restore):
                assert isinstance(message, AnchorValue)
                self._agree(self.lineage, effect.fragment_id, effect.version, message.digest, "a learner")
            elif isinstance(effect, Note) and effect.kind == "lost":
                self._lost(effect, now_s)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                assert isinstance(message, GlobalFragment)
                lineage = self.lineages.get(message.epoch, -1)
                self._agree(lineage, effect.fragment_id, effect.version, message.digest, process.name)
                self._last[process.name] = (lineage, process.holdings.anchors)

    def _sends(self, message: GlobalFragment) -> None:
        """Check that the message names the value that the driver holds, because its payload is made from it."""
        self.check(message.epoch == self.epoch, f"{message} is sent in epoch {self.epoch}")
        value = self.values[message.fragment_id]
        # A dying process may not have executed the effects before this one.
        dying = self.cluster.syncer_node.process.dies_after is not None
        self.check(dying or (message.version, message.digest) == value, f"{message} is sent with the value {value}")
        self._agree(self.lineage, message.fragment_id, message.version, message.digest, "the syncer")
        if message.base != NO_VERSION:
            base = self.cluster.syncer_node.process.steps.get(message.fragment_id)
            self.check(
                dying or (base is not None and base[0] == message.base), f"{message} is sent, a step is of {base}"
            )

    def _lost(self, note: Note, now_s: float) -> None:
        """Check that no learner that could bring it holds a newer version than the one that continues."""
        fragment_id, version = note.fragment_id, self.cluster.syncer.versions[note.fragment_id]
        made = max(v for (lineage, p, v) in self._digests if (lineage, p) == (self.lineage, fragment_id))
        self._forsaken |= {(self.lineage, fragment_id, v) for v in range(version + 1, made + 1)}
        if not self.lossless or now_s < self.messages_heal_s:
            return
        for node in self.cluster.nodes.values():
            process = node.process
            if process is None or process.link is None:
                continue
            lineage, anchors = self._last.get(process.name, (-1, {}))
            if lineage != self.lineage or anchors is not process.holdings.anchors:
                continue
            # The learner can bring a version that it offers later.
            calm_s = self._troubled_s.get(process.name, 0.0)
            for told_s, versions in self._offers.get(process.name, []):
                if calm_s < told_s < now_s - 3 * self.way_s:
                    offered = versions[fragment_id]
                    self.check(
                        offered <= version, f"{process.name} holds version {offered} of {fragment_id}, but {note}"
                    )

    def end(self) -> None:
        cluster = self.cluster
        if cluster.finished_s == NEVER_S:
            return
        final = list(zip(cluster.syncer.versions, cluster.syncer.digests, strict=True))
        saved = list(cluster.syncer_node.disk.final)
        self.check(saved == final, f"the saved model is {saved}, made was {final}")
        for name, (lineage, anchors) in self._last.items():
            for fragment_id, value in anchors.items():
                newer = lineage == self.lineage and value[0] > final[fragment_id][0]
                lost = (lineage, fragment_id, value[0]) in self._forsaken
                self.check(not newer or lost, f"{name} held {value} of fragment {fragment_id}, the end is {final}")
