"""The version of the library, which runs and messages record."""

from __future__ import annotations

__version__ = "0.3.0"
