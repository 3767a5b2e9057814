"""The exchanged state of an island, as the process of an island uses it, wherever the arrays are.

`ExchangedState` has JAX arrays on devices. `NumpyState` has parameters of another library, such as PyTorch.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from diloco_jax.core.fragments import Fragment
from diloco_jax.core.host_bytes import Buffer
from diloco_jax.core.kinds import Kind
from diloco_jax.training.exchange.exchange import NOTHING_INSTEAD, AdoptMode, CpuValues, Instead, PlacedValue
from diloco_jax.training.whole_state.layout import StateLayout
from diloco_jax.training.whole_state.staging import PartialLeaf, StagedShards, StagedState


@runtime_checkable
class StagedUpdate(Protocol):
    """A fragment's update as it was after a step, on its way to CPU memory; any thread may call the methods."""

    def encode(self) -> bytes | list[Buffer]:
        """Wait for the copy, and return its payload; NotFinite if the format cannot represent the values."""


@runtime_checkable
class IslandState(Protocol):
    """Fragments and whole states leave and enter an island between two steps, from the thread that steps.

    Only `warm_up_exchange` and `place` may run in other threads.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter, by path."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Return the kind of every parameter, by path."""

    @property
    def state_layout(self) -> StateLayout:
        """Return the layout of a whole state's bytes."""

    def count_programs(self, fragments: Iterable[Fragment]) -> int:
        """Return the number of programs that `warm_up_exchange` compiles."""

    def warm_up_exchange(self, fragments: Iterable[Fragment], told: Callable[[int, str], object]) -> None:
        """Compile the programs of fragments; any thread.

        Args:
            told: is called with the number of compiled programs and the name of the one that is compiled now, or "".
        """

    def stage(self, fragment: Fragment) -> StagedUpdate:
        """Queue a copy of a fragment's update, as it is after the newest step; return at once."""

    def place(self, fragment: Fragment, values: CpuValues) -> PlacedValue | None:
        """Start to copy a merged fragment to the devices, for `adopt`; None if `adopt` needs it in CPU memory."""

    def adopt(
        self,
        fragment: Fragment,
        values: CpuValues | PlacedValue,
        *,
        mode: AdoptMode = ...,
        alpha: float = ...,
        sent: Any = ...,
    ) -> None:
        """Adopt a merged fragment; `sent` is the staged copy that was merged into it, if there is one."""

    def overwrite(self, fragment: Fragment, values: CpuValues) -> None:
        """Replace a fragment of the parameters; anchor and residual stay as they are."""

    def anchors(self, fragments: Iterable[Fragment], instead: Instead = NOTHING_INSTEAD) -> Any:
        """Return the global model as {path: array}, in the parameters' own types.

        Args:
            fragments: all fragments of the model.
            instead: values of some fragments in place of the held ones, which stay.
        """

    def stage_moments(self) -> StagedState:
        """Queue a copy of everything but the parameters, for another island; return at once."""

    def load_moments(self, leaf: Callable[[str], Any]) -> None:
        """Load everything but the parameters; `leaf` returns the array of a name."""

    def stage_shards(self) -> StagedShards:
        """Queue copies of everything on this process's devices, for its own disk; return at once."""

    def check_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Check that saved shards have everything that `load_shards` needs; ValueError names the difference."""

    def load_shards(self, leaves: Mapping[str, PartialLeaf]) -> None:
        """Load the whole state exactly, from shards that an earlier process saved."""
