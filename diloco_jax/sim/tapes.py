"""Tapes of a simulated run, in the formats of a real one: `diloco replay` trains from them, on real data.

    DIR/tape.jsonl                      the syncer's inputs (protocol/syncer/tape.py)
    DIR/tapes/NAME.INCARNATION.jsonl    what each life of a learner did (as runtime/learner/tape.py)
    DIR/scenario.json                   the protocol's settings, so that a config can be given the same

Digests stand for bytes that were never made, and losses are made up: a replay compares neither.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_jax.protocol.effects import Adopt, AdoptState, Finish, SaveState, Send, StageState
from diloco_jax.protocol.messages import FragmentValue, GlobalFragment, SyncerMessage
from diloco_jax.protocol.releases import STAMP
from diloco_jax.sim.cluster import Cluster
from diloco_jax.sim.node import Effects, LearnerProcess, Observer

LOSS = 1.0


class LearnerTapes(Observer):
    """Writes down what every life of every learner does."""

    def __init__(self, cluster: Cluster, faults: Sequence[str] = ()) -> None:
        self._faults = list(faults)
        self.lines: dict[tuple[str, int], list[str]] = {}  # by name and incarnation
        self._cluster = cluster

    def _write(self, life: tuple[str, int], *fields: Any) -> None:
        lines = self.lines.get(life)
        if lines is None:
            lines = self.lines[life] = []
            self._write(life, "begin", *life, self._cluster.nodes[life[0]].step_samples, STAMP)
        lines.append(json.dumps(fields, separators=(",", ":")))

    def on_learner(self, process: LearnerProcess, given: SyncerMessage | None, effects: Effects, now_s: float) -> None:
        life, machine = process.key, process.machine
        for effect in effects:
            if isinstance(effect, Adopt):
                assert isinstance(given, GlobalFragment), f"{effect} without a fragment that came"
                name = (effect.fragment_id, effect.version, given.epoch, given.digest)
                self._write(life, "adopt", *name, given.merged_round)
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                self._write(life, "sent", value.fragment_id, value.global_step, value.local_step)
            elif isinstance(effect, StageState):
                self._write(life, "staged_state", effect.local_step)
            elif isinstance(effect, SaveState):
                self._write(life, "saved", machine.local_step, effect.global_step)
            elif isinstance(effect, Finish):
                self._write(life, "end", effect.reason, machine.digests)

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            step = process.machine.local_step + 1  # of which the machine is told now
            assert process.step.batch is not None, "a step ended that had no batch"
            self._write(process.key, "step", step, process.step.clock, process.step.batch.ranges, LOSS)

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        if not ok:
            return
        if effect.donor:
            incarnation, donor_step = process.holdings.kept[0].incarnation, effect.donor_step
        else:
            incarnation, donor_step = process.node.saved[-1].incarnation, process.node.saved[-1].local_step
        self._write(process.key, "state", effect.donor, incarnation, donor_step, list(effect.fragments))

    def save(self, folder: Path) -> None:
        """Write all tapes and the scenario; ValueError as `check_folder`."""
        check_folder(folder)
        (folder / "tapes").mkdir(parents=True, exist_ok=True)
        _write_lines(folder / "tape.jsonl", self._cluster.host.tape)
        for (name, incarnation), lines in self.lines.items():
            _write_lines(folder / "tapes" / f"{name}.{incarnation}.jsonl", lines)
        scenario = self._cluster.scenario
        described = {
            "seed": scenario.seed,
            "learners": scenario.learners,
            "total_steps": scenario.total_steps,
            "budget": list(scenario.budget),
            "step_samples": {name: node.step_samples for name, node in self._cluster.nodes.items()},
            "faults": self._faults,
            "protocol": asdict(scenario.config),
        }
        (folder / "scenario.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def check_folder(folder: Path) -> None:
    """Refuse, with ValueError, a folder for tapes that holds some, or could not be written after the simulation."""
    if (folder / "tape.jsonl").exists():
        raise ValueError(f"--tapes {folder} holds a tape already; name another folder, or remove that one")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"--tapes {folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--tapes {folder}: {there} cannot be written; name another folder, or change its permissions")


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
