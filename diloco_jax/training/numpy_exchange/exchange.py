"""Staging and adoption of fragments in NumPy, for parameters that another library owns.

    out  `stage`: the owner copies the due pieces; another thread computes the update, anchor - local, and encodes it.
    in   `adopt`: a new value is rounded to the parameters' type, blended with the local one if needed, and written.

The rules are those of training/exchange/, and so are the bits (rounding.py, core/departure.py). Only the encoding of
integer formats is compiled.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float32

from diloco_jax.core import codec
from diloco_jax.core.fragments import WHOLE, Fragment, Slice
from diloco_jax.core.kinds import Order, inverse, with_order
from diloco_jax.training.exchange.exchange import NOTHING_INSTEAD, AdoptMode, CpuValues, Instead
from diloco_jax.training.numpy_exchange.holder import CpuArray, HostHolder
from diloco_jax.training.numpy_exchange.rounding import DType, as_float32, as_held, blended, rebased, rounded
from diloco_jax.training.whole_state.staging import CpuCopy

if TYPE_CHECKING:
    from diloco_jax.core.departure import Departure

# Islands of one process build their exchanges in threads, and a function that is compiled refuses to compile once more.
_COMPILING = threading.Lock()
# Flat arrays by Slice.key; empty before the first rounding.
Residuals = Mapping[str, Float32[np.ndarray, "n"]]

# Encodes one tensor, given its name for messages and its update: returns the bytes for the wire, and what rounding left
# out; None if nothing is rounded. It raises codec.NotFinite.
Encoder = Callable[[str, Float32[np.ndarray, "n"]], tuple[codec.Bytes, Float32[np.ndarray, "n"] | None]]


class Anchored(NamedTuple):
    """The global value that the island adopted last, and what rounding has left out of its updates so far."""

    values: CpuValues
    residual: Residuals


class CopiedFragment:
    """A fragment's parameters as they were after a step, and their update; any thread may call the methods."""

    def __init__(
        self,
        fragment: Fragment,
        dtypes: Mapping[str, DType],
        format: codec.Format,
        encoder: Encoder,
        held: Anchored,
        copies: "PieceCopies",
        keep_local: bool,
    ) -> None:
        self._fragment = fragment
        self._dtypes = dtypes
        self._format = format
        self._encoder = encoder
        self._held: Anchored | None = held
        self._copies: PieceCopies | None = copies
        self._keep_local = keep_local
        self._lock = threading.Lock()
        self._encoded: tuple[bytes, Residuals] | codec.NotFinite | None = None

    def local(self, key: str) -> Float32[np.ndarray, "..."]:
        """Wait for the copy of a piece, and return it as float32."""
        assert self._copies is not None, "only rebase needs the copies of an encoded fragment"
        return as_float32(self._copies.array(key))

    def encode(self) -> bytes:
        """Wait for the copies, and return the payload: `codec.encode` of anchor - local + residual.

        Raises:
          NotFinite: the update has NaN or infinity, and the format is an integer format.
        """
        return self._result()[0]

    def residual(self) -> Residuals | None:
        """Return the residual that becomes valid if this copy is merged; None if the copy could not be encoded."""
        try:
            return self._result()[1]
        except codec.NotFinite:
            return None

    def _result(self) -> tuple[bytes, Residuals]:
        with self._lock:
            if self._encoded is None:
                try:
                    self._encoded = self._encode()
                except codec.NotFinite as error:
                    self._encoded = error
                # This frees the anchor once a newer one is adopted, and the copies unless `adopt` needs them.
                self._held = None
                self._copies = self._copies if self._keep_local else None
            if isinstance(self._encoded, codec.NotFinite):
                raise self._encoded
            return self._encoded

    def _encode(self) -> tuple[bytes, Residuals]:
        assert self._held is not None, "a copy is encoded once"
        pieces: dict[str, codec.Bytes] = {}
        after = {}
        for part in self._fragment.slices:
            key, (values, before) = part.key, self._held
            with np.errstate(invalid="ignore", over="ignore"):
                # The anchor is rounded to the parameters' type first; otherwise its rounding would be an update.
                anchor = as_held(values[key], self._dtypes[part.path])
                update = anchor.reshape(-1) - self.local(key).reshape(-1)
                if self._format != "float32":
                    update = update + before.get(key, np.float32(0))
            pieces[key], left = self._encoder(key, update)
            if left is not None:
                after[key] = left
        return b"".join(pieces[key] for key in sorted(pieces)), after


class PieceCopies:
    """Copies of a fragment's pieces in CPU memory, or on their way there.

    Args:
      copies: the copies as they are stored, by the key of the canonical piece.
      orders: the stored axes in canonical order, by the same keys.
    """

    def __init__(self, copies: Mapping[str, CpuCopy], orders: Mapping[str, Order]) -> None:
        self._copies = copies
        self._orders = orders

    def array(self, key: str) -> CpuArray:
        """Wait for the copy of a piece, and return it with canonical axes."""
        return with_order(np.asarray(self._copies[key]), self._orders[key])


