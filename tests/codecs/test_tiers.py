"""Clients of different means in one cohort."""

import pytest
import torch

import fedveil as fv
from fedveil.codecs.tiers import Tiers
from fedveil.runs import recipe

STRONG, WEAK = fv.FedSynthCodec(batches=3, epochs=1, fits=8), fv.FedSynthCodec(batches=1, batch=5, epochs=2, fits=4)


@pytest.fixture(scope="module")
def digits():
    return recipe.read("digits/fedavg").build()


def test_each_client_sends_what_its_tier_can_and_all_count(digits):
    codec = Tiers(strong=STRONG, weak=WEAK)
    result = fv.run(digits, fv.FedAvg(local=fv.LocalTraining(), up=codec), rounds=2, cohort=10)
    row = result.ledger.rows[-1]
    alone = {c: fv.run(digits, fv.FedAvg(local=fv.LocalTraining(), up=c), rounds=1, cohort=1) for c in (STRONG, WEAK)}
    sizes = {c: alone[c].summary()["bytes_up"] for c in alone}
    assert row.up == {str(k): sizes[codec.for_client(k)] for k in range(10)}
    assert len(set(row.up.values())) == 2
    assert not row.missing


def test_a_tier_decodes_as_its_codec_does_alone(digits):
    codec = Tiers(strong=STRONG, weak=WEAK)
    clients = (0, 1, 2, 3)
    updates = torch.randn(4, digits.layout.size, generator=fv.Seed.root(0).torch()) * 0.01
    w = digits.initial.expand(4, -1)
    stack = fv.ClientStack(digits, clients, 1, fv.Seed.root(0), fv.Seed.root(0), [fv.Slots()] * 4, [{}] * 4)
    payloads = codec.encode(digits, w, updates, stack.seeds("encoding"), stack)
    decoded = codec.decode(digits, w, payloads)
    assert stack.passes == sum(codec.for_client(k).forecast_compute(0).passes for k in clients)
    for k in clients:
        alone = codec.for_client(k).decode(digits, w[:1], payloads[k : k + 1])
        torch.testing.assert_close(decoded[k : k + 1], alone, atol=5e-6, rtol=1e-4)


def test_compressed_tiers_are_told_apart_by_what_is_inside(digits):
    pytest.importorskip("zstandard")
    codec = Tiers(strong=fv.Zstd(fv.Qsgd(8)), weak=fv.Zstd(fv.Qsgd(2)))
    result = fv.run(digits, fv.FedAvg(local=fv.LocalTraining(), up=codec), rounds=1, cohort=10)
    assert {codec.for_client(k) for k in range(10)} == {codec.strong, codec.weak}
    assert not result.ledger.rows[0].missing


def test_what_a_weak_client_may_send_is_what_the_weak_codec_sends(digits):
    codec = Tiers(strong=STRONG, weak=WEAK)
    weak = next(k for k in range(10) if codec.for_client(k) is WEAK)
    method = fv.FedAvg(up=codec)
    question = fv.links.down.Train(digits.initial)
    assert method.schema(digits, question, weak)["batches"] == 1


def test_tiers_are_not_for_the_way_down():
    with pytest.raises(ValueError, match=r"method\.down is tiers, which is for the way up"):
        fv.FedAvg(down=Tiers())


def test_tiers_of_two_codecs_are_refused():
    with pytest.raises(ValueError, match="two settings of one codec"):
        Tiers(strong=fv.FedSynthCodec(), weak=fv.TofuCodec())
    with pytest.raises(ValueError, match="share is from 0 to 1"):
        Tiers(share=2)
    with pytest.raises(ValueError, match="tiers cannot be of fedage, whose codes are averaged"):
        Tiers(strong=fv.FedAgeCodec(), weak=fv.FedAgeCodec())
    with pytest.raises(ValueError, match="two settings of one codec"):
        Tiers(strong=Tiers(), weak=Tiers())
