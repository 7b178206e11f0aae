import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Tasks of eight weights are slowed down by threads, and a forked child has none of its parent's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
