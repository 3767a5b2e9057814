"""Observers that hold a run to its invariants. Each knows one rule and believes no machine.

A checker keeps its own books from messages, effects and steps. It never asks a machine for a decision, so a bug that a
machine and its own state agree on is still found. The numbers of the rules are those of docs/protocol.md.
"""

from __future__ import annotations

from collections import defaultdict

from diloco_jax.protocol.messages import (
    SYNCER,
    Adopt,
    Discard,
    Drop,
    Effect,
    FragmentValue,
    LearnerMessage,
    Merge,
    Note,
    Send,
    Stage,
    StepReport,
    Unstage,
)
from diloco_jax.protocol.tape import replay
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.faults import NEVER_S
from diloco_jax.sim.node import Node, Observer

STAGED_COPIES_MAX = 3  # of one fragment, see protocol/learner.py


class Violation(AssertionError):
    """A rule of the protocol was broken."""


class Checker(Observer):
    """An observer of one cluster that raises Violation."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.config = cluster.scenario.config

    def check(self, ok: bool, text: str) -> None:
        if not ok:
            raise Violation(f"{type(self).__name__} at {self.cluster.engine.now_s:.3f} s: {text}")


class VersionsGrow(Checker):
    """Adopted versions grow, per incarnation and fragment, and the syncer has made each of them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._held: dict[tuple[str, int, int], int] = {}
        self._made = {(fragment_id, 0) for fragment_id in range(self.config.num_fragments)}

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Merge):
                self._made.add((effect.fragment_id, effect.global_step))
            elif isinstance(effect, Adopt):
                key, version = (source, incarnation, effect.fragment_id), effect.version
                self.check(
                    version > self._held.get(key, -1),
                    f"{source} adopts version {version} of fragment {effect.fragment_id}, held {self._held.get(key)}",
                )
                self.check((effect.fragment_id, version) in self._made, f"{source} adopts {effect}, which nobody made")
                self._held[key] = version


class MergedOnce(Checker):
    """A value is merged at most once, for the round that asked for it, with at least one step; no payload leaks."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._arrived: FragmentValue | None = None
        self._payloads: dict[int, dict[str, FragmentValue]] = defaultdict(dict)  # as a driver holds them
        self._merged: set[tuple[str, int, int, int]] = set()
        self._rounds: set[int] = set()

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        self._arrived = message if isinstance(message, FragmentValue) else None

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source != SYNCER:
            return
        value, self._arrived = self._arrived, None
        if value is not None and not any(isinstance(e, Drop) and e.peer == value.learner_id for e in effects):
            held = self._payloads[value.global_step]
            self.check(value.learner_id not in held, f"a second payload is kept for {value}")
            held[value.learner_id] = value
        for effect in effects:
            if isinstance(effect, Merge):
                self._merge(effect)
            elif isinstance(effect, Discard):
                self._payloads.pop(effect.global_step, None)

    def _merge(self, merge: Merge) -> None:
        self.check(merge.global_step not in self._rounds, f"round {merge.global_step} is merged twice")
        self._rounds.add(merge.global_step)
        held = self._payloads.pop(merge.global_step, {})
        names = [part.learner_id for part in merge.parts]
        self.check(names == sorted(held), f"{merge} merges {names}, payloads are held of {sorted(held)}")
        for part in merge.parts:
            value = held[part.learner_id]
            self.check(part.steps >= 1 and part.tokens >= 1, f"{part} has no step in round {merge.global_step}")
            self.check(
                (part.local_step, part.steps, part.tokens, part.base_version)
                == (value.local_step, value.steps, value.tokens, value.base_version),
                f"{part} is not what arrived: {value}",
            )
            key = (value.learner_id, value.incarnation, value.fragment_id, value.local_step)
            self.check(value.fragment_id == merge.fragment_id and key not in self._merged, f"{value} is merged twice")
            self._merged.add(key)

    def end(self) -> None:
        if self.cluster.syncer.finished:
            self.check(not any(self._payloads.values()), f"payloads were never freed: {dict(self._payloads)}")


class QuorumHolds(Checker):
    """A round closes with at least K learners, each with a step that no round has counted, and merges only them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._reported: dict[str, tuple[int, int]] = {}  # learner -> newest (incarnation, local_step)
        self._counted: dict[str, tuple[int, int]] = {}
        self._closed: dict[int, tuple[str, ...]] = {}

    def on_delivery(self, message: LearnerMessage, now_s: float) -> None:
        if isinstance(message, StepReport):
            newest = (message.incarnation, message.local_step)
            self._reported[message.learner_id] = max(newest, self._reported.get(message.learner_id, newest))

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "closed":
                self._close(effect)
            elif isinstance(effect, Merge):
                members = self._closed.pop(effect.global_step, ())
                names = {part.learner_id for part in effect.parts}
                self.check(bool(names) and names <= set(members), f"{effect}, but the round closed with {members}")

    def _close(self, note: Note) -> None:
        members, quorum = note.members, self.config.quorum
        self.check(
            len(set(members)) == len(members) >= quorum,
            f"round {note.global_step} closes with {members}, the quorum is {quorum}",
        )
        for name in members:
            reported = self._reported.get(name, (0, 0))
            counted = self._counted.get(name, (0, 0))
            self.check(
                reported > counted, f"round {note.global_step} counts {name} at {reported}, counted was {counted}"
            )
            self._counted[name] = reported
        if note.fragment_id >= 0:
            self._closed[note.global_step] = members


