"""The numbers of islands, for shards of data: one number per name, the same at every start."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_jax.runtime.records.telemetry import write_json

# An island with another name at each start would get a new number each time.
NUMBERS_MAX = 4096
FILE_BYTES_MAX = 1 << 20

log = logging.getLogger(__name__)


class IslandNumbers:
    """The numbers that a syncer gave to islands, from 1, in a file of the run's folder.

    Args:
        path: The file; it is written when an island gets a number.
        names: Names of the config's islands, which get their place in this order while it is free.
        on_given: Is called when the file has a new number, before anybody gets it.
    """

    def __init__(self, path: Path, names: Sequence[str], on_given: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._on_given = on_given
        self._places = {name: number for number, name in enumerate(names, start=1)}
        self._lock = threading.Lock()
        self._given = _read(path)

    def number_of(self, learner_id: str) -> int:
        """Return the island's number; 0 if NUMBERS_MAX names have one. Any thread."""
        with self._lock:
            if learner_id not in self._given:
                if len(self._given) >= NUMBERS_MAX:
                    return 0
                taken, own = set(self._given.values()), self._places.get(learner_id, 0)
                free = next(number for number in range(1, NUMBERS_MAX + 1) if number not in taken)
                self._given[learner_id] = own if own and own not in taken else free
                try:
                    write_json(self._path, self._given)
                except OSError as error:
                    log.warning(f"{self._path} cannot be written ({error}); a restarted syncer may give other numbers")
                self._on_given()
            return self._given[learner_id]


def _read(path: Path) -> dict[str, int]:
    try:
        with path.open(encoding="utf-8") as file:
            return {str(name): int(number) for name, number in json.loads(file.read(FILE_BYTES_MAX)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning(f"{path} cannot be read ({error!r}); islands get numbers in the order of their requests")
        return {}
