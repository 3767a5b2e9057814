"""The exchange of fragments: an island's anchors and residuals, and the programs that stage and adopt fragments.

    out  `stage`: an update, anchor - local, is encoded on the devices (outgoing.py).
    in   `place`: a new value is copied to the devices, in the layout of its tensor, while steps run.
         `adopt`: it is blended with the tensor elementwise, in place.

Staging and adoption are each one program per fragment that runs on all devices, each device with its own shards. So
there is no collective, and no step waits. Programs are compiled once, by `warm_up` or when they are first needed.
Fragments share a program if they have the same shapes, even if their slices are of other tensors or start at other
rows.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, Shaped

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment
from diloco_jax.core.held import Box, HeldSlice
from diloco_jax.core.kinds import Order
from diloco_jax.training.exchange.outgoing import (
    DeviceArrays,
    HeldFragment,
    Once,
    OutgoingProgram,
    StagedFragment,
    as_held,
)
from diloco_jax.training.exchange.windows import AS_STORED, FragmentWindows, floats, windows_of
from diloco_jax.training.sharding import put_array
from diloco_jax.training.state import Params

AdoptMode = Literal["overwrite", "blend", "rebase"]
# Float32 arrays by Slice.key; on one host of several, a HeldSlice with the blocks that its devices need.
CpuValues = dict[str, Any]
# Values in place of held ones, by fragment.
Instead = Mapping[int, CpuValues]
NOTHING_INSTEAD: Instead = MappingProxyType({})
# Parameters by path. Only those of a fragment are read, because reading one may cost something.
TensorsByPath = Mapping[str, Any]


class IncomingProgram:
    """The program that adopts one fragment.

    Args:
      on: the fragment's windows.
      rebase: True: new + (local - sent). False: alpha local + (1 - alpha) new; with alpha = 0 `local` is not read.
      once: takes a key and a function; calls the function only if it has no result for the key yet.
    """

    def __init__(self, on: FragmentWindows, rebase: bool, once: Once) -> None:
        self._on = on
        self._rebase = rebase
        self._everywhere = NamedSharding(on.mesh, PartitionSpec())
        # The values of alpha on the devices; a run has one or two.
        self._shares: dict[float, Float[Array, ""]] = {}
        self.compiled = once(("in", rebase, on.geometry), self._compile)

    def blend(self, params: TensorsByPath, new: DeviceArrays, sent: DeviceArrays, alpha: float) -> Params:
        """Return the fragment's new tensors; the program consumes those in `params`.

        Args:
          new: the new value of each slice, in the layout of its window (`value_sharding`).
          sent: windows of the parameters at the time of staging; empty without `rebase`.
          alpha: share of the local values, in [0, 1]; ignored with `rebase`.
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
    """Compute alpha local + (1 - alpha) value in the dtype of `local`, which is not read if alpha is 0.

    The result is rounded towards the global value. With rounding to the nearest, a difference of one unit in the last
    place would stay forever. A learner that lags behind by it would undo a part of the others' progress in every round.
    """
    # This form, unlike a sum of two products, is exact where `local` equals the value.
    exact = jnp.where(alpha == 0, value, value + alpha * (local.astype(jnp.float32) - value))
    if local.dtype == jnp.float32:
        return exact
    near = jax.lax.optimization_barrier(exact.astype(local.dtype))
    beyond = jnp.abs(near.astype(jnp.float32) - value) > jnp.abs(exact - value)
    return jnp.where(beyond, jnp.nextafter(near, value.astype(local.dtype)), near)


@dataclass(frozen=True, eq=False)
class PlacedValue:
    """A fragment's value on the devices or on its way there, in the order of the slices."""

    arrays: DeviceArrays


def _float32(value: Any) -> Any:
    """Return an array as float32; a HeldSlice has float32 already."""
    return value if isinstance(value, HeldSlice) else value.astype(np.float32, copy=False)


