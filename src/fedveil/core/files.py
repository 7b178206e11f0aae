"""Files that are written in one step, and a digest that tells whether one is whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedveil.core.refused import Refused

_DIGEST = 16


def hasher() -> hashlib.blake2b:
    """What makes digests of what it is updated with."""
    return hashlib.blake2b(digest_size=_DIGEST)


def digest(*parts: Any) -> bytes:
    """The digest of buffers, one after the other."""
    found = hasher()
    for part in parts:
        found.update(part)
    return found.digest()


def digested(data: bytes) -> bytes:
    """With a digest at its end, which tells whether a file is whole."""
    return data + digest(data)


def undigested(data: bytes) -> bytes:
    """What was `digested`. Raises `Refused` if it is damaged."""
    body, told = data[:-_DIGEST], data[-_DIGEST:]
    if digest(body) != told:
        raise Refused("damaged", "the digest at its end does not match")
    return body


def write(path: Path, *parts: Any, private: bool = False) -> None:
    """Replace a file in one step: whoever looks finds the old one or the new one, whole.

    parts:   buffers that make up the file, one after the other
    private: nobody but its owner may read it
    """
    beside = path.with_name(path.name + ".new")
    with naming_file(path):
        try:
            mode = 0o600 if private else 0o666
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)  # half a file would only take the room that is missing
            raise
        sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Return when the names of a folder's files are on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """An error of the disk becomes a sentence with the file in it."""
    try:
        yield
    except OSError as error:
        told = f"could not write {path}: {error.strerror}; what was written before is kept"
        raise OSError(error.errno, told) from error
