"""Run the digits with seeds 0 to 4 by the commands below, and write results/digits-seeds.json."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedveil.runs.fingerprint import environment

NAMES = ("fedavg", "fedprox", "scaffold", "fedavg-half", "fedavg-qsgd", "fedavg-top-k")
NAMES += ("tofu", "tofu-8bit", "fedsynth", "fedsynth-8bit")
COMMANDS = (
    f"compare {' '.join(f'digits/{name}' for name in NAMES)} --seeds 5",
    "run digits/fedavg-top-k --grid method.up.share=0.06,0.0155 --seeds 5",
)
KEPT = ("seed", "accuracy", "accuracy_last3", "bytes_up", "bytes_down", "seconds")


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    runs: list[dict[str, Any]] = []
    for command in COMMANDS:
        with TemporaryDirectory() as folder:
            whole = [sys.executable, "-m", "fedveil", *shlex.split(command), "--out", folder, "--format", "json"]
            done = subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=True)
        for run in json.loads(done.stdout)["runs"]:
            name = run["recipe"].removeprefix("digits-").replace("method.up.share=", "fedavg-top-k-")
            runs.append({"recipe": name, **{key: run[key] for key in KEPT}})
    told = [f"fedveil {command} --out DIR --format json" for command in COMMANDS]
    where = environment(device="cpu", commit=commit.stdout.strip(), threads=torch.get_num_threads())
    out = {"command": "python results/seeds.py", "commands": told, **where, "runs": runs}
    (Path(__file__).parent / "digits-seeds.json").write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
