"""The classes of tensors of known models, and of names that users give."""

import pytest

from diloco_jax.core.kinds import check_classes, class_of, matches, members

CLASSES = ("mlp", "attention", "embedding", "norm")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        # Models of this package, with separate layers and with stacked ones.
        ("blocks/0/down/kernel", "mlp"),
        ("blocks/gate/kernel", "mlp"),
        ("blocks/experts_up", "mlp"),
        ("blocks/router", "mlp"),
        ("blocks/0/q/kernel", "attention"),
        ("blocks/k/bias", "attention"),
        ("blocks/0/out/kernel", "attention"),
        ("blocks/0/norm_mlp/scale", "norm"),
        ("blocks/0/norm_q/scale", "norm"),
        ("blocks/0/delta/q/kernel", "attention"),
        ("blocks/0/delta/a/kernel", "attention"),
        ("blocks/0/delta/conv_k/kernel", "attention"),
        ("blocks/delta/a_log", "attention"),
        ("blocks/delta/norm/scale", "norm"),
        ("blocks/0/shared_gate/kernel", "mlp"),
        ("blocks/0/shared_weight/kernel", "rest"),
        ("embed/embedding", "embedding"),
        ("head/kernel", "embedding"),
        ("patches/project/kernel", "rest"),
        # Names in models of other projects.
        ("decoder.layers.3.mlp.out_proj.weight", "mlp"),
        ("encoder/Attention_0/gate/kernel", "attention"),
        ("h/1/attn/c_proj/w", "attention"),
        ("model/input_layernorm/weight", "norm"),
        ("lm_head/kernel", "embedding"),
        ("Dense_0/kernel", "rest"),
    ],
)
def test_a_path_tells_the_class(path: str, found: str) -> None:
    assert class_of(path, CLASSES) == found


def test_the_first_name_that_fits_counts_and_rest_is_what_is_left() -> None:
    path = "blocks/3/down/kernel"
    assert class_of(path, ("*/down/*", "mlp", "rest")) == "*/down/*"
    assert class_of(path, ("mlp", "*/down/*", "rest")) == "mlp"
    assert class_of(path, ("rest", "mlp")) == "mlp", "rest is last wherever it stands"
    assert class_of(path, ("attention",)) == "rest"
    assert matches(path, "*/3/*kernel") and not matches(path, "*/3") and not matches(path, "*/DOWN/*")


def test_groups_have_every_tensor_once() -> None:
    paths = ["a/mlp/w", "a/norm/w", "b/q/w", "c"]
    assert members(paths, [("rest", "norm"), ("mlp",)], "x") == [["a/norm/w", "b/q/w", "c"], ["a/mlp/w"]]
    assert members(["a/mlp/w"], [("mlp",), ("rest",)], "x") == [["a/mlp/w"], []], "nothing needs to be left"


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        ([("mpl",), ("rest",)], "names 'mpl', which is not a class of tensors"),
        ([("blocks",), ("rest",)], r"'blocks', .*; use norm, embedding, mlp, attention, rest, or .* '\*blocks\*'"),
        ([("*/experts_*",), ("rest",)], r"names '\*/experts_\*', but no tensor is left for it; the model has a/mlp/w"),
        ([("*",), ("mlp",)], "names 'mlp', but no tensor is left for it"),
        ([("mlp",), ("norm",)], "has no period for 'b/q/w', which is in none of its classes; add rest"),
    ],
)
def test_names_that_do_not_fit_are_refused(classes: list[tuple[str, ...]], text: str) -> None:
    with pytest.raises(ValueError, match="^protocol.sync_every .*" + text):
        members(["a/mlp/w", "a/norm/w", "b/q/w"], classes, "protocol.sync_every")
    check_classes(["norm", "*", "rest"], "x")
