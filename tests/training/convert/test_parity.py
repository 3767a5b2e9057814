"""Each public family against transformers: the same logits from the same weights, theirs in ours and ours in theirs."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_jax.training.convert.families import family_name, from_hf, to_hf
from diloco_jax.training.convert.table import FAMILIES
from diloco_jax.training.convert.weights import WRITTEN, Weights, write_weights
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig, presets
from diloco_jax.training.models.moe import decoder_of
from diloco_jax.training.models.protocol import join_model, load_model
from tests.drawn import seeds
from tests.extras import absent
from tests.training.convert.cases import ALWAYS, GEMMA4, LIST, MINISTRAL
from tests.training.convert.page import LIMIT, bless
from tests.training.convert.random_variants import MIXTURES, drawn_variant
from tests.training.convert.variants import GEMMA, OWN_SIZES, SIZES, TOKENS, WINDOW, Variant, drawn, kinds, legacy, make
from tests.training.outlines import outline

torch = pytest.importorskip("torch", reason=absent("parity"))
transformers = pytest.importorskip("transformers", reason=absent("parity"))

pytestmark = [
    pytest.mark.extra("parity"),
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("default"),  # theirs are theirs
]

# Rounding in float32 moves the logits of drawn models by up to 2.5e-5, those of transformers by up to 1.5e-5.
DRAWN_LIMIT = 5e-5
# Variants that run without scan_layers; all others have it, because that compiles faster.
SINGLE = ("llama", "mixtral", "gemma4_mixture")
ONE_PER_FAMILY = {variant.family: variant for variant in reversed(LIST) if variant.family in FAMILIES}


def opened(folder: Path) -> Any:
    """The model of a folder in transformers, float32; every tensor is in the folder, and none is left over."""
    how = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(info.values()), info
    return model.eval()


def logits_of_theirs(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def logits_of_ours(model: ModelConfig, values: dict[str, np.ndarray]) -> np.ndarray:
    graphdef, params, _ = outline(lambda: load_model(model.module, model.args, 0))
    assert {path: value.shape for path, value in values.items()} == {path: v.shape for path, v in params.items()}
    return np.asarray(jax.jit(lambda p: join_model(graphdef, p)(jnp.asarray(TOKENS)))(values))  # type: ignore[operator]


def error_of(ours: np.ndarray, theirs: np.ndarray, share: float = 1.0) -> float:
    """The largest difference of logits in their standard deviations, which are large enough to say something.

    `share` is that of the tokens that count, those with the smallest differences.
    """
    assert theirs.std() > 1
    return float(np.quantile(np.abs(ours - theirs).max(-1), share) / theirs.std())


def stacked(model: ModelConfig, stack: bool) -> ModelConfig:
    return replace(model, args={**model.args, "scan_layers": stack})


@cache
def _marks(name: str) -> Any:
    return () if name in ALWAYS else (pytest.mark.slow,)


def bytes_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of all tensors of a folder."""
    found: dict[str, tuple[str, bytes]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        header.pop("__metadata__", None)
        found |= {name: (each["dtype"], data[slice(*each["data_offsets"])]) for name, each in header.items()}
    return found


@pytest.fixture(scope="module")
def worst() -> Iterator[dict[str, float]]:
    """The largest error of each family; ./scripts/bless_families writes them into docs/models.md."""
    found: dict[str, float] = {}
    yield found
    if os.environ.get("DILOCO_BLESS"):
        bless(found)


@pytest.mark.parametrize("variant", [pytest.param(one, id=one.name, marks=_marks(one.name)) for one in LIST])
def test_a_folder_computes_what_it_does_in_transformers_or_is_refused(
    variant: Variant, tmp_path: Path, worst: dict[str, float]
) -> None:
    """And an export has the same tensors and logits, bit for bit."""
    if variant.theirs_fails or variant.refused:
        check_refused(variant, tmp_path)
        return
    error = check_parity(variant, tmp_path)
    worst[variant.family] = max(error, worst.get(variant.family, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_folder_computes_what_it_does_in_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """And comes out again."""
    # Where two experts are nearly equal, rounding decides which one a token gets, and later tokens see it.
    check_parity(drawn_variant(family, seed), tmp_path, DRAWN_LIMIT, 0.5 if family in MIXTURES else 1.0)


def check_refused(variant: Variant, tmp_path: Path) -> None:
    make(variant, tmp_path / "theirs")
    weights = Weights(tmp_path / "theirs")
    if variant.theirs_fails:
        with pytest.raises(Exception):  # noqa: B017  (theirs are of all kinds)
            logits_of_theirs(opened(tmp_path / "theirs"))
    with pytest.raises(ValueError, match=variant.refused) as error:
        weights.model()
    print(f"parity | {variant.name} | refused: {error.value} | | |")


def check_parity(variant: Variant, tmp_path: Path, limit: float = LIMIT, share: float = 1.0) -> float:
    """Compare logits, and the tensors and logits of an export; return the largest error."""
    make(variant, tmp_path / "theirs")
    weights = Weights(tmp_path / "theirs")
    theirs = opened(tmp_path / "theirs")
    want = logits_of_theirs(theirs)
    model = stacked(weights.model(), variant.name not in SINGLE)
    values = dict(weights.read(model))
    error = error_of(logits_of_ours(model, values), want, share)

    (tmp_path / "ours").mkdir()
    described = to_hf(model, family_name(weights.config))
    dtype = variant.dtype if variant.dtype in WRITTEN else "float32"
    write_weights(tmp_path / "ours", model, values.items(), dtype, described["model_type"])
    (tmp_path / "ours" / "config.json").write_text(json.dumps(described | {"dtype": dtype}))
    assert described["model_type"] == variant.family
    if dtype == variant.dtype and not variant.merged:
        extra = {"lm_head.weight"} if variant.head == "equal" else set()
        before, after = bytes_of(tmp_path / "theirs"), bytes_of(tmp_path / "ours")
        assert {name: each for name, each in before.items() if name not in extra} == after
    back = opened(tmp_path / "ours")
    np.testing.assert_array_equal(logits_of_theirs(back), want)
    found, expected = back.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    print(f"parity | {variant.name} | yes | {want.std():.1f} | {error:.1e} | equal |")
    assert error <= limit
    return error


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_each_family_returns_bit_for_bit_and_stacked_layers_are_the_single_ones(
    name: str, tmp_path: Path
) -> None:
    variant = ONE_PER_FAMILY[name]
    make(variant, tmp_path / "theirs")
    weights = Weights(tmp_path / "theirs")
    model = weights.model()
    single, stack = (dict(weights.read(stacked(model, how))) for how in (False, True))
    (tmp_path / "ours").mkdir()
    write_weights(tmp_path / "ours", stacked(model, True), stack.items(), variant.dtype, name)
    assert to_hf(model, name)["model_type"] == name
    assert variant.merged or bytes_of(tmp_path / "theirs") == bytes_of(tmp_path / "ours")
    config = decoder_of(stacked(model, True))
    assert config is not None and {mapped.path for mapped in weights.tensors(stacked(model, True))} == stack.keys()
    for at in config.stacks():
        own = [path for path in stack if path.startswith(f"{at.path}/")]
        assert own
        for path in own:
            each = [single[path.replace(at.path, f"blocks/{layer}", 1)] for layer in at.layers]
            np.testing.assert_array_equal(stack[path], np.stack(each) if at.stacked else each[0])


CAP = {"final_logit_softcapping": 5.0}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 14}
PIXTRAL = {"vision_config": {"model_type": "pixtral", "head_dim": 16, "image_size": 28, **TOWER}}
QWEN_TOWER = {
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 16,
    }
}  # fmt: skip
# For each model that sees: its text, and the keys beside it.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**GEMMA, **kinds("sf"), **CAP},
        {"vision_config": TOWER | {"image_size": 28}, "mm_tokens_per_image": 4},
    ),
    "mistral3": ({"model_type": "mistral", "sliding_window": WINDOW}, PIXTRAL),
    "ministral3": ({"model_type": "ministral3", **MINISTRAL}, PIXTRAL),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}, "image_seq_length": 1},
    ),
    "gemma4": (
        {**GEMMA4, **kinds("sf"), **CAP, "pad_token_id": 0},
        {"vision_config": TOWER | {"num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 32}},
    ),
    "qwen3_5": ({**OWN_SIZES["qwen3_5_text"], **kinds("lf")}, QWEN_TOWER),
    "qwen3_5_moe": ({**OWN_SIZES["qwen3_5_moe_text"], **kinds("lf")}, QWEN_TOWER),
}


@pytest.mark.parametrize(
    ("name", "usual"),
    [*((name, True) for name in SEEING), *((name, False) for name in SEEING)],
    ids=[f"{name}-{which}" for which in ("usual", "other") for name in SEEING],
)
def test_of_a_model_that_sees_the_text_is_read(tmp_path: Path, name: str, usual: bool) -> None:
    """The class of Gemma 3 caps no logits, and the outer config decides whether the embedding is shared."""
    text, beside = SEEING[name]
    kind = "mistral3" if name == "ministral3" else name
    tied = transformers.AutoConfig.for_model(kind).tie_word_embeddings is usual
    outer = {} if usual else {"tie_word_embeddings": tied}
    config = {"text_config": {**SIZES, **text, "num_hidden_layers": 2}, **beside, **outer}
    theirs = drawn(transformers.AutoModelForImageTextToText, transformers.AutoConfig.for_model(kind, **config))
    theirs.save_pretrained(tmp_path)
    weights = Weights(tmp_path)
    model = stacked(weights.model(), True)
    assert decoder_of(model).tie_embeddings is tied  # type: ignore[union-attr]
    values = dict(weights.read(model))
    if usual or name == "gemma3":
        want = logits_of_theirs(theirs.eval())
        error = error_of(logits_of_ours(model, values), want)
        print(f"parity | {name} that sees, {outer} | yes | {want.std():.1f} | {error:.1e} | |")
        assert error <= LIMIT


@pytest.mark.slow
def test_the_cap_of_logits_is_needed_for_parity(tmp_path: Path) -> None:
    """A wrong cap, or none, is far outside of the limit."""
    make(next(variant for variant in LIST if variant.name == "gemma3"), tmp_path)
    weights = Weights(tmp_path)
    model, want = weights.model(), logits_of_theirs(opened(tmp_path))
    values = dict(weights.read(model))
    for cap, least in ((0.0, 0.5), (5.05, 1e-3)):
        other = replace(model, args={**model.args, "logit_cap": cap})
        assert error_of(logits_of_ours(other, values), want) > least


def test_keys_that_shared_layers_do_not_use_are_skipped(tmp_path: Path) -> None:
    """Released files of Gemma 4 have them, and transformers skips them."""
    make(next(variant for variant in LIST if variant.name == "gemma4_shared"), tmp_path)
    weights = Weights(tmp_path)
    want = dict(weights.read(weights.model()))
    found = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        found[f"model.layers.5.self_attn.{name}.weight"] = np.ones((16, 96), np.float32)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    again = dict(Weights(tmp_path).read(Weights(tmp_path).model()))
    assert again.keys() == want.keys() and all(np.array_equal(again[path], want[path]) for path in want)
    found["model.layers.5.self_attn.x_proj.weight"] = np.ones((16, 96), np.float32)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="x_proj"):
        Weights(tmp_path).check(weights.model())


