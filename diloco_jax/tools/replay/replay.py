"""The replay of an asynchronous run: it is trained again from its tapes in one process, and compared bit for bit.

    syncer's tape --machine--> rounds, snapshots, restarts          (script.py)
    learners' tapes ---------> the steps that these rounds need     (learner_tapes.py)
    round by round: the contributing incarnations advance to their step    (replica.py), then the merge

A replay reads only the inputs of the training: positions of samples, global steps, and digests to compare. Incarnations
advance in the order of the run. So a replay holds the states of the incarnations that ran at the same time, and the
global values that an incarnation will still adopt.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from diloco_jax.core import codec
from diloco_jax.protocol.corpora import THE_RUNS
from diloco_jax.protocol.releases import decided_elsewhere
from diloco_jax.protocol.syncer.progress import GLOBAL_STEPS
from diloco_jax.protocol.syncer.tape import BEGINNING, Moment, Moments, stamps
from diloco_jax.runtime.model.arithmetic import Arithmetic, Capture, make_setup
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.model.global_model import make_model
from diloco_jax.runtime.records import checkpoint
from diloco_jax.runtime.records.files import CHECKPOINTS, SUMMARY_FILE, TAPE_FILE
from diloco_jax.runtime.records.tape_file import read_lines
from diloco_jax.runtime.records.telemetry import write_json
from diloco_jax.settings.resolved import resolve
from diloco_jax.settings.run import RunConfig
from diloco_jax.tools.replay import script
from diloco_jax.tools.replay.learner_tapes import NeededIncarnations, TapedStep, TookState
from diloco_jax.tools.replay.replica import Replica, Trainer, Values, use
from diloco_jax.training.whole_state.layout import StateArrays
from diloco_jax.training.whole_state.moving import MovingLayout

# Passes on the given number of events, and shows the progress.
Watch = Callable[[Iterable[script.Event], int], Iterable[script.Event]]


def unwatched(events: Iterable[script.Event], _: int) -> Iterable[script.Event]:
    """Pass on the events, and show nothing."""
    return events


class Replay:
    """One replay of a run.

    Args:
      folder: the run's folder, or a folder with a simulation's tapes.
      until: stop at the first merged round of this global step or later; None: at the end of the tape.
      data: path of a corpus on this machine by its name, where that of the config does not hold.
      compare: compare digests and losses with the tapes; False for a simulation, whose tapes have invented ones.

    Raises:
      ValueError: a tape is missing, broken, or of another program or config.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        until: int | None = None,
        data: Mapping[str, str] = MappingProxyType({}),
        compare: bool = True,
    ) -> None:
        self._compare = compare
        simulated = script.read_scenario(folder)
        budget = config.budget if simulated is None else simulated.budget
        self.script = script.read_script(folder / TAPE_FILE, config.protocol, config.train.steps, until, budget)
        self.needs = NeededIncarnations(folder, self.script)
        self.evaluator = Evaluator(config)
        resolved = resolve(config, self.evaluator.shapes, self.evaluator.kinds)
        self.trainer = Trainer(resolved, 1 if compare else config.island("").batch_size, data)
        ours = resolved.fingerprint(self.evaluator.corpus, self.trainer.island.base.digest)
        told = self.script.fingerprint
        if self.script.raised:
            # The run's limits were raised, so incarnations at different times had different limits.
            ours, told = [tuple(p for p in pairs if p[0] != GLOBAL_STEPS) for pairs in (ours, told)]
        if compare and (different := script.differences(ours, told)):
            raise ValueError(f"this is not the program or the config of the run: {'; '.join(different)}")
        self._moving = MovingLayout(self.trainer.island.state_layout, config.wire.states)
        arithmetic = Arithmetic(make_setup(resolved))
        self.model = make_model(resolved, self.evaluator.initial_parameters(), arithmetic)
        self.merged_rounds = 0
        # The first difference between the run and its repetition.
        self.difference = next(iter(self.script.wrong_exclusions), "")
        self.step_difference = ""
        self.captures: Moments[Capture] = Moments(self.script.returns + _on_disk(folder))
        self._initial = self.model.capture()
        self._uses: Counter[script.Name] = self.needs.names
        self._values: dict[script.Name, Values] = {}
        self._replicas: dict[script.LearnerIncarnation, Replica] = {}
        for fragment_id, (theirs, digest) in enumerate(zip(self.script.digests, self.model.digests, strict=True)):
            self._made(script.Name(fragment_id, 0, theirs), digest, f"fragment {fragment_id} of the initial model")

    def run(self, watch: Watch = unwatched) -> None:
        """Repeat all events of the run."""
        for event in watch(self.script.events, len(self.script.events)):
            self.repeat(event)

    def repeat(self, event: script.Event) -> None:
        """Repeat one event: a merged round, a snapshot, a return to a snapshot, or a value from a learner."""
        match event:
            case script.MergedRound():
                self._round(event)
            case script.SnapshotPoint(moment):
                self.captures.keep(moment, self.model.capture)
            case script.Back(moment):
                self.model.load(self._initial if moment == BEGINNING else self.captures.at(moment))
            case script.Brought(name):
                payload = codec.encode(self.take(name), "float32")
                self.model.restore(name.fragment_id, name.version, payload)

    def _round(self, this: script.MergedRound) -> None:
        order = this.order
        payloads = {}
        for part, incarnation in zip(order.contributions, this.incarnations, strict=True):
            payloads[part.learner_id] = self._replica(incarnation).value(order.fragment_id, part.local_step)
        # Damage of a value on its way, or by `diloco chaos`, is not on the tapes, so `excluded` is passed in.
        merged = self.model.merge(order, payloads, this.excluded)
        where = f"fragment {order.fragment_id}, version {order.global_step}"
        if set(merged.excluded) != set(this.excluded):
            names, theirs = ", ".join(merged.excluded) or "nobody", ", ".join(this.excluded) or "nobody"
            self._differ(f"{where} (excluded: {names}; the run excluded {theirs})")
        if merged.state is None:
            raise ValueError(f"{where} cannot be made: no value is usable now; the first difference: {self.difference}")
        self.merged_rounds += 1
        self.model.publish(merged)
        self._made(script.Name(order.fragment_id, order.global_step, this.digest), merged.state.digest, where)
        # All incarnations advance with the run, so that old global values can be freed.
        for incarnation, local_step in this.reported:
            need = self.needs.incarnations.get(incarnation)
            if need is not None and need.steps:
                self._replica(incarnation).advance(need.steps[min(local_step, len(need.steps)) - 1])

    def _made(self, name: script.Name, digest: int, where: str) -> None:
        """Compare the newest value of a fragment with the run's, and keep the value if it will be used."""
        if self._compare and digest != name.digest:
            self._differ(f"{where} (digest {digest}, the run had {name.digest})")
        if self._uses[name] > 0:
            self._values.setdefault(name, self.model.slices(self.model.capture(), name.fragment_id))

    def _differ(self, where: str) -> None:
        self.difference = self.difference or where

    def _replica(self, incarnation: script.LearnerIncarnation) -> Replica:
        if incarnation not in self._replicas:
            planned = self.script.planned.get(incarnation, 0) if self.script.raised else 0
            need = self.needs.incarnations[incarnation]
            self._replicas[incarnation] = Replica(
                incarnation, need, self.trainer, self, planned, self.script.corpora.get(incarnation, THE_RUNS)
            )
        return self._replicas[incarnation]

    def take(self, name: script.Name) -> Values:
        """Return a global value that an incarnation adopts; ValueError if no round has made it."""
        if name not in self._values:
            raise ValueError(
                f"version {name.version} of fragment {name.fragment_id} with digest {name.digest} was adopted, but no "
                "round on the syncer's tape made it; are all tapes of one run?"
            )
        return use(self._values, self._uses, name)

    def state_of(self, took: TookState, receiver: script.LearnerIncarnation, held: dict[int, int]) -> StateArrays:
        """Return the state that an incarnation loaded from its donor."""
        copies = self._replica(took.donor).copy(took.donor_step)
        if took.donor.learner_id != receiver.learner_id:
            # From another learner only moments came, rounded for the wire.
            return self._moving.rounded(copies[-1][1])
        for versions, state in reversed(copies):
            same = tuple(p for p in sorted(held) if versions.get(p) == held[p])
            if same == tuple(sorted(took.fragments)):
                return state
        return copies[-1][1]

    def on_loss(self, incarnation: script.LearnerIncarnation, step: TapedStep, loss: float) -> None:
        """Compare the loss of a step with the tape, to find the first different step."""
        if self._compare and not self.step_difference and _on_tape(loss) != _on_tape(step.loss):
            self.step_difference = (
                f"local step {step.local_step} of {incarnation.learner_id} (incarnation {incarnation.number}): "
                f"loss {loss}, the run had {step.loss}"
            )


