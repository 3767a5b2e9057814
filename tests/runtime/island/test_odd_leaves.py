"""Leaves of any shape and width travel in every format, and a value that a round left out leaves no trace."""

import json
import math
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.merge import Method
from diloco_jax.protocol.watch.stats import RunStats, never_merged
from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.run import AdoptConfig
from diloco_jax.training.exchange.exchange import AdoptMode
from tests.protocol.syncer_inputs import new
from tests.runtime.helpers import run, write_config
from tests.runtime.island.rounds import IslandOf, Rounds, encoded

FORMATS, MODES, NARROW = get_args(Format), get_args(AdoptMode), ("bfloat16", "float16")
DTYPES = (*NARROW, "float32")
MIXED = {"scalar": (), "nothing": (3, 0), "kernel": (300,), "one": (1,)}
# Leaves of every kind alone, and together. The product of shapes and formats is tried without islands.
SHAPES: list[tuple[dict[str, tuple[int, ...]], Format]] = [
    ({"scalar": ()}, "int8"),
    ({"one": (1,)}, "bfloat16"),
    ({"one": (1, 1), "nothing": (0,)}, "int2"),
    (MIXED, "float32"),
    (MIXED, "int4"),
    (MIXED, "ternary"),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (3, 0)])
def test_a_leaf_of_any_shape_is_encoded_and_read(format: Format, shape: tuple[int, ...]) -> None:
    value = {"leaf": np.full(shape, 1.5, np.float32), "other": np.ones(3, np.float32)}
    payload = codec.encode(value, format)
    assert len(payload) == codec.encoded_size([shape, (3,)], format)
    read = codec.decode(payload, [("leaf", shape), ("other", (3,))], format)
    assert read["leaf"].shape == shape
    # The level stands for elements which are all alike.
    level = {"int2": 1.5336, "ternary": 1.53125}.get(format, 1.0)
    np.testing.assert_allclose(read["leaf"], level * value["leaf"], rtol=1e-6)
    assert codec.as_bytes(value["leaf"]).tobytes() == codec.encode({"leaf": value["leaf"]}, "float32"), "unflattened"


@pytest.mark.parametrize(("shapes", "up"), SHAPES, ids=str)
def test_all_leaves_take_part_in_every_round(shapes: dict[str, tuple[int, ...]], up: Format) -> None:
    initial = {path: np.full(shape, 1.5, np.float32) for path, shape in shapes.items()}
    filled = sum(0 not in shape for shape in shapes.values())
    for fragments in {1, filled}:
        rounds = Rounds(initial, 2, up=up, down="int4", how=AdoptConfig(mode="rebase"), fragments=fragments)
        for _ in range(2):
            for fragment_id in range(fragments):
                for island in rounds.islands:
                    island.put({path: value - np.float32(0.5) for path, value in island.values().items()})
                rounds.send(fragment_id)
                assert rounds.merge(fragment_id).excluded == {}
        after = rounds.parameters()
        assert all(after[path].shape == shape for path, shape in shapes.items())
        assert all((after[path] < 1.2).all() for path in shapes)


def test_a_leaf_without_elements_is_in_no_fragment() -> None:
    plan = plan_fragments({"kernel": (4, 4), "nothing": (0, 4)}, 2)
    assert {piece.path for fragment in plan.fragments for piece in fragment.slices} == {"kernel"}
    assert plan.fingerprint != plan_fragments({"kernel": (4, 4)}, 2).fingerprint, "it is a part of the model"


@pytest.mark.parametrize(
    ("fragments", "words"),
    [((), ""), ((3,), "fragment 3 was never merged"), (tuple(range(10)), "5, 6, 7 and 2 more were never merged")],
)
def test_the_warning_names_the_fragments(fragments: tuple[int, ...], words: str) -> None:
    assert words in never_merged(fragments) and bool(words) == bool(never_merged(fragments))


def test_a_run_that_was_merely_stopped_early_has_no_such_warning() -> None:
    syncer = new(total_steps=20)
    stats = RunStats(("a",), 100, syncer)
    period = syncer.config.groups.gap_max
    syncer.progress.global_step = 2 * period - 1
    assert stats.unmerged_fragments == [0, 1, 2, 3] and not stats.unmerged
    syncer.progress.global_step = 2 * period
    assert "were never merged" in stats.unmerged, "each had its turn twice"
    syncer.progress.global_step, syncer.progress.finished = 2, True
    assert "were never merged" in stats.unmerged, "a complete run has no more turns"


