"""Leaves without axes, with one element and with none travel in every format; what never travelled is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.core import codec
from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.watch.stats import never_merged
from diloco_jax.runtime.records import checkpoint
from diloco_jax.settings.run import AdoptConfig
from tests.runtime.helpers import run, write_config
from tests.runtime.island.rounds import Rounds

SHAPES = [
    {"scalar": ()},
    {"one": (1,)},
    {"one": (1, 1), "nothing": (0,)},
    {"scalar": (), "nothing": (3, 0), "kernel": (300,), "one": (1,)},
]


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (0, 3), (3, 0)])
def test_a_leaf_of_any_shape_is_encoded_and_read(format: Format, shape: tuple[int, ...]) -> None:
    value = {"leaf": np.full(shape, 1.5, np.float32), "other": np.ones(3, np.float32)}
    payload = codec.encode(value, format)
    assert len(payload) == codec.encoded_size([shape, (3,)], format)
    read = codec.decode(payload, [("leaf", shape), ("other", (3,))], format)
    assert read["leaf"].shape == shape
    np.testing.assert_allclose(read["leaf"], value["leaf"], rtol=1e-6)
    assert codec.as_bytes(value["leaf"]).tobytes() == codec.encode({"leaf": value["leaf"]}, "float32"), "unflattened"


@pytest.mark.parametrize("up", get_args(Format))
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
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
                assert rounds.merge(fragment_id).left_out == {}
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


@pytest.mark.net
@pytest.mark.timeout(500)
def test_a_run_with_odd_leaves_merges_all_and_one_that_is_too_short_says_so(tmp_path: Path) -> None:
    odd = {"module": "tests.runtime.island.odd:Odd", "args": {}}
    protocol = {"sync_every": 4, "num_fragments": 4}
    for steps, unmerged in ((16, []), (2, [0, 3])):
        folder = tmp_path / str(steps)
        folder.mkdir()
        train = {"steps": steps, "eval_every": 0}
        changes = {"islands": {"count": 1}, "train": train, "wire": {"up": "float32"}, "optimizer": {"warmup_steps": 1}}
        config = write_config(folder, model=odd, protocol=protocol, **changes)
        result = run("train", config, "--run-dir", folder / "run", "--quiet", timeout_s=200)
        assert result.returncode == 0, result.stdout + result.stderr
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["unmerged_fragments"] == unmerged
        report = (folder / "run" / "report.html").read_text()
        for text in (result.stderr, report):
            assert ("fragments 0, 3 were never merged" in text) == bool(unmerged)


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    arrays = {"nothing": np.zeros((0, 3), np.float32), "scalar": np.float32(2) * np.ones(()), "one": np.ones(1)}
    bare = {"narrow": np.zeros((2, 0), ml_dtypes.bfloat16)}
    path = checkpoint.save(tmp_path, {"some": arrays, "none": {}, "bare": bare}, {"global_step": 3})
    groups, meta = checkpoint.load(path, "some", "none", "bare")
    assert meta == {"global_step": 3} and groups["none"] == {}
    for found, given in ((groups["some"], arrays), (groups["bare"], bare)):
        assert {k: (v.dtype, v.shape) for k, v in found.items()} == {k: (v.dtype, v.shape) for k, v in given.items()}
    assert groups["some"]["scalar"] == 2
