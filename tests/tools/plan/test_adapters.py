"""The forecast of a run with adapters, by hand: what is exchanged, what each chip holds, and the FLOPs."""

import json

import pytest

from diloco_jax.settings.text import parse
from diloco_jax.sim.goodput.settings import Assumptions
from diloco_jax.tools.plan.advice import advise
from diloco_jax.tools.plan.case import case_of
from diloco_jax.tools.plan.forecast import forecast
from diloco_jax.tools.plan.report import describe
from diloco_jax.training.flops import model_flops

SIZES = {"dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "mlp_dim": 256}
SIZES |= {"vocab_size": 256, "activation": "silu", "embed_scale": False, "scan_layers": True}
# In one layer: q, k, v, out, gate, up and down.
MAPS = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 256), (128, 256), (256, 128)]
RANK, LAYERS = 4, 2
LINEAR = LAYERS * sum(n_in * n_out for n_in, n_out in MAPS)
ADAPTERS = LAYERS * sum(RANK * (n_in + n_out) for n_in, n_out in MAPS)
TABLE, VECTORS = 256 * 128, LAYERS * 2 * 128 + 128


@pytest.mark.parametrize(("base_dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2), ("int8", 1 + 1 / 16)])
def test_bytes_memory_and_flops_of_adapters_by_hand(base_dtype: str, bytes_each: float) -> None:
    lora = {"rank": RANK, "base_dtype": base_dtype}
    settings = {
        "model": {"args": SIZES, "weights": "nowhere", "lora": lora},
        "islands": {"count": 2, "devices": 1},
        "train": {"batch_size": 2, "seq_len": 64},
        "protocol": {"num_fragments": 4, "sync_every": 4},
    }
    case = case_of(parse(settings, "test"), Assumptions(step_s=1.0))
    found = json.loads(json.dumps(forecast(case, [])))
    assert found["run"]["parameters"] == ADAPTERS
    assert found["run"]["base_parameters"] == LINEAR + TABLE + VECTORS
    assert found["bytes"]["data_parallel"]["gradient"] == 2 * ADAPTERS
    assert found["recovery"]["global_model_bytes"] == 4 * ADAPTERS
    hbm = found["memory"]["islands"][0]["hbm"]
    assert hbm["base"] == LINEAR * bytes_each + TABLE * (4 if base_dtype == "float32" else 2) + VECTORS * 4
    assert hbm["parameters"] == hbm["anchors"] == 4 * ADAPTERS
    assert f"of adapters above {0.001 * (LINEAR + TABLE + VECTORS) / 1000:.3g} M frozen" in describe(found)
    tokens, seen = 64, 32
    # Forward and backward of the products with frozen weights, and all three products of adapters and of attention.
    products = 2 * 2 * tokens * (LINEAR + TABLE)
    attention = 3 * 4 * tokens * 4 * 32 * LAYERS * seen
    flops = model_flops(case.config.model, case.blueprint.shapes, 1, 64).flops
    assert flops == pytest.approx(products + attention + 3 * 2 * tokens * ADAPTERS)


def test_the_rate_of_adapters_is_compared_with_that_of_the_whole_model() -> None:
    model = {"args": SIZES, "weights": "nowhere", "lora": {"rank": RANK}}
    settings = {
        "model": model,
        "islands": {"count": 2, "devices": 1},
        "optimizer": {"learning_rate": 2e-4},
        "protocol": {"num_fragments": 3, "sync_every": 3},
    }
    case = case_of(parse(settings, "test"), Assumptions(step_s=1.0))
    (rate,) = (each for each in advise(case) if each["setting"] == "optimizer.learning_rate")
    # RDA with H = 3 has 0.7 times the rate of data parallel, and adapters ten times that of the whole model.
    assert rate["change"] is None and "about 7 times as high for adapters on islands" in rate["why"]
    assert "so 0.0002 is right where data parallel of the whole model has 2.9e-05; " in rate["why"]
