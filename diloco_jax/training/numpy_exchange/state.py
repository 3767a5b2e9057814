"""The exchanged state of an island whose parameters are not JAX arrays."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from diloco_jax.core.codec import Format
from diloco_jax.core.fragments import Fragment, whole
from diloco_jax.core.kinds import Canonical
from diloco_jax.training.exchange.exchange import NOTHING_INSTEAD, AdoptMode, CpuValues, Instead, PlacedValue
from diloco_jax.training.numpy_exchange.exchange import CopiedFragment, NumpyExchange
from diloco_jax.training.numpy_exchange.holder import CpuArray, CpuCopy, HostHolder
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.moving import PARAMETERS
from diloco_jax.training.whole_state.staging import PartialLeaf, Shard, Spans, StagedShards, StagedState


class NumpyState:
    """An `IslandState` on the arrays of a holder; it compiles nothing.

    Args:
      holder: the owner of the parameters.
      forms: the canonical form of every parameter, by path.
      format: format of the updates that the island sends.
      rebase: whether `adopt` may be called with mode "rebase".
    """

    def __init__(self, holder: HostHolder, forms: Mapping[str, Canonical], format: Format, rebase: bool) -> None:
        # Fragments have the axes of canonical tensors; whole states have those of the holder.
        self.shapes = {path: form.shape for path, form in forms.items()}
        self.kinds = {path: form.kind for path, form in forms.items()}
        orders = {path: form.order for path, form in forms.items()}
        self.exchange = NumpyExchange(holder, orders, format, rebase)
        self._holder = holder
        self._pieces = {path: whole(path) for path in self.shapes}
        params = {
            PARAMETERS + path: np.broadcast_to(np.zeros((), holder.dtypes[path]), shape)
            for path, shape in holder.shapes.items()
        }
        self.state_layout = StateLayout(params | dict(holder.moments()))

    def count_programs(self, fragments: Iterable[Fragment]) -> int:
        """Return 0: nothing is compiled."""
        return 0

    def warm_up_exchange(
        self, fragments: Iterable[Fragment], told: Callable[[int, str], object] = lambda done, current: None
    ) -> None:
        """Do nothing: nothing is compiled."""

    def stage(self, fragment: Fragment) -> CopiedFragment:
        """Start to copy a fragment as it is after the newest step; return at once."""
        return self.exchange.stage(fragment)

    def place(self, fragment: Fragment, values: CpuValues) -> None:
        """Do nothing: `adopt` gives the holder arrays in CPU memory."""

    def adopt(
        self,
        fragment: Fragment,
        values: CpuValues | PlacedValue,
        *,
        mode: AdoptMode = "overwrite",
        alpha: float = 0.0,
        sent: CopiedFragment | None = None,
    ) -> None:
        """Adopt a merged fragment between two steps; arguments and errors as for `ExchangedState.adopt`."""
        assert not isinstance(values, PlacedValue), "`place` returned None, so the values are in CPU memory"
        self.exchange.adopt(fragment, values, mode, alpha, sent)

    def overwrite(self, fragment: Fragment, values: CpuValues) -> None:
        """Replace a fragment of the parameters; anchor and residual stay as they are."""
        self.exchange.overwrite(fragment, values)

    def anchors(self, fragments: Iterable[Fragment], instead: Instead = NOTHING_INSTEAD) -> dict[str, CpuArray]:
        """Return the global model, by path; arguments as for `IslandState.anchors`."""
        return self.exchange.anchors(fragments, instead)

    def stage_moments(self) -> StagedState:
        """Start to copy everything but the parameters, for another island; return at once."""
        copies = {name: [(_spans(copy.shape), copy)] for name, copy in self._moments().items()}
        return StagedState(self.state_layout, copies, {})

    def load_moments(self, leaf: Callable[[str], Any]) -> None:
        """Load everything but the parameters; `leaf` returns the array of a name."""
        self._holder.set_moments(lambda name: np.asarray(leaf(name)))

    def stage_shards(self) -> StagedShards:
        """Start to copy the whole state, for this process's own disk; return at once."""
        read = self._holder.read(list(self._pieces.values()))
        copies = {PARAMETERS + path: read[piece.key] for path, piece in self._pieces.items()} | self._moments()
        leaves = self.state_layout.by_name
        shards = [Shard(name, leaves[name].dtype, leaves[name].shape, _spans(leaves[name].shape)) for name in copies]
        return StagedShards(shards, [*copies.values()])

    def check_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Check that saved shards have everything that `load_shards` needs; ValueError names the difference."""
        mine = self.state_layout.by_name
        for name in sorted(leaves.keys() | mine.keys()):
            here, there = mine.get(name), leaves.get(name)
            if here is None or there is None or (here.dtype, here.shape) != (there.dtype.name, there.shape):
                raise ValueError(f"it belongs to another model or optimizer, which differs in '{name}'")
            if not there.holds((slice(None),) * len(there.shape)):
                raise ValueError(f"it lacks a part of '{name}', which another process has saved")

    def load_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Load the whole state exactly, from what an earlier process saved."""
        self.load_moments(leaves.__getitem__)
        self._holder.write({piece: np.asarray(leaves[PARAMETERS + path]) for path, piece in self._pieces.items()})

    def _moments(self) -> dict[str, CpuCopy]:
        """Start to copy the state beside the parameters; ValueError if it has changed its layout."""
        found = dict(self._holder.moments())
        for name in sorted(found.keys() | {name for name in self.state_layout.by_name if _is_moment(name)}):
            copy, leaf = found.get(name), self.state_layout.by_name.get(name)
            if copy is None or leaf is None or (copy.dtype.name, tuple(copy.shape)) != (leaf.dtype, leaf.shape):
                now = "missing" if copy is None else f"{copy.dtype} {tuple(copy.shape)}"
                then = "missing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
                raise ValueError(f"'{name}' of the optimizer's state is {now} now, and was {then} at the start")
        return found


def _is_moment(name: str) -> bool:
    return not name.startswith(PARAMETERS)


def _spans(shape: tuple[int, ...]) -> Spans:
    return tuple((0, extent) for extent in shape)
