"""Telemetry of a run, for people and dashboards: metrics.jsonl, trackers and callbacks, small JSON files.

One process writes a run's telemetry: the syncer's, or the data-parallel baseline's. Kinds of records, `t` in seconds
since the run began, bytes and tokens cumulative:

    step    t learner incarnation local_step tokens global_step loss step_s      (tokens of all its incarnations)
            arrived, if any: [version, seconds from its merge until the learner had it]
    metrics t learner incarnation local_step global_step values                  (of an island; docs/metrics.md)
    merged_metrics
            t global_step islands values                                         (of these islands together)
    closed, merged, abandoned, joined, left, silent, back, finished
            t global_step fragment_id members reason                             (the protocol's Note)
    round   t global_step fragment_id opened_s met_s closed_s pulled_s values    (as its merge ends, in the run's time;
            values: learner -> seconds from closing the round until its value was there)
    drift   t learner global_step fragment_id values                             (of one contribution; core/drift.py)
    life    t global_step epoch members reason versions host                     (at the start of a syncer process)
    alarm   t global_step alarm state members reason                             (alarm: its kind; state: begins, ends)
    wire    t global_step up_bytes down_bytes connected_islands                  (the tracked ones of runtime/figures)
    eval    t global_step tokens loss bits_per_byte scores                       (of the global model)

The file is bounded: each record of its earlier part may stand for `n` records of its kind (thinning.py).
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.runtime.records.files import METRICS_FILE
from diloco_jax.runtime.records.os_errors import remedy
from diloco_jax.runtime.records.thinning import BYTES_MAX, ThinnedFile

if TYPE_CHECKING:
    from diloco_jax.runtime.trackers.outlets import Outlets

# The end of the reason in the record of a start of the syncer, if the run continues from a snapshot.
WENT_BACK = "the run went back to a snapshot"
# So many lines wait while the disk accepts them, then they are written together.
FLUSH_EVERY = 500
# So many lines wait while the disk cannot be written; above that the oldest are lost.
WAITING_MAX = 100_000

log = logging.getLogger(__name__)


def went_back(record: Mapping[str, Any]) -> bool:
    """Return whether a record starts a syncer that put the run back to a snapshot: the run had stopped before."""
    return record["kind"] == "life" and str(record.get("reason", "")).endswith(WENT_BACK)


def finite(value: Any) -> Any:
    """Replace every NaN and infinity in `value` by None, because strict JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def strict_json(value: Any, **options: Any) -> str:
    """Return `value` as strict JSON; non-finite numbers become null. The options are those of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    # Non-finite numbers, and mappings other than dict, are rare: the common case needs no walk through the value.
    except (TypeError, ValueError):
        return json.dumps(finite(value), allow_nan=False, **options)


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Replace a JSON file at once: readers see the old or the new content. Non-finite numbers become null."""
    replace_text(path, strict_json(obj, indent=2) + "\n")


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON file with an object that has these keys; ValueError if it is damaged, or another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error}); try again, or remove it") from error
    if not isinstance(found, dict) or (missing := [key for key in keys if key not in found]):
        what = "no object" if not isinstance(found, dict) else f"no {', '.join(missing)}"
        raise ValueError(f"{path} is damaged or of another program: it holds {what}; restore or remove it")
    return found


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a text file at once; its folder must exist."""
    target = Path(path)
    # The process id keeps two writers from sharing a half-written file.
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, target)


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl in order, even while it is being written; ValueError names a bad line.

    A last line without a line break is skipped, because its writer was killed or is still writing.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error.msg}); remove that line") from None
            if not isinstance(record, dict) or not record:
                raise ValueError(f"{path}, line {number} is not a JSON object with content; remove that line")
            yield record


class Telemetry:
    """Writer of a run's records, after those of earlier processes; for one thread.

    A full disk can cost records, but never the run. A file of more than `bytes_max` is thinned.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], outlets: "Outlets | None" = None, *, bytes_max: int = BYTES_MAX
    ) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._outlets = outlets
        self._path = folder / METRICS_FILE
        self._file = ThinnedFile(self._path, bytes_max)
        self._waiting: deque[str] = deque(maxlen=WAITING_MAX)
        self._failing = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record of plain Python values; it reaches the disk with the next `flush`."""
        self._waiting.append(strict_json(record, separators=(",", ":")))
        if len(self._waiting) % FLUSH_EVERY == 0:
            self.flush()
        if self._outlets is not None:
            self._outlets.write(record)

    def flush(self) -> None:
        """Give all records so far to the operating system; to be called about once a second."""
        try:
            if self._waiting:
                self._file.append("".join(f"{line}\n" for line in self._waiting).encode())
                self._waiting.clear()
            self._failing = False
        except OSError as error:
            # The lines wait for the next flush.
            if not self._failing:
                what = f"metrics cannot be written ({error}): {remedy(error, self._path)}"
                log.warning(f"{what}; the newest {WAITING_MAX} records wait")
            self._failing = True

    def close(self) -> None:
        self.flush()
        self._file.close()
        if self._outlets is not None:
            self._outlets.close()
