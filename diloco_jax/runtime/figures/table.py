"""The table of figures: one row has all that an outlet needs to show a figure of a run or of an island.

To add a figure, add its row. A figure that no existing facts give needs a field in facts.py too, and the code that
computes it, which for a syncer is `protocol/watch/stats.py`. The outlets that read the table are `status.json` and
`summary.json` (`computed`), `diloco status` and the live view (tools/terminal), the page, report.html and `diloco
compare` (tools/page), Prometheus (runtime/syncer/exposition.py) and trackers (runtime/syncer/watch.py).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from diloco_jax.runtime.figures.facts import IslandFacts, RunFacts
from diloco_jax.runtime.figures.forms import (
    BYTES,
    COUNT,
    DIGITS,
    DURATION,
    LOSS,
    MEAN,
    PERCENT,
    PLAIN,
    ROUND,
    SECONDS,
    SHARE,
    STEP_LOSS,
    Form,
)

Facts = TypeVar("Facts", IslandFacts, RunFacts)
File = Literal["status", "summary"]


class Series(NamedTuple):
    """The description of a series for Prometheus."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    # Name of the label that tells several values apart; "" for a series with one value.
    label: str = ""


class Words(NamedTuple):
    """The words of a figure in a running text.

    Attributes:
        write: template with {} for the number, or a function of the value. A text that begins with a space or a comma
            continues the text before it. An empty text is left out.
        order: place among the texts; equal places keep the order of the table.
        unknown: whether a dash is written for an unknown number; otherwise the text is left out.
    """

    write: str | Callable[[Any], str]
    order: int = 100
    unknown: bool = True

    def text(self, value: float | None, form: Form) -> str:
        """Return the text for a value."""
        if value is None and not self.unknown:
            return ""
        return self.write.format(form.text(value)) if isinstance(self.write, str) else self.write(value)


class Figure(NamedTuple, Generic[Facts]):
    """One figure and the outlets that show it; an outlet whose attribute is empty does not.

    Attributes:
        name: key in JSON and for trackers.
        words: what people call it.
        value: function that computes the figure; None if it is not known.
        files: JSON files that get the value under its name, because no fact in them is called so.
        live: running text of the live view, for a figure of the run.
        column: header of the live view's column, with its line breaks, for a figure of an island.
        wide: whether the live view shows that column on a wide terminal only.
        status: running text of `diloco status`; an island's is shown while it trains.
        always: the part of an island's text that `diloco status` shows in every condition.
        change: running text of the lines that report progress without a terminal.
        page: place among the page's figures (run) or columns (island), from 1 on.
        compare: place in `diloco compare` and in the page's table of runs, from 1 on.
        series: the series for Prometheus.
        tracked: whether trackers get the figure, in the group "merged", and metrics.jsonl, in records of kind "wire".
        momentary: whether the figure has no meaning any more once the run is over.
    """

    name: str
    words: str
    form: Form
    value: Callable[[Facts], float | None]
    files: Sequence[File] = ()
    live: Words = Words("")
    column: str = ""
    wide: bool = False
    status: Words = Words("")
    always: Words = Words("")
    change: Words = Words("")
    page: int = 0
    compare: int = 0
    series: Series | None = None
    tracked: bool = False
    momentary: bool = False


def _tokens_per_s(run: RunFacts) -> float:
    if run.tokens_per_s is not None:
        return run.tokens_per_s
    return round(sum(island.tokens_per_s or 0.0 for island in run.islands), 1)


def _mean_tokens_per_s(run: RunFacts) -> float | None:
    return run.tokens / run.span_s if run.tokens is not None and run.span_s else None


def _connected(run: RunFacts) -> int:
    # A summary has no conditions, so its islands do not count.
    return sum(island.state not in ("", "gone") for island in run.islands)


def _restarts(number: int) -> str:
    return f"{number} restart{'s' if number != 1 else ''}" if number else ""


