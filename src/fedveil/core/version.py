"""The version of the library, which runs and messages record, and options that came after it was first released."""

from __future__ import annotations

__version__ = "0.3.0"

ADDED = {"added": True}  # metadata of a field that older runs lack: at its default it is no part of a fingerprint
