"""Clients on Flower: in its simulation, which runs on Ray, and in a deployment. Needs the extra `flower`."""

import os

for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():  # read when Flower and Ray are imported; who wants to be counted sets them before
    os.environ.setdefault(_name, _value)

try:
    import flwr  # noqa: F401
except ImportError:
    raise ImportError("the Flower engine is not installed; run: pip install 'fedveil[flower]'") from None

from fedveil.engines.flower.app import client_app  # noqa: E402
from fedveil.engines.flower.codec import codec_mod, decode_replies  # noqa: E402
from fedveil.engines.flower.grid import Flower  # noqa: E402
from fedveil.engines.flower.simulation import FromRecipe, simulate  # noqa: E402

__all__ = ["Flower", "FromRecipe", "client_app", "codec_mod", "decode_replies", "simulate"]
