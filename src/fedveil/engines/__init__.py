"""Where clients live."""

from fedveil.engines import kept
from fedveil.engines.local import LocalEngine

__all__ = ["LocalEngine", "kept"]
