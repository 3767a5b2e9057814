"""The changes of a run as lines for logs: a line when something changes, and at most one line per second."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diloco_jax.protocol.watch.alarms import REMEDIES
from diloco_jax.runtime.figures import table
from diloco_jax.runtime.figures.facts import RunFacts
from diloco_jax.runtime.figures.forms import format_duration
from diloco_jax.runtime.records.liveness import ENDED, StartPhase, repeats
from diloco_jax.runtime.records.status import EVALUATING
from diloco_jax.tools.terminal.words import (
    alarm_line,
    ended_line,
    percent_done,
    share_done,
    stands,
    steps_done,
    time_left,
)

# Least time between two lines.
LINE_EVERY_S = 1.0
# Least time between two lines that say the same of one subject.
FLAP_S = 30.0
TENTHS = 10

Subject = tuple[str, ...]
# The values of an alarm.
STANDS, OVER = "stands", "over"


class Fact(NamedTuple):
    """One fact about a run at this moment.

    Attributes:
        value: compared with the value at the last look.
        text: line about the fact.
    """

    subject: Subject
    value: str
    text: str


@dataclass(slots=True)
class _Topic:
    """The newest value of one subject, and the lines about it.

    Attributes:
        changes: changes since the last line.
        line_s: time of the last line.
        said_s: time of the last line about each value.
    """

    value: str = ""
    text: str = ""
    changes: int = 0
    line_s: float = 0.0
    said_s: dict[str, float] = field(default_factory=dict[str, float])


class Changes:
    """The lines about one run, with its own time, as in its status; before it runs, with the time since the first look.

    Args:
        began_s: time of the first look, on the same clock as later looks.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._topics: dict[Subject, _Topic] = {}
        # Alarms that stood at an earlier look, each with the line that reports its end.
        self._alarms: dict[Subject, str] = {}
        # What each process did at the last look before it trains, and since when.
        self._phases: dict[str, tuple[str, float]] = {}
        self._line_s = float("-inf")
        # The newest time of the run, and the look that read it first.
        self._wall_s, self._read_s = -1.0, began_s

    def look(self, status: Mapping[str, Any] | None, phases: Sequence[StartPhase], now_s: float) -> str:
        """Compare a run with the last look, and return the line that is due now; "" if there is none."""
        if status is not None and status["wall_s"] != self._wall_s:
            self._wall_s, self._read_s = status["wall_s"], now_s
        facts = [*self._facts(status), *self._of_phases(phases, now_s)]
        for fact in facts:
            topic = self._topics.setdefault(fact.subject, _Topic())
            topic.changes += fact.value != topic.value
            topic.value, topic.text = fact.value, fact.text
        if now_s < self._line_s + LINE_EVERY_S:
            return ""
        # The gravest facts come first.
        for fact in facts:
            topic = self._topics[fact.subject]
            last_s = topic.said_s.get(topic.value)
            if not topic.changes or (last_s is not None and now_s < last_s + FLAP_S):
                continue
            again = (
                f" ({topic.changes} changes in {format_duration(now_s - topic.line_s)})" if last_s is not None else ""
            )
            again *= topic.changes > 1
            topic.said_s[topic.value] = topic.line_s = self._line_s = now_s
            topic.changes = 0
            return f"[{self._clock(status, now_s)}] {topic.text}{again}"
        return ""

    def _clock(self, status: Mapping[str, Any] | None, now_s: float) -> str:
        if status is None or status["state"] == "starting":
            return f"start {format_duration(now_s - self._began_s)}"
        # A syncer that is silent does not stop the run's time.
        return format_duration(self._wall_s + now_s - self._read_s)

    def _facts(self, status: Mapping[str, Any] | None) -> Iterator[Fact]:
        if status is None:
            return
        state = status["state"]
        calm = state in (*ENDED, EVALUATING, "running")
        waiting = "" if calm else f", waiting for: {status['waiting_for']}"
        yield Fact(("run",), state, f"{status['run']} is {state}{waiting}")
        yield from self._of_alarms(status["alarms"], status.get("episodes", ()))
        # Islands of a run that is over leave, which is not a change worth a line.
        over = state in (*ENDED, EVALUATING)
        for row in () if over else status["learners"]:
            name, condition = row["learner"], row["condition"]
            # The line about the run says how many islands of a resumed run are still to connect.
            if state == "starting" and row["state"] == "gone":
                continue
            # The result of an evaluation has a line, so its start needs none.
            if condition == "evaluating":
                condition = "training"
            # An alarm reports the other conditions.
            if condition not in REMEDIES:
                reason = f": {row['reason']}" if condition != "training" else ""
                yield Fact(("island", name), condition, f"{name} is {condition}{reason}")
        if status["eval_loss"] is not None:
            # Statuses of older versions do not have the step.
            step = status.get("eval_step")
            of_step = "" if step is None else f" of global step {step}"
            text = f"evaluation loss {status['eval_loss']:.4f}{of_step}"
            yield Fact(("evaluation",), f"{status['eval_loss']} {step}", text)
        tenth = int(share_done(status) * TENTHS)
        if tenth and state != "starting":
            yield Fact(("progress",), str(tenth), _progress(status))

    def _of_alarms(self, alarms: Sequence[Mapping[str, Any]], episodes: Sequence[Mapping[str, Any]]) -> Iterator[Fact]:
        """Yield the alarms that stand, and those of earlier looks that have ended."""
        standing: dict[Subject, Mapping[str, Any]] = {("alarm", alarm["kind"], alarm["who"]): alarm for alarm in alarms}
        for subject, alarm in standing.items():
            self._alarms[subject] = f"alarm over: {alarm['text']}"
            yield Fact(subject, STANDS, alarm_line(alarm))
        ended: dict[Subject, str] = {
            ("alarm", each["kind"], each["who"]): ended_line(each) for each in episodes if not stands(each)
        }
        for subject, text in self._alarms.items():
            if subject not in standing and STANDS in self._topics[subject].said_s:
                yield Fact(subject, OVER, ended.get(subject, text))

    def _of_phases(self, phases: Sequence[StartPhase], now_s: float) -> Iterator[Fact]:
        """Yield what processes do that do not train yet, again if it lasts."""
        known = self._phases
        self._phases = {}
        for phase in phases:
            what = phase.words.partition(",")[0]
            began_s = known[phase.name][1] if known.get(phase.name, ("", 0.0))[0] == what else now_s - phase.ago_s
            self._phases[phase.name] = (what, began_s)
            count = repeats(now_s - began_s)
            since = f", for {format_duration(phase.ago_s)}" if count else ""
            yield Fact(("phase", phase.name), f"{what} {count}", f"{phase.name}: {phase.words}{since}")


def _progress(status: Mapping[str, Any]) -> str:
    active = sum(row["state"] == "active" for row in status["learners"])
    over = status["state"] in (*ENDED, EVALUATING)
    parts = [
        f"{percent_done(status)}, {steps_done(status)}",
        "" if over else f"{active} of {len(status['learners'])} islands active",
        *table.texts(table.RUN_FIGURES, RunFacts.of(status), lambda figure: figure.change, over=over),
        time_left(status),
    ]
    return ", ".join(part for part in parts if part)
