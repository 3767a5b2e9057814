"""The picture of a run says what matters, in as much room as there is."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.figures.forms import format_bytes, format_count, format_duration
from diloco_jax.runtime.records.liveness import StartPhase
from diloco_jax.tools.terminal.picture import History, render, sparkline
from diloco_jax.tools.terminal.words import alarm_line, describe, ended_line, ended_lines
from tests.tools.terminal.made import FRESH, REASONS, STARTING, drawn, learner, status, words

COUNTS = {0: "0", 950: "950", 999.6: "1k", 1234: "1.23k", 45.6e6: "45.6M", 999_499: "999k", 3e15: "3000T"}
BYTES = {0: "0 B", 999: "999 B", 123_456_789: "123 MB", 1.5e9: "1.5 GB"}
DURATIONS = {-1: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 125: "2 min 05 s", 3599.7: "1 h 00 min", 187_200: "2 d 04 h"}


@pytest.mark.parametrize(
    ("form", "texts"), [(format_count, COUNTS), (format_bytes, BYTES), (format_duration, DURATIONS)]
)
def test_numbers_in_words(form: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {value: form(value) for value in texts} == texts


@given(st.floats(min_value=0, max_value=1e14))
def test_a_count_stays_near_its_value(value: float) -> None:
    text = format_count(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    number = float(text.rstrip("kMGT")) * scale
    assert abs(number - value) <= max(0.5, 0.0051 * value)


ROUNDS = "waiting for: round 401: quorum 0 of 1"


def test_the_picture_shows_run_and_islands() -> None:
    island = learner("island-1", "silent", restarts=2, participation=0.5, last_merged_round=321)
    text = drawn(render(status(learners=[learner("island-0"), island, FRESH]), 80), 80)
    for part in (
        "quickstart running",
        "25%, step 400 of 1,600",
        "1 min 40 s, about 5 min 00 s left",
        ROUNDS,
        "1.64M tokens, 26.5k/s · eval loss 1.8500 · 1.97 contributors per round · up 123 MB, down 987 B",
    ):
        assert part in words(text)
    rows = [words(row) for row in text.splitlines() if row.startswith("island-")]
    assert rows == [
        "island-0 training 410 13.2k 1.900 409 98% 0",
        "island-1 silent 1m 410 13.2k 1.900 321 50% 2",
        "island-2 joining 1m 0 0 – – 98% 0",
    ]


def test_long_runs_have_separators_and_decimals() -> None:
    for step, told in ((715, "0.07%, step 715"), (16_400, "1.6%, step 16,400"), (0, "0%, step 0")):
        run = status(global_step=step, total_steps=1_000_000, learners=[learner("island-0", local_step=123_456)])
        text = words(drawn(render(run, 80), 80))
        assert f"{told} of 1,000,000" in text and "island-0 training 123,456 13.2k" in text
    assert "global step 16,400 of 1,000,000 (1.6%) after" in describe(status(global_step=16_400, total_steps=10**6))


def test_sizes_are_written_with_their_units() -> None:
    sizes = {"host_bytes": 3.397e8, "device_bytes": 1.2e10, "device_bytes_peak": 1.4e10}
    text = drawn(render(status(learners=[learner("island-0", metrics=sizes)]), 160), 160)
    row = next(words(line) for line in text.splitlines() if line.startswith("island-0"))
    assert row.endswith("420k 12 GB 340 MB 14 GB") and "steps behind" in text


METRICS = {"mfu": 0.413, "grad_norm": 0.51, "learning_rate": 3e-3, "waiting_for_data": 0.012, "router_entropy": 1.5}


def test_a_wide_terminal_shows_more_with_its_units() -> None:
    rows = [learner("island-0", metrics=METRICS, broadcast_s=0.25), learner("island-1")]
    at_120, at_200 = (drawn(render(status(learners=rows), width), width) for width in (120, 200))
    first, second = (
        [words(row) for row in text.splitlines() if row.startswith("island-")] for text in (at_120, at_200)
    )
    assert first[0] == "island-0 training 410 41% 13.2k 1.900 409 98% 0 0.3 s 1 420k 0.51 0.003"
    assert second == [
        "island-0 training 410 41% 13.2k 1.900 409 98% 0 0.3 s 1 420k 0.51 0.003 1.2% 0.25 s 1.5",
        "island-1 training 410 – 13.2k 1.900 409 98% 0 0.3 s 1 420k – – – – –",
    ]


def test_a_wide_terminal_shows_the_bytes_per_second_of_each_link() -> None:
    moved = {"up_bytes_per_s": 1_234_567.8, "down_bytes_per_s": 0.0}
    islands = [learner("island-0", metrics=METRICS, **moved), learner("island-1", "gone", up_bytes_per_s=None)]
    at_80, at_120, at_160 = (drawn(render(status(learners=islands), width), width) for width in (80, 120, 160))
    assert "per s per s" not in at_80 and "1.23 MB" not in at_80
    for text in (at_120, at_160):
        first, second = ([*words(row).split()] for row in text.splitlines() if row.startswith("island-"))
        assert " ".join(first).startswith("island-0 training 410 41% 13.2k 1.900 409 98% 0 0.3 s 1.23 MB 0 B")
        assert " ".join(second).startswith("island-1 disconnected 1m 410 – 13.2k 1.900 409 98% 0 0.3 s – –")
    assert "420k" not in at_120 and "1 420k" in words(at_160)
    # Nobody knows them of a run that is over, or of an older version.
    assert "per s per s" in at_120 and "per s per s" not in drawn(render(status(), 160), 160)


names = st.text("abc-0123456789", min_size=1, max_size=8)
counts = st.integers(0, 10**6)
rows = st.builds(
    learner,
    names,
    st.sampled_from(sorted(REASONS)),
    local_step=counts,
    since_s=st.floats(0, 1e6),
    metrics=st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(0, 1)),
)


@pytest.mark.parametrize("width", [80, 120, 200])
@given(
    learners=st.lists(rows, max_size=4),
    step=st.integers(0, 10**7),
    losses=st.lists(st.floats(0, 10), min_size=2, max_size=99),
)
def test_no_line_is_wider_than_the_terminal(
    width: int, learners: list[dict[str, Any]], step: int, losses: list[float]
) -> None:
    run = status(learners=learners, global_step=step, total_steps=10**7)
    run["alarms"] = [Alarm("silent", "island-1", f"island-1 is silent: {REASONS['silent']}").as_dict()]
    phases = [StartPhase("compiler-island-0", "compiling, 3 of 7 programs", 4.0)]
    curves = {"training loss": losses, "evaluation loss": losses, "tokens/s": losses}
    text = drawn(render(run, width, curves=curves, span_s=2500.0, phases=phases), 2 * width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and "alarm: island-1 is silent" in text


def test_numbers_stay_with_their_units() -> None:
    waiting = "round 401: quorum 0 of 1 for 12.5 s, while the grace window of at most 3.25 s is open for island-1"
    for width in range(24, 60):
        lines = [line.rstrip() for line in drawn(render(status(waiting_for=waiting), width), 200).splitlines()]
        assert not [line for line in lines if line.endswith(("12.5", "3.25", "up 123", "down 987"))], width


def test_the_status_tells_the_time_left() -> None:
    """So that every view shows the same one."""
    for tell in (describe, lambda state: drawn(render(state, 120))):
        assert "about 2 min 00 s left" in tell(status(left_s=120.0))
        for over in (status(left_s=None), status(state="complete", global_step=1600)):
            assert " left" not in tell(over)


ENDED = {
    "kind": "gone",
    "who": "island-2",
    "text": "island-2 is disconnected: no connection",
    "remedy": "look at its machine",
}
ENDED |= {"from_s": 138.0, "until_s": 154.0, "lasted_s": 16.0, "times": 1, "stands": False}
ENDED |= {"past": "island-2 was disconnected"}


def test_an_alarm_that_ended_is_told_in_the_past_and_once() -> None:
    line = "ended: island-2 was disconnected for 16 s, from 2 min 18 s to 2 min 34 s of the run"
    for tell in (describe, lambda state: words(drawn(render(state, 200)))):
        text = tell(status(episodes=[ENDED]))
        assert text.count(line) == 1 and "alarm" not in text and "look at" not in text
    assert alarm_line(ENDED) == line
    again = ended_line(ENDED | {"times": 3, "lasted_s": 40.0})
    assert again == line.replace("16 s, from", "40 s, in all, 3 times, most recently from")
    assert alarm_line(ENDED | {"stands": True}) == f"alarm: {ENDED['text']} (for 16 s); look at its machine"
    many = [ENDED | {"until_s": float(second)} for second in range(200, 206)]
    assert ended_lines(many)[0] == "ended before: 2 more alarms" and len(ended_lines(many)) == 5
    old = {key: value for key, value in ENDED.items() if key != "past"}
    assert ended_line(old).startswith("ended: island-2 is disconnected: no connection for 16 s"), "of an older version"


def test_an_island_that_finished_is_not_away() -> None:
    row = learner("island-0", "gone", since_s=2.0, finished=True, tokens_per_s=0.0, local_step=599)
    over = status(state="complete", global_step=1600, learners=[row])
    line = (
        "island-0 finished after inner step 599, 12k tokens/s on average; last merged in round 409, participation 98%"
    )
    assert words(describe(over).splitlines()[-1]) == line and "now" not in describe(over)
    assert "island-0 finished 599 12k 1.900 409 98% 0" in words(drawn(render(over, 80), 80))


def test_a_run_that_starts_says_what_happens() -> None:
    text = drawn(render(STARTING, 80))
    assert "no island has connected yet" in text and "waiting for: the first learner" in text
    assert "partici" not in text and "left" not in text
    phases = [StartPhase("island-0", "compiling, 3 of 7 programs", 4.2), StartPhase("island-1", "importing", 61.0)]
    text = drawn(render(STARTING, 80, phases=phases))
    assert "island-0  compiling, 3 of 7 programs  4 s" in text and "no island has" not in text
    assert "island-1 importing 1 min 01 s" in words(text)


def test_more_inner_than_global_steps_are_explained_to_newcomers() -> None:
    ahead = "island-1 has made 1549 inner steps in a run of 1500 global steps: the syncer counts"
    run = status(total_steps=1500, learners=[learner("island-0"), learner("island-1", local_step=1549)])
    assert ahead in words(drawn(render(run, 80), 80))
    run["learners"][1]["local_step"] = 1500
    assert "inner steps" not in words(drawn(render(run, 80), 80))


def test_sparklines_go_from_the_least_to_the_greatest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([4, 4], 8) == "▁▁"
    assert sparkline([8, 6, 1, 1, 0, 0], 3) == "█▂▁"
    assert len(sparkline(list(range(1000)), 36)) == 36


def test_curves_keep_the_whole_run_in_few_points() -> None:
    history = History()
    assert history.curves() == {}
    for step in range(5000):
        row = learner("island-0", loss=float(5000 - step))
        lost = [learner("island-1", "gone", loss=1e9), learner("island-2", loss=None)]
        history.add(status(wall_s=0.5 * step, global_step=step, learners=[row, *lost], eval_loss=2.0 - (step > 2500)))
    curves = history.curves()
    assert curves["evaluation loss"] == (2.0, 1.0)
    losses = curves["training loss"]
    assert 200 < len(losses) <= 512 and losses[0] > 4900 and losses[-1] < 100
    assert list(losses) == sorted(losses, reverse=True), "none is of the islands that are away"
    assert history.span_s == 0.5 * 4999
    text = words(drawn(render(status(), 80, curves=curves, span_s=history.span_s), 80))
    assert f"last 41 min 40 s: training loss {losses[0]:.3f}" in text, "what the first number belongs to"
    shown = drawn(render(status(), 80, curves=curves), 80)
    assert "evaluation loss 2.000 █▁ 1.000" in shown and "tokens/s 26" not in shown
    assert "tokens/s 26.5k ▁" in drawn(render(status(), 160, curves=curves), 160)


def test_what_comes_next_is_shown_while_the_run_trains() -> None:
    due = {"evaluation": 1500, "snapshot": 1600}
    assert "next: evaluation at step 1,500, snapshot at step 1,600" in drawn(render(status(upcoming=due), 80))
    assert "next:" not in drawn(render(status(state="complete", upcoming=due), 80))
    assert "next:" not in drawn(render(status(upcoming={}), 80)) and "next:" not in drawn(render(status(), 80))


@pytest.mark.parametrize("width", [40, 50, 60])
def test_a_curve_stays_on_one_line_of_a_narrow_terminal(width: int) -> None:
    curves = {"training loss": [5.0 - n / 100 for n in range(200)]}
    (line,) = [
        each for each in drawn(render(status(), width, curves=curves), width).splitlines() if "training loss" in each
    ]
    assert line.rstrip().endswith("3.010") and len(line.rstrip()) <= width


def test_text_from_outside_is_not_markup() -> None:
    odd = status(run="[bold]x[/bold]", waiting_for="[red]y", learners=[learner("[link=z]a")])
    text = drawn(render(odd, 120))
    for part in ("[bold]x[/bold]", "[red]y", "[link=z]a"):
        assert part in text


def test_describe_says_which_island_which_condition_since_when() -> None:
    rows = [learner("island-0"), learner("island-1", "silent", since_s=7), FRESH]
    rows.append(learner("island-10", "gone", restarts=1, last_merged_round=5))
    lines = describe(status(learners=rows)).splitlines()
    assert lines[0].startswith("quickstart is running: global step 400 of 1,600 (25%) after 1 min 40 s, about")
    assert lines[1] == "waiting for: round 401: quorum 0 of 1"
    islands = [words(text) for text in lines[4:]]
    training = (
        "training for 1 min 32 s: inner step 410, loss 1.900, 13.2k tokens/s; last heard 0.1 s ago; last merged in"
    )
    assert islands[0].startswith(f"island-0 {training}")
    assert islands[1].startswith(f"island-1 silent for 7 s after inner step 410; {REASONS['silent']}; last merged in")
    assert islands[2].startswith(
        f"island-2 joining for 1 min 32 s after inner step 0; {REASONS['joining']}; never merged"
    )
    assert islands[3].startswith("island-10 disconnected for 1 min 32 s")
    on_this_machine = describe(status(learners=[learner("island-0", process=1234)])).splitlines()[-1]
    assert on_this_machine.endswith("participation 98%; process 1234")
    assert islands[3].endswith("last merged in round 5, participation 98%, 1 restart")
    assert describe(STARTING).splitlines()[-1] == "no island has connected yet"


def test_what_is_wrong_with_the_syncer_is_told() -> None:
    alarm = Alarm("tape", "", "the tape cannot be written: No space left on device").as_dict()
    for tell in (describe, lambda state: words(drawn(render(state, 120)))):
        assert f"alarm: {alarm['text']}" in tell(status(alarms=[alarm]))
        assert "alarm" not in tell(status())
