"""Compare inner and outer optimizers, merges and adoptions, in minutes on one core.

An arm is an argument with settings, such as `H=24`, `H=24,mlp=4` or `M=1,rate=4e-3`; `Arm` lists all of them. All arms
have the same initial parameters and the same samples in each step, so their losses are compared seed by seed; M=1 is
data parallel. Differences below half a per cent need more than one seed. There are no links and no late or lost
islands; a method that wins is added to the package, and then tested with ./scripts/experiments/run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _lanes import Method, Numbers, evaluate, layer_of, train

from diloco_jax.core.kinds import Kind, kind_of
from diloco_jax.training.data.config import DataConfig
from diloco_jax.training.data.corpus import Source, load_source
from diloco_jax.training.data.order import SampleOrder, eval_batches
from diloco_jax.training.models.config import DECODER
from diloco_jax.training.models.protocol import GraphDef, load_model, split_model
from diloco_jax.training.optimizers import OptimizerConfig, learning_rate, make_inner
from diloco_jax.training.state import Params

CLASSES = {"mlp": ("gate/kernel", "up/kernel", "down/kernel"), "attention": ("q/kernel", "k/kernel", "v/kernel",
           "out/kernel"), "embed": ("embedding",), "norm": ("scale",)}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The settings of a run."""

    # The number of learners; 1 is data parallel.
    M: int = 4
    # The steps between two turns of a tensor.
    H: int = 24
    # The steps between two turns for a class of tensors; 0: H.
    mlp: int = 0
    attention: int = 0
    embed: int = 0
    norm: int = 0
    # H after the share `at` of the run; 0: unchanged.
    then: int = 0
    at: float = 0.5
    # 1: all turns of a class are at once; 2: all turns of a layer are at once; 0: turns are spread over the period.
    P: int = 0
    # The steps from a turn to the adoption of its result.
    tau: int = 0
    # overwrite, blend, rebase or eager.
    adopt: str = "overwrite"
    # The share of local work that an adoption keeps; -1: all of it, or 0.5 for blend.
    kept: float = -1.0
    merge: str = "rda"
    unit: str = "tensor"
    outer: str = "sgd"
    outer_rate: float = 1.0
    momentum: float = 0.0
    every: int = 4
    average: float = 0.0
    # The share of broadcasts that a learner misses.
    misses: float = 0.0
    stale: str = ""
    inner: str = "adamw"
    rate: float = 4e-3
    # The rate of adam for tensors that muon does not train.
    adam: float = 4e-3
    b1: float = 0.8
    b2: float = 0.95
    beta: float = 0.95
    wd: float = 0.1
    clip: float = 1.0
    warmup: int = 50
    final: float = 0.05
    schedule: str = "cosine"

    def period(self, path: str, share: float) -> int:
        """Return a tensor's number of steps between two turns."""
        [own] = [getattr(self, name) for name, ends in CLASSES.items() if path.endswith(ends)]
        return own or (self.then if self.then and share >= self.at else self.H)

    def optimizer(self) -> OptimizerConfig:
        """Return the inner optimizer's settings."""
        return OptimizerConfig(
            name=self.inner, learning_rate=self.rate, adam_learning_rate=self.adam, b1=self.b1, b2=self.b2,
            muon_beta=self.beta, weight_decay=self.wd, clip_norm=self.clip, warmup_steps=self.warmup,
            final_fraction=self.final, schedule=self.schedule,
        )  # fmt: skip

    def method(self) -> Method:
        """Return the rules of the exchange."""
        refs = {"overwrite": "theta", "blend": "theta", "rebase": "sent", "eager": "foreseen"}
        return Method(self.M, self.merge, self.unit, refs[self.adopt], self.outer, self.stale)


def arm_of(word: str) -> Arm:
    """Read an arm, such as `H=24,mlp=4`."""
    known = {field.name: type(field.default) for field in dataclasses.fields(Arm)}
    pairs = dict(pair.split("=", 1) for pair in word.split(",") if pair)
    if unknown := set(pairs) - set(known):
        raise SystemExit(f"arm '{word}' has the unknown setting {unknown.pop()}; there are {', '.join(known)}")
    return Arm(**{name: known[name](value) for name, value in pairs.items()})