class NeverWaits(Checker):
    """Outside lockstep a learner that holds every fragment is always in a step, and steps have no gap between them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._ended: dict[tuple[str, int], float] = {}
        self._held: dict[tuple[str, int], set[int]] = defaultdict(set)

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                self._held[source, incarnation].add(effect.fragment_id)

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        key = (node.name, node.incarnation)
        if not began:
            self._ended[key] = now_s
        elif not self.config.lockstep:
            waited_s = now_s - self._ended.get(key, now_s)
            self.check(waited_s == 0, f"{node.name} waited {waited_s} s between two steps")

    def on_settled(self, node: Node, now_s: float) -> None:
        ready = len(self._held[node.name, node.incarnation]) == self.config.num_fragments
        if ready and not self.config.lockstep and not node.stepping:
            self.check(False, f"{node.name} holds every fragment but does not step")


class FreshLearnersKeepQuiet(Checker):
    """A learner neither steps, reports nor contributes before it holds a global value of every fragment."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._held: dict[tuple[str, int], set[int]] = defaultdict(set)

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source == SYNCER:
            return
        held = self._held[source, incarnation]
        for effect in effects:
            if isinstance(effect, Adopt):
                held.add(effect.fragment_id)
            elif isinstance(effect, Send) and isinstance(effect.message, StepReport | FragmentValue):
                self._check_held(source, held, f"sends {type(effect.message).__name__}")

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        self._check_held(node.name, self._held[node.name, node.incarnation], "steps")

    def _check_held(self, name: str, held: set[int], does: str) -> None:
        count = self.config.num_fragments
        self.check(len(held) == count, f"{name} {does}, but holds {len(held)} of {count} fragments")


class RoundsBounded(Checker):
    """At most max(1, tau) rounds are in flight, never two of one fragment, and every one ends."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._flying: dict[int, int] = {}  # round -> fragment

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source != SYNCER:
            return
        for effect in effects:
            if not isinstance(effect, Note):
                continue
            if effect.kind in ("merged", "abandoned"):
                self.check(effect.global_step in self._flying, f"{effect.kind} without being closed: {effect}")
                del self._flying[effect.global_step]
            elif effect.kind == "closed" and effect.fragment_id >= 0:
                twice = effect.fragment_id in self._flying.values()
                self.check(not twice, f"fragment {effect.fragment_id} is in flight twice: {self._flying}, {effect}")
                self._flying[effect.global_step] = effect.fragment_id
                limit = max(1, self.config.overlap_steps)
                self.check(len(self._flying) <= limit, f"{len(self._flying)} rounds are in flight, limit {limit}")

    def end(self) -> None:
        if self.cluster.syncer.finished:
            self.check(not self._flying, f"rounds never ended: {self._flying}")


class CopiesBounded(Checker):
    """Staged copies are few, each is freed once, and a value is sent only from a copy that is there."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._staged: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(dict)

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source == SYNCER:
            return
        staged = self._staged[source, incarnation]
        for effect in effects:
            if isinstance(effect, Stage):
                steps = staged.setdefault(effect.fragment_id, [])
                self.check(not steps or effect.local_step > steps[-1], f"{source} stages again: {effect}")
                steps.append(effect.local_step)
            elif isinstance(effect, Unstage):
                steps = staged.get(effect.fragment_id, [])
                self.check(effect.local_step in steps, f"{source} frees what it does not hold: {effect}")
                steps.remove(effect.local_step)
                if not steps:
                    del staged[effect.fragment_id]
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                steps = staged.get(value.fragment_id, [])
                self.check(value.local_step in steps, f"{source} sends {value}, but holds copies of steps {steps}")
        most = max(map(len, staged.values()), default=0)
        self.check(most <= STAGED_COPIES_MAX, f"{source} holds {most} copies of one fragment")
        limit = 2 * max(1, self.config.overlap_steps)  # what is due next, and what was asked for before it was staged
        self.check(len(staged) <= limit, f"{source} holds copies of {len(staged)} fragments, limit {limit}")


