"""Siamese augmentation: what each strategy does, that it can be differentiated, and what is refused."""

import pytest
import torch

import fedveil as fv
from fedveil.methods.surrogates.augment import STRATEGIES, Siamese, strategies
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.runs import recipe
from methods.surrogates.small import images_task
from toys import linear_task

EXACT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 6.0, 6.0, 0.0, 1.0, 1.0]  # the numbers of a step that changes nothing


def changing(names: str, clients: int = 2, steps: int = 40) -> Siamese:
    return Siamese(names, images_task(), [fv.Seed.root(k) for k in range(clients)], steps)


def changed(x: torch.Tensor, **numbers: float) -> torch.Tensor:
    """Pictures [C, B, …] under the numbers given, by their place, with all strategies at hand."""
    change = changing(" ".join(STRATEGIES), len(x), 1)
    row = [numbers.get(f"n{i}", EXACT[i]) for i in range(len(EXACT))]
    change.draws = torch.tensor([[row] * len(x)])
    return change(x)


def pictures(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_numbers_that_change_nothing_change_nothing():
    x = pictures(2, 3, 3, 6, 6)
    assert torch.allclose(changed(x), x, atol=1e-6)
    assert changing("")(x) is x


def test_where_pixels_come_from():
    x = pictures(2, 3, 3, 6, 6)
    assert torch.allclose(changed(x, n3=-1.0), x.flip(-1), atol=1e-6)
    down = changed(x, n4=1.0)
    assert torch.allclose(down[..., :-1, :], x[..., 1:, :], atol=1e-6)
    assert not down[..., -1, :].any()
    quarter = changed(x, n0=0.0, n1=-1.0, n2=1.0, n3=0.0)
    assert torch.allclose(quarter, x.rot90(-1, (-2, -1)), atol=1e-5)
    half = changed(x, n5=0.5)
    assert torch.allclose(half[..., :-1], (x[..., 1:] + x[..., :-1]) / 2, atol=1e-6)


def test_a_square_is_cut_out():
    x = torch.ones(1, 2, 1, 6, 6)
    cut = changed(x, n6=1.0, n7=-1.0)
    assert float(cut[0, 0].sum()) == 36 - 3 * 2
    assert not cut[0, 0, 0, 1:4, :2].any()


def test_colours():
    x = pictures(1, 2, 3, 6, 6)
    assert torch.allclose(changed(x, n8=0.5), x + 0.5, atol=1e-5)
    grey = changed(x, n9=0.0)
    assert torch.allclose(grey, x.mean(2, keepdim=True).expand_as(x), atol=1e-5)
    flat = changed(x, n10=0.0)
    assert torch.allclose(flat, x.mean((2, 3, 4), keepdim=True).expand_as(x), atol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_changes_all_pictures_of_a_client_alike_and_every_step_differently(name):
    change, x = changing(name), pictures(1, 1, 1, 6, 6).expand(2, 3, 1, 6, 6)
    seen = []
    for _ in range(40):
        seen.append(change(x))
        change.advance()
    assert all(torch.equal(each[:, 0], each[:, 2]) for each in seen)
    assert any(not torch.equal(each[0], each[1]) for each in seen)  # clients have draws of their own
    assert len({tuple(each.flatten().tolist()) for each in seen}) > 1
    assert any(not torch.allclose(each, x) for each in seen)


@pytest.mark.parametrize("name", STRATEGIES)
def test_its_slope_is_that_of_finite_differences(name):
    change = changing(name, 1, 3)
    change.draws = change.draws.double()
    change.advance()
    x = pictures(1, 2, 1, 6, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(change, (x,), atol=1e-6)


def test_real_and_synthetic_images_of_a_step_get_the_same_draw(monkeypatch):
    task, seen = images_task(), []
    whole = Siamese.__call__

    def watched(self, x):
        seen.append((int(self.cursor), x.shape[1]))
        return whole(self, x)

    monkeypatch.setattr(Siamese, "__call__", watched)
    method = FedLap(images=2, passes=1, batches=3, batch=8, image_steps=2, region="fixed", augment="crop rotate")
    fv.run(task, method, rounds=1, cohort=2)
    assert seen == [(step, points) for step in range(3) for points in (8, 4, 4)]


def test_records_of_a_private_step_are_changed_before_their_gradients_are_cut(monkeypatch):
    from fedveil.privacy import dpsgd

    given, whole = [], dpsgd.clipped_sum

    def watched(task, weights, x, y, mask, clip):
        given.append(x)
        return whole(task, weights, x, y, mask, clip)

    monkeypatch.setattr(dpsgd, "clipped_sum", watched)
    private = {"region": "constant", "weighting": "equal", "privacy": fv.DpSgd(delta=1e-3)}
    for names in ("", "cutout"):
        method = FedLap(images=2, passes=1, batches=2, batch=8, augment=names, **private)
        fv.run(images_task(), method, rounds=1, cohort=2, insecure_test_noise=1)
    plain, cut = given[:2], given[2:]
    assert all(one.shape == other.shape and not torch.equal(one, other) for one, other in zip(plain, cut, strict=True))


def test_what_does_not_suit_is_one_sentence():
    with pytest.raises(ValueError, match=r"method.augment names 'mirror'; use some of flip, crop, scale"):
        strategies("crop mirror")
    with pytest.raises(ValueError, match=r"method.augment names 'mirror'"):
        FedLap(augment="mirror")
    with pytest.raises(ValueError, match=r"method.augment changes images, and a record of shape \(3,\) is none"):
        FedLap(augment="crop").init_state(linear_task())
    with pytest.raises(ValueError, match="a digit in the mirror is no digit"):
        FedLap(augment="crop flip").init_state(recipe.read("digits/fedlap").build())