RUN_FIGURES: tuple[Figure[RunFacts], ...] = (
    Figure(
        "eval_loss",
        "eval loss",
        LOSS,
        lambda run: run.eval_loss,
        live=Words("eval loss {}", 2),
        status=Words("eval loss: {}"),
        page=1,
        compare=1,
        series=Series("diloco_evaluation_loss", "gauge", "", "loss of the newest evaluation"),
    ),
    Figure("eval_bits_per_byte", "bits per byte", LOSS, lambda run: run.eval_bits_per_byte, page=2, compare=2),
    Figure(
        "tokens",
        "tokens",
        COUNT,
        lambda run: run.tokens,
        live=Words("{} tokens", 1),
        status=Words("tokens: {}", 1),
        change=Words("{} tokens"),
        page=3,
        compare=3,
        series=Series("diloco_tokens_total", "counter", "tokens", "tokens trained on"),
    ),
    Figure(
        "tokens_per_s",
        "tokens/s",
        COUNT,
        _tokens_per_s,
        files=("status",),
        live=Words(", {}/s", 1),
        status=Words(", now {}/s", 1),
        change=Words(" at {}/s"),
        page=4,
        momentary=True,
    ),
    Figure("mean_tokens_per_s", "tokens/s on average", COUNT, _mean_tokens_per_s, page=5),
    Figure(
        "global_steps",
        "global steps",
        PLAIN,
        lambda run: run.global_step,
        compare=4,
        series=Series("diloco_global_step", "gauge", "", "rounds that have closed"),
    ),
    Figure(
        "total_steps",
        "global steps of the whole run",
        PLAIN,
        lambda run: run.total_steps,
        series=Series("diloco_expected_global_steps", "gauge", "steps", "rounds of the whole run"),
    ),
    Figure("wall_s", "wall time", DURATION, lambda run: run.wall_s, compare=5),
    Figure(
        "goodput",
        "goodput",
        SHARE,
        lambda run: run.goodput,
        page=6,
        compare=6,
        series=Series("diloco_goodput_ratio", "gauge", "ratio", "goodput since the run began"),
    ),
    Figure(
        "uptime",
        "uptime",
        SHARE,
        lambda run: run.uptime,
        page=7,
        compare=7,
        series=Series("diloco_uptime_ratio", "gauge", "ratio", "uptime since the run began"),
    ),
    Figure("waiting_for_data", "waiting for data", SHARE, lambda run: run.waiting_for_data or None, page=8),
    Figure(
        "connected_islands",
        "islands connected",
        PLAIN,
        _connected,
        page=9,
        series=Series("diloco_connected_islands", "gauge", "islands", "islands with a connection"),
        tracked=True,
        momentary=True,
    ),
    Figure(
        "contributors_per_round",
        "contributors per round",
        MEAN,
        lambda run: run.contributors_per_round,
        live=Words("{} contributors per round"),
        status=Words("contributors per round: {}"),
        change=Words("{} contributors per round"),
        page=9,
        compare=8,
    ),
    Figure(
        "restarts",
        "restarts",
        PLAIN,
        lambda run: sum(island.restarts or 0 for island in run.islands),
        compare=9,
    ),
    Figure(
        "up_bytes",
        "moved up",
        BYTES,
        lambda run: run.up_bytes,
        live=Words("up {}"),
        status=Words("moved up {}"),
        page=10,
        compare=10,
        series=Series("diloco_received_bytes_total", "counter", "bytes", "bytes from islands"),
        tracked=True,
    ),
    Figure(
        "down_bytes",
        "moved down",
        BYTES,
        lambda run: run.down_bytes,
        live=Words(", down {}"),
        status=Words(", down {}"),
        page=11,
        compare=11,
        series=Series("diloco_sent_bytes_total", "counter", "bytes", "bytes to islands"),
        tracked=True,
    ),
    Figure(
        "merged_rounds",
        "merged rounds",
        PLAIN,
        lambda run: run.merged_rounds,
        series=Series(
            "diloco_rounds_merged_total", "counter", "rounds", "rounds that made a new version of a fragment"
        ),
    ),
    Figure(
        "merged_parts",
        "merged values",
        PLAIN,
        lambda run: run.merged_parts,
        series=Series(
            "diloco_values_merged_total", "counter", "", "values in merged rounds: per round, its contributors"
        ),
    ),
    Figure(
        "merged_tokens",
        "merged tokens",
        COUNT,
        lambda run: run.merged_tokens,
        series=Series("diloco_tokens_merged_total", "counter", "tokens", "tokens merged, each once"),
    ),
)

