"""Fine-tune a pretrained image network on CIFAR-10, with clients that only run it forward.

    python examples/efficientnet.py toy --out toy.npz                       features of digits, to try this program
    python examples/finetune_images.py toy.npz --rounds 20 --clients 4 --cohort 2

    python examples/efficientnet.py prepare --fetch --out cifar10.npz       see there for the packages it needs
    python examples/finetune_images.py cifar10.npz --out images.json
    python examples/finetune_images.py cifar10.npz --split dirichlet --method fedavg

The network is frozen, so each client runs it once on each of its pictures and keeps the features. A new linear layer on
top of them is trained. By default that needs no backpropagation: in a round, some clients measure how the loss of some
of their pictures changes along K random directions of the layer's weights, and send K numbers. The server takes a step
and sends K numbers, from which every client repeats the step (`method.down = "replay"`).

`--method` compares this with backpropagation of the same layer: FedAvg, with whole updates, with their largest entries
(top-k) or with sketches. The JSON file has, by round, the accuracy on test and validation pictures and the bytes that a
client has sent and received so far. Frames and catching up are counted.
"""

import heads

WIDTH = 256  # features that the new layer sees


def main() -> None:
    heads.main(__doc__, 500, WIDTH)


if __name__ == "__main__":
    main()