class Exchange:
    """The anchors, residuals and programs of an island's fragments.

    Only `warm_up` and `place` may run in other threads.

    Fragments and values have the axes of canonical tensors (core/kinds.py); parameters have those of the loop.

    Args:
      tensors: shape, dtype and layout of every parameter as it is stored, by path; these must not change afterwards.
      format: format of the updates that the island sends.
      rebase: whether `adopt` may be called with mode "rebase".
      orders: by path, the stored axes in canonical order; tensors that are not listed are stored canonically.
    """

    def __init__(
        self,
        tensors: Mapping[str, jax.ShapeDtypeStruct],
        format: Format,
        rebase: bool,
        orders: Mapping[str, Order] = AS_STORED,
    ) -> None:
        # By fragment_id, from the first adoption on. The owner may replace it with what an earlier process saved.
        self.held: dict[int, HeldFragment] = {}
        # The stored axes of every parameter in canonical order, by path.
        self.orders = {path: orders.get(path, tuple(range(len(tensor.shape)))) for path, tensor in tensors.items()}
        self._tensors = tensors
        self._rebase = rebase
        windows_by = self._windows_of = cache(
            lambda fragment: FragmentWindows(windows_of(fragment, tensors, self.orders))
        )
        self._outgoing = cache(lambda fragment: OutgoingProgram(windows_by(fragment), format, rebase, self._once))
        self._incoming = cache(lambda fragment, rebase: IncomingProgram(windows_by(fragment), rebase, self._once))
        self._compiled: dict[object, jax.stages.Compiled] = {}
        self._compiling = threading.Lock()

    def warm_up(
        self, fragments: Iterable[Fragment], report: Callable[[int, str], object] = lambda done, current: None
    ) -> None:
        """Compile the programs of fragments; any thread may call this at any time.

        Args:
          report: is called with the number of compiled programs, out of `count`, and the name of the program that is
            compiled now; at the end the name is "".
        """
        for fragment in fragments:
            for kind, program in self._programs_of(fragment):
                report(len(self._compiled), f"{kind} of fragment {fragment.fragment_id}")
                program()
        report(len(self._compiled), "")

    def count(self, fragments: Iterable[Fragment]) -> int:
        """Return the number of programs that fragments need; a shared program counts once."""
        kinds = 3 if self._rebase else 2
        return kinds * len({self._windows_of(fragment).geometry for fragment in fragments})

    def programs(self, fragments: Iterable[Fragment]) -> Iterator[tuple[str, Fragment, jax.stages.Compiled]]:
        """Compile the programs of fragments one after the other.

        Yields:
          (`adopt`, `stage` or `rebase`, fragment, program); fragments may share a program.
        """
        for fragment in fragments:
            for kind, program in self._programs_of(fragment):
                yield kind, fragment, program()

    def _programs_of(self, fragment: Fragment) -> Iterator[tuple[str, Callable[[], jax.stages.Compiled]]]:
        """Yield the name of each program of a fragment, and a function that compiles it once."""
        # `adopt` comes first, because an island adopts each fragment before it stages one.
        yield "adopt", lambda: self._incoming(fragment, False).compiled
        yield "stage", lambda: self._outgoing(fragment).compiled
        if self._rebase:
            yield "rebase", lambda: self._incoming(fragment, True).compiled

    def stage(self, params: TensorsByPath, fragment: Fragment) -> StagedFragment:
        """Queue a copy of a fragment's update, from the present parameters, to CPU memory; return at once.

            update = anchor - local + residual

        The anchor is the value adopted last; the residual is what rounding left out of earlier updates (outgoing.py).
        """
        assert fragment.fragment_id in self.held, f"fragment {fragment.fragment_id} was never adopted"
        with jax.transfer_guard("disallow"):
            return self._outgoing(fragment).dispatch(params, self.held[fragment.fragment_id])

    def boxes(
        self, fragment: Fragment, host_of: Callable[[jax.Device], int] = lambda device: device.process_index
    ) -> dict[int, dict[str, list[Box]]]:
        """Return the boxes of each slice, by key, that the devices of each host need of a value."""
        found: dict[int, dict[str, list[Box]]] = {}
        for window in self._windows_of(fragment).windows:
            # Devices that hold the same part need it once.
            held: dict[int, dict[tuple[tuple[int, int, int], ...], Box]] = {}
            for device, box in window.value_sharding.devices_indices_map(window.shape).items():
                bounds = tuple(each.indices(size) for each, size in zip(box, window.shape, strict=True))
                held.setdefault(host_of(device), {})[bounds] = box
            for host, by_bounds in held.items():
                found.setdefault(host, {})[window.part.key] = list(by_bounds.values())
        return found

    def place(self, fragment: Fragment, values: CpuValues) -> PlacedValue:
        """Start to copy a value to the devices, for `adopt`; any thread. ValueError if its names or shapes differ."""
        fragment.check(values)
        windows = self._windows_of(fragment).windows
        return PlacedValue([put_array(_float32(values[w.part.key]), w.value_sharding) for w in windows])

    def adopt(
        self,
        params: TensorsByPath,
        fragment: Fragment,
        values: CpuValues | PlacedValue,
        mode: AdoptMode,
        alpha: float,
        sent: StagedFragment | None,
    ) -> Params:
        """Adopt as `ExchangedState.adopt` does; return the new tensors of the fragment, in place of the old ones."""
        if mode == "rebase" and (sent is None or not sent.local):
            raise ValueError("adopt with mode 'rebase' needs `sent` from an island built with rebase=True")
        new = (values if isinstance(values, PlacedValue) else self.place(fragment, values)).arrays
        base = sent.local if sent is not None and mode == "rebase" else ()
        touched = self._blend(params, fragment, new, base, alpha if mode == "blend" else 0.0)
        residual = sent.residual() if sent is not None else None
        if residual is None:
            held = self.held.get(fragment.fragment_id)
            residual = held.residual if held is not None else self._outgoing(fragment).no_residual()
        self.held[fragment.fragment_id] = HeldFragment(new, residual)
        return touched

    def anchors(self, fragments: Iterable[Fragment], instead: Instead = NOTHING_INSTEAD) -> Params:
        """Return the global model: the parameters that adopting all fragments right now would give.

        The arrays are on the devices, in the parameters' own dtypes.

        Args:
          fragments: all fragments of the model.
          instead: values of some fragments in place of the held ones.
        """
        params = self._zeros()
        for fragment in fragments:
            number = fragment.fragment_id
            placed = self.place(fragment, instead[number]).arrays if number in instead else self.held[number].anchor
            params |= self._blend(params, fragment, placed, (), 0.0)
        return params

    def _zeros(self) -> Params:
        tensors = self._tensors
        layouts = {path: tensor.sharding for path, tensor in tensors.items()}

        def zeros() -> Params:
            return {path: jnp.zeros(tensor.shape, tensor.dtype) for path, tensor in tensors.items()}

        return self._once("zeros", lambda: jax.jit(zeros, out_shardings=layouts).lower().compile())()

    def overwrite(self, params: TensorsByPath, fragment: Fragment, values: CpuValues) -> Params:
        """Replace a fragment without making the values its anchor; return its new tensors. ValueError as in `adopt`."""
        return self._blend(params, fragment, self.place(fragment, values).arrays, (), 0.0)

    def _blend(
        self, params: TensorsByPath, fragment: Fragment, new: DeviceArrays, base: DeviceArrays, alpha: float
    ) -> Params:
        return self._incoming(fragment, bool(base)).blend(params, new, base, alpha)

    def _once(self, key: object, compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        with self._compiling:
            if key not in self._compiled:
                self._compiled[key] = compile()
            return self._compiled[key]
