"""Write docs/demo.html: the report of a real run under faults, without the names of the machine that made it.

    diloco chaos CONFIG ... --run-dir RUN
    python scripts/manual/demo.py RUN "diloco chaos CONFIG ..."

The second argument is the command that made the run, without its folder; the page shows it to readers. Without any
argument the page keeps its data, and the rest is written again: do this after a change of the page.
"""

import json
import re
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


def shown_data() -> Any:
    """Return the data of the page that is there."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', TARGET.read_text("utf-8"), re.S)
    return json.loads(found)


def write_demo(data: Any) -> int:
    """Write the page of these data, and return its size in bytes.

    Raises:
        ValueError: the page would be larger than SIZE_MAX.
    """
    text = compose_page(data)[0]
    if len(text.encode()) > SIZE_MAX:
        raise ValueError(f"the page has {len(text.encode()):,} bytes, more than {SIZE_MAX:,}; make a shorter run")
    return TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    made = {"runs": [without_machine(read_report(Path(sys.argv[1])), sys.argv[2])]} if sys.argv[1:] else shown_data()
    print(f"{TARGET.name}: {write_demo(made) / 1e3:.0f} kB")
