"""Federated learning in which no raw gradient has to leave a client."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedveil.api import *  # noqa: F403
else:

    def __getattr__(name):
        """Import `fedveil.api`, and PyTorch with it, when a name is used for the first time: the command line prints
        its help without them."""
        from importlib import import_module, util

        if util.find_spec(f"fedveil.{name}"):
            return import_module(f"fedveil.{name}")
        api = import_module("fedveil.api")
        if name not in ("__all__", *api.__all__):
            raise AttributeError(f"module 'fedveil' has no attribute '{name}'")
        return globals().setdefault(name, getattr(api, name))

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
