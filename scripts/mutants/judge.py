"""Runs tests against one mutant, in a copy of the tree: only the tests that reach it, the cheapest first."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.draw import Mutant, mutate, probe
from mutants.notes import ALL

COPIED = ("diloco_jax", "tests", "scripts", "configs", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
CHOICE = "not (long or nightly or slow or trainers or device)"
# Tests of the sources' text fail for every changed file; they say nothing about behaviour.
TEXT_TESTS = ("tests/test_tidy.py", "tests/test_layers.py", "tests/test_pages.py", "tests/test_docs.py")
# A mutant that never ends is killed as well: its tests may take ten times their usual time, and a start of Python.
START_S, SLOWER, SUITE_HANGS_S = 60.0, 10.0, 3600.0


def copy_tree(root: Path, tests: Path, to: Path) -> Path:
    """Copy the package and its tests to a folder; `tests` may be another checkout's root."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in COPIED:
        source = (tests if name == "tests" else root) / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    shutil.copytree(root / "scripts" / "mutants", to / "scripts" / "mutants", dirs_exist_ok=True)
    return to


def pytest(tree: Path, arguments: Sequence[str], limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Run pytest in a copy; returns its exit status (None if it hung) and the end of its output."""
    variables = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"} | environment
    # Bytecode is used again for a source of equal size and second, and a mutant may be one.
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    # A separate process group, so that what a hanging test started ends with it.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", CHOICE, *arguments],
        cwd=tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told, _ = process.communicate(timeout=limit_s)
        return process.returncode, told
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, f"no end within {limit_s:.0f} s"


def reaching(tree: Path, mutants: Sequence[Mutant], notes: Path) -> tuple[dict[int, set[str]], dict[str, float]]:
    """Run the whole suite once with notes: which tests reach each mutant, and what each passed test costs in seconds.

    A mutant that cannot take notes, or runs at an import, reaches all tests of its room.
    """
    unnoted: set[int] = set()
    by_path: dict[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_path[mutant.path].append(number)
    for path, numbers in by_path.items():
        parsed = ast.parse((tree / path).read_text())
        unnoted |= probe(parsed, {mutants[number].place: number for number in numbers})
        (tree / path).write_text(ast.unparse(parsed))
    notes.write_text("")
    result = notes.with_suffix(".json")
    # Tests of another checkout may import what this package has no more.
    arguments = ["-n", "2", "--dist", "loadfile", "--continue-on-collection-errors", "-p", "scripts.mutants.passed"]
    pytest(tree, [*arguments, "tests"], SUITE_HANGS_S, MUTANT_NOTES=str(notes), MUTANT_PASSED=str(result))
    passed: dict[str, float] = json.loads(result.read_text())
    passed = {test: cost for test, cost in passed.items() if not test.startswith(TEXT_TESTS)}
    reached: dict[int, set[str]] = defaultdict(set)
    for line in notes.read_text().splitlines():
        number, _, test = line.partition("\t")
        reached[int(number)].add(test)
    for number in unnoted | {number for number, tests in reached.items() if ALL in tests}:
        room = mutants[number].path.split("/")[1]
        reached[number] |= {test for test in passed if test.startswith((f"tests/{room}/", "tests/sim/"))}
    return {number: reached[number] & set(passed) for number in range(len(mutants))}, passed


def killed_by(tree: Path, mutant: Mutant, tests: Sequence[str], seconds: Mapping[str, float]) -> str:
    """Return the test that fails on a mutant, or how else it was found; "" if it survives.

    Args:
        seconds: What each test usually takes.
    """
    if not tests:
        return ""
    file = tree / mutant.path
    source = file.read_text()
    file.write_text(ast.unparse(mutate(ast.parse(source), mutant.place)))
    chosen = tree / "tests_of_a_mutant.txt"
    try:
        # In two parts: most mutants die early, and a start collects only the files that it is given.
        for part in (tests[:60], tests[60:]):
            if part:
                chosen.write_text("\n".join(part) + "\n")
                limit_s = START_S + SLOWER * sum(seconds[test] for test in part)
                status, told = pytest(tree, ["-x", "-n", "0", f"@{chosen.name}"], limit_s)
                if status is None:
                    return "hangs"
                if status != 0:
                    failed = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
                    return failed[0].split(" - ")[0] if failed else f"status {status}"
        return ""
    finally:
        file.write_text(source)
