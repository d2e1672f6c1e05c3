"""Memory that is freed stays with the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from zeropp_ray.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in 3 * (40, 3, 60):
        torch.ones(mib * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc: other allocators are left alone")
def test_what_is_freed_is_used_again():
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True).stdout)

    assert faults("kept") < faults("given back") / 2
