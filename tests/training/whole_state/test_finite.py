"""The numbers that a state must not have."""

import ml_dtypes
import numpy as np
import pytest

from diloco_jax.training.whole_state import finite
from diloco_jax.training.whole_state.finite import UnusableState, check_finite

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize(
    ("name", "values", "fits"),
    [
        ("params/a", [0.0, 1.0, 2.0], True),
        ("params/a", [0.0, 1.0, NAN], False),
        ("params/a", [0.0, 1.0, -INF], False),
        ("optimizer/mu/a", [[0.0, INF]], False),
        ("optimizer/mu/a", [[0.0, NAN]], False),
        # The best loss so far, before the first one.
        ("optimizer/best_value", INF, True),
        ("optimizer/best_value", NAN, False),
        # A mask.
        ("other/mask", [0.0, -INF], True),
        ("other/mean", [0.0, NAN], False),
        ("other/empty", [], True),
    ],
)
def test_which_numbers_a_leaf_may_have(name: str, values: object, fits: bool, dtype: type) -> None:
    array = np.asarray(values, dtype)
    if fits:
        check_finite(name, array)
        return
    with pytest.raises(UnusableState, match=f"it is not finite in '{name}'"):
        check_finite(name, array)


def test_all_of_a_large_leaf_is_looked_at_with_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "ELEMENTS", 4)
    values, rests = np.zeros((3, 3), np.float32), list[None]()
    check_finite("params/a", values, lambda: rests.append(None))
    assert len(rests) == 3
    values[2, 2] = NAN
    with pytest.raises(UnusableState):
        check_finite("params/a", values)
    check_finite("optimizer/count", np.asarray([1, 2]))
