"""The faults that `diloco chaos` injected into a run, for its page."""

import json
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from diloco_jax.runtime.records.files import CHAOS, FAULTS_FILE

# Faults of a page; a run may have more.
SHOWN_MAX = 200
# Lines that are read: each fault has a start, at most one end, and a recovery.
LINES_MAX = 10_000


def read_faults(run_dir: Path) -> list[dict[str, Any]]:
    """Return the injected faults in the order of their starts, on the run's clock; [] for a run without chaos.

    `recovered_s` is the time of the recovery in seconds of the run, None if there was none.
    """
    found = dict[int, dict[str, Any]]()
    with suppress(OSError), (run_dir / CHAOS / FAULTS_FILE).open(encoding="utf-8", errors="replace") as file:
        for line in islice(file, LINES_MAX):
            # The last line may be half written.
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                number, at_s = int(record["fault"]), float(record["t"])
                if record["event"] == "begin":
                    what = str(record["what"]).partition(": ")[2]
                    found[number] = {"n": number, "t": at_s, "what": what, "recovered_s": None}
                elif record["event"] == "recovered" and number in found:
                    found[number]["recovered_s"] = at_s
    return sorted(found.values(), key=lambda fault: (fault["t"], fault["n"]))[:SHOWN_MAX]
