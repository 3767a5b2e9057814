"""Statistics of a run, counted from the messages that the syncer gets; status and summary show them.

No rule reads them, and simulated runs count with them too. docs/architecture.md defines every figure. A lost or
restarting island lowers the goodput; the final evaluation and the end of the run do not. The first step of an island
compiles, and that time counts as a step.

After a restart of the syncer all counts continue exactly, from a snapshot and the reports on the tape. Steps without a
syncer are approximate: a learner's next report has their number, and each counts as long as the newest one. A run that
went back to a snapshot has lost the steps after it, and the time when nothing ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from diloco_jax.protocol.bounds import objection
from diloco_jax.protocol.member import ACTIVE, Member
from diloco_jax.protocol.messages import FragmentValue, StepReport
from diloco_jax.protocol.watch.drift import DriftWatch
from diloco_jax.protocol.watch.health import conditions
from diloco_jax.protocol.watch.signs import Crowd, Episode, Links, Losses, Outrun
from diloco_jax.protocol.watch.terms import FINISHING_S, WAITING

if TYPE_CHECKING:
    from diloco_jax.protocol.syncer.machine import Syncer

BFLOAT16_BYTES = 2
# Share of the moving average of an island's speed that remains after one more step.
KEPT_PER_STEP = 0.9
# Fragments that a warning names.
NAMED_MAX = 8


def never_merged(fragments: Sequence[int]) -> str:
    """Return a warning that names the fragments that no round ever merged; "" if there are none."""
    if not fragments:
        return ""
    names = ", ".join(str(fragment_id) for fragment_id in fragments[:NAMED_MAX])
    more = f" and {len(fragments) - NAMED_MAX} more" if len(fragments) > NAMED_MAX else ""
    which = f"fragment {names}{more} was" if len(fragments) == 1 else f"fragments {names}{more} were"
    return (
        f"{which} never merged: nothing that the islands learnt there is in the global model; the syncer's log says "
        "how each round ended, and a run of fewer global steps than protocol.sync_every has no round for some"
    )


def participation(merged: int, rounds: int) -> float:
    """Return the share of the merged rounds that merged a learner."""
    return merged / max(1, rounds)


def step_overhead(busy_s: float, span_s: float) -> float:
    """Return the share of a learner's time, first to last step, that it spent outside inner steps."""
    return max(0.0, 1 - busy_s / span_s) if span_s > 0 else 0.0


def goodput_of(trained_s: float, all_s: float) -> float:
    """Return goodput: the time in inner steps without waiting for data, as a share of the time of all islands.

    Both times are sums over all configured islands. For a simulated cluster (`sim/goodput`) they are sums over all
    chips, because some slices of an island may be missing in a step.
    """
    return min(1.0, trained_s / all_s) if all_s > 0 else 0.0


@dataclass(slots=True)
class LearnerStats:
    """Time accounting of one learner over all its incarnations."""

    incarnation: int = -1
    # Time in inner steps.
    busy_s: float = 0.0
    # Start and end of the present incarnation's steps.
    begin_s: float = 0.0
    end_s: float = 0.0
    # Time from first to last step of earlier incarnations.
    span_s: float = 0.0
    # Moving average of the tokens per second.
    rate: float | None = None
    last_round: int = 0
    # Newest step of the present incarnation.
    last_step: int = 0
    step_tokens: int = 0
    # The part of busy_s whose waiting for data is known, and that waiting.
    told_s: float = 0.0
    waited_s: float = 0.0

    @property
    def waiting(self) -> float:
        """Return the share of its time in steps that it waited for data, as far as it has reported."""
        return self.waited_s / self.told_s if self.told_s else 0.0

    @property
    def total_span_s(self) -> float:
        return self.span_s + self.end_s - self.begin_s