@pytest.mark.nightly
@pytest.mark.net
def test_a_run_with_odd_leaves_merges_them_and_says_what_it_was_too_short_for(tmp_path: Path) -> None:
    odd = {"module": "tests.runtime.island.odd:Odd", "args": {}}
    protocol, train = {"sync_every": 4, "num_fragments": 4}, {"steps": 3, "eval_every": 0}
    changes = {"islands": {"count": 1}, "train": train, "wire": {"up": "float32"}, "optimizer": {"warmup_steps": 1}}
    config = write_config(tmp_path, model=odd, protocol=protocol, **changes)
    result = run("train", config, "--run-dir", tmp_path / "run", "--quiet")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["unmerged_fragments"] == [0]
    for text in (result.stderr, (tmp_path / "run" / "report.html").read_text()):
        assert "fragment 0 was never merged" in text


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    arrays = {"nothing": np.zeros((0, 3), np.float32), "scalar": np.full((), 2.0), "one": np.ones(1)}
    bare = {"narrow": np.zeros((2, 0), ml_dtypes.bfloat16)}
    path = checkpoint.save(tmp_path, {"some": arrays, "none": {}, "bare": bare}, {"global_step": 3})
    reader = checkpoint.CheckpointReader(path)
    groups = {g: {name: reader.array(g, name) for name in reader.names(g)} for g in ("some", "none", "bare")}
    assert reader.meta == {"global_step": 3} and groups["none"] == {}
    for found, given in ((groups["some"], arrays), (groups["bare"], bare)):
        assert {k: (v.dtype, v.shape) for k, v in found.items()} == {k: (v.dtype, v.shape) for k, v in given.items()}
    assert groups["some"]["scalar"] == 2


SHAPE = (64, 64)
SETTLE, AFTER = 10, 6


def move(island: IslandOf, rng: np.random.Generator, norm: float = 1.0) -> None:
    """Training: by a usual distance, or another one."""
    direction = rng.standard_normal(SHAPE).astype(np.float32)
    step = direction * np.float32(norm / np.linalg.norm(direction))
    island.put({"kernel": island.values()["kernel"] - step})


def rounds_after_a_bad_value(rounds: Rounds, size: float) -> tuple[list[float], list[set[str]]]:
    """Norms of the global steps, and who was left out; island 0 has one bad value in round SETTLE."""
    rng = np.random.default_rng(5)
    norms, excluded = [], []
    for number in range(SETTLE + AFTER):
        for island in rounds.islands:
            move(island, rng)
        if number == SETTLE:
            move(rounds.islands[0], rng, size)
        rounds.send()
        for island in rounds.islands:
            # The parameters move while the values travel.
            move(island, rng, 0.5)
        before = rounds.parameters()
        excluded.append(set(rounds.merge().excluded))
        norms.append(rounds.step_norm(before))
    return norms, excluded


FINITE, NOT_FINITE = (300.0, 8_000.0, 30_000.0, 1e12), (math.inf, math.nan)
# Each format with a finite value and one that is not, and each size with two formats or more.
BAD = [(up, sizes[n % len(sizes)], "overwrite") for n, up in enumerate(FORMATS) for sizes in (FINITE, NOT_FINITE)]
BAD += [("float32", 1e12, "overwrite"), ("int4", 30_000.0, "blend"), ("int4", 30_000.0, "rebase")]


@pytest.mark.parametrize(("up", "size", "mode"), BAD)
def test_after_a_bad_value_the_next_steps_are_of_the_usual_size(up: Format, size: float, mode: AdoptMode) -> None:
    """Whatever the mode: the parameters that gave the value are replaced."""
    rounds = Rounds({"kernel": np.zeros(SHAPE, np.float32)}, up=up, how=AdoptConfig(mode=mode, alpha=0.75))
    norms, excluded = rounds_after_a_bad_value(rounds, size)
    usual = float(np.median(norms[0 if mode == "overwrite" else 3 : SETTLE]))
    assert excluded == [set()] * SETTLE + [{"0"}] + [set()] * (AFTER - 1), "one bad value, and left out once"
    assert max(norms[SETTLE:]) <= 1.2 * usual, [norm / usual for norm in norms]


def test_what_was_kept_back_of_the_values_before_it_is_not_lost() -> None:
    """Only the value that was left out is lost: all that was learnt before and after it arrives."""
    rounds = Rounds({"bias": np.zeros(500, np.float32)}, 1, up="int4")
    rng = np.random.default_rng(1)
    learnt, (island,) = np.zeros(500), rounds.islands
    for number in range(40):
        step = rng.standard_normal(500).astype(np.float32)
        island.put({"bias": island.values()["bias"] + step})
        learnt += step
        rounds.send()
        # This round ends without the island.
        if number == 20:
            values = rounds.model.slices(rounds.model.capture(), 0)
            island.adoptions.adopt(0, rounds.round, rounds.merged_rounds[0][0], values)
            learnt -= step
            continue
        rounds.merge()
    kept = learnt - rounds.parameters()["bias"]
    assert np.abs(kept).max() < 0.5, "a rounding step of the last value is about 0.5"


