"""The rule for learning rates, against the best rates of trainings that were tuned (docs/results)."""

import pytest

from diloco_jax.core.merge import MergeConfig, Method
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.tools.plan.rates import OFF_BY, rate_factor

# (merge, H, best rate of islands, best rate of data parallel): 0.12M, 0.5M, 1M, mixture, images.
TUNED: list[tuple[Method, int, float, float]] = [
    ("average", 3, 8.0e-3, 8.0e-3),
    ("rda", 3, 5.6e-3, 8.0e-3),
    ("average", 6, 5.6e-3, 8.0e-3),
    ("rda", 6, 4.0e-3, 8.0e-3),
    ("average", 12, 8.0e-3, 8.0e-3),
    ("rda", 12, 4.0e-3, 8.0e-3),
    ("average", 3, 4.0e-3, 2.0e-3),
    ("rda", 6, 2.0e-3, 2.0e-3),
    ("rda", 6, 4.0e-3, 4.0e-3),
    ("rda", 6, 1.0e-3, 2.0e-3),
]


def factor(method: Method, period: int) -> float:
    return rate_factor(MergeConfig(method=method), ProtocolConfig(sync_every=period, num_fragments=1))


@pytest.mark.parametrize(("method", "period", "islands", "alone"), TUNED)
def test_the_rule_is_within_its_error(method: Method, period: int, islands: float, alone: float) -> None:
    off = factor(method, period) * alone / islands
    # 0.7 / sqrt(2) is a hundredth less than a half.
    assert 1 / OFF_BY / 1.02 <= off <= OFF_BY


def test_the_rule_by_hand() -> None:
    assert factor("average", 1) == factor("average", 3) == 1.0
    assert factor("rda", 3) == 0.7
    assert factor("average", 6) == factor("average", 24) == pytest.approx(0.7071, abs=1e-4)
    assert factor("rda", 24) == pytest.approx(0.495, abs=1e-3)
    adapters = rate_factor(MergeConfig(method="rda"), ProtocolConfig(sync_every=3, num_fragments=1), adapters=True)
    assert adapters == pytest.approx(7.0)
    classes = ProtocolConfig(sync_every={"mlp": 4, "rest": 24}, num_fragments=24)
    assert rate_factor(MergeConfig(method="average"), classes) == pytest.approx(0.866, abs=1e-3)