class TapeReplays(Checker):
    """A fresh syncer that is fed the tape takes the same decisions, input by input."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._effects: list[list[Effect]] = []

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source == SYNCER:
            self._effects.append(effects)

    def end(self) -> None:
        replayed: list[list[Effect]] = []
        try:
            for effects in replay(self.cluster.tape, self.cluster.new_syncer()):
                recorded = self._effects[len(replayed)]
                replayed.append(effects)
                self.check(effects == recorded, f"line {len(replayed)} led to {recorded}, when replayed to {effects}")
        except ValueError as error:
            self.check(False, str(error))
        self.check(len(replayed) == len(self._effects), f"{len(self._effects)} inputs, {len(replayed)} lines of tape")


class HealthyChecker(Checker):
    """A checker whose rule holds only from a time on: when nothing goes wrong any more.

    healed_s is that time; bound_s the longest way from one closed round to the next: the learners' own pace, and every
    timeout of the protocol.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        scenario, network, config = cluster.scenario, cluster.scenario.network, self.config
        self.healed_s = max(scenario.faults_over_s, network.heals_s)
        self.lossless = not network.loss or network.heals_s > 0
        steps = config.sync_every + 2 if config.lockstep else config.overlap_steps + 3
        transfer_s = 0.0
        if network.bandwidth_bytes_per_s:  # everything may be under way at once
            transfer_s = 3 * config.num_fragments * scenario.payload_bytes / network.bandwidth_bytes_per_s
        way_s = network.delay_s + network.jitter_s + (network.reorder_s if network.reorder else 0.0)
        pace_s = (steps + config.grace_steps_max) * scenario.longest_step_s + 2 * scenario.merge_s
        timeouts_s = 3 * config.lease_s + config.heartbeat_s + config.pull_timeout_s + 2 * config.resend_s
        self.bound_s = (pace_s + 10 * way_s + transfer_s + timeouts_s) * (1 if self.lossless else 4)

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        if began and node.factor > 1:  # a slow step goes on when the slow phase is over
            ends_s = now_s + self.cluster.scenario.longest_step_s * node.factor
            self.healed_s = max(self.healed_s, ends_s)


class RoundsAdvance(HealthyChecker):
    """Rounds close within a bound, the run completes, and every learner hears of it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._progress_s = 0.0

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        if source != SYNCER:
            return
        waited_s = now_s - max(self._progress_s, self.healed_s)
        self._check_wait(waited_s)
        if any(isinstance(e, Note) and e.kind in ("closed", "finished") for e in effects):
            self._progress_s = now_s

    def _check_wait(self, waited_s: float) -> None:
        if waited_s > self.bound_s and self.cluster.finished_s == NEVER_S:
            waiting = self.cluster.syncer.waiting_for(self.cluster.engine.now_s)
            self.check(False, f"no round closed for {waited_s:.1f} s, bound {self.bound_s:.1f} s; waiting: {waiting}")

    def end(self) -> None:
        self._check_wait(self.cluster.end_s - max(self._progress_s, self.healed_s))
        self.check(self.cluster.finished_s < NEVER_S, "the simulation ended before the run was complete")
        running = [f"{n.name} ({n.machine.state})" for n in self.cluster.nodes.values() if n.machine is not None]
        self.check(self.cluster.complete, f"the run is complete, but these never heard of it: {running}")


class VersionsConverge(HealthyChecker):
    """Whoever is connected adopts every new version, or a newer one, within a bound."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._made: list[tuple[float, int, int, dict[str, int]]] = []  # when, fragment, version, who must get it
        self._held: dict[tuple[str, int, int], int] = {}
        self._stepped_s: dict[tuple[str, int], float] = {}

    def on_effects(self, source: str, incarnation: int, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                self._held[source, incarnation, effect.fragment_id] = effect.version
            elif isinstance(effect, Note) and effect.kind == "merged" and self.lossless:
                if now_s < self.healed_s + self.bound_s:
                    continue  # whoever was cut off may not be back yet
                who = {n.name: n.incarnation for n in self.cluster.nodes.values() if n.link is not None}
                self._made.append((now_s, effect.fragment_id, effect.global_step, who))

    def on_step(self, node: Node, began: bool, now_s: float) -> None:
        super().on_step(node, began, now_s)
        self._stepped_s[node.name, node.incarnation] = now_s

    def end(self) -> None:
        network = self.cluster.scenario.network
        way_s = network.delay_s + network.jitter_s + self.cluster.scenario.longest_step_s
        if network.bandwidth_bytes_per_s:  # what is sent before it has the same way
            payloads = 2 * max(1, self.config.overlap_steps)
            way_s += payloads * self.cluster.scenario.payload_bytes / network.bandwidth_bytes_per_s
        for made_s, fragment_id, version, who in self._made:
            for name, incarnation in who.items():
                if self._stepped_s.get((name, incarnation), 0.0) <= made_s + way_s:
                    continue  # it stopped before the fragment can have arrived
                held = self._held.get((name, incarnation, fragment_id), -1)
                self.check(held >= version, f"{name} ends with version {held} of {fragment_id}, {version} was sent")


CHECKERS: tuple[type[Checker], ...] = (
    VersionsGrow,
    MergedOnce,
    QuorumHolds,
    NeverWaits,
    FreshLearnersKeepQuiet,
    RoundsBounded,
    CopiesBounded,
    TapeReplays,
    RoundsAdvance,
    VersionsConverge,
)
