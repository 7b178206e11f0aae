"""Pretrain a small network on half of the classes, then let clients teach it the other half without backpropagation.

    python examples/own_backbone.py                       digits, in seconds, without a download
    python examples/own_backbone.py --data cifar10 --fetch --epochs 10 --width 64 --rounds 200

The first half of the classes stands for data that the owner of the model has. A small ConvNet is trained on them as
usual. It is then frozen, and its last layer is dropped. Clients hold the other half of the classes, which it has never
seen. Each client runs the frozen network once on each of its pictures, and a new last layer is trained: with forward
passes only, and by FedAvg. The same is done with a network of random weights, to see what pretraining is worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from heads import build, fedavg, forward, shown, train
from torch import Tensor, nn

import fedveil as fv
from fedveil.data import from_tensors

BATCH, SIDE = 64, 2


class Network(nn.Module):
    """Convolutions over pictures [n, channels, h, w], each but the last with a pool, then a classifier."""

    def __init__(self, channels: int, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        sizes = [channels, *(width << min(i, 2) for i in range(blocks))]
        layers: list[nn.Module] = []
        for i in range(blocks):
            layers += [nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1), nn.GroupNorm(8, sizes[i + 1]), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] * (i < blocks - 1)
        self.body = nn.Sequential(*layers)
        self.classifier = nn.Linear(SIDE**2 * sizes[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """What the classifier sees, [n, features]."""
        found: Tensor = F.adaptive_avg_pool2d(self.body(x), SIDE).flatten(1)
        return found

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def half(x: Tensor, y: Tensor, first: int, past: int) -> tuple[Tensor, Tensor]:
    """The records of the classes from `first` to before `past`, whose labels then begin at 0."""
    chosen = (y >= first) & (y < past)
    return x[chosen], y[chosen] - first


def pretrain(model: Network, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Train all weights by Adam, with a rate that falls along a cosine, on pictures that are shifted a little."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(moved(x[rows])), y[rows]).backward()
            optimizer.step()
            schedule.step()


def moved(x: Tensor) -> Tensor:
    """Pictures [n, c, h, w], each batch shifted by up to an eighth of its side."""
    most = x.shape[-1] // 8
    down, right = (int(torch.randint(-most, most + 1, ())) for _ in range(2))
    return x.roll((down, right), (2, 3))


@torch.no_grad()
def accuracy(model: Network, x: Tensor, y: Tensor) -> float:
    return sum(float((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True)) / len(y)


@torch.no_grad()
def frozen(model: Network, data: fv.Data, first: int) -> fv.Data:
    """The features of the classes from `first` on, each record's standardised by themselves."""

    def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = half(x, y, first, data.classes)
        found = torch.cat([model.features(rows) for rows in x.split(500)])
        return F.layer_norm(found, found.shape[1:]), y

    return from_tensors(
        *part(data.x, data.y), *part(data.test_x, data.test_y), labels=data.labels[first:], name=data.name
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("digits", "mnist", "fashion-mnist", "cifar10"), default="digits")
    parser.add_argument("--data-dir", type=Path, help="where data sets are (default: FEDVEIL_DATA or ~/.cache/fedveil)")
    parser.add_argument("--fetch", action="store_true", help="download the data set if it is missing")
    parser.add_argument("--epochs", type=int, default=12, help="of pretraining (default 12)")
    parser.add_argument("--rate", type=float, default=0.003, help="of pretraining (default 0.003)")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer (default 32)")
    parser.add_argument("--clients", type=int, default=8, help="default 8")
    parser.add_argument("--cohort", type=int, default=4, help="clients a round (default 4)")
    parser.add_argument("--rounds", type=int, default=100, help="with forward passes only (default 100)")
    parser.add_argument("--rounds-fedavg", type=int, default=20, help="default 20")
    parser.add_argument("--directions", type=int, default=32, help="K (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    data = fv.load(options.data, options.data_dir, options.fetch)
    first = data.classes // 2
    torch.manual_seed(options.seed)
    blocks = {8: 3, 28: 4, 32: 4}[data.input[-1]]
    model = Network(data.input[0], options.width, blocks, first)
    drawn = Network(data.input[0], options.width, blocks, first)
    pretrain(model, *half(data.x, data.y, 0, first), options.epochs, options.rate)
    reached = accuracy(model, *half(data.test_x, data.test_y, 0, first))
    print(f"pretrained on {', '.join(data.labels[:first])}: {100 * reached:.1f}% of their test pictures")
    print(f"clients hold {', '.join(data.labels[first:])}")
    found: dict[str, Any] = {"pretrained": reached}
    for start, network in (("pretrained", model), ("random", drawn)):
        task = build(frozen(network, data, first), options.clients, seed=options.seed)
        for name, method, rounds in (
            ("forward only", forward(options.directions), options.rounds),
            ("FedAvg", fedavg(), options.rounds_fedavg),
        ):
            each = train(task, method, rounds, options.cohort, options.seed, rounds)
            print(f"{start} network, {name}, {task.layout.size:,} weights, {shown(each['rounds'][-1])}")
            found[f"{start}, {name}"] = each
    if options.out:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings} | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
