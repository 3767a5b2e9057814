"""An inner step in parts: gradients of parts of a batch, computed anywhere, and one update with their mean.

    handle = steps.gradient(island.put_batch(batch), position)      one program; the state stays; returns at once
    part = steps.take(handle)                                       the flat gradient in RAM, and its metrics
    mean = mean_chunk([part.flat, ...], [part.weight, ...])         parts in their order, on any island
    handle = steps.apply(mean, learning_rate, mean_metrics(...))    one donated program; returns at once
    island.wait(handle)                                             {"loss": ..., "grad_norm": ...}

The mean of parts p = 1 ... n with weights w is that of micro-batches in train_step.py:

    g = (w_1 g_1 + ... + w_n g_n) / (w_1 + ... + w_n)               float32, from left to right

Each element is computed alone and in the order of parts. So the mean has the same bits whatever island of an equal mesh
computed a part, and into however many chunks the flat gradients are cut.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32

from diloco_jax.training.blueprint import Blueprint
from diloco_jax.training.data.sample import Shapes
from diloco_jax.training.island import Island, StepHandle, shapes_key
from diloco_jax.training.state import Batch
from diloco_jax.training.train_step import WEIGHT
from diloco_jax.training.whole_state.staging import Spans, lengths, spans_of

# XLA's alignment of buffers in bytes.
ALIGNMENT = 64
Flat = Float32[np.ndarray, "n"]


def check_no_other_state(blueprint: Blueprint) -> None:
    """Check that a step of a model can be computed in parts; ValueError if it changes more than parameters."""
    if other := blueprint.state_shapes.other:
        raise ValueError(
            f"the model has variables beside its parameters, such as '{min(other)}', and an island of several slices "
            "cannot keep them equal; set islands.slices to 1, or use a layer without them, such as LayerNorm instead "
            "of BatchNorm"
        )


class ShardPlace(NamedTuple):
    """A shard in a device's part of a bucket, and in a flat gradient."""

    at: int
    start: int
    size: int


class HeldRow(NamedTuple):
    """The shards in a bucket that some devices of this process hold, all of them the same."""

    pieces: tuple[ShardPlace, ...]
    devices: list[jax.Device]


class PartHandle(NamedTuple):
    """A dispatched gradient of a part, which `PartSteps.take` waits for."""

    # The parts of buckets on this process's devices, and the pieces to read of each.
    rows: Sequence[tuple[Array, Sequence[ShardPlace]]]
    step: StepHandle


class Part(NamedTuple):
    """The gradient of a part of a batch."""

    # The shards of this process by ascending path and then by place, each in C order.
    flat: Flat
    # `loss`, and what the model reports.
    metrics: dict[str, float]
    # The metric `weight`; 1.0 if the model reports none.
    weight: float


