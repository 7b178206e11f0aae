"""Local training, under the name by which this family knows it."""

from fedveil.local import Local, full_gradient, full_work

__all__ = ["Local", "full_gradient", "full_work"]
