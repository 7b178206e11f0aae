"""The networks: their sizes, their shapes, and that each runs stacked over clients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedveil import models
from fedveil.core.seeds import Seed
from fedveil.models.text import LSTM

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)

SIZES = [
    ("digits-cnn", (1, 8, 8), 10, 20_010),
    ("lenet5", MNIST, 10, 61_706),
    ("lenet5", CIFAR, 10, 62_006),
    ("mcmahan-cnn", MNIST, 10, 1_663_370),
    ("convnet", MNIST, 10, 317_706),
    ("convnet", CIFAR, 10, 320_010),
    ("vgg13", CIFAR, 10, 9_410_122),
    ("baffle-lenet", MNIST, 10, 26_730),
    ("baffle-lenet", CIFAR, 10, 27_530),
    ("wrn-10-2", MNIST, 10, 302_506),
    ("wrn-10-2", CIFAR, 10, 302_794),
    ("fedage-mnist", MNIST, 10, 1_663_370),
    ("fedage-cifar", CIFAR, 10, 368_938),
    ("char-lstm", (80,), 80, 819_920),
]

STACKED = [
    ("digits-cnn", (1, 8, 8), {}),
    ("digits-cnn", (1, 8, 8), {"activation": "selu"}),
    ("lenet5", MNIST, {}),
    ("lenet5", CIFAR, {"activation": "sigmoid"}),
    ("mcmahan-cnn", MNIST, {}),
    ("convnet", MNIST, {}),
    ("vgg13", CIFAR, {}),
    ("baffle-lenet", MNIST, {}),
    ("baffle-lenet", (1, 9, 7), {"activation": "hardswish"}),
    ("wrn-10-2", MNIST, {}),
    ("wrn-10-2", (3, 9, 7), {"activation": "hardswish"}),
    ("fedage-cifar", CIFAR, {}),
    ("char-lstm", (6,), {"hidden": 12}),
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def examples(input: tuple[int, ...], *sizes: int) -> Tensor:
    generator = Seed.root(1).torch()
    if len(input) == 1:
        return torch.randint(10, (*sizes, *input), generator=generator)
    return torch.randn(*sizes, *input, generator=generator)


def other(model: nn.Module, seed: int) -> dict[str, Tensor]:
    models.initialise(model, Seed.root(seed))
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(("name", "input", "classes", "weights"), SIZES)
def test_number_of_weights_and_shape_of_logits(name, input, classes, weights):
    model = models.build(name, input, classes)
    assert sum(weight.numel() for weight in model.parameters()) == weights
    assert not list(model.buffers())
    with torch.no_grad():
        logits = model(examples(input, 2))
    assert logits.shape == ((2, 80, classes) if name == "char-lstm" else (2, classes))


def test_every_model_is_sized_and_stacked_here():
    assert {name for name, *_ in SIZES} == set(models.names())
    assert {models.MODELS[name] for name, *_ in STACKED} == set(models.MODELS.values())


@pytest.mark.parametrize(("name", "input", "options"), STACKED)
def test_stacked_clients_get_what_each_gets_alone(name, input, options):
    model = models.build(name, input, 10, **options)
    clients = [other(model, seed) for seed in (1, 2)]
    stack = {key: torch.stack([weights[key] for weights in clients]) for key in clients[0]}
    x = examples(input, 2, 1)

    def forward(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,))

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        logits = forward(weights, x).flatten(0, -2)
        return F.cross_entropy(logits, torch.full((len(logits),), 3))

    with torch.no_grad():
        logits = vmap(forward)(stack, x)
    gradients = vmap(grad(loss))(stack, x)
    for k, weights in enumerate(clients):
        torch.testing.assert_close(logits[k], forward(weights, x[k]), rtol=1e-4, atol=1e-5)
        alone = torch.cat([g.flatten() for g in grad(loss)(weights, x[k]).values()])
        stacked = torch.cat([g[k].flatten() for g in gradients.values()])
        assert alone.norm() > 0
        assert (stacked - alone).norm() < 1e-4 * alone.norm()


@pytest.mark.parametrize("name", ["digits-cnn", "lenet5", "convnet", "baffle-lenet"])
def test_a_gradient_can_be_matched_on_a_stack(name):
    """Gradient matching differentiates, with respect to the images, a function of the weights' gradient."""
    input = (1, 8, 8) if name == "digits-cnn" else MNIST
    model = models.build(name, input, 10)
    weights = {key: weight.detach() for key, weight in model.named_parameters()}

    def length(x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x,)), torch.tensor([3]))

        return torch.stack([g.square().sum() for g in grad(loss)(weights).values()]).sum()

    pull = vmap(grad(length))(examples(input, 2, 1))
    assert pull.shape == (2, 1, *input)
    assert torch.isfinite(pull).all()
    assert pull.abs().amax() > 0


def test_deep_nets_without_normalisation_still_tell_images_apart():
    model = models.build("vgg13", CIFAR, 10)
    models.initialise(model, Seed.root(1))
    with torch.no_grad():
        assert model(examples(CIFAR, 8)).std(dim=0).mean() > 0.01


def test_activation_changes_the_function_and_not_the_weights():
    relu = models.build("wrn-10-2", MNIST, 10)
    hardswish = models.build("wrn-10-2", MNIST, 10, activation="hardswish")
    assert all(torch.equal(a, b) for a, b in zip(relu.parameters(), hardswish.parameters(), strict=True))
    x = examples(MNIST, 1)
    assert not torch.allclose(relu(x), hardswish(x), atol=1e-3)


def test_lstm_is_torchs():
    ours = LSTM(3, 5, layers=2)
    theirs = nn.LSTM(3, 5, num_layers=2, batch_first=True)
    models.initialise(ours, Seed.root(4))
    models.initialise(theirs, Seed.root(4))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)

    x = torch.randn(4, 7, 3, generator=Seed.root(5).torch())
    out, expected = ours(x), theirs(x)[0]
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_char_lstm_never_looks_ahead():
    model = models.build("char-lstm", (6,), 10, hidden=12)
    text = examples((6,), 1)
    changed = torch.cat([text[:, :4], (text[:, 4:] + 1) % 10], dim=1)
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
