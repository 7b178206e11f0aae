"""The client without PyTorch beside the one with it: memory, disk, and where a federation ends.

PYTHONPATH=examples python results/edge.py measure --out results/edge.json
PYTHONPATH=examples python results/edge.py slopes --out results/edge-slopes.json

measure: a random transformer of the example's kind with about 11 million frozen weights; its norms' scales and its
    adapters are trained. Four clients of 48 prompts of up to 64 tokens probe 4 directions over 8 prompts a round, take
    the server's steps themselves, and answer within a secure sum. Each is a process of its own, of either kind. Memory
    is what the kernel counts as resident at the process's peak. Disk is the files of the packages a client needs.
slopes: how far the slopes of either client are from those of a model in float64, for networks of two depths.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import llama
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from packaging.requirements import Requirement

import fedveil as fv
from fedveil import models
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.identity import simulated
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.gpu.graphs import one_thread
from fedveil.methods.baffle.edge.model import Model
from fedveil.methods.baffle.edge.probing import Probing
from fedveil.methods.baffle.export import export
from fedveil.methods.baffle.probing import forward_only
from fedveil.runs.fingerprint import environment

SEED = fv.Seed.root(0)
CLIENTS, RECORDS, LENGTH = 4, 48, 64
CONFIG = llama.Config(4096, width=256, hidden=1024, layers=10, heads=8, shared_heads=4, lora=4)
TRAINED = ["*norm.scale", "*adapter*"]
SUM = fv.SecureSum(clip=64.0, bits=40)
PROBING = {"directions": 4, "batch": 8, "sigma": 1e-3, "down": "replay", "secure": SUM}
METHODS = {
    "replay, secure sum": fv.Baffle(**PROBING),
    "replay, secure sum, privacy": fv.Baffle(**PROBING, privacy=fv.DpSgd(delta=1e-3)),
}
ROUNDS = {"replay, secure sum": 6, "replay, secure sum, privacy": 2}


def transformer() -> fv.Task:
    """The random model and prompts whose first token tells the label."""
    draw = np.random.default_rng(0)
    count = CLIENTS * RECORDS + 32
    x = draw.integers(1, CONFIG.vocabulary, (count, LENGTH))
    x[np.arange(LENGTH) >= draw.integers(4, LENGTH + 1, count)[:, None]] = llama.PADDING
    rows, labels = torch.from_numpy(x), torch.from_numpy(x[:, 0] % 2)
    data = from_tensors(
        rows[:-32], labels[:-32], rows[-32:], labels[-32:], padding=llama.PADDING, name="random prompts"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = llama.Llama(CONFIG)
    return fv.Task(model, data, fv.split("iid", data, CLIENTS, SEED, max_records=RECORDS), trainable=TRAINED)


# ---------------------------------------------------------------------------------------------------- processes


class Piped(LocalEngine):
    """Clients as processes that take questions and give replies as `python -m fedveil_edge --serve` does."""

    def __init__(self, commands: Mapping[int, Sequence[str]], folder: Path | None) -> None:
        super().__init__()
        path = os.environ.get("PYTHONPATH", "") if folder is None else str(folder)
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.processes = {
            client: subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            for client, command in commands.items()
        }

    def deliver(self, letters: Iterable[Letter], deadline: Any) -> Iterator[Reply]:
        letters = list(letters)
        for letter in letters:
            pipe = self.processes[letter.client].stdin
            assert pipe
            pipe.write(len(letter.frame).to_bytes(4, "little") + letter.frame)
            pipe.flush()
        for letter in letters:
            pipe = self.processes[letter.client].stdout
            assert pipe
            reply = pipe.read(int.from_bytes(pipe.read(4), "little"))
            told = {"frame": reply[1:]} if reply[:1] == b"\0" else {"problem": reply[1:].decode()}
            yield Reply(letter.client, **told)

    def memory(self) -> list[dict[str, float]]:
        """Of each process in megabytes: resident at its peak and now, and how much of that is files mapped."""
        found = []
        for process in self.processes.values():
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            held = dict(line.split(":", 1) for line in lines)
            parts = {"peak": "VmHWM", "now": "VmRSS", "mapped files": "RssFile"}
            found.append({name: int(held[key].split()[0]) * 1024 / 1e6 for name, key in parts.items()})
        return found

    def stop(self) -> None:
        for process in self.processes.values():
            assert process.stdin
            process.stdin.close()
            process.wait()


def serve(name: str, client: int) -> None:
    """A client with PyTorch: it answers from stdin to stdout."""
    task, method, here = transformer(), METHODS[name], dict[bytes, Clients]()
    while len(head := sys.stdin.buffer.read(4)) == 4:
        letter = Letter.read(sys.stdin.buffer.read(int.from_bytes(head, "little")))
        run = letter.envelope.run
        if run not in here:
            here[run] = Clients(method, task, run, SEED, identities=simulated(SEED))
        assert letter.client == client
        with one_thread():
            (reply,) = here[run].answer([letter])
        frame = b"\0" + reply.frame
        sys.stdout.buffer.write(len(frame).to_bytes(4, "little") + frame)
        sys.stdout.buffer.flush()


def keys(folder: Path) -> None:
    """The simulation's identities in files, as deployed clients have them."""
    for client in range(CLIENTS):
        secret = Ed25519PrivateKey.from_private_bytes(simulated(SEED).own[client])
        path = folder / f"identity-{client}"
        path.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = secret.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public)