@dataclass(frozen=True)
class Bed:
    """The settings that all arms share."""

    steps: int
    batch_size: int
    seq_len: int
    dim: int
    layers: int
    mlp_dim: int
    # The number of samples of the evaluation.
    held_out: int

    @property
    def heads(self) -> int:
        return self.dim // 32

    def model(self, seed: int) -> tuple[GraphDef, Params]:
        args = {"dim": self.dim, "num_layers": self.layers, "num_heads": self.heads, "num_kv_heads": self.heads,
                "head_dim": 32, "mlp_dim": self.mlp_dim, "seq_len_max": self.seq_len,
                "activation": "relu2"}  # fmt: skip
        return split_model(load_model(DECODER, args, seed))


@cache
def _source(seq_len: int) -> Source:
    return load_source(DataConfig(), seq_len)


@cache
def _samples(bed: Bed, seed: int) -> np.ndarray:
    batches = SampleOrder(_source(bed.seq_len), seed).batches(bed.batch_size)
    return np.stack([next(batches)["tokens"].astype(np.uint8) for _ in range(bed.steps)])


@cache
def _held_out(bed: Bed) -> np.ndarray:
    chosen = eval_batches(_source(bed.seq_len), 64, bed.held_out // 64)
    return np.stack([batch["tokens"].astype(np.uint8) for batch in chosen])


@cache
def _inner(settings: str) -> Callable[[Params], optax.GradientTransformation]:
    """Return a function that makes an inner optimizer; equal settings share one, so nothing is compiled twice."""
    config = OptimizerConfig(**json.loads(settings))

    def make(params: Params) -> optax.GradientTransformation:
        kinds = {path: kind_of(value.shape) for path, value in params.items()}
        table = {path: Kind("table") for path in params if path.endswith("embedding")}
        return make_inner(config, params, kinds={**kinds, **table})

    return make


def turns(arm: Arm, sizes: Mapping[str, int], steps: int) -> np.ndarray:
    """Return whether a tensor has its turn after a step [steps, tensors]; tensors are in the order of their names."""
    paths = sorted(sizes)
    due = np.zeros((steps, len(paths)), bool)
    for step in range(steps if arm.M > 1 else 0):
        share = step / steps
        periods = [arm.period(path, share) for path in paths]
        for number, (path, period) in enumerate(zip(paths, periods, strict=True)):
            same = [other for other, of in zip(paths, periods, strict=True) if of == period]
            if arm.P == 2:
                groups = list(dict.fromkeys(map(layer_of, same)))
                offset = groups.index(layer_of(path)) * period // len(groups)
            else:
                offset = 0 if arm.P == 1 else same.index(path) * period // len(same)
            due[step, number] = (step + 1) % period == (offset + 1) % period
    return due


def run(arm: Arm, bed: Bed, seed: int) -> dict[str, object]:
    """Train one arm, and return its line of results."""
    began_s = time.monotonic()
    graphdef, theta = bed.model(seed)
    theta = dict(sorted(theta.items()))
    sizes = {path: value.size for path, value in theta.items()}
    due = turns(arm, sizes, bed.steps)
    adopts = np.zeros_like(due)
    adopts[arm.tau :] = due[: bed.steps - arm.tau]
    if arm.M > 1 and arm.tau >= min(arm.period(path, share) for path in sizes for share in (0.0, 1.0)):
        raise SystemExit(f"tau={arm.tau} is not below every period, so turns would overlap; lower tau")
    missing = np.random.default_rng(seed).random((bed.steps, arm.M)) < arm.misses
    config = dataclasses.replace(arm.optimizer(), warmup_steps=min(arm.warmup, bed.steps // 10))
    rate = learning_rate(config, bed.steps)
    kept = arm.kept if arm.kept >= 0 else {"overwrite": 0.0, "blend": 0.5}.get(arm.adopt, 1.0)
    numbers = Numbers(
        np.array([rate(step) for step in range(bed.steps)], np.float32), due, adopts, missing, np.float32(kept),
        np.float32(arm.outer_rate), np.float32(arm.momentum), np.int32(arm.every), np.float32(arm.average),
    )  # fmt: skip
    fixed = dataclasses.replace(config, warmup_steps=0, final_fraction=0.0, schedule="constant")
    if arm.inner == "adamw":
        fixed = dataclasses.replace(fixed, learning_rate=1.0, adam_learning_rate=1.0)
    inner = _inner(json.dumps(dataclasses.asdict(fixed)))
    final, average, mean, losses = train(
        theta, jnp.asarray(_samples(bed, seed)), numbers,
        graphdef=graphdef, make_inner=inner, method=arm.method(), heads=bed.heads,
    )  # fmt: skip
    held_out = jnp.asarray(_held_out(bed))
    found = {name: round(float(evaluate(params, held_out, graphdef=graphdef)), 5)
             for name, params in (("loss", final), ("averaged", average), ("mean", mean))}  # fmt: skip
    sent = float((due * np.array([sizes[path] for path in sorted(sizes)])).sum() / sum(sizes.values()))
    wall_s = time.monotonic() - began_s
    tail = round(float(np.mean(losses[-bed.steps // 10 :])), 5)
    return {**found, "train": tail, "merges": round(sent, 1), "wall_s": round(wall_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="+", help="settings of each arm, such as H=24,mlp=4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64, help="width, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--mlp-dim", type=int, default=192)
    parser.add_argument("--held-out", type=int, default=1024, help="samples of the evaluation, a multiple of 64")
    parser.add_argument("--against", help="arm that the others are compared with; default: the first")
    parser.add_argument("--out", type=Path, help="file of JSON lines; its arms are not run again")
    parser.add_argument("--json", action="store_true", help="print one JSON object per arm instead of a table")
    words = parser.parse_args()
    bed = Bed(words.steps, words.batch_size, words.seq_len, words.dim, words.layers, words.mlp_dim, words.held_out)
    arms = {word: arm_of(word) for word in words.arms}
    known = (
        [json.loads(line) for line in words.out.read_text().splitlines()] if words.out and words.out.exists() else []
    )
    done = {(row["arm"], row["seed"]): row for row in known if row["bed"] == dataclasses.asdict(bed)}
    for seed in words.seeds:
        for word, arm in arms.items():
            if (word, seed) in done:
                continue
            row = {"arm": word, "seed": seed, **run(arm, bed, seed), "bed": dataclasses.asdict(bed)}
            done[word, seed] = row
            sys.stderr.write(f"{word} seed {seed}: {row['loss']} ({row['merges']} merges, {row['wall_s']} s)\n")
            if words.out:
                with words.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    report(list(arms), words.seeds, done, words.against or words.arms[0], words.json)


def report(
    arms: Sequence[str], seeds: Sequence[int], rows: Mapping[tuple[str, int], dict], against: str, as_json: bool
) -> None:
    """Print the losses of each arm and its distance from the reference arm, seed by seed."""
    for arm in arms:
        losses = [rows[arm, seed]["loss"] for seed in seeds]
        behind = [loss / rows[against, seed]["loss"] - 1 for loss, seed in zip(losses, seeds, strict=True)]
        mean = statistics.mean(behind)
        if as_json:
            line = {"name": f"methods {arm}", "value": statistics.mean(losses), "unit": "nats per byte, held out",
                    "low": min(losses), "high": max(losses), "runs": len(losses), "behind": behind,
                    "merges": rows[arm, seeds[0]]["merges"]}  # fmt: skip
            sys.stdout.write(json.dumps(line) + "\n")
        else:
            each = " ".join(f"{loss:.4f} ({100 * b:+.2f} %)" for loss, b in zip(losses, behind, strict=True))
            sys.stdout.write(
                f"{arm:<40} {rows[arm, seeds[0]]['merges']:7.1f} merges  {each}  mean {100 * mean:+.2f} %\n"
            )


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 2.0)
    main()