ISLAND_FIGURES: tuple[Figure[IslandFacts], ...] = (
    Figure(
        "local_step",
        "step",
        PLAIN,
        lambda island: island.local_step,
        column="inner\nstep",
        status=Words("inner step {}", 1),
        page=1,
        series=Series("diloco_island_steps_total", "counter", "steps", "inner steps"),
    ),
    Figure(
        "mfu",
        "MFU",
        PERCENT,
        lambda island: island.measured("mfu"),
        column="MFU",
        status=Words(lambda share: f"MFU {share:.1%}", 5, unknown=False),
        series=Series(
            "diloco_island_mfu_ratio", "gauge", "ratio", "model FLOPs utilisation, if the peak of its devices is known"
        ),
    ),
    Figure("model_flops_per_s", "FLOP/s", COUNT, lambda island: island.measured("model_flops_per_s"), column="FLOP/s"),
    Figure(
        "tokens_per_s",
        "tokens/s",
        COUNT,
        lambda island: island.tokens_per_s,
        column="tokens/s",
        status=Words("{} tokens/s", 3),
        page=2,
    ),
    Figure(
        "loss",
        "loss",
        STEP_LOSS,
        lambda island: island.loss,
        column="loss",
        status=Words("loss {}", 2),
        page=4,
        series=Series("diloco_island_loss", "gauge", "", "training loss of the newest step; may be NaN or infinite"),
    ),
    Figure(
        "last_merged_round",
        "last merged in round",
        ROUND,
        lambda island: island.last_merged_round,
        column="merged\nin round",
        always=Words(lambda number: f"last merged in round {number}" if number else "never merged yet"),
        page=6,
        series=Series("diloco_island_last_merged_round", "gauge", "", "global step of the newest round that merged it"),
    ),
    Figure(
        "participation",
        "participation",
        PERCENT,
        lambda island: island.participation,
        column="partici-\npation",
        always=Words("participation {}"),
        page=5,
        series=Series(
            "diloco_island_participation_ratio", "gauge", "ratio", "share of the merged rounds that merged it"
        ),
    ),
    Figure(
        "restarts",
        "restarts",
        PLAIN,
        lambda island: island.restarts,
        column="restarts",
        always=Words(_restarts),
        page=8,
        series=Series(
            "diloco_island_restarts_total",
            "counter",
            "",
            "starts after the first one, without those by a resume of the run",
        ),
    ),
    Figure(
        "step_s",
        "time per step",
        SECONDS,
        lambda island: island.step_s,
        column="time per\ninner step",
        wide=True,
        page=3,
        series=Series("diloco_island_step_seconds", "gauge", "seconds", "seconds of an inner step, moving average"),
    ),
    Figure(
        "up_bytes_per_s",
        "up per second",
        BYTES,
        lambda island: island.up_bytes_per_s,
        column="up\nper s",
        wide=True,
    ),
    Figure(
        "down_bytes_per_s",
        "down per second",
        BYTES,
        lambda island: island.down_bytes_per_s,
        column="down\nper s",
        wide=True,
    ),
    Figure(
        "up_bytes",
        "moved up",
        BYTES,
        lambda island: island.up_bytes,
        series=Series("diloco_island_received_bytes_total", "counter", "bytes", "bytes from all its hosts"),
    ),
    Figure(
        "down_bytes",
        "moved down",
        BYTES,
        lambda island: island.down_bytes,
        series=Series("diloco_island_sent_bytes_total", "counter", "bytes", "bytes to all its hosts"),
    ),
    Figure(
        "staleness",
        "global steps behind the syncer",
        PLAIN,
        lambda island: island.staleness,
        column="steps behind\nthe syncer",
        wide=True,
        series=Series(
            "diloco_island_staleness_rounds", "gauge", "rounds", "rounds closed since the newest that it had heard of"
        ),
    ),
    Figure(
        "tokens",
        "tokens",
        COUNT,
        lambda island: island.tokens,
        column="tokens",
        wide=True,
        series=Series("diloco_island_tokens_total", "counter", "tokens", "tokens trained on"),
    ),
    Figure(
        "grad_norm",
        "grad norm",
        DIGITS,
        lambda island: island.measured("grad_norm"),
        column="gradient\nnorm",
        wide=True,
        status=Words("grad norm {}", 4, unknown=False),
        series=Series("diloco_island_gradient_norm", "gauge", "", "norm of its gradient before clipping"),
    ),
    Figure(
        "learning_rate",
        "learning rate",
        DIGITS,
        lambda island: island.measured("learning_rate"),
        column="learning\nrate",
        wide=True,
        series=Series("diloco_island_learning_rate", "gauge", "", "learning rate of its inner optimizer"),
    ),
    Figure(
        "waiting_for_data",
        "waits for data",
        SHARE,
        lambda island: island.measured("waiting_for_data"),
        column="waits for\ndata",
        wide=True,
        series=Series(
            "diloco_island_data_wait_ratio",
            "gauge",
            "ratio",
            "share of its time in steps that it spent waiting for data",
        ),
    ),
    Figure(
        "broadcast_s",
        "broadcast takes",
        SECONDS,
        lambda island: island.broadcast_s,
        column="broadcast\ntakes",
        wide=True,
        page=7,
        series=Series(
            "diloco_island_broadcast_seconds",
            "gauge",
            "seconds",
            "way of a new version to it, moving average, at most tau steps",
        ),
    ),
    Figure(
        "drift_norm_ratio",
        "norm ratio of its contributions",
        MEAN,
        lambda island: island.drift_norm_ratio,
        column="norm\nratio",
        wide=True,
        series=Series(
            "diloco_island_drift_norm_ratio",
            "gauge",
            "ratio",
            "norm of its contributions over the median of their rounds, moving average",
        ),
    ),
    Figure(
        "drift_cosine",
        "cosine with the others",
        DIGITS,
        lambda island: island.drift_cosine,
        column="cosine with\nthe others",
        wide=True,
        series=Series(
            "diloco_island_drift_cosine",
            "gauge",
            "",
            "cosine of its contributions with the mean direction of the others, moving average",
        ),
    ),
    Figure(
        "device_bytes",
        "device memory",
        BYTES,
        lambda island: island.measured("device_bytes"),
        column="device\nmemory",
        wide=True,
        series=Series("diloco_island_device_memory_bytes", "gauge", "bytes", "memory in use on its fullest device"),
    ),
    Figure(
        "host_bytes",
        "CPU memory",
        BYTES,
        lambda island: island.measured("host_bytes"),
        column="host\nmemory",
        wide=True,
        series=Series(
            "diloco_island_host_memory_bytes", "gauge", "bytes", "memory of its process; of several, the leader's"
        ),
    ),
)


