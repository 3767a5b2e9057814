"""Loops that keep their arrays in an object: what is read and written, and what a report waits for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from diloco_jax.core.fragments import FragmentConfig
from diloco_jax.runtime.own_loop.attached import HeldArrays
from diloco_jax.runtime.own_loop.lagging import LaggingMetrics
from diloco_jax.runtime.records.checkpoint import complete, load_parameters
from diloco_jax.training.exchanged import OPTIMIZER, Deferred
from tests.runtime.helpers import kill_processes, run

HERE = Path(__file__).parent


class Reads(dict[str, jax.Array]):
    """Parameters that record which of them were read and written."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[str] = []
        self.written: list[str] = []

    def __getitem__(self, path: str) -> jax.Array:
        self.read.append(path)
        return super().__getitem__(path)

    def __setitem__(self, path: str, leaf: jax.Array) -> None:
        self.written.append(path)
        super().__setitem__(path, leaf)


class Held:
    """A holder of two parameters and one moment."""

    def __init__(self, dtype: Any = jnp.float32) -> None:
        self.params = Reads({"a": jnp.arange(8.0, dtype=dtype), "b": jnp.ones((4, 6))})
        self.axes: dict[str, Any] = {"b": ("vocab", None)}
        self.mu: Any = {"mu": jnp.full(8, 0.5)}

    def moments(self) -> Any:
        return self.mu

    def set_moments(self, tree: Any) -> None:
        self.mu = tree


def test_only_the_tensors_of_a_fragment_are_read_and_written() -> None:
    held = Held()
    before = held.params["a"]
    arrays = HeldArrays(held)
    island = arrays.exchanged("float32", False)
    assert arrays.kinds["b"].form == "table"
    plan = FragmentConfig().plan(arrays.shapes, arrays.kinds, 2)
    for fragment in plan.fragments:
        paths = {piece.path for piece in fragment.slices}
        held.params.read.clear(), held.params.written.clear()
        values = {key: np.full(shape, 3.0, np.float32) for key, shape in fragment.keys_shapes}
        island.adopt(fragment, values)
        assert set(held.params.written) == paths
        held.params.read.clear()
        island.exchange.stage(island.state.params, fragment).encode()
        assert set(held.params.read) == paths
    assert np.asarray(held.params["a"]).tolist() == [3.0] * 8
    assert np.asarray(before).tolist() == list(range(8)), "the loop's own array stays whole"


def test_moments_are_read_for_a_copy_and_replaced_when_the_island_loads_some() -> None:
    held = Held()
    arrays = HeldArrays(held)
    island = arrays.exchanged("float32", False)
    held.mu = {"mu": jnp.full(8, 2.0)}
    staged = island.stage_moments()
    assert staged.leaf(OPTIMIZER + "mu").tolist() == [2.0] * 8
    island.load_moments(lambda name: np.full(8, 7.0, np.float32))
    arrays.take_loaded(island)
    assert np.asarray(held.mu["mu"]).tolist() == [7.0] * 8 and isinstance(island.state.opt_state, Deferred)
    held.mu = {"mu": jnp.ones(8), "nu": jnp.ones(8)}
    with pytest.raises(ValueError, match="another structure than when the island joined"):
        island.stage_moments()


def test_an_array_that_changed_its_type_is_named() -> None:
    held = Held()
    island = HeldArrays(held).exchanged("float32", False)
    held.params["a"] = jnp.ones(8, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"params\['a'\] of bfloat16 \(8,\), join\(\) float32"):
        _ = island.state.params["a"]


@jax.jit
def slow(x: jax.Array) -> jax.Array:
    """Return 4.0 after about a second of work."""
    return 4.0 + 0.0 * jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ x), x).sum()


def test_a_report_takes_the_newest_known_metrics_and_waits_for_no_step_of_its_own() -> None:
    metrics = LaggingMetrics(waits=False)
    assert metrics.take(jnp.float32(5.0)) == {"loss": 5.0}
    x = jnp.ones((1000, 1000)) / 1000
    slow.lower(x).compile()
    running: Any = slow(x)
    found = metrics.take({"loss": running})
    assert not running.is_ready() and found == {"loss": 5.0}
    assert metrics.take({"loss": slow(x)}) == {"loss": 4.0}
    assert metrics.take(3.0) == {"loss": 3.0}
    with pytest.raises(ValueError, match="no 'loss'"):
        metrics.take({"accuracy": 1.0})
    assert LaggingMetrics(waits=True).take(2.0) == {"loss": 2.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    kill_processes(tmp_path)


@pytest.mark.nightly
@pytest.mark.net
def test_a_loop_with_a_holder_trains_to_the_bits_of_one_that_passes_its_trees(tmp_path: Path, run_dir: Path) -> None:
    found = {}
    for loop in ("loop.py", "held_loop.py"):
        config = {
            "name": "own",
            "islands": {"count": 1, "devices": 2, "command": [sys.executable, str(HERE / loop)]},
            "model": {"module": "own"},
            "train": {"steps": 40, "eval_every": 0},
            # With this protocol every value is merged and adopted before the next step.
            "protocol": {"sync_every": 4, "num_fragments": 3, "snapshot_every": 20, "overlap_steps": 0},
            "trackers": [],
        }
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        ended = run("train", tmp_path / "own.yaml", "--quiet", "--run-dir", run_dir / loop)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        log = (run_dir / loop / "logs" / "island-0.log").read_text()
        assert "1 compiled step" in log, log
        found[loop], _ = load_parameters(complete(run_dir / loop / "checkpoints")[0])
    assert "3 seen" in log and float(log.rpartition(" due")[0].split()[-1]) < 2.0
    for path, values in found["loop.py"].items():
        np.testing.assert_array_equal(values, found["held_loop.py"][path])
