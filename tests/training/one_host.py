"""One of two processes with two devices each that are an island together; test_island.py starts both.

    python -m tests.training.one_host FOLDER PROCESS PORT

It writes what `exercise` gives to FOLDER/PROCESS.npz. The test runs `exercise` too, on an island of one process.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from diloco_jax.core import codec
from diloco_jax.core.fragments import Fragment, plan_fragments
from diloco_jax.runtime.island.built_in import Feed
from diloco_jax.training.data.corpus import Source
from diloco_jax.training.data.order import SampleOrder
from diloco_jax.training.data.sample import Sample
from diloco_jax.training.island import Island
from diloco_jax.training.models.config import ModelConfig
from diloco_jax.training.optimizers import OptimizerConfig
from diloco_jax.training.sharding import MeshConfig
from tests.limits import HANGS_S
from tests.quick import compile_quickly

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Rows of 512 elements among others: whole blocks, so that shards of them are rounded on the devices.
MODEL = {"vocab_size": 16, "dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 512}
CASES: Sequence[tuple[dict[str, int], codec.Format]] = (
    ({"fsdp": 4}, "int4"),
    # Every shard is on both hosts.
    ({"data": 2, "fsdp": 2}, "int8"),
    ({"fsdp": 2, "tensor": 2}, "bfloat16"),
    ({"fsdp": 4}, "float32"),
    ({"data": 2, "fsdp": 2}, "ternary"),
)
FRAGMENTS = 3


class Alone:
    """An exchange among processes, without any other process."""

    def give(self, name: str, mine: bytes) -> None:
        """Let the others have this, under a name."""

    def take(self, name: str) -> Mapping[int, bytes]:
        """Return what the others gave under a name, by process."""
        return {}


class ThroughFiles(Alone):
    """One of two processes that write files in a folder for each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, name: str, mine: bytes) -> None:
        """See Alone."""
        written = self._folder / f"{name}.{jax.process_index()}"
        unfinished = written.with_name(f"{written.name}-unfinished")
        unfinished.write_bytes(mine)
        unfinished.replace(written)

    def take(self, name: str) -> Mapping[int, bytes]:
        """See Alone."""
        other = 1 - jax.process_index()
        theirs, ends_s = self._folder / f"{name}.{other}", time.monotonic() + HANGS_S
        while not theirs.exists():
            assert time.monotonic() < ends_s, f"the other host did not write {theirs}"
            time.sleep(0.01)
        return {other: theirs.read_bytes()}


def make_island(mesh: Mapping[str, int], wire: codec.Format) -> Island:
    """The island of a case, on four devices of however many processes."""
    config = OptimizerConfig(warmup_steps=0)
    return Island(ModelConfig(args=MODEL), config, MeshConfig(**mesh), seed=0, devices=jax.devices()[:4], wire=wire)


class Counting:
    """A source of two epochs' worth of samples for three steps, which remembers what was read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Sample:
        self.read.append(number)
        return {"tokens": (number + np.arange(9, dtype=np.int32)) % 16}


def values_of(fragment: Fragment, seed: int) -> dict[str, np.ndarray]:
    """Random values of a fragment, the same everywhere."""
    rng = np.random.default_rng((seed, fragment.fragment_id))
    return {key: rng.standard_normal(shape).astype(np.float32) for key, shape in fragment.keys_shapes}


def exercise(case: int, others: Alone) -> dict[str, np.ndarray]:
    """Adopt, stage and encode every fragment twice, then load, step, and stage a whole state of one of CASES."""
    mesh, wire = CASES[case]
    island = make_island(mesh, wire)
    axes = {path: min(1, len(shape) - 1) for path, shape in island.shapes.items()}
    plan = plan_fragments(island.shapes, FRAGMENTS, split_axis=axes)
    found: dict[str, np.ndarray] = {}
    for fragment in plan.fragments:
        sent = None
        for turn in range(2):
            island.adopt(fragment, values_of(fragment, turn), sent=sent)
            island.overwrite(fragment, values_of(fragment, 10 + turn))
            sent = island.exchange.stage(island.state.params, fragment)
            name = f"{case}-{fragment.fragment_id}-{turn}"
            if sent.has_loose:
                others.give(name, b"".join(sent.loose()))
                sent.of_others = partial(others.take, name)
            found[name] = np.frombuffer(_flat(sent.encode()), np.uint8)
    texts = [program.as_text() or "" for program in island.exchange._compiled.values()]
    found[f"{case}-collectives"] = np.array([name in text for text in texts for name in COLLECTIVES])
    state = island.stage_state()
    names = {leaf.name: f"{case}-state-{number}" for number, leaf in enumerate(state.layout.leaves)}
    for leaf, name in names.items():
        others.give(name, b"".join(state.loose(leaf)))
    state.of_others = lambda leaf: others.take(names[leaf])
    whole = state.value()
    island.load_state({name: value / 2 if value.dtype == np.float32 else value for name, value in whole.items()})
    samples = Counting()
    feed = Feed(island, SampleOrder(Source(samples, samples, 16), 0), samples[0], ahead=2, size=8)
    samples.read.clear()
    losses = []
    for step in range(3):
        feed.put([(8 * step, 8 * step + 8)], [(8 * step + 8, 24)])
        batch, position = feed.take()
        losses.append(island.wait(island.step(batch, 1e-3, position))["loss"])
    feed.close()
    found |= {f"{case}-losses": np.array(losses), f"{case}-read": np.array(samples.read)}
    return found | {f"{case}/{name}": value for name, value in whole.items()}


def _flat(payload: bytes | list[codec.Bytes]) -> bytes:
    return payload if isinstance(payload, bytes) else b"".join(payload)


def main() -> None:
    """Run all cases as one of the two processes."""
    folder, host, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # The bits are compared with those of the test's process, which compiles quickly too.
    compile_quickly()
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, host, coordinator_bind_address=f"127.0.0.1:{port}")
    found: dict[str, np.ndarray] = {}
    for case in range(len(CASES)):
        found |= exercise(case, ThroughFiles(folder))
    np.savez(folder / f"{host}.npz", **{name.replace("/", "|"): value for name, value in found.items()})


if __name__ == "__main__":
    main()
