"""The reports of a syncer about its run: telemetry, log, status and alarms."""

import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from diloco_jax.core.drift import Drift
from diloco_jax.protocol.effects import Merge, Note
from diloco_jax.protocol.messages import (
    DRAINED,
    OWN_MACHINE,
    OWN_PROCESS,
    OWN_TIME,
    FragmentValue,
    MetricsReport,
    Score,
    StepReport,
)
from diloco_jax.protocol.texts import clean
from diloco_jax.protocol.watch.alarms import Alarm, AlarmBook, alarms_of, starving
from diloco_jax.protocol.watch.sites import RisingLosses
from diloco_jax.protocol.watch.terms import WAITING
from diloco_jax.protocol.watch.time_left import TimeLeft
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import RunFacts
from diloco_jax.runtime.records.earlier import Earlier
from diloco_jax.runtime.records.files import STATUS_FILE
from diloco_jax.runtime.records.liveness import BEGIN_S, machine_number, read_restart
from diloco_jax.runtime.records.pulse import Pulse
from diloco_jax.runtime.records.status import compose_status, upcoming
from diloco_jax.runtime.records.telemetry import WENT_BACK, Telemetry, replace_text, strict_json
from diloco_jax.runtime.syncer.band import Band, Point
from diloco_jax.runtime.syncer.begin import FAILOVER, FRESH, REWIND
from diloco_jax.runtime.syncer.context import SyncerContext
from diloco_jax.runtime.syncer.exposition import Exposition
from diloco_jax.runtime.syncer.island_traffic import IslandTraffic
from diloco_jax.runtime.syncer.machine_alarms import MachineAlarms
from diloco_jax.runtime.syncer.subtraction import Subtraction
from diloco_jax.runtime.trackers.outlets import Outlets
from diloco_jax.transport.endpoints.probe import versions
from diloco_jax.transport.link import Traffic
from diloco_jax.transport.session.listener import Listener
from diloco_jax.transport.store.counts import calls

# Longer reasons of refusals are cut to this many characters.
REFUSAL_LENGTH_MAX = 300
# Metrics of islands that are summed for all islands together; the others are averaged.
SUMMED = ("tokens_per_s", "model_flops_per_s")

EVAL_ALARMS_MAX = 8
STARTS = {FRESH: "the run starts", FAILOVER: "it came back from its tape", REWIND: WENT_BACK}

log = logging.getLogger(__name__)


