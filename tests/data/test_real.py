"""The published files, where the environment's FEDVEIL_DATA says they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from fedveil.core.seeds import Seed
from fedveil.data import files, load, split

pytestmark = pytest.mark.skipif(
    "FEDVEIL_DATA" not in os.environ, reason="set FEDVEIL_DATA to the directory with the published files"
)


def here(name: str) -> Path:
    folder = files.data_directory(None) / name
    if not folder.is_dir():
        pytest.skip(f"FEDVEIL_DATA has no folder {name}")
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_published_sums_are_those_of_the_files(name: str) -> None:
    for file, md5 in files.HOMES[name].files.items():
        path = here(name) / file
        if path.exists():
            assert hashlib.md5(path.read_bytes()).hexdigest() == md5, file


@pytest.mark.parametrize(
    ("name", "train", "shape"),
    [("mnist", 60_000, (1, 28, 28)), ("fashion-mnist", 60_000, (1, 28, 28)), ("cifar10", 50_000, (3, 32, 32))],
)
def test_pictures_have_their_sizes_and_are_standardised(name: str, train: int, shape: tuple[int, ...]) -> None:
    here(name)
    data = load(name)
    assert (len(data.x), len(data.test_x), data.input, data.classes) == (train, 10_000, shape, 10)
    assert (data.y.unique().tolist(), data.test_y.unique().tolist()) == ([*range(10)], [*range(10)])
    assert data.x.mean((0, 2, 3)).abs().max() < 1e-3
    assert (data.x.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_shakespeare_has_a_client_a_role() -> None:
    here("shakespeare")
    data = load("shakespeare")
    assert (len(data.x), len(data.test_x), data.input, data.classes) == (42_201, 11_065, (80,), 76)
    assert (data.x[:, 1:] == data.y[:, :-1]).all()
    assert "".join(data.labels[i] for i in data.x[0]).startswith("Hie, good Sir Michael;")
    assert len(split("natural", data, None, Seed.root(0))) == 1054
