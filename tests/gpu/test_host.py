"""Host memory that a process keeps: a large message that comes and goes touches no new pages."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from fedveil.gpu.host import keep_freed_memory
kept = sys.argv[1] == "kept" and keep_freed_memory()
size = 50_000_000
def faults():
    for _ in range(20):
        b"x" * size  # larger than what glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(int(kept), faults() - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
    return [int(number) for number in done.stdout.split()]


def test_freed_memory_is_used_again():
    kept, few = faults("kept")
    if not kept:
        pytest.skip("another C library")
    assert few < 1000
    assert faults("plain")[1] > 10_000, "it would be kept anyway, so this tests nothing"