def merged_metrics(islands: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all islands together: sums of SUMMED, and means of the others."""
    found: dict[str, list[float]] = {}
    for values in islands:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: sum(each) / (1 if name in SUMMED else len(each)) for name, each in found.items()}


@dataclass(eq=False)
class Watch:
    """The counts of a run, and every report about it.

    Attributes:
        machine_alarms: alarms of the syncer's machine, such as a full disk.
        pulse: pulse of the reporting thread, which beats at every report, however long the thread waits for a disk.
        exposed: metrics for Prometheus, which get the same events.
        subtraction: evaluations without single contributions.
        band: the comparison with an earlier run; None if the config names none.
    """

    context: SyncerContext
    earlier: Earlier
    machine_alarms: MachineAlarms
    pulse: Pulse
    exposed: Exposition
    subtraction: Subtraction
    band: Band | None = None

    def __post_init__(self) -> None:
        self._told_s: float | None = None
        # Results of the newest evaluation.
        self.eval_loss, self.eval_scores = self.earlier.eval_loss, dict(self.earlier.eval_scores)
        self._rising = RisingLosses()
        # Global step of the evaluated model.
        self._eval_step = self.earlier.eval_step
        self.eval_bits: float | None = None
        # Failures of evaluations since the last good one, each once.
        self.eval_alarms: list[str] = []
        # Tokens of the run when this process last asked for an evaluation.
        self.asked_tokens: int | None = None
        self._book = AlarmBook(self.earlier.episodes)
        self._listener: Listener | None = None
        self._listens_s = 0.0
        # Returns the rows of the connected subscribers.
        self.subscribers: Callable[[], list[dict[str, Any]]] = list
        self._traffic = IslandTraffic(self.earlier.by_island)
        # Newest metrics of each island.
        self._metrics: dict[str, Mapping[str, float]] = {}
        # Process number of each island that runs on this machine.
        self._processes: dict[str, int | None] = {}
        # Seconds from the end of each round in flight until the value of each learner.
        self._came: dict[int, dict[str, float]] = {}
        # Islands of a resumed run that have not connected since, and until when they may start.
        self._awaited, self._awaited_until_s = frozenset[str](), 0.0
        # Islands that the config names or that were members -> why their newest greeting was refused.
        self._refused: dict[str, str] = {}
        self._news = False
        self._time_left = TimeLeft(self.context.machine.global_step)
        self._telemetry = Telemetry(self.context.run_dir, Outlets(self.context.config, self.context.run_dir))

    def begins(self, how: str) -> None:
        """Record that a process of the syncer starts, how it starts (begin.py), and on what machine."""
        machine = self.context.machine
        if how == REWIND:
            members = machine.membership.members.values()
            bans = machine.membership.bans
            left = {m.learner_id for m in members if m.goodbye == DRAINED or m.credit.expelled or m.learner_id in bans}
            self._awaited = frozenset(machine.membership.members) - left
            self._awaited_until_s = self.context.clock.now_s() + BEGIN_S
        record = {"kind": "life", "t": self.context.clock.now_s(), "global_step": machine.global_step, "members": []}
        record |= {"epoch": machine.epoch, "reason": f"process {machine.epoch} of the syncer: {STARTS[how]}"}
        host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
        self._telemetry.write(record | {"versions": versions(), "host": host})

    def listens(self, listener: Listener) -> None:
        """Answer requests at this listener from now on, and count its traffic."""
        self._listener, self._listens_s = listener, self.context.clock.now_s()
        self.pulse.ready(True)

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Count and record a report that the machine is about to take."""
        stats = self.context.stats
        if not stats.on_report(report, now_s):
            return
        # It was another process of this name that was refused.
        self._refused.pop(report.learner_id, None)
        arrived = self.exposed.on_report(report, now_s)
        member = self.context.machine.membership.members[report.learner_id]
        record = {"kind": "step", "t": now_s, "learner": report.learner_id, "incarnation": report.incarnation}
        record |= {"local_step": report.local_step, "tokens": member.past_tokens + report.tokens}
        record |= {"global_step": report.global_step, "loss": report.loss, "step_s": report.step_s}
        if arrived:
            record["arrived"] = [[version, round(took_s, 4)] for version, took_s in arrived]
        self._telemetry.write(record)

    def on_value(self, value: FragmentValue, now_s: float) -> None:
        """Count a learner's value for a round, and keep the time of its arrival."""
        if (took_s := self.context.stats.on_value(value, now_s)) is not None:
            self._came.setdefault(value.global_step, {})[value.learner_id] = round(took_s, 4)

    def on_merged(self, global_step: int, excluded: Iterable[str], now_s: float) -> None:
        """Record the times of a round that the machine is about to end."""
        self.exposed.on_merged(global_step, excluded, now_s)
        this = self.context.machine.rounds.flying[global_step]
        record = {"kind": "round", "t": now_s, "global_step": global_step, "fragment_id": this.fragment_id}
        record |= {"opened_s": this.opened_s, "met_s": this.met_s, "closed_s": this.closed_s}
        self._telemetry.write(record | {"pulled_s": this.pulled_s, "values": self._came.pop(global_step, {})})

    def on_drift(self, order: Merge, drifts: Mapping[str, Drift], now_s: float) -> None:
        """Count and record how each contribution of a round differs from the others."""
        self.context.stats.drifts.on_round(drifts)
        for name, drift in drifts.items():
            record = {"kind": "drift", "t": now_s, "learner": name, "global_step": order.global_step}
            values = {f"drift_{key}": each and round(each, 6) for key, each in drift._asdict().items()}
            self._telemetry.write(record | {"fragment_id": order.fragment_id, "values": values})

    def on_metrics(self, report: MetricsReport, now_s: float) -> None:
        """Record the metrics of an island, unless another process has replaced the one that sent them."""
        machine = self.context.machine
        if machine.membership.get(report.learner_id, report.incarnation) is None:
            return
        values = dict(report.values)
        if (unix_s := values.pop(OWN_TIME, None)) is not None:
            self.machine_alarms.on_clock(report.learner_id, unix_s)
        process, here = values.pop(OWN_PROCESS, None), values.pop(OWN_MACHINE, None) == machine_number()
        self._processes[report.learner_id] = int(process) if here and process is not None else None
        self._metrics[report.learner_id] = values
        self.context.stats.on_waiting(report.learner_id, values.get(WAITING, 0.0))
        self._news = True
        record = {"kind": "metrics", "t": now_s, "learner": report.learner_id, "incarnation": report.incarnation}
        record |= {"local_step": report.local_step, "global_step": machine.global_step, "values": values}
        self._telemetry.write(record)

    def on_refused(self, learner_id: str, reason: str) -> None:
        """Record why the greeting of an island was refused, whose credentials were accepted where the run requires any.

        A banned name has its reason already. A connected member has no part in the greeting of another process with its
        name. A name that is neither in the config nor of a member is ignored.
        """
        members, names = self.context.machine.membership, self.context.config.islands.names
        if learner_id in members.bans or learner_id in {member.learner_id for member in members.connected()}:
            return
        if learner_id in names or learner_id in members.members:
            self._refused[learner_id] = clean(reason, REFUSAL_LENGTH_MAX)

    def on_note(self, note: Note) -> None:
        """Count and record a note of the machine about a round or a learner."""
        now_s = self.context.clock.now_s()
        record = {"kind": note.kind, "t": now_s, "global_step": note.global_step}
        record |= {"fragment_id": note.fragment_id, "members": list(note.members), "reason": note.reason}
        self._telemetry.write(record)
        if note.kind in ("joined", "left", "disconnected"):
            # Its next process tells its own number.
            for name in note.members:
                self._processes.pop(name, None)
        if note.kind in ("joined", "banned"):
            for name in note.members:
                self._refused.pop(name, None)
        self.exposed.on_note(note)
        self._time_left.step(now_s, self.context.machine.global_step)
        if note.kind == "abandoned":
            self._came.pop(note.global_step, None)
        if note.kind == "merged":
            self.context.stats.on_merged(note.members, note.global_step)
        elif note.kind == "unevaluated":
            self._not_evaluated(f"no evaluation at global step {note.global_step}: {note.reason}")
        elif note.kind != "closed":
            log.info(f"{', '.join(note.members) or 'round ' + str(note.global_step)} {note.kind}: {note.reason}")

    def on_score(self, score: Score, now_s: float) -> None:
        """Record the result of an evaluation."""
        score = self.subtraction.on_score(score)
        finite_or_none = {name: value if isfinite(value) else None for name, value in score.scores}
        bits = score.bits_per_byte if isfinite(score.bits_per_byte) else None
        tokens = self.context.stats.tokens if self.asked_tokens is None else self.asked_tokens
        if score.reason:
            self._not_evaluated(f"{score.learner_id}: {score.reason}")
        else:
            self.eval_alarms.clear()
        self.eval_loss, self.eval_bits, self.eval_scores = score.loss, bits, finite_or_none
        corpora = self.context.machine.membership.corpora.known
        self._rising.on_score(score, corpora)
        if self.band is not None:
            known = frozenset(name for name, value in finite_or_none.items() if value is not None)
            self.band.on_score(Point(tokens, score.loss, known), corpora)
        self._eval_step = score.global_step
        record = {"kind": "eval", "t": now_s, "loss": score.loss, "bits_per_byte": bits, "scores": finite_or_none}
        record |= {"global_step": score.global_step, "tokens": tokens}
        self._telemetry.write(record | {"learner": score.learner_id, "took_s": score.took_s})
        log.info(f"global step {score.global_step}: evaluation loss {score.loss:.4f}")

    def _not_evaluated(self, words: str) -> None:
        if words not in self.eval_alarms and len(self.eval_alarms) < EVAL_ALARMS_MAX:
            self.eval_alarms.append(words)

    def _look(self, now_s: float) -> list[dict[str, Any]]:
        """Look for alarms, record those that start or end, and return those that stand."""
        machine = self.context.machine
        active = [name for name, member in machine.membership.members.items() if member.state == "active"]
        found = [*self.machine_alarms.alarms(now_s), *alarms_of(machine, self.context.stats, now_s)]
        found = [alarm for alarm in found if not (alarm.kind == "gone" and alarm.who in self._awaited)]
        found += starving({name: self._metrics[name] for name in active if name in self._metrics})
        found += [Alarm("evaluation", "", text) for text in self.eval_alarms] + self._rising.alarms()
        found += self.subtraction.alarms(active)
        found += self.band.alarms() if self.band is not None else []
        if self.eval_loss is not None and not isfinite(self.eval_loss):
            found.append(Alarm("loss", "", f"the loss of the newest evaluation is {self.eval_loss}"))
        changes = self._book.look(found, now_s)
        for stands, alarms in zip(("begins", "ends"), changes, strict=True):
            for alarm in alarms:
                if stands == "begins":
                    log.warning(f"alarm: {alarm.text}; {self._with_restart(alarm, now_s)['remedy']}")
                else:
                    log.info(f"alarm over: {alarm.past}")
                record = {"kind": "alarm", "t": now_s, "global_step": machine.global_step, "alarm": alarm.kind}
                record |= {"state": stands, "members": [alarm.who] * bool(alarm.who), "reason": alarm.text}
                self._telemetry.write(record)
        return [self._with_restart(alarm, now_s) for alarm in self._book.standing]

    def _with_restart(self, alarm: Alarm, now_s: float) -> dict[str, Any]:
        """Return an alarm; its remedy is what the supervisor does about an island whose process has ended."""
        told, member = alarm.as_dict(), self.context.machine.membership.members.get(alarm.who)
        if alarm.kind == "gone" and member is not None:
            restart = read_restart(self.context.run_dir, alarm.who, now_s - member.since_s)
            refused = f"refused: {self._refused[alarm.who]}" if alarm.who in self._refused else ""
            told["remedy"] = refused or restart or told["remedy"]
        return told

    def alarms(self) -> list[dict[str, Any]]:
        """Return every alarm of the run; the alarm of islands that outran rounds has the text of the longest time."""
        found = self._book.as_dicts()
        for each in found:
            if each["kind"] == "outrun" and (outruns := self.context.stats.outruns):
                each["text"] = str(max(outruns, key=lambda episode: episode.steps))
        return found

    def wire(self) -> dict[str, Any]:
        """Return the bytes from and to islands, together and of each, over all processes of the syncer."""
        (received, sent), of_learners = self._moved()
        before = self.earlier.wire
        totals = {"up_bytes": before["up_bytes"] + received, "down_bytes": before["down_bytes"] + sent}
        # The bytes of subscribers, and of learners that the run refused, are only in the totals.
        return {**totals, "by_island": self._traffic.totals(of_learners, self.context.machine.membership.members)}

    def _moved(self) -> tuple[Traffic, Mapping[str, Traffic]]:
        """Return the bytes from and to all peers of this process of the syncer, and those of each learner."""
        return self._listener.traffic_of_learners() if self._listener is not None else (Traffic(0, 0), {})

    def requests(self) -> dict[str, int]:
        """Return the requests to a bucket, and their bytes, over all processes of the syncer; {} without a bucket."""
        made = self._listener.requests if self._listener is not None else {}
        before = self.earlier.requests
        return {name: before.get(name, 0) + made.get(name, 0) for name in {**before, **made}}

    def _requests_per_s(self, now_s: float) -> float:
        """Return the requests to a bucket per second since this process listens."""
        made = self._listener.requests if self._listener is not None else {}
        return round(calls(made) / max(1.0, now_s - self._listens_s), 3)

    def _rates(self, now_s: float) -> dict[str, dict[str, float | None]]:
        """Return the bytes per second on the links of connected islands."""
        steps = {member.learner_id: member.step_s for member in self.context.machine.membership.connected()}
        return self._traffic.rates(self._moved()[1], steps, now_s)

    def _upcoming(self) -> dict[str, int]:
        """Return the global steps of the next evaluation and the next snapshot."""
        config, machine = self.context.config, self.context.machine
        periods = {"evaluation": config.train.eval_every, "snapshot": config.protocol.snapshot_every}
        return upcoming(machine.global_step, machine.progress.expected_steps, periods)

    def tell(self) -> None:
        """Publish the status: on the listener, for Prometheus, and in the folder, where a write may fail."""
        context = self.context
        now_s = context.clock.now_s()
        self.pulse.beat(None if self._told_s is None else now_s - self._told_s)
        self._told_s = now_s
        if self._awaited:
            gone = {name for name, each in context.machine.membership.members.items() if each.state == "gone"}
            self._awaited = (
                self._awaited & gone - self._refused.keys() if now_s < self._awaited_until_s else frozenset()
            )
        status = compose_status(
            context.config.name,
            context.machine,
            context.stats,
            now_s,
            stopped=context.stop.is_set(),
            blocked=self.machine_alarms.blocked,
            alarms=self._look(now_s),
            episodes=self._book.as_dicts(),
            eval_loss=self.eval_loss,
            eval_step=self._eval_step,
            eval_scores=self.eval_scores,
            wire=self.wire(),
            requests=self.requests(),
            requests_per_s=self._requests_per_s(now_s),
            metrics=self._metrics,
            processes=self._processes,
            awaited=self._awaited,
            refused=self._refused,
            rates=self._rates(now_s),
            left_s=self._time_left.left_s(now_s, context.machine.progress.expected_steps),
            num_parameters=context.stats.num_parameters,
            subscribers=self.subscribers(),
            upcoming=self._upcoming(),
        )
        # With indentation, json is several times slower, because its C encoder does not know it.
        text = strict_json(status)
        if self._listener is not None:
            self._listener.status_json = text
        self.exposed.tell(status, now_s)
        try:
            replace_text(context.run_dir / STATUS_FILE, text + "\n")
        except OSError as error:
            log.warning(f"status not written: {error}")
        when = {"t": now_s, "global_step": context.machine.global_step}
        together = {m.learner_id for m in context.machine.membership.connected()} & self._metrics.keys()
        if self._news and together:
            values = merged_metrics(self._metrics[name] for name in together)
            self._telemetry.write({"kind": "merged_metrics", **when, "islands": sorted(together), "values": values})
        self._news = False
        facts = RunFacts.of(status)
        tracked = {figure.name: figure.value(facts) for figure in table.RUN_FIGURES if figure.tracked}
        self._telemetry.write({"kind": "wire", **when, **tracked})
        self._telemetry.flush()

    def close(self) -> None:
        """Close telemetry and metrics."""
        self._telemetry.close()
        self.exposed.close()
