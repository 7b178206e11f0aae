"""Where clients live."""

from fedveil.engines import kept
from fedveil.engines.local import Local

__all__ = ["Local", "kept"]
