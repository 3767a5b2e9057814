"""Logs get a line when something changes: the right one, in the right order, and few of them."""

from typing import Any

from diloco_jax.protocol.watch.alarms import Alarm
from diloco_jax.runtime.records.liveness import StartPhase
from diloco_jax.tools.terminal.changes import FLAP_S, LINE_EVERY_S, Changes
from tests.tools.terminal.made import FRESH, STARTING, learner, status

SILENT = Alarm("silent", "island-1", "island-1 is silent: connected, but not heard for 7.0 s").as_dict()
JOINING = "alive, last heard 0.2 s ago; loads, compiles or downloads"
Moment = tuple[float, dict[str, Any] | None, list[StartPhase]]


def lines_of(moments: list[Moment]) -> list[str]:
    """The lines of looks at a run whose time is that of the looks."""
    changes = Changes(0.0)
    looks = (changes.look(state and state | {"wall_s": now_s}, phases, now_s) for now_s, state, phases in moments)
    return [line for line in looks if line]


def running(*conditions: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    rows = [learner(f"island-{number}", condition) for number, condition in enumerate(conditions)]
    return status(global_step=step, total_steps=1000, learners=rows, eval_loss=None) | fields


def test_the_lines_of_a_run() -> None:
    both, one, begun = ("training", "training"), ("training", "silent"), [learner("island-0"), FRESH]
    compiling = [StartPhase("island-0", f"compiling, {done} of 7 programs", 0.1) for done in range(4)]
    lines = lines_of(
        [
            (0.0, None, []),
            (1.0, None, [StartPhase("syncer", "importing JAX", 0.5)]),
            (2.0, STARTING, []),
            *((3.0 + n, STARTING, [phase]) for n, phase in enumerate(compiling)),
            *((8.0 + n, status(global_step=0, eval_loss=None, learners=begun), []) for n in range(3)),
            (60.0, running(*both, step=99), []),
            *((61.0 + n, running(*both, step=99), []) for n in range(3)),
            (65.0, running(*both, step=250), []),
            (66.0, running(*both, step=260, eval_loss=1.25, eval_step=256), []),
            (70.0, running(*one, step=270, eval_loss=1.25, eval_step=256, alarms=[SILENT]), []),
            (71.5, running(*one, step=270, eval_loss=1.25, eval_step=256, alarms=[SILENT]), []),
            (125.0, running(*both, step=280, eval_loss=1.25, eval_step=256), []),
            (126.0, running(*both, step=280, eval_loss=1.25, eval_step=256, state="complete"), []),
            (127.0, running("gone", "gone", step=280, eval_loss=1.25, eval_step=256, state="complete"), []),
        ]
    )
    remedy = "look at its process and its network; its log is in logs/ of the run's folder where it runs"
    assert lines == [
        "[start 1 s] syncer: importing JAX",
        "[start 2 s] quickstart is starting, waiting for: the first learner",
        "[start 3 s] island-0: compiling, 0 of 7 programs",
        "[8 s] quickstart is running",
        "[9 s] island-0 is training",
        f"[10 s] island-2 is joining: {JOINING}",
        "[1 min 00 s] island-1 is training",
        "[1 min 05 s] 25%, step 250 of 1,000, 2 of 2 islands active, 1.64M tokens at 26.5k/s, "
        "1.97 contributors per round, about 5 min 00 s left",
        "[1 min 06 s] evaluation loss 1.2500 of global step 256",
        f"[1 min 10 s] alarm: {SILENT['text']}; {remedy}",
        f"[2 min 05 s] alarm over: {SILENT['text']}",
        "[2 min 06 s] quickstart is complete",
    ]


def test_a_line_has_the_time_of_the_run_even_while_its_syncer_is_silent() -> None:
    changes = Changes(0.0)
    assert changes.look(None, [StartPhase("syncer", "importing JAX", 0.5)], 20.0).startswith("[start 20 s] syncer")
    told = running("training") | {"wall_s": 3.0}
    assert changes.look(told, [], 28.0) == "[3 s] quickstart is running"
    assert changes.look(told, [], 30.0) == "[5 s] island-0 is training"
    assert changes.look(told | {"state": "silent"}, [], 40.0).startswith("[15 s] quickstart is silent")


def test_nothing_is_said_while_nothing_changes() -> None:
    assert lines_of([(0.5 * n, running("training"), []) for n in range(1000)]) == [
        "[0 s] quickstart is running",
        "[1 s] island-0 is training",
    ]


def test_a_phase_that_lasts_gets_few_lines_with_its_newest_words() -> None:
    step, adopt = ("compiling, 0 of 7 are ready, now: step", "compiling, 1 of 7 are ready, now: adopt")
    slow: list[Moment] = [(float(n), None, [StartPhase("island-0", step, float(n))]) for n in range(45)]
    rest: list[Moment] = [(45.0 + n, None, [StartPhase("island-0", adopt, float(n))]) for n in range(45)]
    assert lines_of([*slow, *rest]) == [
        f"[start 0 s] island-0: {step}",
        f"[start 10 s] island-0: {step}, for 10 s",
        f"[start 20 s] island-0: {step}, for 20 s",
        f"[start 40 s] island-0: {step}, for 40 s",
        f"[start 1 min 20 s] island-0: {adopt}, for 35 s",
    ]


def test_there_is_at_most_one_line_in_a_second_and_what_is_over_is_not_told() -> None:
    phases = [StartPhase(f"island-{n}", "importing", 0.0) for n in range(5)]
    moments: list[Moment] = [(0.1 * n, STARTING, phases if n < 25 else []) for n in range(100)]
    assert lines_of(moments) == [
        "[start 0 s] quickstart is starting, waiting for: the first learner",
        "[start 1 s] island-0: importing",
        "[start 2 s] island-1: importing",
    ]
    assert LINE_EVERY_S == 1.0


def test_an_island_that_flaps_gets_few_lines() -> None:
    begin: list[Moment] = [(0.0, running("training"), []), (1.0, running("training"), [])]
    flaps: list[Moment] = [(100.0 + 2 * n, running(("joining", "training")[n % 2]), []) for n in range(30)]
    lines = lines_of([*begin, *flaps])
    assert lines == [
        "[0 s] quickstart is running",
        "[1 s] island-0 is training",
        f"[1 min 40 s] island-0 is joining: {JOINING}",
        "[1 min 42 s] island-0 is training",
        f"[2 min 12 s] island-0 is joining: {JOINING} (15 changes in 30 s)",
        "[2 min 14 s] island-0 is training",
    ]
    assert FLAP_S == 30.0


def test_an_alarm_that_was_never_told_is_not_told_to_be_over() -> None:
    busy = [Alarm("slow", f"island-{n}", f"island-{n} is slow").as_dict() for n in range(2)]
    moments: list[Moment] = [(0.0, running(alarms=busy), []), (0.5, running(), []), (5.0, running(), [])]
    assert lines_of(moments) == ["[0 s] quickstart is running"]


def test_an_evaluation_is_not_a_change_of_an_island() -> None:
    asked = [learner("island-0") | {"condition": "evaluating", "reason": "between two steps"}]
    moments: list[Moment] = [(float(n), running("training"), []) for n in range(3)]
    assert len(lines_of([*moments, (9.0, running(learners=asked), [])])) == 2
