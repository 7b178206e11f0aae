"""The named data sets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.core.data import Data
from fedveil.core.spelling import check_options, unknown
from fedveil.data import files
from fedveil.data.folders import from_folder
from fedveil.data.tensors import from_tensors

# The characters that the plays use. Any other becomes a space.
VOCABULARY = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"


def load(name: str | Path, directory: str | Path | None = None, fetch: bool = False, **options: Any) -> Data:
    """A data set by name (`SETS`), or a user's own by the path of its folder or .npz file.

    Files of a named set are looked for in `directory`/NAME, where `directory` is by default the environment's
    FEDVEIL_DATA or ~/.cache/fedveil; with `fetch`, missing ones are downloaded there from the set's home.
    `options` are the keyword-only parameters of the set's function, or of `from_folder`.
    """
    name = os.fspath(name)
    if name in SETS:
        check_options(f"data set {name!r}", SETS[name], options)
        data: Data = SETS[name](files.data_directory(directory) / name, fetch, **options)
        return data
    path = Path(name).expanduser()
    if path.exists() or path.suffix == ".npz" or len(path.parts) > 1:
        check_options(f"data in {name}", from_folder, options)
        return from_folder(path, **options)
    raise unknown("data set", name, SETS)


def digits(folder: Path, fetch: bool) -> Data:
    """8×8 grey digits that ship with scikit-learn: 1,437 to train and 360 to test, standardised.

    The split is fixed: record i of the 1,797 goes to place 607·i mod 1,797, places are sorted by label (ties keep
    their order), and every fifth of them, from the first, holds a test record, so each class is tested on a fifth
    of it. Both parts keep scikit-learn's order, in which classes are mixed.
    """
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)
    x = (pixels / 16).reshape(-1, 1, 8, 8)
    places = np.argsort(607 * np.arange(len(y)) % len(y))
    places = places[np.argsort(y[places], kind="stable")]
    test = np.zeros(len(y), bool)
    test[places[::5]] = True
    return from_tensors(x[~test], y[~test], x[test], y[test], mean=(0.305,), std=(0.376,), name="digits")


def mnist(folder: Path, fetch: bool) -> Data:
    """MNIST, handwritten digits, from its four IDX files, standardised: 60,000 and 10,000 pictures [1, 28, 28]."""
    return _idx("mnist", tuple("0123456789"), 0.1307, 0.3081, folder, fetch)


def fashion_mnist(folder: Path, fetch: bool) -> Data:
    """Fashion-MNIST, pieces of clothing, from its four IDX files, standardised and shaped like MNIST."""
    return _idx("fashion-mnist", FASHION, 0.2860, 0.3530, folder, fetch)


def _idx(name: str, labels: Sequence[str], mean: float, std: float, folder: Path, fetch: bool) -> Data:
    paths = files.require(name, folder, [file.removesuffix(".gz") for file in files.HOMES[name].files], fetch)
    x, y = files.read_images(paths[0], paths[1], 28, 10)
    test_x, test_y = files.read_images(paths[2], paths[3], 28, 10)
    return from_tensors(x, y, test_x, test_y, labels=labels, mean=(mean,), std=(std,), name=name)


def cifar10(folder: Path, fetch: bool) -> Data:
    """CIFAR-10 from its binary batches, standardised: 50,000 and 10,000 pictures [3, 32, 32]."""
    batches = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    paths = files.require("cifar10", folder, batches, fetch)
    parts = [files.parse_cifar10(files.read(path), path) for path in paths]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts[:5], strict=True))
    labels = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return from_tensors(x, y, *parts[5], labels=labels, mean=mean, std=std, name="cifar10")


def shakespeare(folder: Path, fetch: bool, *, length: int = 80, min_windows: int = 2) -> Data:
    """Next characters in Shakespeare's plays; a group is a speaking role.

    The roles are those of a public-domain edition of 37 plays, **not LEAF's**: figures do not compare with LEAF's.
    A role's lines, joined by newlines, are cut into windows of `length` characters that do not overlap; a record is
    a window (tokens int64 [length], places in `VOCABULARY`) with, as y, the character that follows each of its own.
    The last fifth of a role's windows, rounded up, is for testing, so each role is trained and tested on; roles with
    fewer than `min_windows` windows are dropped.
    """
    if length < 1 or min_windows < 2:
        raise ValueError(
            f"A window has length {length} and a role at least {min_windows} windows; use 1 or more, and 2 or more."
        )
    (path,) = files.require("shakespeare", folder, ["shakespeare_roles_mit.json"], fetch)
    table = np.full(128, VOCABULARY.index(" "))
    table[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    train: list[npt.NDArray[np.int64]] = []
    test: list[npt.NDArray[np.int64]] = []
    groups: list[npt.NDArray[np.int64]] = []
    for lines in files.parse_roles(files.read(path), path).values():
        codes = np.frombuffer("\n".join(lines).encode("utf-32-le", "surrogatepass"), "<u4")
        windows = (len(codes) - 1) // length
        if windows < min_windows:
            continue
        tokens = table[np.minimum(codes, 127)][: windows * length + 1]
        pairs = np.stack([tokens[:-1], tokens[1:]]).reshape(2, windows, length)
        kept = windows - math.ceil(windows / 5)
        groups.append(np.full(kept, len(groups)))
        train.append(pairs[:, :kept])
        test.append(pairs[:, kept:])
    if not groups:
        raise ValueError(
            f"No role in {path} has {min_windows} windows of {length} characters; lower min_windows or length."
        )
    return from_tensors(
        *np.concatenate(train, axis=1),
        *np.concatenate(test, axis=1),
        labels=tuple(VOCABULARY),
        groups=np.concatenate(groups),
        name="shakespeare",
    )


FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SETS: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "shakespeare": shakespeare,
}
