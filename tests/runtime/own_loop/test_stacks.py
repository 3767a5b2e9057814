"""Loops that store the axes of stacks in different places: what travels, is merged and adopted has the same bits."""

import json
import sys
from copy import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, FragmentConfig, FragmentPlan, put, take
from diloco_jax.core.kinds import Kind
from diloco_jax.core.layout import whole
from diloco_jax.core.merge import MergeConfig, merge_rules
from diloco_jax.core.outer import Nesterov
from diloco_jax.core.passes import Merger, Values
from diloco_jax.runtime.model.layout_text import layout_of
from diloco_jax.runtime.own_loop.introduce import _whole
from diloco_jax.runtime.own_loop.trees import LoopState
from diloco_jax.training.exchange.exchange import AdoptMode
from diloco_jax.training.exchanged import ExchangedState
from tests.runtime.helpers import kill_processes, run
from tests.runtime.own_loop.test_join import write
from tests.training.one_host import COLLECTIVES

Arrays = dict[str, np.ndarray]
SIZES = {"layers": 4, "exp": 2, "embed": 8, "mlp": 64, "vocab": 16}
FRONT = {
    "blocks/experts": ("layers", "exp", "embed", "mlp"),
    "blocks/mlp": ("layers", "embed", "mlp"),
    "blocks/scale": ("layers", "embed"),
    "table": ("vocab", "embed"),
}
# As MaxText stores them; and two stack axes that are apart.
SECOND = {
    **FRONT,
    "blocks/experts": ("exp", "layers", "embed", "mlp"),
    "blocks/mlp": ("embed", "layers", "mlp"),
    "blocks/scale": ("embed", "layers"),
}
APART = {**SECOND, "blocks/experts": ("layers", "embed", "exp", "mlp"), "blocks/mlp": ("embed", "mlp", "layers")}
# The mesh axes of logical axes: none on one device; others sharded; the stacks sharded.
MESHES: dict[str, dict[str, str]] = {
    "one": {},
    "others": {"embed": "x", "mlp": "y"},
    "stacks": {"layers": "x", "exp": "y", "vocab": "y"},
    "both": {"layers": "x", "mlp": "y"},
}
LEARNERS, ROUNDS, FRAGMENTS = 2, 3, 2


def stored(values: Arrays, axes: dict[str, tuple[str, ...]]) -> Arrays:
    """Canonical values as a loop stores them: an independent few lines."""
    return {path: values[path].transpose([FRONT[path].index(name) for name in axes[path]]) for path in values}


def canonical(values: Any, axes: dict[str, tuple[str, ...]]) -> Arrays:
    return {path: np.asarray(v).transpose([axes[path].index(n) for n in FRONT[path]]) for path, v in values.items()}


def random_values(seed: int, scale: float) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = {path: [SIZES[name] for name in names] for path, names in FRONT.items()}
    return {path: np.float32(scale * rng.standard_normal(shape)) for path, shape in shapes.items()}


class Loop:
    """A loop that stores its parameters with these axes on this mesh."""

    def __init__(self, values: Arrays, axes: dict[str, tuple[str, ...]], mesh: str) -> None:
        count = 1 if mesh == "one" else 4
        devices = jax.make_mesh(
            (1, 1) if count == 1 else (2, 2), ("x", "y"), devices=jax.devices()[:count], axis_types=(AxisType.Auto,) * 2
        )
        self.axes = axes
        self.layouts = {
            path: NamedSharding(devices, PartitionSpec(*(MESHES[mesh].get(name) for name in names)))
            for path, names in axes.items()
        }
        self.loop = LoopState(self.placed(values), None, axes)

    def placed(self, values: Arrays) -> Any:
        return {path: jax.device_put(v, self.layouts[path]) for path, v in stored(values, self.axes).items()}


def merged(plan: FragmentPlan, fragment: Fragment, value: Arrays, payloads: list[bytes], format: Format) -> Arrays:
    layout, rules = whole(fragment), merge_rules(plan, MergeConfig())[fragment.fragment_id]
    merger = Merger(layout, [rules[p.key] for p in layout.pieces], Nesterov(1.0, 0.0), format, "float32")
    values = Values([np.frombuffer(payload, np.uint8) for payload in payloads], [None] * len(payloads))
    state = merger.first(layout.flat(take(value, fragment)))
    weights = np.full(len(payloads), 1 / len(payloads))
    return dict(layout.views(merger.update(values, merger.inspect(values), weights, state).state.value))


def trained(
    axes: dict[str, tuple[str, ...]], mesh: str, format: Format, mode: AdoptMode
) -> tuple[list[bytes], Arrays, list[Arrays]]:
    """Some rounds of two learners; return all payloads, the global model and the learners' parameters."""
    theta, sent = random_values(0, 1.0), list[bytes]()
    loops = [Loop(theta, axes, mesh) for _ in range(LEARNERS)]
    plan = FragmentConfig().plan(loops[0].loop.shapes, loops[0].loop.kinds, FRAGMENTS)
    islands: list[ExchangedState] = [each.loop.exchanged(format, mode == "rebase") for each in loops]
    # Both have the same programs, which are compiled once.
    for island in islands[1:]:
        island.exchange = copy(islands[0].exchange)
        island.exchange.held = {}
    for island in islands:
        for fragment in plan.fragments:
            island.adopt(fragment, take(theta, fragment))
    for number in range(ROUNDS):
        for index, (loop, island) in enumerate(zip(loops, islands, strict=True)):
            step = random_values(100 + 10 * number + index, 0.01)
            now = canonical(jax.device_get(dict(island.state.params)), axes)
            params = loop.placed({path: now[path] - step[path] for path in now})
            island.state = loop.loop.taken(params, None, "after_step()")
        for fragment in plan.fragments:
            staged = [island.exchange.stage(island.state.params, fragment) for island in islands]
            payloads = [bytes(each.encode()) for each in staged]  # type: ignore[arg-type]
            sent += payloads
            values = merged(plan, fragment, theta, payloads, format)
            theta = put(theta, fragment, values)
            for island, own in zip(islands, staged, strict=True):
                island.adopt(fragment, values, mode=mode, alpha=0.25, sent=own)
    for program in islands[0].exchange._compiled.values():
        assert not [name for name in COLLECTIVES if name in program.as_text()]
    for loop, island in zip(loops, islands, strict=True):
        assert all(
            value.sharding.is_equivalent_to(loop.layouts[path], value.ndim)
            for path, value in island.state.params.items()
        )
    return sent, theta, [canonical(jax.device_get(dict(island.state.params)), axes) for island in islands]


