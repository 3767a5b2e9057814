"""Tapes of a simulated run in the formats of a real one; `diloco replay` can train on real data with them.

    DIR/tape.jsonl                      inputs of the syncer (protocol/syncer/tape.py)
    DIR/tapes/NAME.INCARNATION.jsonl    actions of each process of a learner (runtime/learner/tape.py)
    DIR/scenario.json                   settings of the protocol, to be copied into a config

Digests and losses are invented, and a replay compares neither.
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
    """Records the actions of every process of every learner; the key of `lines` is its name and incarnation."""

    def __init__(self, cluster: Cluster, faults: Sequence[str] = ()) -> None:
        self._faults = list(faults)
        self.lines: dict[tuple[str, int], list[str]] = {}
        self._cluster = cluster

    def _write(self, incarnation: tuple[str, int], *fields: Any) -> None:
        lines = self.lines.get(incarnation)
        if lines is None:
            lines = self.lines[incarnation] = []
            self._write(incarnation, "begin", *incarnation, self._cluster.nodes[incarnation[0]].step_samples, STAMP)
        lines.append(json.dumps(fields, separators=(",", ":")))

    def on_learner(
        self, process: LearnerProcess, message: SyncerMessage | None, effects: Effects, now_s: float
    ) -> None:
        incarnation, machine = process.key, process.machine
        for effect in effects:
            if isinstance(effect, Adopt):
                assert isinstance(message, GlobalFragment), f"{effect} without a fragment that arrived"
                name = (effect.fragment_id, effect.version, message.epoch, message.digest)
                self._write(incarnation, "adopt", *name, message.merged_round)
            elif isinstance(effect, Send) and isinstance(effect.message, FragmentValue):
                value = effect.message
                self._write(incarnation, "sent", value.fragment_id, value.global_step, value.local_step)
            elif isinstance(effect, StageState):
                self._write(incarnation, "staged_state", effect.local_step)
            elif isinstance(effect, SaveState):
                self._write(incarnation, "saved", machine.local_step, effect.global_step)
            elif isinstance(effect, Finish):
                self._write(incarnation, "end", effect.reason, machine.digests)

    def on_step(self, process: LearnerProcess, began: bool, now_s: float) -> None:
        if not began:
            # The machine gets the end of this step next, and counts it then.
            step = process.machine.local_step + 1
            assert process.step.batch is not None, "a step without a batch ended"
            self._write(process.key, "step", step, process.step.clock, process.step.batch.ranges, LOSS)

    def on_state(self, process: LearnerProcess, effect: AdoptState, ok: bool, now_s: float) -> None:
        if not ok:
            return
        if effect.donor:
            incarnation, donor_step = process.holdings.kept[0].incarnation, effect.donor_step
        else:
            own = process.node.own
            assert own is not None, f"{process.name} loads its own state, and has none"
            incarnation, donor_step = own.incarnation, own.local_step
        self._write(process.key, "state", effect.donor, incarnation, donor_step, list(effect.fragments))

    def save(self, folder: Path) -> None:
        """Write all tapes and the scenario.

        Raises:
            ValueError: as `check_folder`.
        """
        check_folder(folder)
        (folder / "tapes").mkdir(parents=True, exist_ok=True)
        _write_lines(folder / "tape.jsonl", self._cluster.syncer_node.tape)
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
    """Check before a simulation that its tapes can be written to this folder.

    Raises:
        ValueError: the folder holds a tape, is below a file, or cannot be written.
    """
    if (folder / "tape.jsonl").exists():
        raise ValueError(f"--tapes {folder} holds a tape already; name another folder, or remove that one")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"--tapes {folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--tapes {folder}: {there} cannot be written; name another folder, or change its permissions")


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