class PartSteps:
    """The inner steps of an island as gradients of parts and updates; for one thread, except `warm_up`."""

    def __init__(self, island: Island) -> None:
        """Describe the two programs, without compiling them; ValueError as for `check_no_other_state`."""
        check_no_other_state(island.blueprint)
        self._island = island
        self._blueprint = blueprint = island.blueprint
        # The places of this process's shards, in their order in a flat gradient.
        self.places: dict[str, list[Spans]] = {}
        for path, leaf in sorted(blueprint.tensors.items()):
            held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
            self.places[path] = sorted({spans_of(index, leaf.shape) for index in held})
        # The number of elements of a flat gradient.
        self.size = sum(math.prod(lengths(spans)) for places in self.places.values() for spans in places)
        # Compiled gradients by the shapes of their parts, and the compiled update.
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._update: jax.stages.Compiled | None = None

    @cached_property
    def _rows(self) -> list[list[HeldRow]]:
        """Return the rows of every bucket."""
        packing, start = self._blueprint.packing, 0
        starts = packing.starts
        pieces = [defaultdict[jax.Device, list[ShardPlace]](list) for _ in packing.buckets]
        for path, places in self.places.items():
            leaf = self._blueprint.tensors[path]
            bucket, at = starts[path]
            size = math.prod(lengths(places[0]))
            for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
                number = places.index(spans_of(index, leaf.shape))
                pieces[bucket][device].append(ShardPlace(at, start + number * size, size))
            start += len(places) * size
        rows = []
        for by_device in pieces:
            alike = defaultdict[tuple[ShardPlace, ...], list[jax.Device]](list)
            for device, held in by_device.items():
                alike[tuple(held)].append(device)
            rows.append([HeldRow(held, devices) for held, devices in alike.items()])
        return rows

    def warm_up(self, shapes: Shapes) -> None:
        """Compile both programs for parts of these shapes, without running them; any thread may call this."""
        if shapes_key(shapes) not in self._compiled:
            self._compiled[shapes_key(shapes)] = self._blueprint.lower_part(shapes).compile()
        if self._update is None:
            self._update = self._blueprint.lower_update().compile()

    def gradient(self, batch: Batch, position: int = 0) -> PartHandle:
        """Dispatch the gradient of a part with the parameters of now, which stay as they are; return at once.

        Args:
          batch: the result of `Island.put_batch` for the part's samples.
          position: position of the part's first sample in the global order, as for `Island.step`.
        """
        island = self._island
        program = self._compiled.get(shapes_key(batch), self._blueprint.part)
        draw = self._blueprint.put_draw(position)
        packed, step = island.dispatch(program, island.state.params, batch, draw, island.base.values)
        rows, known = [], set[int]()
        for bucket, held in zip(packed, self._rows, strict=True):
            here = {shard.device: shard.data for shard in bucket.addressable_shards}
            for pieces, devices in held:
                # Each shard is read once, although rows that differ may both have it. A piece of an empty tensor starts
                # where the next one does.
                if new := [piece for piece in pieces if piece.size and piece.start not in known]:
                    known.update(piece.start for piece in new)
                    here[devices[0]].copy_to_host_async()
                    rows.append((here[devices[0]], new))
        return PartHandle(rows, step)

    def take(self, handle: PartHandle) -> Part:
        """Wait until a gradient is computed, and return it in RAM."""
        metrics = self._island.wait(handle.step)
        flat = np.empty(self.size, np.float32)
        for row, pieces in handle.rows:
            values = jax.device_get(row).reshape(-1)
            for at, start, size in pieces:
                flat[start : start + size] = values[at : at + size]
        return Part(flat, metrics, metrics.get(WEIGHT, 1.0))

    def apply(self, mean: Flat, learning_rate: float, metrics: Mapping[str, float]) -> StepHandle:
        """Dispatch the update with a mean gradient, which changes the state in place; return at once.

        Args:
          mean: float32 [size]; the caller may change it afterwards.
          metrics: means over the parts; `Island.wait` returns them together with `grad_norm`.

        Raises:
          ValueError: `mean` has another size.
        """
        if mean.shape != (self.size,):
            raise ValueError(
                f"the mean gradient has shape {mean.shape}, expected ({self.size},); do all slices have the same model?"
            )
        packed = []
        for bucket, held in zip(self._blueprint.packing.buckets, self._rows, strict=True):
            arrays, shape = [], bucket.shard_shape
            for pieces, devices in held:
                row = aligned(math.prod(shape))
                for at, start, size in pieces:
                    row[at : at + size] = mean[start : start + size]
                # Nobody changes the row afterwards, so the devices may share its memory.
                arrays += [jax.device_put(row.reshape(shape), device) for device in devices]
            packed.append(jax.make_array_from_single_device_arrays(bucket.shape, bucket.sharding, arrays))
        island = self._island
        program = self._update or self._blueprint.update
        island.state, handle = island.dispatch(
            program, island.state, packed, island.put_rate(learning_rate), known=metrics
        )
        return handle


def aligned(size: int) -> Flat:
    """Return an array of `size` numbers that a CPU device can use in place; XLA copies other arrays."""
    memory = np.empty(4 * size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + 4 * size].view(np.float32)


def mean_chunk(chunks: Sequence[Flat], weights: Sequence[float]) -> Flat:
    """Return the weighted mean of the same piece of every part's gradient: (sum of w_p g_p) / (sum of w_p).

    All arithmetic is float32, from left to right. The sum is divided by 1 if no part has a weight above 0.

    Args:
      chunks: float32 [n] of each part, in the order of parts.
      weights: weight of each part.

    Raises:
      ValueError: there is no part, or the parts have different numbers of elements or of weights.
    """
    shapes = {chunk.shape for chunk in chunks}
    if len(chunks) != len(weights) or len(shapes) != 1:
        raise ValueError(
            f"{len(chunks)} parts of shapes {sorted(shapes)} with {len(weights)} weights have no mean; give pieces of "
            "one length, with one weight each"
        )
    # A number that leaves the range of float32 becomes infinite, as on the devices.
    with np.errstate(all="ignore"):
        exact = np.asarray(weights, np.float32)
        total, scaled = chunks[0] * exact[0], np.empty_like(chunks[0])
        for chunk, weight in zip(chunks[1:], exact[1:], strict=True):
            # A factor of 1 changes no bit, and without it the sum takes half of the time.
            total += chunk if weight == 1 else np.multiply(chunk, weight, out=scaled)
        divisor = _sum(exact)
        return np.divide(total, divisor if divisor > 0 else np.float32(1.0), out=total)


def mean_metrics(parts: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the means of metrics over parts, like `mean_chunk`; the metric `weight` is a sum.

    Raises:
      ValueError: there is no part, or the parts report different metrics.
    """
    names = sorted(parts[0]) if parts else []
    if different := next((part.keys() ^ set(names) for part in parts if part.keys() != set(names)), None):
        raise ValueError(f"only some parts report the metric '{min(different)}'; do all slices have the same program?")
    with np.errstate(all="ignore"):
        rows = [np.array([part[name] for name in names], np.float32) for part in parts]
        means = dict(zip(names, map(float, mean_chunk(rows, weights)), strict=True))
        if WEIGHT in means:
            means[WEIGHT] = float(_sum(np.array([part[WEIGHT] for part in parts], np.float32)))
    return means


def _sum(values: Float32[np.ndarray, "p"]) -> np.float32:
    """Add from left to right; `np.sum` would add in pairs."""
    total = np.float32(0.0)
    for value in values:
        total = np.float32(total + value)
    return total
