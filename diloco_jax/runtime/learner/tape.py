"""The tape of a learner: all its actions in order, so that the same steps can be repeated (`diloco replay`).

RUN/tapes/NAME.INCARNATION.jsonl, one JSON list a line. The learner writes a step's line before it reports the step, so
every merged value has its steps on a tape, even if its learner was killed afterwards.

    ["begin", learner_id, incarnation, step_samples, [protocol, release]]
    ["data", guarantee]                  only if the loop reads its own data: "resumed" (a loader with state), or "own"
    ["loader", incarnation, local_step]  the loader continued after this step of its earlier incarnation, before step 1
    ["adopt", fragment_id, version, epoch, digest, merged_round]   a global fragment, between two steps
    ["state", donor, donor_incarnation, donor_step, [fragments]]   a whole state; donor "": its own earlier incarnation
    ["staged_state", local_step]                                   a copy for a receiver
    ["saved", local_step, global_step]                             a copy for the disk
    ["sent", fragment_id, global_step, local_step]                 the value of a round left
    ["step", local_step, clock, [[start, stop], ...], loss]        clock: step of the schedule; then what it read
    ["lost", lines]                                                the disk took so many lines not: no replay from here
    ["end", reason, [digest of each fragment held], head]          head of the hash chain over the lines before
"""

import json
import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import AdoptState
from diloco_jax.protocol.messages import GlobalFragment
from diloco_jax.protocol.releases import STAMP
from diloco_jax.runtime.records.files import TAPES
from diloco_jax.runtime.records.os_errors import remedy
from diloco_jax.runtime.records.tape_chain import TapeChain
from diloco_jax.runtime.records.tape_file import SegmentedFile
from diloco_jax.runtime.records.telemetry import finite

log = logging.getLogger(__name__)


def learner_tape_path(run_dir: Path, learner_id: str, incarnation: int) -> Path:
    return run_dir / TAPES / f"{learner_id}.{incarnation}.jsonl"


class LearnerTape:
    """The tape of one incarnation, written by one thread at a time; a full disk never stops the learner."""

    def __init__(self, run_dir: Path, learner_id: str, incarnation: int, step_samples: int) -> None:
        self._path = learner_tape_path(run_dir, learner_id, incarnation)
        self._file: SegmentedFile | None = None
        self._lost = 0
        self.note("begin", learner_id, incarnation, step_samples, STAMP)

    def adopt(self, message: GlobalFragment) -> None:
        name = (message.fragment_id, message.version, message.epoch, message.digest)
        self.note("adopt", *name, message.merged_round)

    def state(self, effect: AdoptState, donor_incarnation: int, donor_step: int) -> None:
        self.note("state", effect.donor, donor_incarnation, donor_step, effect.fragments)

    def step(self, local_step: int, clock: int, ranges: Sequence[Sequence[int]], loss: float) -> None:
        """Write a step, with as many digits of its loss as distinguish float32 values."""
        self.note("step", local_step, clock, ranges, shortest_float32(loss))

    def end(self, reason: str, digests: Sequence[int]) -> None:
        chain = TapeChain(self._file.head if self._file is not None else "")
        for line in self._lost_line():
            chain.add(line)
        self.note("end", reason, digests, chain.head)
        if self._file is not None:
            self._file.close()

    def note(self, *fields: Any) -> None:
        """Write one line: its kind, then its fields, as the module's docstring lists them."""
        lines = [*self._lost_line(), _line(*fields)]
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = SegmentedFile(self._path)
            self._file.append(*lines)
        except OSError as error:
            if not self._lost:
                what = f"{self._path.name} cannot be written ({error}): {remedy(error, self._path)}"
                log.warning(f"{what}; training continues, replay will not work")
            self._lost += 1
            return
        self._lost = 0

    def _lost_line(self) -> list[bytes]:
        """Return the line that replaces those that the disk refused; none if it refused none."""
        return [_line("lost", self._lost)] if self._lost else []


def shortest_float32(value: float) -> float:
    """Return the shortest decimal number with the same float32 value; a value beyond float32 as it is."""
    try:
        packed = struct.pack("f", value)
    except OverflowError:
        return value
    for digits in range(6, 9):
        if struct.pack("f", short := float(f"{value:.{digits}g}")) == packed:
            return short
    return float(f"{value:.9g}")


def _line(*fields: Any) -> bytes:
    return json.dumps(finite(fields), allow_nan=False, separators=(",", ":")).encode()
