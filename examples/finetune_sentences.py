"""Teach a frozen language model to tell good reviews from bad ones, with clients that only run it forward.

    python examples/smollm2.py toy --out toy                                a tiny random model, to try this program
    python examples/smollm2.py features toy --layer 1 --width 16 --out toy.npz
    python examples/finetune_sentences.py toy.npz --rounds 20 --clients 4 --cohort 2

    python examples/smollm2.py prepare --gguf … --sst2 … --out smollm2      SmolLM2-135M and SST-2, see there
    python examples/smollm2.py features smollm2 --precision bfloat16 --out sst2.npz
    python examples/finetune_sentences.py sst2.npz --out sentences.json
    python examples/finetune_sentences.py sst2.npz --method fedavg

Each client runs the first layers of the model once on each of its sentences. It keeps 128 coordinates of what they make
of the last token. A new linear layer on top of these is trained, as in `finetune_images.py`, which also explains
`--method`. To train weights inside of the model, see `finetune_language_model.py`.

The file of features is a data set for `fedveil run`, too: set `task.data` to its path and `task.model` to `heads:head`.
"""

import heads


def main() -> None:
    heads.main(__doc__, 200)


if __name__ == "__main__":
    main()
