"""Processor time of the suite: what each test, folder and collection costs, and what was not run.

The suite prints the sums by folder and its dearest tests, and keeps them in build/suite.json. CI compares this file
with the committed budget: `python tests/meter.py` ends with status 1 if a folder costs half as much again as its row in
tests/budget.toml. Processor time is that of the worker and of the processes that a test started and waited for. Each
test's is divided by the machine's pace while it ran, so that a slow machine does not exceed a budget that was measured
on another one. The division is exact only on a machine like that one: where the loop of `pace` took twice as long,
other processes with JAX took 2.2, the simulator 3.6 and the compiler of Numba 4.0 times as long. So what a folder may
take grows with the pace of the whole run again.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "build" / "suite.json"
BUDGET = Path(__file__).with_name("budget.toml")
DEAREST = 20
# What the work of `pace` takes on an idle core of the machine that measured the budget.
PIECE_S = 0.022
# The pace is read again after so much processor time. A shared machine changes it by half within seconds, so a test is
# divided by the mean of the last readings.
READ_EVERY_S = 2.0
READINGS = 5
MISSING = re.compile(r"the extra ([\w-]+) is not installed")
# By mark: the command that runs what the default selection leaves out.
LEFT_OUT = {
    "long": "./scripts/test -m long",
    "nightly": "./scripts/check nightly",
    "slow": "./scripts/test -m slow",
    "trainers": "./scripts/test -m trainers",
    "device": "./scripts/test -m device",
}
COLLECTION = "collection"
# CI fails if a folder takes more than this many times its row and NOISE_S. Two runs of one commit, both at the pace of
# the budget, differed by 37 % in a folder, because other programs share the caches. A folder that grows by less is
# marked in the table, and the person who adds the next test to it pays for it.
NOISE = 1.5
# Folders with little time vary by more.
NOISE_S = 3.0


def processor_s() -> float:
    """Return the processor time of this process and of its ended children, in seconds."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def pace() -> float:
    """Return how many times longer a fixed piece of work takes now than where the budget was measured."""
    begun_s = time.process_time()
    table = {}
    for number in range(200_000):
        table[number & 1023] = str(number)
    return (time.process_time() - begun_s) / PIECE_S


def folder_of(test: str) -> str:
    """Return the row of the budget that pays for a test: the folder of its file."""
    path = Path(test.split("::")[0])
    parts = path.parts[1:-1] if path.parts[0] == "tests" else path.parts[:-1]
    return "/".join(parts) or "tests"


