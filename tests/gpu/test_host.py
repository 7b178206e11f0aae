"""Memory of the host: what a process keeps of it, and copies of what is on a GPU."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedveil.gpu.graphs import repeat
from fedveil.gpu.host import HostCopies

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_copies_in_the_hosts_memory_are_whole_after_waiting(device):
    copies, tensors = HostCopies(), [torch.randn(1000, 1000, device=device) for _ in range(3)]
    found = [copies.take(tensor) for tensor in tensors]
    copies.wait()
    assert all(copy.device.type == "cpu" for copy in found)
    assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(found, tensors, strict=True))


@NEEDS_GPU
def test_another_thread_may_wait_for_copies_while_a_graph_is_captured():
    copies, total, over = HostCopies(), torch.zeros(3, device="cuda"), threading.Event()
    copy = copies.take(torch.ones(3, device="cuda"))

    def wait():
        while not over.is_set():
            copies.wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        for _ in range(20):
            repeat(lambda: total.add_(1), 10, torch.device("cuda"))
        over.set()
        waiting.result()
    assert total.tolist() == [200] * 3
    assert copy.tolist() == [1] * 3