def measure() -> dict[str, Any]:
    """Federations of either kind of client."""
    task, found = transformer(), dict[str, Any]()
    for name, method in METHODS.items():
        with tempfile.TemporaryDirectory() as made:
            home, folder = Path(made), Path(made) / "edge"
            told = export(task, method, folder, seed=SEED)
            keys(home)
            edges = {}
            for client, own in enumerate(task.clients):
                np.savez(home / f"{client}.npz", x=task.x[own].numpy(), y=task.y[own].numpy())
                files = [home / f"{client}.npz", "--client", client, "--state", home / f"state-{client}"]
                files += ["--identity", home / f"identity-{client}", "--known", home, "--serve"]
                edges[client] = [sys.executable, "-m", "fedveil_edge", *map(str, files)]
            own = [sys.executable, __file__, "serve", "--name", name]
            piped = {
                "edge": Piped(edges, folder),
                "pytorch": Piped({k: [*own, "--client", str(k)] for k in range(CLIENTS)}, None),
            }
            ends, rows = {}, dict[str, Any]()
            for kind, engine in piped.items():
                result = fv.run(task, method, rounds=ROUNDS[name], cohort=CLIENTS, engine=engine, seed=0)
                peaks = engine.memory()
                engine.stop()
                ends[kind] = result.weights
                assert not any(row.missing for row in result.ledger.rows), result.ledger.rows[-1].missing
                rows[kind] = {
                    "resident megabytes, by client": peaks,
                    "resynced": sum(row.metrics["resynced"] for row in result.ledger.rows),
                }
            disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        moved = torch.linalg.vector_norm(ends["pytorch"] - task.initial)
        apart = torch.linalg.vector_norm(ends["edge"] - ends["pytorch"])
        found[name] = {
            **{key: told[key] for key in ("trained", "frozen", "needs")},
            "rounds": ROUNDS[name],
            "exported megabytes": disk,
            **rows,
            "moved / trained weights": float(moved / torch.linalg.vector_norm(task.initial)),
        }
        if not method.privacy:  # noise is the operating system's
            found[name] |= {
                "edge - pytorch / trained weights": float(apart / torch.linalg.vector_norm(ends["pytorch"])),
                "edge - pytorch / moved": float(apart / moved),
            }
    edge = installed(["numpy", "onnxruntime", "cryptography"])
    return {**found, "megabytes of packages": {"edge": edge, "pytorch": installed(["fedveil"])}}


def installed(names: Sequence[str]) -> float:
    """The megabytes of files of these packages and all that they need."""
    seen, left, total = set[str](), [name.lower() for name in names], 0
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        package = importlib.metadata.distribution(name)
        total += sum(
            path.stat().st_size for file in package.files or () if (path := Path(str(file.locate()))).is_file()
        )
        needs = (Requirement(each) for each in package.requires or ())
        left += [each.name.lower() for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return total / 1e6


# ---------------------------------------------------------------------------------------------------- slopes


def slopes() -> dict[str, Any]:
    """Relative errors of slopes at σ = 10⁻⁴, 10⁻³ and 10⁻²: the median over 3 keys."""
    draw = SEED.torch()
    x, y = torch.randn(32, 1, 28, 28, generator=draw), torch.randint(0, 10, (32,), generator=draw)
    data, found = from_tensors(x, y, x[:2], y[:2]), dict[str, Any]()
    for name in ("baffle-lenet", "wrn-10-2"):
        model = models.build(name, data.input, 10, activation="hardswish")
        task = fv.Task(model, data, fv.split("iid", data, 1, SEED))
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "edge"
            export(task, fv.Baffle(directions=8), folder)
            settings = json.loads((folder / "settings.json").read_text())
            graph = Model(folder, settings)
            found[name] = {f"sigma {s:g}": _errors(task, graph, settings, s) for s in (1e-4, 1e-3, 1e-2)}
    return found


def _errors(task: fv.Task, graph: Model, settings: dict[str, Any], sigma: float) -> dict[str, float]:
    rows = []
    share = torch.full((1, len(task.x), 1), 1 / len(task.x))
    for key in (1, 2, 3):
        given = task.initial[None], torch.tensor([key]), task.x[None], task.y[None]
        with forward_only(task.device), one_thread():
            own = fv.Baffle(directions=8, sigma=sigma).prober(task)
            plain = own.slopes(*given, share, 8)[0, 0]
            wide = dataclasses.replace(own, precision=torch.float64)
            moved = wide.slopes(*given, share, 8)[0, 0]
            each = wide.slopes(given[0].double(), *given[1:], share.double(), 8)[0, 0]
        probing = Probing(graph, {**settings, "sigma": sigma}, 0, task.x.numpy(), task.y.numpy())
        edge = torch.from_numpy(probing.slopes(task.initial.numpy(), key, 8))
        size = torch.linalg.vector_norm(each)
        pairs = {
            "weights moved in float32, model in float64": moved - each,
            "pytorch": plain - each,
            "edge": edge - each,
            "edge - pytorch": edge - plain,
        }
        rows.append({name: float(torch.linalg.vector_norm(gap) / size) for name, gap in pairs.items()})
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "slopes", "serve"))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--name", help="serve: which method")
    parser.add_argument("--client", type=int, help="serve: which client")
    chosen = parser.parse_args()
    if chosen.what == "serve":
        serve(chosen.name, chosen.client)
        return
    found = {"measure": measure, "slopes": slopes}[chosen.what]()
    print(json.dumps(found, indent=1))
    if chosen.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        where = environment(commit=commit.stdout.strip())
        told = {"command": f"python results/edge.py {chosen.what}", **where, "results": found}
        chosen.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
