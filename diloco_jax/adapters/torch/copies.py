"""Copies of tensors in CPU memory, and of CPU arrays into tensors; a loop on a GPU waits for neither.

Out of a GPU, the tensor is first copied on the device, in the stream of the loop. A second stream moves that copy to
pinned memory, so the next step may change the tensor at once. Into a GPU, the array goes through pinned memory in the
stream of the loop: behind the newest step, and before the next one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

CpuArray = np.ndarray[Any, Any]
# NumPy has bfloat16 only through ml_dtypes, so such tensors pass as integers of 16 bits.
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: BFLOAT16,
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


class TensorCopy:
    """A copy of a tensor in CPU memory, or on its way there.

    Args:
        tensor: The copy on the CPU, contiguous.
        arrived: Event at the end of the copy; None if the copy is complete.
    """

    def __init__(self, tensor: torch.Tensor, arrived: Any = None) -> None:
        self._tensor = tensor
        self._arrived = arrived
        self.shape = tuple(tensor.shape)
        self.dtype = DTYPES[tensor.dtype]

    def is_ready(self) -> bool:
        """Tell whether `__array__` need not wait."""
        return self._arrived is None or bool(self._arrived.query())

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> CpuArray:
        """Wait for the copy, and return it without another one; any thread may call it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self.dtype == BFLOAT16:
            found: CpuArray = self._tensor.view(torch.int16).numpy().view(BFLOAT16)
        else:
            found = self._tensor.numpy()
        return found if dtype is None or dtype == found.dtype else found.astype(dtype)


def start_copy(tensor: torch.Tensor) -> TensorCopy:
    """Start to copy a tensor, as it is after the newest step, to CPU memory; of a GPU's tensor, return at once."""
    source = tensor.detach()
    if not source.is_cuda:
        return TensorCopy(source.to("cpu").clone(memory_format=torch.contiguous_format))
    own = source.clone(memory_format=torch.contiguous_format)
    aside = _stream(own.device)
    aside.wait_stream(torch.cuda.current_stream(own.device))
    host = torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
    with torch.cuda.stream(aside):
        host.copy_(own, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(aside)
    # The allocator may give the memory of `own` to others only after the second stream has read it.
    own.record_stream(aside)
    return TensorCopy(host, arrived)


def fill(tensor: torch.Tensor, value: CpuArray) -> None:
    """Copy a CPU array into a tensor or a view of one, in place, before the next step."""
    host = as_tensor(value)
    if tensor.is_cuda:
        host = host.pin_memory()
    with torch.no_grad():
        # The allocator of pinned memory keeps `host` until the copy is made.
        tensor.detach().copy_(host, non_blocking=tensor.is_cuda)


def as_tensor(value: CpuArray) -> torch.Tensor:
    """Return a tensor on the CPU with the values of a CPU array, which it may share."""
    # PyTorch warns of memory that must not be written, and a view of one is written by mistake.
    plain = np.require(value, requirements=("C", "W"))
    if plain.dtype == BFLOAT16:
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(plain)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
