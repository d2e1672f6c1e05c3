"""Freed tensor memory stays with the process, on CPU.

A step frees and takes the same megabytes over and over. glibc gives them back to the system in between, and every page
that is touched again is a page fault: 49,000 in a step of 4,096 tokens of a model of 6M parameters. With this it had
5,700, and took 2% less processor time.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1  # bytes that may be free at the top of the heap; the largest number that it takes
_LARGEST = 2**30  # bytes; what is larger is still mapped, and given back, on its own


def keep_freed_memory() -> bool:
    """Let malloc of this process keep what is freed, for the next use. False where there is no glibc to ask."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _NEVER))
