"""One seed, simulated under all checkers: what happened, line by line, and the verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diloco_jax.protocol.effects import Discard, Drop, Effect, Finish, Merge, Note
from diloco_jax.protocol.learner.machine import Learner
from diloco_jax.protocol.messages import SYNCER, LearnerMessage, SyncerMessage
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.fault import Fault
from diloco_jax.sim.invariants.all import CHECKERS
from diloco_jax.sim.invariants.checker import Checker
from diloco_jax.sim.node import Effects, LearnerProcess, MakeLearner, MakeSyncer, Observer
from diloco_jax.sim.scenario import Scenario
from diloco_jax.sim.tapes import LearnerTapes

# Limit of virtual time, far beyond the end of any healthy run.
UNTIL_S = 10_000.0


class Verdict(NamedTuple):
    """Outcome of a run."""

    scenario: Scenario
    # Empty if every rule held.
    problem: str
    events: int
    simulated_s: float
    merged_rounds: int
    merged_parts: int
    # Steps of all learners, including earlier incarnations.
    local_steps: int

    @property
    def contributors_per_round(self) -> float:
        return self.merged_parts / max(1, self.merged_rounds)

    @property
    def steps_per_global_step(self) -> float:
        """Inner steps of the mean learner per global step."""
        return self.local_steps / self.scenario.learners / self.scenario.total_steps

    def __str__(self) -> str:
        norms = " --norms" if self.scenario.norms is not None else ""
        what = f"FAILED: {self.problem}; rerun with {command(self.scenario.seed)}{norms}" if self.problem else "ok"
        return (
            f"seed {self.scenario.seed}: {self.events} events, {self.simulated_s:.1f} s, {self.merged_rounds} rounds "
            f"merged with {self.contributors_per_round:.2f} of {self.scenario.learners} learners: {what}"
        )


def command(seed: int) -> str:
    """Return the command that reruns a seed of random_scenario, with everything that happened."""
    return f"./scripts/sweep --seed {seed}"


class Timeline(Observer):
    """Writes down what is worth telling: faults, and what the syncer decided."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_fault(self, fault: Fault, now_s: float) -> None:
        self.lines.append(f"{now_s:9.3f}  fault     {fault}")

    def on_syncer(self, message: LearnerMessage | None, effects: Effects, now_s: float) -> None:
        self._tell(SYNCER, effects, now_s)

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        self._tell(process.name, effects, now_s)

    def _tell(self, who: str, effects: Effects, now_s: float) -> None:
        texts = [text for text in map(_text, effects) if text]
        self.lines += [f"{now_s:9.3f}  {who:<9} {text}" for text in texts]


def _text(effect: Effect) -> str:
    if isinstance(effect, Note):
        what = f"round {effect.global_step}" + (f" fragment {effect.fragment_id}" if effect.fragment_id >= 0 else "")
        members = f" {', '.join(effect.members)}" if effect.members else ""
        return f"{effect.kind:<9} {what}{members}" + (f": {effect.reason}" if effect.reason else "")
    if isinstance(effect, Merge):
        shares = ", ".join(f"{p.learner_id} {p.steps} steps from {p.base_version}" for p in effect.contributions)
        return f"merges    round {effect.global_step} fragment {effect.fragment_id}: {shares}"
    if isinstance(effect, Drop):
        return f"drops     {effect.peer}: {effect.reason}"
    if isinstance(effect, Discard):
        return f"discards  round {effect.global_step}"
    if isinstance(effect, Finish):
        return f"finishes  {effect.reason}"
    return ""


def judge(
    scenario: Scenario,
    *,
    checkers: Sequence[type[Checker]] = CHECKERS,
    observers: Sequence[Observer] = (),
    tapes: Path | None = None,
    make_learner: MakeLearner = Learner,
    make_syncer: MakeSyncer = Syncer,
) -> Verdict:
    """Simulate a scenario to its end, or to the first broken rule or whatever else a machine raises.

    Args:
        scenario: what to simulate.
        checkers: the rules.
        observers: see everything too.
        tapes: folder for the run's tapes.
        make_learner: builds a learner.
        make_syncer: builds the syncer.

    Raises:
        ValueError: `tapes` holds some already.
        OSError: `tapes` cannot be written.
    """
    cluster = Cluster(scenario, make_learner=make_learner, make_syncer=make_syncer)
    recorder = LearnerTapes(cluster, list(map(str, scenario.faults))) if tapes is not None else None
    cluster.watch(*observers, *([recorder] if recorder is not None else []), *(make(cluster) for make in checkers))
    problem = ""
    try:
        cluster.run(UNTIL_S)
    # A machine may raise an assertion or any other error.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if recorder is not None and tapes is not None:
        recorder.save(tapes)
    syncer = cluster.syncer
    return Verdict(
        scenario,
        problem,
        cluster.engine.events,
        cluster.engine.now_s,
        syncer.merged_rounds,
        syncer.progress.merged_parts,
        sum(member.total_steps for member in syncer.membership.members.values()),
    )
