"""Every registered codec passes `check_codec`: a new one is covered as soon as it has a name."""

import pytest

import fedveil as fv
from fedveil.testing import check_codec
from testing.settings import CODECS, FEDSYNTH, SLOW, TOFU

NAMES = [name for name, codec in fv.Codec.registry.items() if codec.__module__.startswith("fedveil.")]
MORE: list[fv.Codec] = [
    fv.Half("bfloat16"),
    fv.Qsgd(8),
    fv.TopK(0.5),
    fv.Zstd(fv.Raw()),
    fv.Zstd(fv.Half()),
    fv.PowerSgd(rank=1),
    fv.Sketch(64, law="count"),
    fv.Sketch(64, law="gaussian"),
    fv.FedAgeCodec(code="linear", block=16, permute=False),
    fv.FedAgeCodec(code="packed", block=16, scales="layers"),
    fv.Tiers(strong=fv.Qsgd(8), weak=fv.Qsgd(4)),
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES])
def test_a_codec_passes(name: str) -> None:
    check_codec(CODECS.get(name) or fv.Codec.registry[name]())


@pytest.mark.slow
@pytest.mark.parametrize("codec", MORE, ids=str)
def test_other_settings_pass(codec: fv.Codec) -> None:
    check_codec(codec)


@pytest.mark.parametrize("codec", [TOFU, FEDSYNTH], ids=["tofu", "fedsynth"])
def test_a_fit_that_is_too_short_for_feedback_is_told(codec: fv.Codec) -> None:
    """Three steps fit nothing: all but the check of error feedback passes, and that one says what is wrong."""
    with pytest.raises(AssertionError, match=r"of error feedback .* lose less than it is given"):
        check_codec(codec)
