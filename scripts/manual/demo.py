"""Write docs/demo.html: the report of a real run under faults, without the names of the machine that made it.

    diloco chaos CONFIG ... --run-dir RUN
    python scripts/manual/demo.py RUN "diloco chaos CONFIG ..."

The second argument is the command that made the run, without its folder; the page shows it to readers.
"""

import sys
from pathlib import Path
from typing import Any

from diloco_jax.tools.page.page import compose_page, read_report

TARGET = Path(__file__).resolve().parents[2] / "docs" / "demo.html"
# A page that a reader opens without installing anything should open at once.
SIZE_MAX = 500_000


def without_machine(run: dict[str, Any], command: str) -> dict[str, Any]:
    """Return the data of a report without identities of processes and machines, and with the command to repeat it."""
    status = {name: value for name, value in run["status"].items() if name != "said"}
    status["learners"] = [
        {name: value for name, value in row.items() if name != "process"} for row in run["status"]["learners"]
    ]
    made = {**run["made"], "again": command}
    return {**run, "name": made["config"], "status": status, "made": made}


def write_demo(folder: Path, command: str) -> int:
    """Write the page of a run, and return its size in bytes.

    Raises:
        ValueError: the page would be larger than SIZE_MAX.
    """
    text = compose_page({"runs": [without_machine(read_report(folder), command)]})[0]
    if len(text.encode()) > SIZE_MAX:
        raise ValueError(
            f"the page of {folder} has {len(text.encode()):,} bytes, more than {SIZE_MAX:,}; make a shorter run"
        )
    return TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    print(f"{TARGET.name}: {write_demo(Path(sys.argv[1]), sys.argv[2]) / 1e3:.0f} kB")