def test_layers_that_predict_several_tokens_are_skipped(tmp_path: Path) -> None:
    make(next(variant for variant in LIST if variant.name == "qwen3_5_hub"), tmp_path)
    want = dict(Weights(tmp_path).read(Weights(tmp_path).model()))
    (tmp_path / "model.safetensors.index.json").unlink()
    found: dict[str, np.ndarray] = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
        path.unlink()
    found |= {"mtp.fc.weight": np.ones((96, 192), np.float32), "mtp.norm.weight": np.ones(96, np.float32)}
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    again = dict(Weights(tmp_path).read(Weights(tmp_path).model()))
    assert again.keys() == want.keys() and all(np.array_equal(again[path], want[path]) for path in want)


@pytest.mark.parametrize("name", presets())
def test_presets_are_what_configs_of_transformers_say(name: str) -> None:
    model = ModelConfig(preset=name)
    described = to_hf(model)
    theirs = transformers.AutoConfig.for_model(**described)
    assert theirs.architectures == [described["architectures"][0]]
    assert decoder_of(from_hf(theirs.to_dict(), images=model.module == SEEING_DECODER)) == decoder_of(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_usual_config_of_each_family_is_understood(name: str) -> None:
    theirs = transformers.AutoConfig.for_model(name)
    # Settings with default values are not in this text.
    saved = json.loads(theirs.to_json_string())
    assert from_hf(saved) == from_hf(theirs.to_dict()) == from_hf(to_hf(from_hf(saved)))


# Variants whose config.json only transformers 4 writes differently.
LEGACY = [each for each in LIST if each.legacy and each.edit is Variant._field_defaults["edit"]]


@pytest.mark.parametrize("variant", LEGACY, ids=lambda variant: variant.name)
def test_configs_of_transformers_4_are_those_of_5(variant: Variant) -> None:
    sizes = SIZES | OWN_SIZES.get(variant.family, {}) | variant.config
    saved = transformers.AutoConfig.for_model(variant.family, **sizes, dtype="float32").to_dict()
    old = json.loads(json.dumps(saved))
    legacy(old)
    assert old != saved and from_hf(old) == from_hf(saved)
