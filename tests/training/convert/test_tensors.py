"""Tensors that hold several of our parameters, or are one of a stack: cut and joined without a changed bit."""

from typing import Any

import numpy as np
import pytest

from diloco_jax.training.convert.tensors import of_layer

E, D, F, X, Y = 3, 4, 5, 6, 2
RNG = np.random.default_rng(0)
OURS = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, shape in {
        "q/kernel": (D, X), "k/kernel": (D, Y), "v/kernel": (D, Y), "q/bias": (X,), "k/bias": (Y,), "v/bias": (Y,),
        "gate/kernel": (D, F), "up/kernel": (D, F), "down/kernel": (F, D),
        "experts_gate": (E, D, F), "experts_up": (E, D, F), "experts_down": (E, F, D), "norm_q/scale": (X,),
    }.items()
}  # fmt: skip


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    found = np.empty((*gate.shape[:-1], 2 * gate.shape[-1]), np.float32)
    found[..., 0::2], found[..., 1::2] = gate, up
    return found


o = OURS
GATE_UP = {"name": "gate_up", "turned": False, "interleaved": True}
# The table of names for some parameters, and the tensors that the files have, built independently.
CASES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "one each": (
        {"q/kernel": "q.weight", "norm_q/scale": "q_norm"},
        {"q.weight": o["q/kernel"].T, "q_norm": o["norm_q/scale"]},
    ),
    "fused rows": (
        {"q/kernel": "qkv", "k/kernel": "qkv", "v/kernel": "qkv", "gate/kernel": "gu", "up/kernel": "gu"},
        {
            "qkv": np.concatenate([o["q/kernel"].T, o["k/kernel"].T, o["v/kernel"].T]),
            "gu": np.concatenate([o["gate/kernel"].T, o["up/kernel"].T]),
        },
    ),
    "fused biases, in the order of the table": (
        {"v/bias": "b", "q/bias": "b", "k/bias": "b"},
        {"b": np.concatenate([o["v/bias"], o["q/bias"], o["k/bias"]])},
    ),
    "an expert each": (
        {"experts_up": "experts.{}.up", "experts_down": "experts.{}.down"},
        {f"experts.{e}.up": o["experts_up"][e].T for e in range(E)}
        | {f"experts.{e}.down": o["experts_down"][e].T for e in range(E)},
    ),
    "fused in an expert each": (
        {"experts_gate": "experts.{}.gu", "experts_up": "experts.{}.gu"},
        {f"experts.{e}.gu": np.concatenate([o["experts_gate"][e].T, o["experts_up"][e].T]) for e in range(E)},
    ),
    "merged experts": (
        {"experts_gate": "gate_up", "experts_up": "gate_up", "experts_down": "down"},
        {
            "gate_up": np.stack([np.concatenate([o["experts_gate"][e].T, o["experts_up"][e].T]) for e in range(E)]),
            "down": np.stack([o["experts_down"][e].T for e in range(E)]),
        },
    ),
    "merged experts, interleaved and not turned": (
        {"experts_gate": GATE_UP, "experts_up": GATE_UP, "experts_down": {"name": "down", "turned": False}},
        {"gate_up": interleaved(o["experts_gate"], o["experts_up"]), "down": o["experts_down"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_the_files_are_ours_both_ways(case: str) -> None:
    names, theirs = CASES[case]
    found = list(of_layer({path: OURS[path].shape for path in names}, names, "a family"))
    assert {one.path for one in found} == names.keys() and {name for one in found for name in one.hf} == theirs.keys()
    written = {name: np.full(theirs[name].shape, np.nan, np.float32) for name in theirs}
    for one in found:
        assert {theirs[name].shape for name in one.hf} == {one.hf_shape}
        ours = np.full(one.shape, np.nan, np.float32)
        for name, piece in zip(one.hf, one.to_hf(ours), strict=True):
            piece[...] = one.in_theirs(theirs[name])
        np.testing.assert_array_equal(ours, OURS[one.path])
        for name, piece in zip(one.hf, one.to_hf(OURS[one.path]), strict=True):
            one.in_theirs(written[name])[...] = piece
    for name in theirs:
        np.testing.assert_array_equal(written[name], theirs[name])


def test_a_parameter_without_a_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match="models of a family in transformers have no tensor for the parameter k/kernel"
    ):
        list(of_layer({"q/kernel": (D, X), "k/kernel": (D, Y)}, {"q/kernel": "q"}, "a family"))
