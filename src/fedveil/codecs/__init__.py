"""How an update looks on the wire. A recipe can name every codec once this package is imported."""
# ruff: noqa: F401

import fedveil.codecs.fedage
import fedveil.codecs.fedsynth
import fedveil.codecs.half
import fedveil.codecs.powersgd
import fedveil.codecs.qsgd
import fedveil.codecs.raw
import fedveil.codecs.sketch
import fedveil.codecs.tiers
import fedveil.codecs.tofu
import fedveil.codecs.topk
import fedveil.codecs.zstd
