"""The canonical form of a tensor: its stack axes, their order in front of the others, and what is refused."""

import numpy as np
import pytest

from diloco_jax.core.kinds import Kind, as_stored, canonical_forms, canonical_of, inverse


@pytest.mark.parametrize(
    ("names", "shape", "order", "canonical", "kind"),
    [
        # Scanned layers of Flax in front, and of MaxText at axis 1.
        (("layers", "embed", "mlp"), (2, 4, 8), (0, 1, 2), (2, 4, 8), Kind("matrix", 1)),
        (("embed", "layers", "mlp"), (4, 2, 8), (1, 0, 2), (2, 4, 8), Kind("matrix", 1)),
        (("embed", "layers", "heads", "kv"), (4, 2, 3, 5), (1, 0, 2, 3), (2, 4, 3, 5), Kind("matrix", 1)),
        (("norm", "moe_layers"), (4, 2), (1, 0), (2, 4), Kind("vector", 1)),
        (("dense_layers_0_2", None, None), (2, 4, 8), (0, 1, 2), (2, 4, 8), Kind("matrix", 1)),
        # Layers lead experts, wherever both are stored.
        (("exp", "layers", "embed_moe", "mlp_moe"), (3, 2, 4, 8), (1, 0, 2, 3), (2, 3, 4, 8), Kind("matrix", 2)),
        (("layers", "embed", "expert", "mlp"), (2, 4, 3, 8), (0, 2, 1, 3), (2, 3, 4, 8), Kind("matrix", 2)),
        (("exp", "layers", None), (3, 2, 4), (1, 0, 2), (2, 3, 4), Kind("vector", 2)),
        (("exp", "layers"), (3, 2), (1, 0), (2, 3), Kind("vector", 2)),
        # Stages of a pipeline, each with scanned layers, and blocks of layers.
        (
            ("circular_repeats", "layers", "embed", "layers_per_stage", "mlp"),
            (2, 3, 4, 5, 8), (0, 1, 3, 2, 4), (2, 3, 5, 4, 8), Kind("matrix", 3),
        ),
        (("embed", "local_layers", "layers"), (4, 5, 2), (2, 1, 0), (2, 5, 4), Kind("vector", 2)),
        # The outputs of a router are one matrix of each layer; tables of layers are tables.
        (("embed", "expert"), (4, 3), (0, 1), (4, 3), Kind("matrix")),
        (("embed", "layers", "expert"), (4, 2, 3), (1, 0, 2), (2, 4, 3), Kind("matrix", 1)),
        (("vocab", "layers", "embed"), (9, 2, 4), (1, 0, 2), (2, 9, 4), Kind("table", 1)),
        (("vocab", "embed"), (9, 4), (0, 1), (9, 4), Kind("table")),
        ((), (4, 2, 8), (0, 1, 2), (4, 2, 8), Kind("matrix")),
        ((), (), (), (), Kind("vector")),
    ],
)  # fmt: skip
def test_stack_axes_lead_the_canonical_tensor(
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
    order: tuple[int, ...],
    canonical: tuple[int, ...],
    kind: Kind,
) -> None:
    form = canonical_of(shape, names)
    assert form == (order, canonical, kind)
    stored = np.arange(np.prod(shape)).reshape(shape)
    seen = form.view(stored)
    assert seen.shape == canonical and np.shares_memory(seen, stored)
    np.testing.assert_array_equal(form.stored(seen), stored)
    np.testing.assert_array_equal(as_stored({"w": seen}, {"w": names})["w"], stored)
    assert tuple(order[axis] for axis in inverse(order)) == tuple(range(len(shape)))


def test_an_element_keeps_its_layer() -> None:
    stored = np.arange(24).reshape(4, 2, 3)
    seen = canonical_of(stored.shape, ("embed", "layers", "mlp")).view(stored)
    assert seen[1].tolist() == stored[:, 1].tolist()


@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        (
            ("layers", "embed"),
            (2, 4, 8),
            r"parameter 'a/w': the axes \(layers, embed\) are 2, but .* \(2, 4, 8\) has 3",
        ),
        (("layers", "embed", "layers"), (2, 4, 2), "name 'layers' twice.*rename one of them"),
        (("exp", "exp", None), (2, 2, 4), "name 'exp' twice"),
        (("moe_layers_0_1", "moe_layers_2_3", None), (2, 2, 4), "name 'moe_layers' twice"),
        (("embed", "encoder_layers", "mlp"), (4, 2, 8), "'encoder_layers' seems to count separate tensors"),
        (("experts", "embed", "mlp"), (2, 4, 8), "'experts' seems to count separate tensors.*expert"),
    ],
)
def test_a_stack_that_cannot_be_described_is_refused(
    names: tuple[str | None, ...], shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        canonical_forms({"a/w": shape}, {"a/w": names}, "name them")


def test_a_tensor_without_names_beside_a_stack_of_its_length_is_refused() -> None:
    shapes = {"blocks/w": (4, 2, 8), "blocks/scale": (4, 2), "head": (4, 2)}
    axes = {"blocks/w": ("embed", "layers", "mlp")}
    with pytest.raises(ValueError, match=r"'blocks/scale' of shape \(4, 2\) names no axes.*2 layers.*name them"):
        canonical_forms(shapes, {**axes, "blocks/scale": ()}, "name them")
    forms = canonical_forms(shapes, {**axes, "blocks/scale": (None, None)}, "name them")
    assert forms["blocks/scale"].kind == Kind("matrix") and forms["blocks/w"].kind == Kind("matrix", 1)
