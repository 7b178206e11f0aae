"""Where data files live, how they are fetched, and how their bytes become arrays.

Bytes are taken to be hostile: a size that a header claims is compared with the bytes at hand before anything is
allocated, decompression stops at a limit, and whatever is wrong is one ValueError that names the file.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

MIB = 2**20
FILE_LIMIT = 128 * MIB  # of one official file, decompressed; the largest, MNIST's training images, has 45 MiB
ARRAY_LIMIT = 4096 * MIB  # of one array in a user's .npz

CIFAR10_FOLDER = "cifar-10-batches-bin"  # what the official archive unpacks to
CIFAR10_RECORD = 1 + 3 * 32 * 32


class DataMissing(FileNotFoundError):
    """A data file is not where it should be; the message says where it goes and how to get it."""


@dataclass(frozen=True)
class Home:
    """Where a set's files are published: `files` maps each name below `url` to its published MD5."""

    url: str
    files: Mapping[str, str]


# MNIST's own home, yann.lecun.com, no longer serves the files; this mirror does, byte for byte.
HOMES = {
    "mnist": Home(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Home(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": Home(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


def data_directory(directory: str | Path | None) -> Path:
    """`directory`, else the environment's FEDVEIL_DATA, else ~/.cache/fedveil."""
    return Path(directory or os.environ.get("FEDVEIL_DATA") or "~/.cache/fedveil").expanduser()


def require(name: str, folder: Path, files: Sequence[str], fetch: bool) -> list[Path]:
    """The paths of `files`, each plain or with .gz, in `folder`; those missing are fetched if `fetch` is set."""
    missing = [file for file in files if find(folder, file) is None]
    if missing and fetch and name in HOMES:
        download(name, folder, missing)
    paths = [path for file in files if (path := find(folder, file))]
    if len(paths) < len(files):
        fetching = "fetch them with fetch=True (--fetch on the command line)"
        raise DataMissing(
            f"{name!r} needs {', '.join(missing)} (plain or .gz) in {folder}: put them there, "
            f"{fetching if name in HOMES else 'as they have no home to be fetched from'}, "
            f"or name another data directory by directory= or FEDVEIL_DATA."
        )
    return paths


def find(folder: Path, file: str) -> Path | None:
    """Where `file` is in `folder`: plain or gzipped, also in the folder that CIFAR-10's archive makes."""
    for home in (folder, folder / CIFAR10_FOLDER):
        for path in (home / file, home / f"{file}.gz"):
            if path.is_file():
                return path
    return None


def download(name: str, folder: Path, missing: Sequence[str]) -> None:
    """Fetch the `missing` files of a set from its home into `folder`, checked against their published sums."""
    try:
        import pooch
    except ImportError:
        raise ImportError("Fetching data needs pooch: pip install 'fedveil[fetch]'.") from None
    home = HOMES[name]
    for file, md5 in home.files.items():
        archive = file.endswith(".tar.gz")
        if not archive and file.removesuffix(".gz") not in missing:
            continue
        try:
            path = pooch.retrieve(home.url + file, f"md5:{md5}", fname=file, path=folder)
        except OSError as error:
            raise DataMissing(
                f"{home.url}{file} could not be fetched ({type(error).__name__}); "
                f"try again, or put the file into {folder} by hand."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{home.url}{file} is not the published file (its MD5 should be {md5}); "
                f"put the right one into {folder} by hand."
            ) from error
        if archive:
            unpack(Path(path), folder, missing)


def unpack(archive: Path, folder: Path, files: Sequence[str]) -> None:
    """Write the named members of CIFAR-10's archive, and nothing else of it, into `folder`."""
    try:
        with tarfile.open(archive) as tar:
            for file in files:
                member = tar.extractfile(f"{CIFAR10_FOLDER}/{file}")
                raw = member.read(FILE_LIMIT) if member else b""
                part = folder / f"{file}.part"
                part.write_bytes(raw)
                part.replace(folder / file)
    except (KeyError, tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} is not CIFAR-10's archive ({error}); delete it and fetch again.") from error


def read(path: Path, limit: int = FILE_LIMIT) -> bytes:
    """A file's bytes, decompressed where its name ends in .gz; at most `limit` of them."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(limit + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}); get it again.") from error
    if len(raw) > limit:
        raise ValueError(f"{path} holds more than {limit:,} bytes, which is no file of this kind; get it again.")
    return raw


def parse_idx(raw: bytes, dims: int, where: str | Path) -> Bytes:
    """The unsigned bytes of an IDX file as an array of `dims` dimensions.

    The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
    32-bit number, then the values, last dimension fastest.
    """
    magic = bytes([0, 0, 8, dims])
    if raw[:4] != magic:
        raise ValueError(f"{where} starts with {raw[:4].hex() or 'nothing'}, not with {magic.hex()} as its kind must.")
    header = 4 + 4 * dims
    if len(raw) < header:
        raise ValueError(f"{where} ends within its header, after {len(raw)} of {header} bytes.")
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4)]
    if (claimed := math.prod(shape)) == 0:
        raise ValueError(f"{where} is empty: its header says {' × '.join(map(str, shape))}.")
    if claimed != len(raw) - header:
        raise ValueError(f"{where} claims {claimed:,} values but holds {len(raw) - header:,}; get it again.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_images(images: Path, labels: Path, side: int, classes: int) -> tuple[Bytes, Bytes]:
    """Pictures uint8 [n, 1, side, side] and labels uint8 [n] of two IDX files."""
    x = parse_idx(read(images), 3, images)
    y = parse_idx(read(labels), 1, labels)
    if x.shape[1:] != (side, side):
        raise ValueError(f"{images} holds pictures of {x.shape[1]} × {x.shape[2]}, not of {side} × {side}.")
    if len(x) != len(y):
        raise ValueError(f"{images} holds {len(x):,} pictures but {labels} {len(y):,} labels.")
    _check_labels(y, classes, labels)
    return x[:, None], y


def parse_cifar10(raw: bytes, where: str | Path) -> tuple[Bytes, Bytes]:
    """Pictures uint8 [n, 3, 32, 32] and labels uint8 [n] of a binary batch: n times a label and 3,072 pixels."""
    if not raw or len(raw) % CIFAR10_RECORD:
        raise ValueError(f"{where} holds {len(raw):,} bytes, not some records of {CIFAR10_RECORD:,}; get it again.")
    records = np.frombuffer(raw, np.uint8).reshape(-1, CIFAR10_RECORD)
    _check_labels(records[:, 0], 10, where)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


class Roles(msgspec.Struct):
    """The part of the roles file that is read: what each role says, line by line."""

    user_lines: dict[str, list[str]]


def parse_roles(raw: bytes, where: str | Path) -> dict[str, list[str]]:
    """The lines of each speaking role, in the file's order."""
    try:
        return msgspec.json.decode(raw, type=Roles).user_lines
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not a JSON of roles ({error}).") from error


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file by name; no pickles."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: _read_member(archive, info, path) for info in archive.infolist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"{path} is not a readable .npz file ({error}); write it with numpy.savez.") from error
    return {name.removesuffix(".npy"): parse_npy(raw, f"{path}, array {name!r},") for name, raw in members.items()}


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    if info.file_size > ARRAY_LIMIT or info.compress_size > path.stat().st_size:
        raise ValueError(f"{info.filename!r} claims {info.file_size:,} bytes, above {ARRAY_LIMIT:,} or the file's own")
    with archive.open(info) as file:
        return file.read()


def parse_npy(raw: bytes, where: str | Path) -> npt.NDArray[Any]:
    """The numbers of an .npy file. (numpy.load would allocate what the header claims before it reads.)"""
    stream = BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = header(stream)
    except Exception as error:  # the header is a Python literal, which fails in many ways
        raise ValueError(f"{where} is no .npy array; write it with numpy.savez.") from error
    if dtype.kind not in "biuf":
        raise ValueError(f"{where} has type {dtype}, not numbers.")
    held = len(raw) - stream.tell()
    if min(shape, default=1) < 1 or math.prod(shape) * dtype.itemsize != held:
        raise ValueError(f"{where} claims the shape {shape} of {dtype} but holds {held:,} bytes.")
    array = np.frombuffer(raw, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def read_picture(path: Path, size: tuple[int, int] | None) -> Bytes:
    """A picture file as uint8 [1, h, w] (grey) or [3, h, w], resized to `size` = (height, width) where given."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > 64 * MIB or picture.mode.startswith(("I", "F")):
                raise ValueError(f"{picture.width} × {picture.height} pixels of mode {picture.mode}")
            pixels = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    except Exception as error:  # each decoder fails in its own way
        raise ValueError(f"{path} is no picture of 8-bit pixels that can be read ({error}).") from error
    if size is not None:
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    array = np.asarray(pixels)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _check_labels(y: Bytes, classes: int, where: str | Path) -> None:
    if y.max() >= classes:
        raise ValueError(f"{where} holds the label {y.max()}, but there are {classes} classes, from 0.")
