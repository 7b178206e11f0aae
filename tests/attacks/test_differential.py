"""What a server that averages codes finds out: the control succeeds, and codes hide about what they lose."""

import math
from dataclasses import replace

import pytest
import torch

import fedveil as fv
from codec_tools import digits, image_task, stack_of, trained
from fedveil.attacks.differential import differential, direct, expose
from fedveil.codecs.fedage import Send

LINEAR = fv.FedAgeCodec(block=16, cohort=5, code="linear")
SHIPPED = replace(LINEAR, code="learned", width=64)
PACKED = replace(LINEAR, code="packed")


def unlike() -> torch.Tensor:
    """Five updates that have nothing in common, [5, d]."""
    return torch.randn(5, digits().layout.size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", [LINEAR, SHIPPED], ids=["linear", "learned"])
def test_the_control_is_rebuilt_and_codes_show_what_they_keep(codec):
    found = expose(digits(), codec, unlike(), fv.Seed.root(1))
    assert float(found.control.min()) > 0.999
    kept = math.sqrt(0.5)  # of the directions
    for cosines in (found.direct, found.differential, found.own):
        assert cosines.tolist() == pytest.approx([kept] * 5, abs=0.06)
    assert float(found.baseline.abs().max()) < 0.05
    assert found.errors.std(1).tolist() == pytest.approx([kept] * 5, abs=0.06)


@pytest.mark.parametrize("codec", [PACKED, replace(PACKED, scales="layers", cohort=8)], ids=["whole", "layers"])
def test_a_code_that_loses_nothing_hides_nothing(codec):
    """All but the rounding is found of every client, directly and by leaving it out of the mean."""
    found = expose(digits(), codec, unlike(), fv.Seed.root(1))
    for cosines in (found.control, found.direct, found.differential, found.own):
        assert float(cosines.min()) > 0.99


def test_of_a_linear_code_leaving_out_finds_what_decoding_finds():
    task, updates = image_task(), torch.randn(3, image_task().layout.size, generator=torch.Generator().manual_seed(0))
    tuned = LINEAR.at(task, Send(float(updates.abs().max()), LINEAR.digest), fv.Seed.root(2))
    payloads = tuned.encode(task, updates, updates, [fv.Seed.root(k) for k in range(3)], None)
    torch.testing.assert_close(direct(task, tuned, payloads), differential(task, tuned, payloads), atol=1e-4, rtol=1e-4)


def test_clients_that_are_alike_have_a_high_baseline_and_their_own_part_is_found_all_the_same():
    updates = trained(stack_of(digits(), 0, 1, 2, 3, 4), fv.LocalTraining(lr=0.3, epochs=5, batch=20))
    found = expose(digits(), SHIPPED, updates, fv.Seed.root(1))
    assert float(found.baseline.min()) > 0.8
    assert float(found.own.min()) > 0.4
    assert set(found.figures()) == {"control", "direct", "differential", "baseline", "own", "spread"}


def test_more_noise_before_the_code_leaves_less_to_find():
    updates = unlike()
    noisy = updates + 3 * torch.randn(updates.shape, generator=torch.Generator().manual_seed(1))
    task = digits()
    tuned = LINEAR.at(task, Send(float(noisy.abs().max()), LINEAR.digest), fv.Seed.root(2))
    payloads = tuned.encode(task, noisy, noisy, [fv.Seed.root(k) for k in range(5)], None)
    found = torch.cosine_similarity(differential(task, tuned, payloads), updates, 1)
    assert float(found.max()) < 0.3