class Meter:
    """Measures in the process that runs tests, and adds up and prints in the process that a person started."""

    def __init__(
        self, config: pytest.Config, clock: Callable[[], float] = processor_s, reading: Callable[[], float] = pace
    ) -> None:
        self.config = config
        self.clock = clock
        self.reading = reading
        self.is_worker = hasattr(config, "workerinput")
        self.mark_s = 0.0
        self.read_s = 0.0
        self.tests: Counter[str] = Counter()
        self.collection = 0.0
        self.paces: list[float] = []
        self.left_out: Counter[str] = Counter()
        self.missing: set[str] = set()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.left_out.update(name for name in LEFT_OUT if item.get_closest_marker(name))

    def pytest_collection_finish(self) -> None:
        spent_s = self.clock()
        self.paces = [self.reading() for _ in range(READINGS)]
        self.collection = spent_s / self.slower()
        self.read_s = self.clock()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        if self.clock() - self.read_s > READ_EVERY_S:
            self.paces.append(self.reading())
            self.read_s = self.clock()
        self.mark_s = self.clock()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = self.clock()
        report.user_properties.append(("processor_s", (now_s - self.mark_s) / self.slower()))
        self.mark_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A later phase repeats the properties of the earlier ones, and its own is the last.
        spent = [value for name, value in report.user_properties if name == "processor_s"]
        if spent:
            self.tests[report.nodeid] += spent[-1]
        self.note_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note_skip(report)

    def note_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and (found := MISSING.search(str(report.longrepr))):
            self.missing.add(found[1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            output: dict[str, Any] = self.config.workeroutput  # type: ignore[attr-defined]
            output["meter"] = [self.collection, self.paces, dict(self.left_out), sorted(self.missing)]

    # This hook is part of pytest-xdist, which the environments of other trainers do not have.
    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        collection_s, paces, left_out, missing = getattr(node, "workeroutput", {}).get("meter", (0.0, [], {}, []))
        self.collection += collection_s
        self.paces += paces
        self.left_out |= Counter(left_out)
        self.missing.update(missing)

    def slower(self) -> float:
        """Return by what a test's time is divided: the mean of the last readings, at least 1."""
        return max(1.0, statistics.fmean(self.paces[-READINGS:]))

    def sums(self) -> dict[str, float]:
        """Return processor time by row of the budget, in seconds at the pace of the budget's machine."""
        rows: dict[str, float] = defaultdict(float)
        for test, spent_s in self.tests.items():
            rows[folder_of(test)] += spent_s
        rows[COLLECTION] = self.collection
        return dict(sorted(rows.items()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.is_worker or self.config.option.collectonly or not self.tests:
            return
        rows = self.sums()
        kept: dict[str, Any] = {
            "folders": rows,
            "tests": dict(self.tests.most_common()),
            "missing": sorted(self.missing),
            "pace": max(1.0, statistics.fmean(self.paces or [1.0])),
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(kept, indent=1))
        if sum(rows.values()) > 60:
            terminalreporter.section("processor time, s")
            for line in table(rows, read_budget(), kept["pace"]):
                terminalreporter.write_line(line)
            terminalreporter.write_line(f"the {DEAREST} dearest tests:")
            for test, spent_s in self.tests.most_common(DEAREST):
                terminalreporter.write_line(f"{spent_s:8.1f}  {test}")
        if line := self.not_run():
            terminalreporter.config.add_cleanup(lambda: print(line, flush=True))

    def not_run(self) -> str:
        """Return the sentence that names what this selection left out, and how to run it; empty if nothing."""
        said = []
        if self.missing:
            extras = ",".join(sorted(self.missing))
            said.append(f"tests of the extras {extras} (DILOCO_EXTRAS=test,{extras} ./scripts/test)")
        said += [
            f"{self.left_out[name]} {name} ({command})" for name, command in LEFT_OUT.items() if self.left_out[name]
        ]
        return f"not run here: {'; '.join(said)}" if said else ""


def read_budget() -> dict[str, float]:
    return tomllib.loads(BUDGET.read_text())["processor_s"] if BUDGET.exists() else {}


def table(rows: dict[str, float], budget: dict[str, float], slower: float) -> list[str]:
    """Return the lines of the table: processor time, budget, and a mark where the first exceeds the second.

    Args:
        slower: The mean pace of the run, at least 1.
    """
    lines = [f"the machine was {slower:.2f} times slower than that of the budget"] if slower > 1.0 else []
    for name, spent_s in [*rows.items(), ("sum", sum(rows.values()))]:
        allowed_s = sum(budget.values()) if name == "sum" else budget.get(name)
        exceeds = allowed_s is not None and spent_s > allowed_s * slower + NOISE_S
        mark = "  exceeds its budget" if exceeds else ""
        lines.append(f"{spent_s:8.1f} of {'none' if allowed_s is None else f'{allowed_s:.0f}':>4}  {name}{mark}")
    return lines


def problems(rows: dict[str, float], budget: dict[str, float], slower: float) -> list[str]:
    """Return one sentence for each folder that exceeds its row of the budget or has none; `slower` as for `table`."""
    found = []
    for name, spent_s in rows.items():
        if name not in budget:
            found.append(f"{name} has no row in tests/budget.toml and takes {spent_s:.1f} s of processor time; add one")
        elif spent_s > budget[name] * slower * NOISE + NOISE_S:
            found.append(
                f"{name} takes {spent_s:.1f} s of processor time, its budget is {budget[name]:.0f} s; "
                "make its tests cheaper (build/suite.json has each), or raise the row and say why in the commit"
            )
    return found


def main() -> int:
    """Compare the last whole run of the suite with the committed budget."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("result", nargs="?", type=Path, default=RESULT, help="what the suite measured")
    kept = json.loads(parser.parse_args().result.read_text())
    rows, slower = kept["folders"], kept["pace"]
    print("\n".join(table(rows, read_budget(), slower)))
    found = problems(rows, read_budget(), slower)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
