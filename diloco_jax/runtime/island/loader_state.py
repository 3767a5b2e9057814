"""The state of a loader that reads an island's own data: bytes that are saved beside the shards of the same step."""

from typing import Protocol, runtime_checkable

# A loader's state holds a position; a shuffle buffer of samples in it would be written at every save.
LOADER_BYTES_MAX = 1 << 26


@runtime_checkable
class Loader(Protocol):
    """A loader whose position can be saved and restored."""

    def state(self) -> bytes:
        """Return the position after the batch that was trained last."""
        ...

    def restore(self, state: bytes) -> None:
        """Continue after the batch of this position; ValueError if the state does not fit."""
        ...


def bounded(loader: Loader) -> bytes:
    """Return the loader's state; ValueError if it is too large or not bytes."""
    state = loader.state()
    if not isinstance(state, bytes):
        raise ValueError(f"the loader's state() returned a {type(state).__name__}; it must return bytes")
    if len(state) > LOADER_BYTES_MAX:
        raise ValueError(
            f"the loader's state has {len(state)} bytes, the limit is {LOADER_BYTES_MAX}: use a smaller shuffle "
            "buffer, or shuffle an index of the samples instead of the samples"
        )
    return state


def restored(loader: Loader, state: bytes, global_step: int) -> None:
    """Restore a loader; ValueError names the save and the remedy if the loader refuses it."""
    try:
        loader.restore(state)
    # Libraries of loaders raise many kinds of errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(
            f"the loader cannot continue from the state that this island saved at global step {global_step}: {reason}. "
            "Join with the same loader as before (same source, order and batch), or delete this island's folder below "
            "states to start from the beginning of the data"
        ) from error
