"""Tensors in MXFP4 against transformers: the same bits, the same logits, and what is refused."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.training.convert.families import to_hf
from diloco_jax.training.convert.mxfp4 import unpack
from diloco_jax.training.convert.weights import Weights, write_weights
from tests.extras import absent
from tests.training.convert.cases import GPT_OSS
from tests.training.convert.page import LIMIT
from tests.training.convert.test_parity import bytes_of, error_of, logits_of_ours, logits_of_theirs, stacked
from tests.training.convert.variants import Variant, make

torch = pytest.importorskip("torch", reason=absent("parity"))
transformers = pytest.importorskip("transformers", reason=absent("parity"))

pytestmark = [
    pytest.mark.extra("parity"),
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("default"),  # theirs are theirs
]

FILE = "model.safetensors"
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def oracle(blocks: np.ndarray, scales: np.ndarray, dtype: Any) -> np.ndarray:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: np.ndarray = (
        convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype).float().numpy()
    )
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_transformers_bit_for_bit(dtype: str) -> None:
    """All bytes with all scales, even if float32 has no such number; 255 is not a number by definition."""
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 1, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16).reshape(1, 256, 16)
    found, wanted = unpack(blocks[0], scales[0]), oracle(blocks, scales, getattr(torch, dtype))[0]
    assert found.dtype == np.float32 and found.shape == (512, 256)
    # Each scale has a column.
    np.testing.assert_array_equal(found[:, :255].view(np.uint32), wanted[:, :255].view(np.uint32))
    assert np.isfinite(found[:, :253]).all() and not np.isfinite(found[:, 255]).any()


def packed(folder: Path, experts: int = 5, **config: Any) -> Path:
    """Write a folder of gpt-oss as it is released, with random blocks and scales."""
    sizes = {**GPT_OSS, "num_hidden_layers": 2, "num_local_experts": experts, "intermediate_size": 64, **config}
    make(Variant("packed", "gpt_oss", sizes, dtype="bfloat16"), folder)
    change(folder, quantization_config=PACKED)
    with torch.no_grad():
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / FILE)
        # The order of a file's names changes from process to process.
        rng = np.random.default_rng(0)
        for name in sorted(name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))):
            count, inner, outer = tensors.pop(name).shape
            shape = (count, outer, inner // 32)
            tensors[f"{name}_blocks"] = torch.tensor(rng.integers(0, 256, (*shape, 16), np.uint8))
            # Numbers have a standard deviation of about 3.3 times 2^-5 to 2^-3.
            tensors[f"{name}_scales"] = torch.tensor(rng.integers(122, 125, shape, np.uint8))
        save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def change(folder: Path, **changes: Any) -> None:
    """Replace keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def opened(folder: Path) -> Any:
    """The model of a folder in transformers, float32."""
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        how["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(info.values()), info
    return model.eval()


def split_files(folder: Path) -> None:
    """Put the scales into a separate file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / FILE)
    where = {name: f"{'b' if name.endswith('_scales') else 'a'}.safetensors" for name in tensors}
    for file in {*where.values()}:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file, {"format": "pt"})
    (folder / FILE).unlink()
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("scan", [False, True])
def test_a_folder_as_released_computes_what_it_does_in_transformers(tmp_path: Path, scan: bool) -> None:
    """And its export in bfloat16 loses nothing."""
    folder = packed(tmp_path / "theirs")
    theirs = opened(folder)
    if scan:
        split_files(folder)
    weights = Weights(folder)
    model = stacked(weights.model(), scan)
    values = dict(weights.read(model))
    if scan:
        assert error_of(logits_of_ours(model, values), logits_of_theirs(theirs)) <= LIMIT
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", model, values.items(), "bfloat16", "gpt_oss")
    (tmp_path / "ours" / "config.json").write_text(json.dumps(to_hf(model, "gpt_oss")))
    assert {dtype for dtype, _ in bytes_of(tmp_path / "ours").values()} == {"BF16"}
    found, expected = opened(tmp_path / "ours").state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_one_expert_is_unpacked_at_a_time(tmp_path: Path) -> None:
    """Beside the parameter, only a small part of its tensors is in memory."""
    weights = Weights(packed(tmp_path, 64, num_hidden_layers=4))
    model = stacked(weights.model(), True)
    # The names are looked up before the measurement.
    weights.check(model)
    tracemalloc.start()
    sizes = []
    for path, value in weights.read(model):
        if path.endswith(("experts_gate", "experts_down")):
            sizes.append(tracemalloc.get_traced_memory()[1] / value.nbytes)
        del value
        tracemalloc.reset_peak()
    tracemalloc.stop()
    # Both periods of the pattern are a stack of two layers.
    assert len(sizes) == 4 and max(sizes) < 1.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": None}, "_blocks of .* is U8; only F32, BF16, F16 are read"),
        ({"quantization_config": {"quant_method": "fp8"}}, "unknown keys: quantization_config"),
        ({"scales": None}, "_blocks in MXFP4, but no file has its scales, .*down_proj_scales; copy the model again"),
        ({"scales": (5, 96, 1)}, r"_blocks of .* has shape \(5, 96, 2, 16\), and its scales \(5, 96, 1\); blocks"),
        ({"scales": 255}, "down_proj_blocks of .* holds NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = packed(tmp_path)
    if "scales" in changes:
        tensors, name = load_file(folder / FILE), "model.layers.1.mlp.experts.down_proj_scales"
        scales = tensors.pop(name)
        if isinstance(changes["scales"], int):
            tensors[name] = torch.full_like(scales, changes["scales"])
        elif changes["scales"]:
            tensors[name] = scales[:, :, :1].contiguous()
            assert tensors[name].shape == changes["scales"]
        save_file(tensors, folder / FILE, {"format": "pt"})
    else:
        change(folder, **changes)
    weights = Weights(folder)
    with pytest.raises(ValueError, match=message):
        dict(weights.read(weights.model()))


def test_another_family_has_no_such_tensors(tmp_path: Path) -> None:
    make(Variant("llama", "llama", {}), tmp_path)
    change(tmp_path, quantization_config=PACKED)
    with pytest.raises(ValueError, match="of llama has unknown keys: quantization_config"):
        Weights(tmp_path).model()


def test_a_tensor_in_two_formats_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, name = packed(tmp_path), "model.layers.1.mlp.experts.down_proj"
    save_file({**load_file(folder / FILE), name: torch.zeros(5, 64, 96)}, folder / FILE, {"format": "pt"})
    with pytest.raises(ValueError, match=f"has {name} in F32, and .* has it in MXFP4 as {name}_blocks; remove one"):
        Weights(folder).model()
