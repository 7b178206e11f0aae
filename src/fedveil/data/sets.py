"""`Data`, the named data sets, and a user's own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedveil.core.spelling import check_options, unknown
from fedveil.data import files

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")

# The characters that the plays use. Any other becomes a space.
VOCABULARY = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, eq=False)
class Data:
    """Records to learn from and records to test on.

    A picture's pixels in [0, 1] are `x * std + mean`, channel by channel; what is no picture ([n, channels, h, w])
    has empty `mean` and `std`.
    """

    name: str
    x: Tensor  # [n, *input]: float32, or int64 or uint8 tokens [n, T]
    y: Tensor  # [n] int64; for next-token tasks [n, T]
    test_x: Tensor
    test_y: Tensor
    classes: int
    labels: tuple[str, ...]  # a name a class
    groups: Tensor | None = None  # [n] int64: the natural owner of each record
    mean: tuple[float, ...] = ()  # a number a channel
    std: tuple[float, ...] = ()

    @property
    def input(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.x.shape[1:])

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x, self.y), ("test", self.test_x, self.test_y)):
            where = f"the {part} part of {self.name!r}"
            if x.ndim < 2 or y.ndim < 1:
                raise ValueError(f"In {where} x is {list(x.shape)} and y {list(y.shape)}, not [n, *input] and [n].")
            if x.numel() == 0:
                raise ValueError(f"There is no record in {where}; give at least one.")
            if len(x) != len(y):
                raise ValueError(f"There are {len(x):,} records but {len(y):,} labels in {where}.")
            if x.dtype not in (torch.float32, torch.int64, torch.uint8) or y.dtype != torch.int64:
                raise ValueError(f"In {where} x is {x.dtype} and y {y.dtype}; from_tensors converts them.")
            if not x.is_floating_point() and x.ndim != 2:
                raise ValueError(f"In {where} x holds whole numbers, so tokens [n, T], but is {list(x.shape)}.")
            if x.is_floating_point() and not all(map(math.isfinite, _range(x))):
                raise ValueError(f"In {where} some values of x are not finite; clean them first.")
            if y.ndim != 1 and y.shape != x.shape:
                raise ValueError(
                    f"In {where} y is {list(y.shape)}, neither a label a record [n] nor a token each {list(x.shape)}."
                )
            low, high = _range(y)
            if low < 0 or high >= self.classes:
                raise ValueError(
                    f"In {where} labels go from {low:g} to {high:g}, but there are {self.classes} classes, from 0."
                )
        if self.x.shape[1:] != self.test_x.shape[1:] or self.x.dtype != self.test_x.dtype:
            raise ValueError(
                f"In {self.name!r} training records are {self.x.dtype} {list(self.x.shape[1:])} "
                f"but test records {self.test_x.dtype} {list(self.test_x.shape[1:])}."
            )
        if len(self.labels) != self.classes:
            raise ValueError(f"{self.name!r} has {self.classes} classes but {len(self.labels)} labels; name each.")
        g = self.groups
        if g is not None and (g.shape != self.x.shape[:1] or g.dtype != torch.int64):
            raise ValueError(
                f"The groups of {self.name!r} are {g.dtype} {list(g.shape)}, not torch.int64 [{len(self.x)}]."
            )
        channels = self.x.shape[1] if self.x.ndim == 4 else 0
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(
                f"{self.name!r} has {channels} picture channels, but {len(self.mean)} means and {len(self.std)} stds."
            )
        if not all(map(math.isfinite, self.mean)) or not all(0 < s < math.inf for s in self.std):
            raise ValueError(f"{self.name!r} has mean {self.mean} and std {self.std}; std must be above 0.")


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

Values = Tensor | npt.NDArray[Any]


def from_tensors(
    x: Values,
    y: Values,
    test_x: Values,
    test_y: Values,
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    groups: Values | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "tensors",
) -> Data:
    """`Data` from tensors or arrays: x [n, *input], y [n] or [n, T] whole numbers.

    Floats become float32; pictures of unsigned bytes [n, channels, h, w] are divided by 255; other whole numbers are
    tokens [n, T]. `classes` is by default the number of `labels`, or one more than the highest label. Pictures are
    standardised by `mean` and `std`, a number a channel, where these are given.
    """
    y, test_y = _whole(y, "y"), _whole(test_y, "test_y")
    if classes is None:
        highest = max((int(part.max()) for part in (y, test_y) if part.numel()), default=0)
        classes = len(labels) if labels is not None else highest + 1
    x, test_x = _inputs(x), _inputs(test_x)
    channels = x.shape[1] if x.ndim == 4 else 0
    data = Data(
        name=name,
        x=x,
        y=y,
        test_x=test_x,
        test_y=test_y,
        classes=classes,
        labels=tuple(map(str, range(classes))) if labels is None else tuple(labels),
        groups=None if groups is None else _whole(groups, "groups"),
        mean=(0.0,) * channels if mean is None else tuple(mean),
        std=(1.0,) * channels if std is None else tuple(std),
    )
    if mean is not None or std is not None:
        shift, scale = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
        for part in (data.x, data.test_x):
            part.sub_(shift).div_(scale)
    return data


def from_dataset(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    name: str = "dataset",
) -> Data:
    """`Data` from two torch datasets with a length, whose items are pairs (x, y) of one shape."""
    return from_tensors(*_collect(train), *_collect(test), classes=classes, labels=labels, name=name)


def from_folder(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Data:
    """`Data` from a folder of pictures, or from an .npz file.

    A folder holds train/CLASS/PICTURE and test/CLASS/PICTURE; classes are numbered in the order of their names.
    All-grey pictures have one channel, others three. Pictures have one size, or are resized to `size` =
    (height, width).

    An .npz file holds x_train, y_train, x_test, y_test, and may hold groups. Unsigned bytes [n, h, w], [n, h, w, 3],
    [n, h, w, 1] or [n, channels, h, w] are pictures; anything else is taken as in `from_tensors`.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise files.DataMissing(f"There is no folder or .npz file at {path}.")
    if path.suffix == ".npz":
        if size is not None:
            raise ValueError(f"size= is for folders of pictures, and {path} is an .npz file; leave it out.")
        return _from_npz(path, mean, std)
    labels = _subfolders(path / "train")
    if strangers := set(_subfolders(path / "test")) - set(labels):
        raise ValueError(f"{path / 'test'} has the class {min(strangers)!r}, which {path / 'train'} has not.")
    train, y = _read_classes(path / "train", labels, size)
    test, test_y = _read_classes(path / "test", labels, size)
    channels = max(picture.shape[0] for picture in train + test)
    x, test_x = (np.stack([np.broadcast_to(p, (channels, *p.shape[1:])) for p in part]) for part in (train, test))
    return from_tensors(x, y, test_x, test_y, labels=labels, mean=mean, std=std, name=path.name)


