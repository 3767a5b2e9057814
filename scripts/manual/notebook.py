"""Run docs/notebook.ipynb from its first cell to its last, and keep what the cells print and draw.

    python scripts/manual/notebook.py

The outputs are those of a real run, so that a reader sees them without starting one. Jupyter is not needed.
"""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
# Characters of an output; a picture has less.
OUTPUT_MAX = 20_000


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell in the names of the cells before it, and return its outputs as a notebook keeps them."""
    tree = ast.parse(source)
    # Jupyter shows the value of the last line if it is an expression.
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue()[:OUTPUT_MAX]:
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None and hasattr(value, "_repr_svg_"):
        shown = {"image/svg+xml": value._repr_svg_().splitlines(keepends=True), "text/plain": ["a picture"]}
        outputs.append({"data": shown, "metadata": {}, "output_type": "display_data"})
    return outputs


def main() -> None:
    """Run every cell, and write the notebook with its outputs."""
    notebook, names = json.loads(NOTEBOOK.read_text(encoding="utf-8")), {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), names)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