def computed(figures: Sequence[Figure[Facts]], file: File, facts: Facts) -> dict[str, float | None]:
    """Return the figures that a JSON file gets beside its facts, by name."""
    return {figure.name: figure.value(facts) for figure in figures if file in figure.files}


def with_figures(file: File, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status or a summary with the figures that are computed from its facts, of the run and of each island."""
    facts, learners = RunFacts.of(status), status["learners"]
    added = [computed(ISLAND_FIGURES, file, island) for island in facts.islands]
    if isinstance(learners, Mapping):
        rows: Any = {name: {**learners[name], **more} for name, more in zip(learners, added, strict=True)}
    else:
        rows = [{**row, **more} for row, more in zip(learners, added, strict=True)]
    return {**status, "learners": rows, **computed(RUN_FIGURES, file, facts)}


def texts(
    figures: Sequence[Figure[Facts]],
    facts: Facts,
    words: Callable[[Figure[Facts]], Words],
    *,
    over: bool = False,
    more: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the texts of the figures that have some.

    Args:
        words: returns which of a figure's words to write.
        over: whether the run is over, so that momentary figures are left out.
        more: text that follows the text of a figure, by name.
    """
    found: list[str] = []
    for figure in sorted(figures, key=lambda each: words(each).order):
        if over and figure.momentary:
            continue
        text = words(figure).text(figure.value(facts), figure.form) + more.get(figure.name, "")
        if found and text.startswith((",", " ")):
            found[-1] += text
        elif text:
            found.append(text)
    return found


def on_page(figures: Sequence[Figure[Facts]]) -> list[Figure[Facts]]:
    """Return the figures that the page shows, in its order."""
    return sorted((figure for figure in figures if figure.page), key=lambda figure: figure.page)


def compared() -> list[Figure[RunFacts]]:
    """Return the figures that runs are compared by, in their order."""
    return sorted((figure for figure in RUN_FIGURES if figure.compare), key=lambda figure: figure.compare)