NARROW_SHAPES = {"kernel": (40, 33), "bias": (7,), "scale": ()}


def initial(seed: int = 0) -> dict[str, np.ndarray]:
    """Values of many magnitudes, down to float16's subnormal ones; no dtype but float32 holds them."""
    rng = np.random.default_rng(seed)
    return {
        path: np.asarray(rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 4, shape), np.float32)
        for path, shape in NARROW_SHAPES.items()
    }


def pairs(dtypes: tuple[str, ...]) -> list[tuple[str, Format, AdoptMode]]:
    """Return cases that pair each format with each mode, and each dtype with each format and each mode."""
    return [(dtypes[(f + m) % len(dtypes)], up, mode) for f, up in enumerate(FORMATS) for m, mode in enumerate(MODES)]


@pytest.mark.parametrize(("dtype", "up", "mode"), pairs(DTYPES))
def test_without_training_there_is_no_outer_gradient(dtype: str, up: Format, mode: AdoptMode) -> None:
    rounds = Rounds(initial(), 2, dtype=dtype, up=up, how=AdoptConfig(mode=mode, alpha=0.7))
    island = rounds.islands[0]

    def gradient() -> dict[str, np.ndarray]:
        return codec.decode(encoded(island.send(0, rounds.round)), rounds.plan.fragments[0].keys_shapes, up)

    for _ in range(3):
        rounds.send()
        assert not any(value.any() for value in gradient().values())
        before = rounds.parameters()
        rounds.merge()
        assert rounds.step_norm(before) == 0
    # Other islands have moved the model; blend keeps what the island had before.
    for seed in range(1, 4 if mode != "blend" else 1):
        rounds.round += 1
        island.adoptions.adopt(0, rounds.round, -1, initial(seed))
        assert not any(value.any() for value in gradient().values())


def arrived(
    dtype: str,
    *,
    up: Format = "float32",
    down: Format = "float32",
    mode: AdoptMode = "overwrite",
    learners: int = 4,
    method: Method = "average",
    rounds: int = 200,
) -> float:
    """Return the share of sparse moves by one unit in the last place that reaches the global model."""
    rng = np.random.default_rng(3)
    start = {"kernel": (rng.standard_normal(4096) + 3 * np.sign(rng.standard_normal(4096))).astype(np.float32)}
    start["kernel"] = start["kernel"].astype(_dtype(dtype)).astype(np.float32)
    made = Rounds(start, learners, dtype=dtype, up=up, down=down, how=AdoptConfig(mode=mode), merge=method)
    moved = np.zeros(4096)
    up_or_down = np.where(rng.random(4096) < 0.5, -np.inf, np.inf).astype(_dtype(dtype))

    def train(number: int) -> None:
        nonlocal moved
        island = made.islands[number]
        values, chosen = island.values()["kernel"], rng.random(4096) < 0.01
        after = np.where(chosen, np.nextafter(values, up_or_down), values)
        moved += (after.astype(float) - values.astype(float)) / learners
        island.put({"kernel": after})

    for _ in range(rounds):
        for number in range(learners):
            train(number)
        made.send()
        # Changes that happen meanwhile are kept, and are included in the next value.
        if mode == "rebase":
            for number in range(learners):
                train(number)
        made.merge()
    made.send()
    made.merge()
    came = made.parameters()["kernel"].astype(float) - start["kernel"]
    return float(came @ moved / (moved @ moved))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize(("dtype", "up", "mode"), pairs(NARROW))
def test_sparse_moves_by_one_unit_in_the_last_place_arrive(dtype: str, up: Format, mode: AdoptMode) -> None:
    # The change of the last rounds waits in the feedback.
    late = 0.1 if up in ("int2", "ternary") else 0.02
    assert arrived(dtype, up=up, mode=mode, rounds=20) == pytest.approx(1.0, abs=late)


@pytest.mark.parametrize("down", ["bfloat16", "int8", "int4", "int2", "ternary"])
def test_they_arrive_through_rounded_global_steps_too(down: Format) -> None:
    assert arrived("bfloat16", up="int4", down=down, rounds=60) == pytest.approx(1.0, abs=0.05)
