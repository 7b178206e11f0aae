"""`Data` from a user's own folder of pictures or .npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.core.data import Data
from fedveil.core.spelling import unknown
from fedveil.data import files
from fedveil.data.tensors import from_tensors

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


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

    An .npz file holds x_train, y_train, x_test, y_test, and may hold groups, x_validation and y_validation. Unsigned
    bytes [n, h, w], [n, h, w, 3], [n, h, w, 1] or [n, channels, h, w] are pictures; anything else is taken as in
    `from_tensors`.
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
    validation = [name for name in ("x_validation", "y_validation") if name in arrays]
    if len(validation) == 1:
        raise ValueError(f"{path} has {validation[0]} alone; give x_validation and y_validation, or neither.")
    if strangers := set(arrays) - {*names, *validation, "groups"}:
        raise unknown(f"array in {path}", min(strangers), (*names, "groups", "x_validation", "y_validation"))
    for name in ("y_train", "y_test", *validation[1:]):
        if arrays[name].ndim == 2 and arrays[name].shape[1] == 1:
            arrays[name] = arrays[name][:, 0]
    x, y, test_x, test_y = (arrays[name] for name in names)
    return from_tensors(
        _channels_first(x),
        y,
        _channels_first(test_x),
        test_y,
        groups=arrays.get("groups"),
        mean=mean,
        std=std,
        validation=(_channels_first(arrays["x_validation"]), arrays["y_validation"]) if validation else None,
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
