"""A new layer on a frozen EfficientNet-Lite0 for CIFAR-10: forward passes only, beside backpropagation.

    PYTHONPATH=examples python results/images.py FEATURES --out results/images.json

FEATURES is written by examples/efficientnet.py. `frozen.py` explains the steps.
"""

from functools import partial

import finetune_images
import frozen
import heads

# Messages of top-k and of sketches are so large that a client sends and receives in all about as many bytes as with 64
# slopes. The best settings of slopes are then used for more rounds.
RATES = (0.1, 0.3)
STUDY = frozen.Study(
    "images.py",
    "pictures",
    sweep={
        "forward": [(heads.forward, 200, {"rate": rate, "directions": 64}) for rate in (0.005, 0.01, 0.02)],
        "fedavg": [(heads.fedavg, 40, {"rate": rate}) for rate in RATES],
        "top-k": [(heads.top_k, 100, {"rate": rate, "share": 0.1}) for rate in RATES],
        "sketch": [(heads.sketch, 100, {"rate": rate, "numbers": 500}) for rate in RATES],
    },
    longer={"forward": 500},
    read=partial(heads.read, width=finetune_images.WIDTH),
)

if __name__ == "__main__":
    frozen.main(__doc__, STUDY)
