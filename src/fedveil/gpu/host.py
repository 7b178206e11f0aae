"""Memory of a GPU and of the host beside it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
LARGEST = 1 << 30  # bytes of a block that is kept
KEPT = (1 << 31) - 1  # bytes at the end of the heap that are kept


def free_memory(device: torch.device) -> int:
    """Bytes that are free: of a GPU, or of this machine where the device is a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep the memory that this process frees, and return whether it does.

    Messages as large as a model come and go in every round. By default each gets new pages from the operating system,
    and to clear those takes longer than to fill them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST) and mallopt(TRIM_THRESHOLD, KEPT))


class HostCopies:
    """Copies of tensors in the memory of the host, made while the GPU goes on.

    A tensor on a GPU is copied to pinned memory, on a stream of its own. A tensor on a CPU is taken as it is; whoever
    takes it must not change it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy, which may be read after `wait`."""
        if tensor.device.type != "cuda":
            return tensor
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not used again before the copy is done
        return copy

    def wait(self) -> None:
        """Return when every copy is complete. Any thread may call it."""
        if self._stream is not None:
            self._stream.synchronize()
