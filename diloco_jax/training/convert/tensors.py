"""The tensors of public families: for each of our parameters, the corresponding tensors in the files.

Matrices in these files are [out, in], in this package [in, out]. One of our parameters may be a stack of several of
their tensors, and one of their tensors may hold several of our parameters:

    stack      blocks/q/kernel [L, D, X]       model.layers.0.self_attn.q_proj.weight [X, D], model.layers.1. ...
    stack      experts_up [E, D, F]            mlp.experts.0.up_proj.weight [F, D], mlp.experts.1. ...
    fused      q/kernel, k/kernel, v/kernel    self_attn.qkv_proj.weight [X + 2 Y, D]
    grouped    the same, cut into heads        [q of head 0; k of head 0; v of head 0; q of head 1; ...]
    merged     experts_gate, experts_up        mlp.experts.gate_up_proj [E, 2 F, D]
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from diloco_jax.training.convert.families import TEXT_OF_TOWER, decoder, to_hf
from diloco_jax.training.convert.layers import of_layers
from diloco_jax.training.convert.table import FAMILIES, LAYER, MERGED, OUTSIDE
from diloco_jax.training.convert.tower import tower_tensors
from diloco_jax.training.models.config import SEEING_DECODER, ModelConfig
from diloco_jax.training.models.options import DecoderConfig
from diloco_jax.training.models.protocol import find_model, split_model
from diloco_jax.training.models.seeing import SeeingConfig

# Tables have the same axes in both formats, so they are not transposed.
TABLES = ("embed/embedding", "head", "per_layer_table")


class TensorName(NamedTuple):
    """The tensor of one of our parameters in the files."""

    name: str
    # False if a matrix is [in, out] in the files too.
    turned: bool = True
    # True if the rows of a fused tensor's parts alternate; otherwise one part follows the other.
    interleaved: bool = False
    # The axis of a fused tensor that its parts share, in our order of axes.
    axis: int = -1
    # The argument of the decoder that has the number of groups; each group of a fused tensor has a piece of every part.
    groups: str = ""


@dataclass(frozen=True)
class Mapped:
    """One of our parameters with the corresponding tensors of a public family."""

    # The names of their tensors; for a stack in the order of its layers and, within a layer, of its experts.
    hf: tuple[str, ...]
    path: str
    shape: tuple[int, ...]
    # The shape of each tensor in `hf`.
    hf_shape: tuple[int, ...]
    # Whether the last two axes of their tensors are exchanged.
    turned: bool = False
    # Our part of each group of `axis`; None unless the tensor holds several of our parameters.
    part: slice | None = None
    # The axis that the parts share, in their order of axes and from the end, and the number of groups along it.
    axis: int = -1
    groups: int = 1

    def to_hf(self, array: Float[np.ndarray, "..."]) -> list[Float[np.ndarray, "..."]]:
        """Cut our parameter into one piece for each of their tensors, as views with the axes of `in_theirs`.

        An import fills the views of an empty parameter, and an export writes those of a trained one.
        """
        pieces = array.reshape(len(self.hf), *array.shape[len(array.shape) - len(self.hf_shape) :])
        # With the ellipsis, a single number is a view too; plain indexing would copy it.
        return [self._grouped(self._exchange(pieces[i, ...])) for i in range(len(pieces))]

    def in_theirs(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Return the part of one of their tensors that belongs to our parameter, as a view.

        Its axes are in their order. If there are groups, an axis of them precedes the axis of the parts.
        """
        if self.part is None:
            return array
        index: tuple[Any, ...] = (..., self.part, *(slice(None),) * (-1 - self.axis))
        return self._grouped(array)[index]

    def _grouped(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Cut the axis of the parts into groups, as a view: NumPy copies only if axes are joined."""
        if self.groups == 1:
            return array
        at = array.ndim + self.axis
        return array.reshape(*array.shape[:at], self.groups, -1, *array.shape[at + 1 :])

    def _exchange(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        return array.swapaxes(-1, -2) if self.turned else array


def tensors(model: ModelConfig, family: str = "", merged: bool = False) -> list[Mapped]:
    """List all parameters of a model with the corresponding tensors in the files of a family.

    Args:
        model: a model whose module is a built-in decoder.
        family: a key of FAMILIES; if empty, the one of `to_hf`.
        merged: whether the files have a layer's experts in one tensor although the family usually does not.

    Raises:
        ValueError: the model has no family, or parameters without a name in it.
    """
    c, name = decoder(model), family or to_hf(model)["model_type"]
    name = TEXT_OF_TOWER if model.module == SEEING_DECODER else name
    table = (c.vocab_size, c.dim)
    outside = {"embed/embedding": table, "norm_final/scale": (c.dim,)} | ({} if c.tie_embeddings else {"head": table})
    if c.per_layer_dim:
        width = c.num_layers * c.per_layer_dim
        outside["per_layer_table"] = (c.per_layer_vocab or c.vocab_size, width)
        outside |= {"per_layer_project/kernel": (c.dim, width), "per_layer_norm/scale": (c.per_layer_dim,)}
    found = list(of_layer(outside, {path: _outside(path) for path in OUTSIDE}, name))
    names = FAMILIES[name].layer
    if merged and "{}" in _name(names["experts_up"]).name:
        names |= MERGED
    for stack in c.stacks():
        axis = (len(stack.layers),) if stack.stacked else ()
        layer = c.of_kind(c.kind(stack.layers[0]))
        for one in of_layer(_shapes_of_layer(model.module, layer), names, name, layer):
            theirs = tuple(LAYER.format(i) + each for i in stack.layers for each in one.hf)
            found.append(replace(one, hf=theirs, path=f"{stack.path}/{one.path}", shape=axis + one.shape))
    return _with_tower(found, c) if isinstance(c, SeeingConfig) else found


def _with_tower(found: list[Mapped], c: SeeingConfig) -> list[Mapped]:
    """Return the parameters of text under their names in a model of images and text, and those of its tower."""
    text = [
        replace(one, hf=tuple(re.sub(r"^model\.", "model.language_model.", name) for name in one.hf)) for one in found
    ]
    return text + [
        Mapped(one.hf, f"tower/{one.path}", one.shape, one.hf_shape, one.transposed)
        for one in tower_tensors(c.tower_config())
    ]


def unread(model: ModelConfig) -> re.Pattern[str]:
    """Return a pattern of the names of tensors that files may have although transformers does not read them.

    These tensors compute keys and values in layers that use those of an earlier layer.
    """
    shared = [number for number, layer in enumerate(of_layers(decoder(model))) if layer.kv_from]
    prefixes = "|".join(re.escape(LAYER.format(number)) for number in shared)
    return re.compile(rf"({prefixes or '$.'})self_attn\.[kv]_(proj|norm)\..*")


@lru_cache
def _shapes_of_layer(module: str, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return path and shape of each parameter of a layer."""

    def build() -> Any:
        with nnx.use_eager_sharding(False):
            model: Any = find_model(module)
            return split_model(model.block_class(config, rngs=nnx.Rngs(0)))[1]

    return {path: value.shape for path, value in jax.eval_shape(build).items()}


def of_layer(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, Any], family: str, config: DecoderConfig | None = None
) -> Iterator[Mapped]:
    """Yield the parameters of one layer, with names that lack the layer's prefix.

    Args:
        shapes: the shape of each parameter by path.
        names: the tensor's name, or the fields of a `TensorName`, for at least these paths.
        family: the name of the family, for messages.
        config: the options of the layer, which count the groups of tensors.
    """
    if unknown := sorted(shapes.keys() - names.keys()):
        raise ValueError(f"models of {family} in transformers have no tensor for the parameter {unknown[0]}")
    places = {path: _name(names[path]) for path in names if path in shapes}
    for name in dict.fromkeys(place.name for place in places.values()):
        # Our parameters in this tensor; they share an axis of it.
        group = [path for path, place in places.items() if place.name == name]
        yield from _in_tensor(name, group, places[group[0]], shapes, config)


