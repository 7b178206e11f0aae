import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Small tensors are slowed down by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
