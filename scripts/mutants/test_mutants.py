"""Each kind of fault changes what a function returns, and notes name the function that runs."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from mutants import notes
from mutants.draw import draw, mutate, places, probe

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
def f(a, b):
    'A docstring 7.'
    log.info(f"no place {a + 1}")
    found = []
    if a < b and a:
        found.append(b - 3)
    return found
"""
# Results of f(1, 5) and f(5, 5) with the fault of each place, in the order of the source.
RESULTS = [([], [2]), ([2], [2]), ([2], [2]), ([], []), ([8], []), ([1], []), (None, None)]


def run(tree: ast.Module) -> object:
    namespace: dict[str, Any] = {"log": type("Log", (), {"info": print})}
    exec(compile(tree, "f", "exec"), namespace)
    return namespace["f"](1, 5), namespace["f"](5, 5)


def test_every_place_of_a_function_is_found_once_and_changes_it() -> None:
    found = [run(mutate(ast.parse(SOURCE), place)) for place, _ in enumerate(places(ast.parse(SOURCE)))]
    assert run(ast.parse(SOURCE)) == ([2], [])
    assert found == RESULTS


def test_a_note_names_the_test_that_runs_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse("LIMIT = 3\n" + SOURCE)
    assert probe(tree, {0: 10, 3: 11}) == {10}, "a statement outside of functions cannot be noted"
    monkeypatch.setenv("MUTANT_NOTES", str(tmp_path / "notes"))
    monkeypatch.syspath_prepend(ROOT)
    assert run(tree) == ([2], [])
    monkeypatch.setattr(notes, "_noted", set())
    name, test = (tmp_path / "notes").read_text().rstrip().split("\t")
    assert name == "11" and test.endswith("test_a_note_names_the_test_that_runs_the_function")


def test_what_runs_at_an_import_is_for_all_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_noted", set())
    monkeypatch.setenv("MUTANT_NOTES", str(tmp_path / "notes"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "computed_at_import.py").write_text("from mutants import notes\nnotes.note(3)\n")
    importlib.import_module("computed_at_import")
    assert (tmp_path / "notes").read_text() == f"3\t{notes.ALL}\n"


def test_a_seed_draws_the_same_mutants_of_every_room() -> None:
    first = draw(ROOT, 8, seed=5)
    assert first == draw(ROOT, 8, seed=5) != draw(ROOT, 8, seed=6)
    assert [mutant.path.split("/")[1] for mutant in first[::2]] == ["protocol", "core", "runtime", "transport"]
    assert all(mutant.before != mutant.after for mutant in first)