class RunStats:
    """The counts of a run; `losses`, `links`, `crowd` and `drifts` are signs of trouble, for alarms.

    Args:
        least: number of connected islands that the run needs; 0 if each island that disconnects is an alarm.
    """

    def __init__(self, names: tuple[str, ...], num_parameters: int, syncer: Syncer, least: int = 0) -> None:
        self._names, self.least = names, least
        self.num_parameters = num_parameters
        self._syncer = syncer
        self._learners: dict[str, LearnerStats] = {}
        self._began_s: float | None = None
        # Time with at least one learner in an inner step.
        self._covered_s = 0.0
        self._finished_s: float | None = None
        self._covered_until_s = 0.0
        self._outrun = Outrun()
        self.losses, self.links, self.crowd = Losses(), Links(), Crowd()
        self.drifts = DriftWatch()

    def on_report(self, report: StepReport, now_s: float) -> bool:
        """Count a report before the machine gets it; return whether it is of a newer step of a member."""
        member = self._syncer.membership.get(report.learner_id, report.incarnation)
        if member is None or report.local_step <= member.local_step or objection(report):
            return False
        # Islands make steps until they get Stop.
        if self._syncer.finished:
            return True
        stats = self._learners.setdefault(report.learner_id, LearnerStats())
        busy_s = report.step_s
        # Rounds that wait for an island on purpose say nothing about the syncer.
        enough = self._syncer.membership.live >= self._syncer.config.quorum
        # The first report after a greeting has the steps that the island made without a syncer.
        if member.state == ACTIVE and enough and not self._syncer.rounds.awaits_starters:
            made = report.local_step - member.local_step
            self._outrun.on_steps(report.learner_id, made, self._syncer.global_step, report.step_s)
        self.losses.on_report(report)
        if report.incarnation != stats.incarnation:
            stats.span_s = stats.total_span_s
            stats.incarnation = report.incarnation
            stats.begin_s = now_s - busy_s
        elif report.local_step > stats.last_step + 1:
            # The learner made steps without a link, and did not report them.
            busy_s = min((report.local_step - stats.last_step) * report.step_s, now_s - stats.end_s)
        began_s = now_s - busy_s
        if self._began_s is None:
            self._began_s = self._covered_until_s = began_s
        stats.busy_s += busy_s
        stats.end_s = now_s
        stats.last_step = report.local_step
        stats.step_tokens = report.tokens // max(1, report.local_step)
        sample = stats.step_tokens / max(report.step_s, 1e-9)
        stats.rate = sample if stats.rate is None else KEPT_PER_STEP * stats.rate + (1 - KEPT_PER_STEP) * sample
        self._covered_s += max(0.0, now_s - max(began_s, self._covered_until_s))
        self._covered_until_s = max(self._covered_until_s, now_s)
        return True

    def on_waiting(self, learner_id: str, share: float) -> None:
        """Record the share of a learner's time in steps, since its last message, that it waited for data.

        Unlike reports this is not on the tape, so what arrived after a snapshot is lost with the syncer.
        """
        stats = self._learners.get(learner_id)
        if stats is not None and 0 <= share <= 1:
            stats.waited_s += share * (stats.busy_s - stats.told_s)
            stats.told_s = stats.busy_s

    def on_value(self, value: FragmentValue, now_s: float) -> float | None:
        """Record a value; return the time since the close of its round, None if no round waits for it."""
        this = self._syncer.rounds.flying.get(value.global_step)
        if this is None:
            return None
        self.links.on_value(value, now_s - this.closed_s)
        return now_s - this.closed_s

    def on_merged(self, members: tuple[str, ...], global_step: int) -> None:
        """Record the newest round that merged each of these learners."""
        for name in members:
            self._learners.setdefault(name, LearnerStats()).last_round = global_step

    def state(self) -> dict[str, Any]:
        """Return, as plain values for `restore`, all counts that the machine does not have."""
        learners = {name: asdict(stats) for name, stats in self._learners.items()}
        covered_s = [self._covered_s, self._covered_until_s]
        return {"learners": learners, "began_s": self._began_s, "covered_s": covered_s, "outrun": self._outrun.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._learners = {name: LearnerStats(**plain) for name, plain in state["learners"].items()}
        self._began_s = state["began_s"]
        self._covered_s, self._covered_until_s = state["covered_s"]
        self._outrun.restore(state["outrun"])

    @property
    def tokens(self) -> int:
        """Return the tokens that all learners have trained on."""
        return sum(member.total_tokens for member in self._members())

    @property
    def outrun(self) -> str:
        """Return how far islands outrun rounds at this moment; "" if they do not."""
        return str(self._outrun.episodes[-1]) if self._outrun.current else ""

    @property
    def outruns(self) -> list[Episode]:
        """Return all episodes of islands that outran rounds, oldest first."""
        return self._outrun.episodes

    @property
    def unmerged_fragments(self) -> list[int]:
        """Return the fragments that no round has merged."""
        return [p for p, version in enumerate(self._syncer.versions) if version == 0]

    @property
    def unmerged(self) -> str:
        """Return a warning about fragments that were never merged; "" if the run stopped before each had two turns."""
        early = self._syncer.global_step < 2 * self._syncer.config.groups.gap_max
        return "" if early and not self._syncer.finished else never_merged(self.unmerged_fragments)

    @property
    def contributors_per_round(self) -> float:
        """Return the mean number of learners in a merge, with the digits that status and summary have."""
        return round(self._syncer.progress.merged_parts / max(1, self._syncer.merged_rounds), 4)

    def _members(self) -> list[Member]:
        return [member for _, member in sorted(self._syncer.membership.members.items())]

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Return one entry per known learner, for people and dashboards."""
        rows = []
        by_name = {condition.learner_id: condition for condition in conditions(self._syncer, now_s)}
        if self._syncer.finished and self._finished_s is None:
            self._finished_s = now_s
        for member in self._members():
            condition = by_name[member.learner_id]
            stats = self._learners.get(member.learner_id) or LearnerStats()
            running = member.state in ("active", "silent")
            stayed = member.state != "gone" or (self._finished_s or 0.0) - member.since_s <= FINISHING_S
            span_s = max(stats.busy_s, stats.total_span_s)
            rows.append(
                {
                    "learner": member.learner_id,
                    "state": member.state,
                    "condition": condition.condition,
                    "since_s": round(max(0.0, now_s - condition.since_s), 1),
                    "reason": condition.reason,
                    "local_step": member.total_steps,
                    "tokens": member.total_tokens,
                    "tokens_per_s": round(stats.rate or 0.0, 1) if running else 0.0,
                    "mean_tokens_per_s": round(member.total_tokens / span_s, 1) if span_s else 0.0,
                    "finished": self._syncer.finished and stayed and bool(member.total_steps),
                    "loss": member.loss if member.local_step else None,
                    "step_s": member.step_s,
                    "staleness": self._syncer.global_step - member.global_step,
                    "broadcast_s": member.down.broadcast_s,
                    "last_merged_round": stats.last_round,
                    "participation": round(participation(member.rounds, self._syncer.merged_rounds), 4),
                    "restarts": member.restarts,
                    **{f"drift_{key}": each for key, each in self.drifts.of(member.learner_id)._asdict().items()},
                }
            )
        return rows

    def data_parallel_bytes(self) -> int:
        """Return the bytes of one bfloat16 gradient all-reduce per inner step through the islands' links.

        A ring of M islands sends, and receives, 2 (M - 1) / M times the gradient at each of them.
        """
        islands = max(1, len(self._names))
        per_step = 2 * (2 * (islands - 1) / islands) * self.num_parameters * BFLOAT16_BYTES
        return round(per_step * sum(member.total_steps for member in self._members()))

    def summary(self, wire: Mapping[str, Any], now_s: float) -> dict[str, Any]:
        """Return the measured part of summary.json, without the evaluation; docs/architecture.md lists its keys."""
        began_s = self._began_s if self._began_s is not None else now_s
        until_s = self._covered_until_s if self._syncer.finished else now_s
        window_s = max(until_s - began_s, 1e-9)
        busy_s = sum(stats.busy_s for stats in self._learners.values())
        waited_s = sum(stats.busy_s * stats.waiting for stats in self._learners.values())
        learners = {}
        for member in self._members():
            stats = self._learners.get(member.learner_id) or LearnerStats()
            learners[member.learner_id] = {
                "local_steps": member.total_steps,
                "tokens": member.total_tokens,
                "participation": round(participation(member.rounds, self._syncer.merged_rounds), 4),
                "restarts": member.restarts,
                "step_overhead": round(step_overhead(stats.busy_s, stats.total_span_s), 4),
            }
        most = max((member.total_steps for member in self._members()), default=0)
        return {
            "tokens": self.tokens,
            "merged_tokens": self._syncer.progress.merged_tokens,
            "wall_s": round(now_s, 3),
            "epoch": self._syncer.epoch,
            "global_steps": self._syncer.global_step,
            "goodput": round(goodput_of(busy_s - waited_s, max(1, len(self._names)) * window_s), 4),
            WAITING: round(waited_s / max(busy_s, 1e-9), 4),
            "uptime": round(min(1.0, self._covered_s / window_s), 4),
            "contributors_per_round": self.contributors_per_round,
            "unmerged_fragments": self.unmerged_fragments,
            "steps_per_round": round(most / max(1, self._syncer.global_step), 4),
            "samples": self._syncer.leases.fates._asdict(),
            "wire": {**wire, "data_parallel_bytes": self.data_parallel_bytes()},
            "learners": learners,
        }
