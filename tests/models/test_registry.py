"""Building by name, what a wrong name, shape or option is told, and drawing weights from a seed."""

import pytest
import torch
from torch import nn

from fedveil import models
from fedveil.core.seeds import Seed


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize(
    ("name", "input", "classes", "options", "words"),
    [
        ("lenet", (1, 28, 28), 10, {}, r"unknown model 'lenet'; did you mean 'lenet5'\?"),
        ("zzz", (1, 28, 28), 10, {}, r"unknown model 'zzz'; known: .*digits-cnn"),
        ("lenet5", (1, 28, 28), 1, {}, "'lenet5' needs 2 classes or more, not 1"),
        ("digits-cnn", (1, 28, 28), 10, {}, r"digits-cnn takes .* of 8, not \(1, 28, 28\)"),
        ("digits-cnn", (8, 8), 10, {}, r"digits-cnn takes .*\(channels, height, width\)"),
        ("digits-cnn", (0, 8, 8), 10, {}, "digits-cnn takes"),
        ("lenet5", (1, 8, 28), 10, {}, "lenet5 takes .* of 28 or 32"),
        ("lenet5", (1, 28, 8), 10, {}, "lenet5 takes .* of 28 or 32"),
        ("mcmahan-cnn", (1, 30, 30), 10, {}, "mcmahan-cnn takes .* in multiples of 4"),
        ("convnet", (3, 64, 64), 10, {}, "convnet takes .* of 28 or 32"),
        ("vgg13", (1, 28, 28), 10, {}, "vgg13 takes .* of 32"),
        ("baffle-lenet", (1, 1, 1), 10, {}, "baffle-lenet takes .* of 2 or more"),
        ("wrn-10-2", (1, 3, 3), 10, {}, "wrn-10-2 takes .* of 4 or more"),
        ("fedage-cifar", (3, 31, 31), 10, {}, "fedage-cifar takes .* in multiples of 4"),
        ("char-lstm", (1, 8, 8), 10, {}, r"char-lstm takes text of shape \(length,\)"),
        ("char-lstm", (0,), 10, {}, r"char-lstm takes text of shape \(length,\)"),
        ("char-lstm", (8,), 10, {"hidden": 0}, "char-lstm takes .* of 1 or more"),
        (
            "char-lstm",
            (8,),
            10,
            {"hidden": "12"},
            "'hidden' of model 'char-lstm' must be of type int, not '12'",
        ),
        (
            "lenet5",
            (1, 28, 28),
            10,
            {"activaton": "relu"},
            r"unknown option of model 'lenet5' 'activaton'; did you mean 'activation'\?",
        ),
        ("lenet5", (1, 28, 28), 10, {"activation": "swish"}, "unknown activation 'swish'.*hardswish"),
        ("vgg13", (3, 32, 32), 10, {"width": 3}, "unknown option of model 'vgg13' 'width'; known: none"),
    ],
)
def test_a_mistake_is_named_in_one_sentence(name, input, classes, options, words):
    with pytest.raises(ValueError, match=words) as error:
        models.build(name, input, classes, **options)
    assert "\n" not in str(error.value)


def test_names_are_those_of_the_registry():
    assert models.names() == list(models.MODELS)
    assert models.MODELS["fedage-mnist"] is models.MODELS["mcmahan-cnn"]


def test_build_gives_the_same_weights_and_leaves_the_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = models.build("lenet5", (1, 28, 28), 10)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(weights(first), weights(models.build("lenet5", (1, 28, 28), 10)))


@pytest.mark.parametrize(("name", "input"), [("lenet5", (1, 28, 28)), ("wrn-10-2", (1, 28, 28)), ("char-lstm", (5,))])
def test_initialise_draws_every_weight_from_the_seed_alone(name, input):
    model, again = models.build(name, input, 10), models.build(name, input, 10)
    for weight in model.parameters():
        nn.init.constant_(weight, 7.0)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    models.initialise(model, Seed.root(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert not (weights(model) == 7.0).any()

    torch.manual_seed(4)
    models.initialise(again, Seed.root(1))
    assert torch.equal(weights(model), weights(again))
    models.initialise(again, Seed.root(2))
    assert not torch.equal(weights(model), weights(again))


def test_initialise_leaves_what_cannot_redraw_itself():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.tensor(7.0)))
    models.initialise(model, Seed.root(1))
    assert model.get_parameter("scale") == 7.0


def test_initialise_refuses_a_model_that_is_not_on_the_cpu():
    with pytest.raises(ValueError, match="on the CPU"):
        models.initialise(nn.Linear(2, 2, device="meta"), Seed.root(1))
