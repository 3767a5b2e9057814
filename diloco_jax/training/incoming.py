"""The way in of a fragment: one program on all devices blends its new value into the parameters, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from diloco_jax.training.models.protocol import Params
from diloco_jax.training.outgoing import DeviceArrays
from diloco_jax.training.placement import put_array
from diloco_jax.training.windows import Shape, Starts, Window, tensors_of


class IncomingProgram:
    """How one fragment is adopted.

    Attributes:
      key: equal for fragments that may share what `compile` makes.
      compiled: what `compile` made, set by the owner.

    Args:
      windows: of its slices.
      rebase: new + (local - sent); else alpha local + (1 - alpha) new, where alpha = 0 does not look at local.
    """

    def __init__(self, windows: Sequence[Window], rebase: bool) -> None:
        self.compiled: jax.stages.Compiled | None = None
        self._windows = windows
        self._rebase = rebase
        self._paths, self._tensor_of = tensors_of(windows)
        self._starts = Starts(windows)
        self._everywhere = NamedSharding(windows[0].sharding.mesh, PartitionSpec())
        self.key = (rebase, self._tensor_of, *(window.geometry for window in windows))

    def blend(self, params: Params, new: DeviceArrays, sent: DeviceArrays, alpha: float) -> Params:
        """Return the new tensors of the fragment, in place of those in `params`, which are gone.

        Args:
          params: of the island.
          new: value of each slice, laid out as its window says (`value_sharding`).
          sent: windows of the parameters as they were sent; none without `rebase`.
          alpha: share of the local values, in [0, 1]; without meaning for `rebase`.
        """
        assert self.compiled is not None, "the program was not compiled"
        share = put_array(np.asarray(alpha, np.float32), self._everywhere)
        with jax.transfer_guard("disallow"):
            updated = self.compiled([params[path] for path in self._paths], new, sent, share, self._starts.on_devices)
        return dict(zip(self._paths, updated, strict=True))

    def compile(self, tensors: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Compiled:
        """Compile for parameters of these shapes, dtypes and layouts, by path, which may not change afterwards."""

        def described(shape: Shape, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

        inputs: tuple[Any, ...] = (
            [tensors[path] for path in self._paths],
            [described(window.shape, window.value_sharding) for window in self._windows],
            [described(window.global_shape, window.sharding) for window in self._windows] if self._rebase else (),
            described((), self._everywhere),
            self._starts.described,
        )
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, inputs)
        mesh = self._everywhere.mesh
        program = jax.shard_map(self._on_each_device, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
        shardings = [tensors[path].sharding for path in self._paths]
        return jax.jit(program, donate_argnums=0, out_shardings=shardings).lower(*inputs).compile()

    def _on_each_device(
        self,
        tensors: DeviceArrays,
        new: DeviceArrays,
        sent: DeviceArrays,
        alpha: Float[Array, ""],
        starts: Int32[Array, "slices"],
    ) -> list[Shaped[Array, "..."]]:
        out = list(tensors)
        for number, (position, window) in enumerate(zip(self._tensor_of, self._windows, strict=True)):
            start = starts[number]
            local, value = window.cut(out[position], start), window.of_value(new[number], start)
            if self._rebase:
                met = value + (local - sent[number])
            else:
                met = jnp.where(alpha == 0, value, alpha * local + (1 - alpha) * value)
            out[position] = window.paste(out[position], met.astype(local.dtype), start)
        return out
