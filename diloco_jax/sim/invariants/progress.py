"""Checkers of what happens when nothing goes wrong any more."""

from diloco_jax.protocol.effects import Adopt, Note
from diloco_jax.protocol.messages import LearnerMessage, SyncerMessage
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.engine import NEVER_S
from diloco_jax.sim.invariants.checker import HealthyChecker, longest_step_s
from diloco_jax.sim.node import Effects, LearnerProcess


class RoundsAdvance(HealthyChecker):
    """Rounds close within a bound, the run completes, and every learner gets to know it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._progress_s = 0.0

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
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
        running = [
            f"{n.name} ({n.process.machine.state})" for n in self.cluster.nodes.values() if n.process is not None
        ]
        self.check(self.cluster.complete, f"the run is complete, but these never heard of it: {running}")


class EverybodyTrains(HealthyChecker):
    """A connected learner starts to train within a bound, with or without another learner's state."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._trained: set[tuple[str, int]] = set()

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        super().on_step(process, began, now_s)
        self._trained.add(process.key)

    def on_settled(self, process: LearnerProcess, now_s: float) -> None:
        if process.link is None or process.key in self._trained:
            return
        waited_s = now_s - max(process.linked_s, self.healed_s)
        bound_s = self.bound_s * (1 + self.config.recovery_attempts)
        state = process.machine.state
        self.check(waited_s <= bound_s, f"{process.name} is {state} for {waited_s:.1f} s, bound {bound_s:.1f} s")


class VersionsConverge(HealthyChecker):
    """A connected learner adopts every new version, or a newer one, within a bound."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        # Time, fragment, version, and the learners that must get it.
        self._made: list[tuple[float, int, int, dict[str, int]]] = []
        self._held: dict[tuple[str, int, int], int] = {}
        self._stepped_s: dict[tuple[str, int], float] = {}

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        for effect in effects:
            if isinstance(effect, Adopt):
                self._held[(*process.key, effect.fragment_id)] = effect.version

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, Note) and effect.kind == "merged" and self.lossless:
                if now_s < self.healed_s + self.bound_s:
                    # A learner that was disconnected may not be back yet.
                    continue
                running = [node.process for node in self.cluster.nodes.values() if node.process is not None]
                who = dict(process.key for process in running if process.link is not None)
                self._made.append((now_s, effect.fragment_id, effect.global_step, who))

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        super().on_step(process, began, now_s)
        self._stepped_s[process.key] = now_s

    def end(self) -> None:
        network = self.cluster.scenario.network
        way_s = network.delay_s + network.jitter_s + longest_step_s(self.cluster.scenario)
        # Payloads that were sent before take the same link.
        if network.bandwidth_bytes_per_s:
            payloads = 2 * max(1, self.config.overlap_steps)
            way_s += payloads * self.cluster.scenario.payload_bytes / network.bandwidth_bytes_per_s
        for made_s, fragment_id, version, who in self._made:
            for name, incarnation in who.items():
                if self._stepped_s.get((name, incarnation), 0.0) <= made_s + way_s:
                    # The learner stopped before the fragment can have arrived.
                    continue
                held = self._held.get((name, incarnation, fragment_id), -1)
                self.check(held >= version, f"{name} ends with version {held} of {fragment_id}, {version} was sent")
