"""The way in of a fragment: one program on all devices blends its new value into the parameters, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, Shaped

from diloco_jax.training.exchange.outgoing import DeviceArrays, Once, as_held
from diloco_jax.training.exchange.windows import FragmentWindows, floats
from diloco_jax.training.models.protocol import Params
from diloco_jax.training.sharding import put_array


class IncomingProgram:
    """The program that adopts one fragment.

    Args:
      rebase: new + (local - sent); else alpha local + (1 - alpha) new, where alpha = 0 does not look at local.
      once: returns what a function made for an equal key before, or makes now.
    """

    def __init__(self, on: FragmentWindows, rebase: bool, once: Once) -> None:
        self._on = on
        self._rebase = rebase
        self._everywhere = NamedSharding(on.mesh, PartitionSpec())
        self._shares: dict[float, Float[Array, ""]] = {}  # on the devices, by alpha: a run has one or two
        self.compiled = once(("in", rebase, on.geometry), self._compile)

    def blend(self, params: Params, new: DeviceArrays, sent: DeviceArrays, alpha: float) -> Params:
        """Return the new tensors of the fragment, in place of those in `params`, which are gone.

        Args:
          new: value of each slice, laid out as its window says (`value_sharding`).
          sent: windows of the parameters as they were sent; none without `rebase`.
          alpha: share of the local values, in [0, 1]; without meaning for `rebase`.
        """
        if alpha not in self._shares:
            self._shares[alpha] = put_array(np.asarray(alpha, np.float32), self._everywhere)
        share = self._shares[alpha]
        with jax.transfer_guard("disallow"):
            updated = self.compiled([params[path] for path in self._on.paths], new, sent, share, self._on.starts)
        return dict(zip(self._on.paths, updated, strict=True))

    def _compile(self) -> jax.stages.Compiled:
        on = self._on
        sent = [floats(window.global_shape, window.sharding) for window in on.windows] if self._rebase else ()
        inputs: tuple[Any, ...] = (on.tensors, on.anchors, sent, floats((), self._everywhere), on.starts_described)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, inputs)
        program = jax.shard_map(self._on_each_device, mesh=on.mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
        shardings = [tensor.sharding for tensor in on.tensors]
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
        for number, (position, window) in enumerate(zip(self._on.tensor_of, self._on.windows, strict=True)):
            start = starts[number]
            local = window.cut(out[position], start)
            value = as_held(window.of_value(new[number], start), local.dtype)
            if self._rebase:
                met = (value + (local.astype(jnp.float32) - sent[number])).astype(local.dtype)
            else:
                met = _blended(local, value, alpha)
            out[position] = window.paste(out[position], met, start)
        return out


def _blended(local: Float[Array, "..."], value: Float32[Array, "..."], alpha: Float[Array, ""]) -> Shaped[Array, "..."]:
    """Compute alpha local + (1 - alpha) value, in the type of the local one, which is not read if alpha is 0.

    It is rounded towards the global value. To the nearest, a difference of one unit in the last place would stay for
    ever: who lags behind by it would pull back in every round what the others had moved.
    """
    # Whoever is where the value is stays there: so not as a sum of two products, which rounds.
    exact = jnp.where(alpha == 0, value, value + alpha * (local.astype(jnp.float32) - value))
    if local.dtype == jnp.float32:
        return exact
    near = jax.lax.optimization_barrier(exact.astype(local.dtype))
    beyond = jnp.abs(near.astype(jnp.float32) - value) > jnp.abs(exact - value)
    return jnp.where(beyond, jnp.nextafter(near, value.astype(local.dtype)), near)