def _in_tensor(
    name: str, group: list[str], place: TensorName, shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig | None
) -> Iterator[Mapped]:
    """Yield the parameters that one tensor holds, in its order."""
    groups = getattr(config, place.groups) if place.groups else 1
    pieces = [shapes[path][1:] if "{}" in name else shapes[path] for path in group]
    width, start = sum(piece[place.axis] for piece in pieces), 0
    for number, (path, piece) in enumerate(zip(group, pieces, strict=True)):
        stop = start + piece[place.axis] // groups
        part = slice(number, None, len(group)) if place.interleaved else slice(start, stop)
        turned = place.turned and len(piece) > 1
        whole = list(piece)
        whole[place.axis] = width
        theirs = (*whole[:-2], whole[-1], whole[-2]) if turned else tuple(whole)
        axis = {-1: -2, -2: -1}.get(place.axis, place.axis) if turned else place.axis
        names_of = tuple(name.format(e) for e in (range(shapes[path][0]) if "{}" in name else range(1)))
        alone = len(group) == 1
        yield Mapped(
            names_of, path, shapes[path], theirs, turned, None if alone else part, axis, 1 if alone else groups
        )
        start = stop


def _outside(path: str) -> TensorName:
    return TensorName(OUTSIDE[path], turned=path not in TABLES)


def _name(entry: Any) -> TensorName:
    if isinstance(entry, TensorName):
        return entry
    return TensorName(entry) if isinstance(entry, str) else TensorName(**entry)
