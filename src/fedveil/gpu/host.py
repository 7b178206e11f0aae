"""Memory of the host beside a GPU."""

from __future__ import annotations

import ctypes
import functools

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of glibc's mallopt
LARGEST = 1 << 30  # bytes of a block that is kept
KEPT = (1 << 31) - 1  # bytes at the end of the heap that are kept


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
