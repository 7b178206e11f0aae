"""Settings of all tests."""

import os

import pytest
import torch
from hypothesis import settings

from fedveil.gpu.graphs import one_thread

# How long an example takes says something of the machine only; and where a failure would stop others, draws are fixed.
settings.register_profile("fedveil", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedveil")


@pytest.fixture(scope="session", autouse=True)
def threads():
    """Tasks of eight weights are slowed down by threads, and a forked child has none of its parent's."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def still_one_thread(threads):
    """The command line sets as many as a run asks for, and a forked child of the next test would wait for them."""
    with one_thread():
        yield


@pytest.fixture
def tensor_cores():
    """Products in the precision that the engine sets on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)