class CanonicalPieces:
    """The pieces of a holder's parameters with the axes of canonical tensors."""

    def __init__(self, holder: HostHolder, orders: Mapping[str, Order]) -> None:
        self._holder = holder
        self._orders = orders

    def read(self, fragment: Fragment) -> PieceCopies:
        """Start to copy a fragment's pieces; return at once."""
        stored = {part.key: self._stored(part) for part in fragment.slices}
        copies = self._holder.read([*stored.values()])
        for part in stored.values():
            whole_shape = tuple(self._holder.shapes[part.path])
            size = (part.stop - part.start,)
            shape = (
                whole_shape if part.axis == WHOLE else (*whole_shape[: part.axis], *size, *whole_shape[part.axis + 1 :])
            )
            # An array of another shape could be broadcast, and would be merged.
            if (found := tuple(copies[part.key].shape) if part.key in copies else None) != shape:
                raise ValueError(
                    f"the holder's read() returned {part.key!r} with shape {found}, and the piece has {shape}; return "
                    "parameter[piece.at] for each piece, by piece.key"
                )
        orders = {part.key: self._orders[part.path] for part in fragment.slices}
        return PieceCopies({key: copies[part.key] for key, part in stored.items()}, orders)

    def write(self, values: Mapping[Slice, CpuArray]) -> None:
        """Replace pieces of the parameters."""
        self._holder.write(
            {self._stored(part): with_order(value, inverse(self._orders[part.path])) for part, value in values.items()}
        )

    def _stored(self, part: Slice) -> Slice:
        """Return the same piece in the stored tensor."""
        return part if part.axis == WHOLE else part._replace(axis=self._orders[part.path][part.axis])


def _encoder_of(format: codec.Format) -> Encoder:
    if not codec.is_integer(format):
        return lambda key, update: rounded(update, format)
    # Numba reads the settings of its cache when it is imported, and an island sets them after this file is loaded.
    with _COMPILING:
        departure: Departure = importlib.import_module("diloco_jax.core.departure").Departure(format)
    return departure.encode


class NumpyExchange:
    """The anchors and residuals of an island's fragments, in CPU memory.

    Args:
      holder: the owner of the parameters.
      orders: the stored axes of every parameter in canonical order, by path (core/kinds.py); fragments have canonical
        axes, and the holder's pieces have stored ones.
      format: format of the updates that the island sends.
      rebase: whether `adopt` may be called with mode "rebase".
    """

    def __init__(self, holder: HostHolder, orders: Mapping[str, Order], format: codec.Format, rebase: bool) -> None:
        # By fragment_id, from the first adoption on.
        self.held: dict[int, Anchored] = {}
        self._pieces = CanonicalPieces(holder, orders)
        self._orders = orders
        self._shapes = dict(holder.shapes)
        self._dtypes = dict(holder.dtypes)
        self._format: codec.Format = format
        self._encoder = _encoder_of(format)
        self._rebase = rebase

    def stage(self, fragment: Fragment) -> CopiedFragment:
        """Start to copy a fragment's parameters as they are after the newest step; return at once."""
        assert fragment.fragment_id in self.held, f"fragment {fragment.fragment_id} was never adopted"
        held, copies = self.held[fragment.fragment_id], self._pieces.read(fragment)
        return CopiedFragment(fragment, self._dtypes, self._format, self._encoder, held, copies, self._rebase)

    def adopt(
        self, fragment: Fragment, values: CpuValues, mode: AdoptMode, alpha: float, sent: CopiedFragment | None
    ) -> None:
        """Adopt a merged fragment between two steps, as `ExchangedState.adopt` does; ValueError likewise."""
        if mode == "rebase" and (sent is None or not self._rebase):
            raise ValueError("adopt with mode 'rebase' needs `sent` from an island built with rebase=True")
        fragment.check(values)
        if mode == "overwrite" or (mode == "blend" and alpha == 0):
            self.overwrite(fragment, values)
        else:
            local = self._pieces.read(fragment)
            base = sent if mode == "rebase" else None
            self._pieces.write(
                {part: self._met(part, local.array(part.key), values, alpha, base) for part in fragment.slices}
            )
        residual = sent.residual() if sent is not None else None
        if residual is None:
            held = self.held.get(fragment.fragment_id)
            residual = held.residual if held is not None else {}
        self.held[fragment.fragment_id] = Anchored(values, residual)

    def overwrite(self, fragment: Fragment, values: CpuValues) -> None:
        """Replace a fragment without making the values its anchor; ValueError as in `adopt`."""
        fragment.check(values)
        self._pieces.write({part: self._in_type(part, values[part.key]) for part in fragment.slices})

    def anchors(self, fragments: Iterable[Fragment], instead: Instead = NOTHING_INSTEAD) -> dict[str, CpuArray]:
        """Return the global model: the parameters that adopting all fragments right now would give, by path.

        Args:
            fragments: all fragments of the model.
            instead: values of some fragments in place of the held ones.
        """
        found = {path: np.zeros(shape, self._dtypes[path]) for path, shape in self._shapes.items()}
        canonical = {path: with_order(array, self._orders[path]) for path, array in found.items()}
        for fragment in fragments:
            number = fragment.fragment_id
            values = instead[number] if number in instead else self.held[number].values
            for part in fragment.slices:
                canonical[part.path][part.at] = self._in_type(part, values[part.key])
        return found

    def _in_type(self, part: Slice, value: Float32[np.ndarray, "..."]) -> CpuArray:
        with np.errstate(over="ignore"):
            return value.astype(self._dtypes[part.path], copy=False)

    def _met(
        self, part: Slice, local: CpuArray, values: CpuValues, alpha: float, sent: CopiedFragment | None
    ) -> CpuArray:
        """Return the new parameters where a local value and a global one meet."""
        value = as_held(values[part.key].astype(np.float32, copy=False), local.dtype)
        return blended(local, value, alpha) if sent is None else rebased(local, value, sent.local(part.key))
