"""The table of families in docs/models.md: its rows are those of families.yaml, its last column is measured."""

from collections.abc import Mapping
from pathlib import Path

from diloco_jax.training.convert.table import FAMILIES, SEEING

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
HEAD = """| family | `model_type` | for example | not supported | difference |
|---|---|---|---|---|
"""
# The largest difference of two logits that the tests accept, in standard deviations of all logits.
LIMIT = 2e-5


def rows(errors: Mapping[str, float]) -> str:
    """The table, with the largest error of each family."""
    lines = []
    for name, family in FAMILIES.items():
        types = [name, *(outer for outer, seeing in SEEING.items() if seeing["text"] == name)]
        error = f"{errors[name]:.1e}".replace("e-0", "e-")
        shown = ", ".join(f"`{one}`" for one in types)
        lines.append(f"| {family.models} | {shown} | `{family.example}` | {family.without} | {error} |\n")
    return HEAD + "".join(lines)


def listed() -> tuple[str, dict[str, float]]:
    """The table that the page has, and the error in it for each family."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(HEAD) :].split("\n\n")[0] + "\n"
    cells = [line.split("|") for line in table.removeprefix(HEAD).splitlines()]
    return table, {row[2].split("`")[1]: float(row[5]) for row in cells}


def bless(errors: Mapping[str, float]) -> None:
    """Write the table into the page; families that were not measured keep their figures."""
    table, old = listed()
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(table, rows(dict.fromkeys(FAMILIES, 0.0) | old | errors)), encoding="utf-8")
