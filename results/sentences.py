"""A new layer on the first layers of SmolLM2-135M for SST-2: forward passes only, beside backpropagation.

    PYTHONPATH=examples python results/sentences.py FEATURES --out results/sentences.json

FEATURES is written by examples/smollm2.py. `frozen.py` explains the steps.
"""

from functools import partial

import frozen
import heads

import fedveil as fv
from fedveil.attacks.matrix import Case

# No method sends and receives more bytes in all than 200 rounds of 16 slopes, but for the secure sum: its keys and
# shares cost some kilobytes a round, so there slopes are sent in fewer rounds.
FORWARD = [(200, {"directions": 16, "rate": rate}) for rate in (0.005, 0.01, 0.02)]
FORWARD += [(130, {"directions": 32, "rate": rate}) for rate in (0.01, 0.02)]
RATES = (0.03, 0.1, 0.3)


def private(epsilon: float, directions: int, clip: float, **settings: float) -> fv.Baffle:
    """Slopes of records of which each is clipped and noised, with a budget for all rounds together."""
    privacy = fv.DpSgd(clip=clip, budget=epsilon, delta=1e-3, noise="auto")
    return heads.forward(directions, batch=64, privacy=privacy, **settings)


def slopes(name: str, method: fv.Method, records: int = 1, rounds: int = 1) -> Case:
    """A case of messages that are attacked; those of several rounds, together."""
    return Case(name, method, records, rounds, ("slopes over rounds",) if rounds > 1 else ())


ATTACKS = (
    slopes("16 slopes, 1 round", heads.forward(16)),
    slopes("16 slopes, 20 rounds", heads.forward(16), rounds=20),
    slopes("64 slopes, 1 round", heads.forward(64)),
    slopes("258 slopes, as many as weights, 1 round", heads.forward(258)),
    slopes("16 slopes, 200 rounds, 216 records", heads.forward(16, rate=0.005), 216, 200),
    slopes("16 private slopes, 100 rounds, ε = 8", private(8, 16, 4, rate=0.02), rounds=100),
    slopes("258 slopes in a secure sum", heads.forward(258, secure=fv.SecureSum(clip=64))),
    slopes("258 slopes in a secure sum, 216 records", heads.forward(258, secure=fv.SecureSum(clip=64)), 216),
)

STUDY = frozen.Study(
    "sentences.py",
    "sentences",
    sweep={
        "forward": [(heads.forward, rounds, settings) for rounds, settings in FORWARD],
        "fedavg": [(heads.fedavg, 60, {"rate": rate}) for rate in RATES],
        "top-k": [(heads.top_k, 120, {"rate": rate, "share": 0.1}) for rate in RATES],
        "sketch": [(heads.sketch, 120, {"rate": rate, "numbers": 50}) for rate in RATES],
        **{
            f"private-{epsilon}": [
                (partial(private, epsilon), 100, {"directions": 16, "clip": clip, "rate": rate})
                for rate in (0.005, 0.01, 0.02)
                for clip in (2, 4)
            ]
            for epsilon in (8, 2)
        },
        "secure": [
            (partial(heads.forward, secure=fv.SecureSum(clip=64)), rounds, {"directions": directions, "rate": rate})
            for rounds, directions in ((60, 32), (40, 64))
            for rate in (0.01, 0.02, 0.04)
        ],
    },
    once=("private-8", "private-2", "secure"),
    attacks=ATTACKS,
)

if __name__ == "__main__":
    frozen.main(__doc__, STUDY)
