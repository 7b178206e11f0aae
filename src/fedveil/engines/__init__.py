"""Where clients live."""

from fedveil.engines import kept
from fedveil.engines.local import LocalEngine
from fedveil.engines.ray import RayEngine

__all__ = ["LocalEngine", "RayEngine", "kept"]