def _on_tape(loss: float | None) -> np.float32 | None:
    """Return a loss as float32, because tapes may have different numbers of digits; None if it is not finite."""
    return None if loss is None or not math.isfinite(loss) else np.float32(loss)


def replay_run(
    config: RunConfig,
    run_dir: Path,
    until: int | None = None,
    data: Mapping[str, str] = MappingProxyType({}),
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Replay a run, and compare its parameters with those of its newest checkpoint.

    Args:
      until, data: as for `Replay`.
      watch: passes on the events of the run, and shows the progress.

    Returns:
      identical, sha256, expected_sha256 (None if there is no checkpoint of that moment), merged_rounds, inner_steps,
      wall_s, difference and step_difference (the first difference of each kind, "" if there is none).

    Raises:
      ValueError: a tape or a checkpoint is missing, or the run cannot be replayed.
    """
    began_s = time.monotonic()
    _check_alike(config)
    this = Replay(config, run_dir, until=until, data=data)
    this.run(watch)
    capture, expected = _expected(this, run_dir)
    if expected is None and until is None:
        raise ValueError(
            f"{run_dir / CHECKPOINTS} has no readable checkpoint of a moment on the tape; wait for the end of the run, "
            "or use --until to compare only the rounds"
        )
    sha256 = digest_of(this.model.parameters(capture))
    expected_sha256 = digest_of(expected) if expected is not None else None
    same = expected_sha256 in (None, sha256)
    elsewhere = decided_elsewhere(stamps(read_lines(run_dir / TAPE_FILE)))
    difference = this.difference or ("" if same else "the final parameters, although every digest was equal")
    return {
        "identical": same and not this.difference,
        "sha256": sha256,
        "expected_sha256": expected_sha256,
        "merged_rounds": this.merged_rounds,
        "inner_steps": this.trainer.steps,
        "wall_s": round(time.monotonic() - began_s, 3),
        "difference": f"{difference}; {elsewhere}" if difference and elsewhere else difference,
        "step_difference": this.step_difference,
    }


def _check_alike(config: RunConfig) -> None:
    """Refuse islands that add in another order than the single process and mesh of a replay; ValueError."""
    usual = config.island("")
    for name in config.islands.names:
        own = config.island(name)
        if own.hosts > 1:
            raise ValueError(
                f"{name} has {own.hosts} hosts, which add gradients in another order than the single process of a "
                "replay: runs with islands.hosts above 1 cannot be replayed bit for bit"
            )
        if (own.devices, own.mesh) != (usual.devices, usual.mesh):
            raise ValueError(
                f"{name} has other devices or another mesh than the other islands, but a replay has one mesh: runs "
                "with islands.each.*.devices or mesh cannot be replayed"
            )


def _on_disk(run_dir: Path) -> Counter[Moment]:
    """Count the checkpoints on disk by their moments, to compare the replayed model with them."""
    found: Counter[Moment] = Counter()
    for path in checkpoint.complete(run_dir / CHECKPOINTS):
        try:
            meta = checkpoint.CheckpointReader(path).meta
        except ValueError:
            continue
        found[Moment(int(meta["global_step"]), str(meta.get("tape_head", "")))] += 1
    return found


def _expected(this: Replay, run_dir: Path) -> tuple[Capture, Mapping[str, np.ndarray] | None]:
    """Return the moment to compare, and the parameters of its newest checkpoint; None if there is none."""
    moments = [this.model.capture(), *this.captures]
    for path in checkpoint.complete(run_dir / CHECKPOINTS):
        try:
            parameters, meta = checkpoint.load_parameters(path)
        except ValueError:
            continue
        for capture in moments:
            if list(meta.get("versions", ())) == [mark.version for mark in capture.marks]:
                return capture, parameters
    return moments[0], None


def replay_synthetic(
    config: RunConfig, folder: Path, out: Path, until: int | None = None, watch: Watch = unwatched
) -> dict[str, Any]:
    """Train on real data along the tapes of a simulation; write summary.json to `out` and return its content.

    Args:
      config: the result of `as_simulated`.

    Raises:
      ValueError: a tape is missing, broken, or of another protocol.
    """
    began_s = time.monotonic()
    this = Replay(config, folder, until=until, compare=False)
    this.run(watch)
    parameters = this.model.parameters()
    learners = _work(this, config.island("").batch_size * config.train.seq_len)
    tokens = sum(row["tokens"] for row in learners.values())
    result = this.evaluator.evaluate(parameters, config.train.final_eval_batches, this.script.global_step)
    meta = {"global_step": this.script.global_step, "tokens": tokens, "run": config.name}
    checkpoint.save_parameters(out / CHECKPOINTS, parameters, meta)
    summary = {
        "eval_loss": result["loss"],
        "eval_bits_per_byte": result["bits_per_byte"],
        "eval_scores": result["scores"],
        "sha256": digest_of(parameters),
        "tokens": tokens,
        "global_steps": this.script.global_step,
        "merged_rounds": this.merged_rounds,
        "inner_steps": this.trainer.steps,
        "wall_s": round(time.monotonic() - began_s, 3),
        "num_parameters": this.evaluator.num_parameters,
        "learners": learners,
        "complete": True,
    }
    write_json(out / SUMMARY_FILE, summary)
    return summary


def _work(this: Replay, sample_tokens: int) -> dict[str, dict[str, int]]:
    """Return the repeated local steps and tokens of each learner."""
    learners: dict[str, dict[str, int]] = {}
    for incarnation, need in sorted(this.needs.incarnations.items()):
        steps = sum(line <= need.stop for line in need.steps)
        row = learners.setdefault(incarnation.learner_id, {"local_steps": 0, "tokens": 0})
        row["local_steps"] += steps
        row["tokens"] += steps * need.step_samples * sample_tokens
    return learners


def digest_of(parameters: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of a model's parameters: path, shape and float32 bytes of each, by ascending path."""
    hasher = hashlib.sha256()
    for path in sorted(parameters):
        value = np.ascontiguousarray(parameters[path], np.float32)
        hasher.update(f"{path} {value.shape}\0".encode())
        hasher.update(value.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def describe(result: Mapping[str, Any]) -> str:
    """Format the result of a replay as text."""
    done = f"{result['merged_rounds']} merged rounds, {result['inner_steps']} inner steps, {result['wall_s']:.1f} s"
    if "identical" not in result:
        return f"trained along the tapes: evaluation loss {result['eval_loss']:.4f}, {done}; see {result['run_dir']}"
    if result["identical"]:
        what = "the parameters" if result["expected_sha256"] else "every merged round (there is no checkpoint of it)"
        return f"identical: {what}; {done}\nsha256 {result['sha256']}"
    words = [f"DIFFERENT, first in {result['difference']}; {done}", f"sha256 {result['sha256']}"]
    words += [f"  not  {result['expected_sha256']}"] if result["expected_sha256"] else []
    words += [f"the first step that differs: {result['step_difference']}"] if result["step_difference"] else []
    return "\n".join(words)