def _from_npz(path: Path, mean: Sequence[float] | None, std: Sequence[float] | None) -> Data:
    arrays = files.read_npz(path)
    names = ("x_train", "y_train", "x_test", "y_test")
    if absent := [name for name in names if name not in arrays]:
        raise ValueError(f"{path} has no array {absent[0]!r}; it needs {', '.join(names)}.")
    if strangers := set(arrays) - {*names, "groups"}:
        raise unknown(f"array in {path}", min(strangers), (*names, "groups"))
    x, y, test_x, test_y = (arrays[name] for name in names)
    y, test_y = (part[:, 0] if part.ndim == 2 and part.shape[1] == 1 else part for part in (y, test_y))
    return from_tensors(
        _channels_first(x),
        y,
        _channels_first(test_x),
        test_y,
        groups=arrays.get("groups"),
        mean=mean,
        std=std,
        name=path.stem,
    )


def _channels_first(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return np.moveaxis(x, 3, 1)
    return x


def _subfolders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not names:
        raise files.DataMissing(f"{folder} holds no class folders; pictures go into {folder / 'CLASS'}.")
    return names


def _read_classes(
    folder: Path, labels: Sequence[str], size: tuple[int, int] | None
) -> tuple[list[files.Bytes], npt.NDArray[np.int64]]:
    """The pictures below `folder` and their labels, class by class in the order of file names."""
    pictures: list[files.Bytes] = []
    y: list[int] = []
    for label, name in enumerate(labels):
        for path in sorted((folder / name).glob("*")):
            if path.suffix.lower() not in PICTURES:
                continue
            picture = files.read_picture(path, size)
            if pictures and picture.shape[1:] != pictures[0].shape[1:]:
                h, w = pictures[0].shape[1:]
                raise ValueError(
                    f"{path} is {picture.shape[1]} × {picture.shape[2]} but pictures before it are {h} × {w}; "
                    f"give size=({h}, {w}) to resize all."
                )
            pictures.append(picture)
            y.append(label)
    if not pictures:
        raise files.DataMissing(f"{folder} holds no pictures ({', '.join(PICTURES)}) in its class folders.")
    return pictures, np.array(y)


def _collect(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All items of a dataset, stacked: x [n, *input] and y [n] or [n, T]."""
    pairs = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    if not pairs:
        raise ValueError("A dataset has no items; give one with at least one pair (x, y).")
    try:
        x, y = (torch.stack([torch.as_tensor(item) for item in column]) for column in zip(*pairs, strict=True))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"The items of a dataset are not pairs (x, y) of tensors of one shape ({error}).") from error
    return x, y


def _inputs(x: Values) -> Tensor:
    """A copy: float32, or int64 tokens."""
    x = x.detach() if isinstance(x, Tensor) else torch.tensor(np.ascontiguousarray(x))
    if x.dtype == torch.uint8 and x.ndim == 4:
        return x.float().div_(255)
    return x.to(torch.float32 if x.is_floating_point() else torch.int64, copy=True)


def _whole(values: Values, what: str) -> Tensor:
    """Whole numbers as int64."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(np.ascontiguousarray(values))
    if tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{what} holds {tensor.dtype}, but must hold whole numbers.")
    return tensor.to(torch.int64)


def _range(values: Tensor) -> tuple[float, float]:
    """The lowest and the highest value; NaN if there is one."""
    low, high = torch.aminmax(values)
    return float(low), float(high)
