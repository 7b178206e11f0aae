"""The entropy coder: the same update in fewer bytes, and nothing unpacked that is longer than it may be."""

import pytest
import torch

import fedveil as fv
from fedveil.codecs.zstd import Squeezed
from fedveil.core import message
from fedveil.core.message import Envelope, Refused
from toys import linear_task

zstandard = pytest.importorskip("zstandard")


@pytest.fixture
def task():
    return linear_task()


def encoded(codec, task):
    update = torch.linspace(-1, 1, task.layout.size)[None]
    return codec.encode(task, task.initial[None], update, [fv.Seed.root(1)], None)[0]


def test_what_is_decoded_is_what_the_inner_codec_decodes(task):
    inner = fv.Qsgd(bits=8, bucket=8)
    plain, squeezed = encoded(inner, task), encoded(fv.Zstd(inner=inner), task)
    w = task.initial[None]
    assert torch.equal(fv.Zstd(inner=inner).decode(task, w, [squeezed]), inner.decode(task, w, [plain]))


def test_a_run_sends_fewer_bytes_and_ends_with_the_same_weights():
    from fedveil.runs import recipe

    chosen = recipe.read("digits/fedavg-qsgd")
    task, ends = chosen.build(), []
    for up in (chosen.method.up, fv.Zstd(inner=chosen.method.up)):
        ends.append(fv.run(task, fv.FedAvg(local=fv.LocalTraining(), up=up), rounds=2, cohort=3))
    assert torch.equal(ends[0].weights, ends[1].weights)
    sent = [end.summary()["bytes_up"] for end in ends]
    assert sent[1] < 0.85 * sent[0]


def bomb(task):
    return zstandard.ZstdCompressor().compress(bytes(10**8))


def unsized(task):
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**8))


def understated(task):
    honest = bytearray(zstandard.ZstdCompressor().compress(bytes(10**6)))
    size = honest.index((10**6).to_bytes(4, "little"))
    honest[size : size + 4] = (100).to_bytes(4, "little")
    return bytes(honest)


HOSTILE = [
    (bomb, "too large"),
    (unsized, "too large"),
    (understated, "malformed"),
    (lambda task: b"", "malformed"),
    (lambda task: b"not zstandard at all", "malformed"),
    (lambda task: encoded(fv.Zstd(), task).data[:-2], "malformed"),
    (lambda task: encoded(fv.Zstd(), task).data + b"more", "malformed"),
    (lambda task: zstandard.ZstdCompressor().compress(b"\x80\x04K\x01."), "truncated"),
    (
        lambda task: zstandard.ZstdCompressor().compress(message.frame(encoded(fv.Half(), task), Envelope())),
        "wrong kind",
    ),
]


@pytest.mark.parametrize(("forge", "reason"), HOSTILE, ids=[f"{i}-{r}" for i, (_, r) in enumerate(HOSTILE)])
def test_hostile_bytes_are_refused_by_name(task, forge, reason):
    with pytest.raises(Refused, match=reason):
        fv.Zstd().check(task, Squeezed(forge(task)))


def test_tiers_are_around_it_and_not_within():
    with pytest.raises(ValueError, match="zstd cannot be put around tiers, of which clients differ; put it within"):
        fv.Zstd(fv.Tiers())


def test_the_name_of_the_inner_codec_is_a_key_of_the_recipe():
    from fedveil.runs import recipe

    chosen = recipe.read("digits/fedavg", ["method.up.name=zstd", "method.up.inner.name=top-k"])
    assert chosen.method.up == fv.Zstd(inner=fv.TopK())
