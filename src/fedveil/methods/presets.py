"""FedSynth, TOFU and FedAGE: FedAvg with the codec of the paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedveil.codecs.base import Codec
from fedveil.codecs.fedage import FedAgeCodec
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.codecs.tofu import TofuCodec
from fedveil.core.method import About
from fedveil.methods.about import PRIVATE
from fedveil.methods.averaging import Averaging

_EXPOSED = (
    (
        "heuristic",
        "the points look like noise. This is not a guarantee: the server decodes each client's update from them.",
    ),
    (
        "measured",
        "'fedveil audit --matrix digits' identifies most records of clients with one or eight of them from these "
        "points. They hide little.",
    ),
)
_SEES = "the synthetic points of every client and, by decoding them, an approximation of its update"


@dataclass(frozen=True)
class FedSynth(Averaging):
    """FedAvg with FedSynth's codec (Goetz & Tewari 2020, algorithms 1 to 3)."""

    name: ClassVar[str] = "fedsynth"
    about: ClassVar[About] = About(
        "Clients send synthetic batches on which a few training steps reproduce their update.",
        "synthetic inputs with soft labels, a step size for each unrolled step, and the update's norm",
        _SEES,
        "the same bytes, unless the transport encrypts them",
        (*_EXPOSED, *PRIVATE),
        "Goetz & Tewari, Federated Learning via Synthetic Data, 2020",
    )

    up: Codec = field(default_factory=FedSynthCodec)


@dataclass(frozen=True)
class Tofu(Averaging):
    """FedAvg with TOFU's codec up; with `down` and `full_rounds` the paper's federated algorithm (section 4)."""

    name: ClassVar[str] = "tofu"
    about: ClassVar[About] = About(
        "Clients send a few proxy points whose weighted gradient points along their update.",
        "proxy inputs with soft labels, a weight for each, and the norm of each layer's update",
        _SEES + "; in full rounds the update itself, or with secure the sum of all",
        "the same bytes, unless the transport encrypts them",
        (*_EXPOSED, *PRIVATE),
        "TOFU: Towards Obfuscated Federated Updates by Encoding Weight Updates into Gradients from Proxy Data, 2022",
    )

    up: Codec = field(default_factory=TofuCodec)


@dataclass(frozen=True)
class FedAge(Averaging):
    """FedAvg with FedAGE's codec: the server averages codes and decodes their mean (Zeng et al. 2022, algorithm 1)."""

    name: ClassVar[str] = "fedage"
    about: ClassVar[About] = About(
        "Clients send codes of their update; the server averages the codes and decodes the mean.",
        "the largest magnitude in its update, then the codes of the rounded update and the share of records behind it",
        "every client's codes and, because it holds the decoder, by decoding them an approximation of its update",
        "the same bytes, unless the transport encrypts them; the pair of encoder and decoder is no secret",
        (
            (
                "heuristic",
                "the paper calls the decoder's error a Gaussian mechanism and derives an ε. This is wrong: the error "
                "is a fixed function of the updates and not noise, the sensitivity lacks a factor √d, the scale n "
                "cancels, and the server can decode each client. 'fedveil fedage pretrain' prints that heuristic ε.",
            ),
            (
                "measured",
                "'fedveil fedage attack DIR' decodes each client's codes as a server could, directly and by "
                "difference, and compares the results with the updates; the control is a lossless code. 'fedveil audit "
                "--matrix digits' rebuilds records from the codes of single clients. Packed codes "
                "(method.up.code) lose nothing in a mean and so hide nothing: the secure sum protects, not the code.",
            ),
            (
                "proved",
                "with secure: the server learns only the sum of the codes and cannot decode those of one client; it "
                "still learns the largest magnitude in each update.",
            ),
            *PRIVATE,
        ),
        "Zeng et al., Aggregating Gradients in Encoded Domain for Federated Learning, 2022",
    )

    up: Codec = field(default_factory=FedAgeCodec)
