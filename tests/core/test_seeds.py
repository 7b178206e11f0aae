"""Streams depend on their path alone."""

import numpy as np
import torch

from fedveil import Seed
from fedveil.core.seeds import is_weak


def test_golden_values_do_not_change():
    seed = Seed.root(7).child("round", 3, "client", 12, "shuffle")
    assert seed.key.hex() == "7489948e21d97b857ac6d6ef8428404b"
    assert seed.numpy().integers(0, 1000, 4).tolist() == [174, 396, 870, 627]
    assert torch.randint(0, 1000, (4,), generator=seed.torch()).tolist() == [313, 780, 912, 372]


def test_a_path_in_one_step_or_several_is_the_same():
    assert Seed.root(1).child("a", 2, "b") == Seed.root(1).child("a").child(2).child("b")


def test_different_paths_and_roots_differ():
    paths = [("a",), ("b",), ("a", "b"), ("ab",), (1,), ("1",), (11,), (1, 1)]
    keys = {Seed.root(r).child(*path).key for r in (0, 1) for path in paths}
    assert len(keys) == 2 * len(paths)


def test_private_roots_are_fresh_and_no_global_generator_moves():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = Seed.private(), Seed.private()
    first.numpy().random()
    torch.rand(2, generator=second.torch())
    assert first != second
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_about_their_share_of_clients_is_weak_and_always_the_same_ones():
    assert [k for k in range(12) if is_weak(k, 0.5)] == [0, 3, 5, 9, 10, 11]
    assert 450 < sum(is_weak(k, 0.5) for k in range(1000)) < 550
    assert not any(is_weak(k, 0.0) for k in range(100))
    assert all(is_weak(k, 1.0) for k in range(100))
