"""The suite's budget: what is added up, what exceeds it, what was left out; and CI runs what README prints."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import meter
from tests.meter import READINGS, Meter, folder_of, problems, read_budget

ROOT = Path(__file__).resolve().parent.parent


def report(test: str, *spent_s: float, reason: str = "") -> Any:
    properties = [("processor_s", each) for each in spent_s]
    return SimpleNamespace(nodeid=test, user_properties=properties, skipped=bool(reason), longrepr=reason)


def measured() -> Meter:
    found = Meter(SimpleNamespace())  # type: ignore[arg-type]
    # Each phase repeats the properties of the phases before it.
    for spent_s in ([1.0], [1.0, 2.0], [1.0, 2.0, 0.5]):
        found.pytest_runtest_logreport(report("tests/core/test_a.py::test_b[c/d]", *spent_s))
    found.pytest_runtest_logreport(report("tests/test_e.py::test_f", 4.0, reason="the extra ray is not installed"))
    worker = {"meter": [8.0, [1.0, 2.0, 2.0, 9.0], {"long": 3}, ["parity"]]}
    found.pytest_testnodedown(SimpleNamespace(workeroutput=worker))
    return found


def test_sums_are_of_all_phases_by_folder() -> None:
    assert measured().sums() == {"collection": 8.0, "core": 3.5, "tests": 4.0}


def test_a_test_is_divided_by_the_machines_pace_while_it_ran() -> None:
    # The machine is at the budget's pace until the second test begins, then three times slower. Each works for 6 s.
    spent_s = iter([10.0, 10.0, 10.0, 10.0, 16.0, 16.0, 16.0, 16.0, 22.0])
    paces = iter([1.0] * READINGS + [3.0] * READINGS)
    found = Meter(SimpleNamespace(), lambda: next(spent_s), lambda: next(paces))  # type: ignore[arg-type]
    found.pytest_collection_finish()
    assert found.collection == 10.0
    for at_its_pace_s in (6.0, 6.0 / 1.4):
        next(found.pytest_runtest_protocol())
        said = report("tests/core/test_a.py::test_b")
        phase = found.pytest_runtest_makereport()
        next(phase)
        with pytest.raises(StopIteration):
            phase.send(said)
        assert said.user_properties == [("processor_s", pytest.approx(at_its_pace_s))]


def test_the_last_line_names_what_was_left_out_and_how_to_run_it() -> None:
    line = measured().not_run()
    assert "extras parity,ray (DILOCO_EXTRAS=test,parity,ray ./scripts/test)" in line
    assert "3 long (./scripts/test -m long)" in line and "slow" not in line


def test_a_folder_above_its_row_or_without_one_is_named() -> None:
    budget = {"core": 2.0, "tests": 1.9, "sim": 5.0}
    rows = {"core": 3.0 + meter.NOISE_S, "tests": 3.0 + meter.NOISE_S, "new": 0.1}
    found = problems(rows, budget, 1.0)
    assert len(found) == 2 and "tests takes 6.0 s" in found[0] and "new has no row" in found[1]
    assert len(problems(rows, budget, 1.1)) == 1, "a slower machine is slower by different amounts"


def test_ci_ends_with_status_1_if_a_folder_exceeds_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "suite.json"
    monkeypatch.setattr("sys.argv", ["meter", str(result)])
    monkeypatch.setattr(meter, "read_budget", lambda: {"core": 2.0})
    for spent_s, status in ((3.0 + meter.NOISE_S, 0), (3.1 + meter.NOISE_S, 1)):
        result.write_text(json.dumps({"folders": {"core": spent_s}, "pace": 1.0}))
        assert meter.main() == status
    assert "core takes 6.1 s of processor time, its budget is 2 s" in capsys.readouterr().err


def test_the_budget_has_every_folder_and_at_most_600_s() -> None:
    budget = read_budget()
    assert sum(budget.values()) <= 600
    found = {folder_of(str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("test_*.py")}
    assert found <= set(budget), f"add rows: {sorted(found - set(budget))}"


def test_ci_runs_the_commands_of_readme_as_printed_in_a_fresh_clone_without_extras() -> None:
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    before, _, rest = script.partition('git clone --quiet . "$fresh/diloco_jax"')
    fresh = rest.partition("mapfile")[0]
    assert "unset DILOCO_EXTRAS DILOCO_VENV" in before and "DILOCO_" not in fresh
    for command in ("./scripts/train configs/quickstart.yaml", "./scripts/test"):
        assert command in readme and f'" {command}' in fresh