# Each mesh, each mode and each kind of format.
CASES: list[tuple[str, Format, AdoptMode]] = [
    ("one", "int4", "rebase"),
    ("others", "int4", "overwrite"),
    ("stacks", "int4", "blend"),
    ("both", "float32", "overwrite"),
]


@pytest.mark.parametrize(("mesh", "format", "mode"), CASES)
def test_stacks_anywhere_give_the_bits_of_stacks_in_front(mesh: str, format: Format, mode: AdoptMode) -> None:
    sent, theta, locals_ = trained(FRONT, mesh, format, mode)
    for axes in (SECOND, APART)[: 1 if mesh == "both" else 2]:
        found = trained(axes, mesh, format, mode)
        assert found[0] == sent
        for got, want in ((found[1], theta), *zip(found[2], locals_, strict=True)):
            for path in FRONT:
                np.testing.assert_array_equal(got[path], want[path], err_msg=path)


def test_the_run_sees_one_model_wherever_an_island_stores_its_stacks() -> None:
    values = random_values(0, 1.0)
    loops = [Loop(values, axes, "one").loop for axes in (FRONT, SECOND, APART)]
    assert len({layout_of(loop.shapes, loop.kinds) for loop in loops}) == 1
    assert loops[2].kinds == {
        "blocks/experts": Kind("matrix", 2), "blocks/mlp": Kind("matrix", 1), "blocks/scale": Kind("vector", 1),
        "table": Kind("table"),
    }  # fmt: skip
    plans = [FragmentConfig().plan(loop.shapes, loop.kinds, FRAGMENTS) for loop in loops]
    assert plans[0].fragments == plans[1].fragments == plans[2].fragments
    assert len({plan.fingerprint for plan in plans}) == 1
    for loop, axes in zip(loops, (FRONT, SECOND, APART), strict=True):
        # What the first island sends, and what comes back for an evaluation.
        for path, value in _whole(loop.initial, loop.forms).items():
            np.testing.assert_array_equal(value, values[path])
        for path, value in loop.placed(values).items():
            np.testing.assert_array_equal(value, stored(values, axes)[path])


def test_whole_states_keep_the_axes_of_the_loop() -> None:
    values, changed = random_values(0, 1.0), random_values(1, 1.0)
    island = Loop(values, APART, "one").loop.exchanged("float32", False)
    saved = island.stage_state().value()
    for path, value in stored(values, APART).items():
        np.testing.assert_array_equal(saved["params/" + path], value)
    island.load(changed)
    for path, value in island.parameters().items():
        np.testing.assert_array_equal(value, changed[path])
        assert value.flags.c_contiguous
    island.load_state(saved)
    for path, value in island.parameters().items():
        np.testing.assert_array_equal(value, values[path])


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"blocks/mlp": ("layers", None)}, r"'blocks/mlp': the axes \(layers, None\) are 2"),
        ({"blocks/mlp": ("layers", "layers", None)}, "'blocks/mlp'.* name 'layers' twice"),
        (
            {"blocks/mlp": ("embed", "layers", "mlp")},
            r"'blocks/experts' of shape \(2, 4, 8, 64\) names no axes.*in `axes` too",
        ),
        ({"blocks/mlp": ("embed", "decoder_layers", "mlp")}, "'decoder_layers' seems to count"),
    ],
)
def test_join_refuses_stacks_that_are_not_described(axes: Any, words: str) -> None:
    values = stored(random_values(0, 1.0), SECOND)
    with pytest.raises(ValueError, match=words):
        LoopState({path: jax.numpy.asarray(value) for path, value in values.items()}, None, axes)


@pytest.mark.nightly
@pytest.mark.net
def test_islands_that_store_layers_at_different_axes_are_merged(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("stacked_loop.py"))]
    changes = {"islands": {"command": command}, "train": {"steps": 120}, "protocol": {"sync_every": 6}}
    run_dir = tmp_path / "run"
    try:
        ended = run("train", write(tmp_path, **changes), "--json", "--run-dir", run_dir)
    finally:
        kill_processes(tmp_path)
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["complete"] and summary["contributors_per_round"] > 1.5, ended.stderr
    told = [(run_dir / "logs" / f"island-{n}.log").read_text().split("global ")[-1].split()[:4] for n in range(2)]
    # Stored axis, a number of the canonical global model, first and last loss: both hold the same model.
    assert [each[0] for each in told] == ["0", "1"] and told[0][1] == told[1][1]
    assert float(told[0][3]) < 0.5 * float(told[0][2])
