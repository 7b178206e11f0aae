"""Where clients live."""

from fedveil.engines.local import Local

__all__ = ["Local"]
