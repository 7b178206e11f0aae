"""Ask `fedveil choose` about ten situations, train each recipe that it recommends, and write results/situations.json.

    python results/situations.py

The JSON file has, for each situation, the command, the first recipe, its forecast, and what its run then took.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedveil as fv
from fedveil.runs import choice, recipe
from fedveil.runs.fingerprint import environment

HOME = Path(__file__).parent
EPSILON = ("--epsilon", "8", "--delta", "1e-3")
MANY = ("--clients", "287", "--cohort", "287")
SITUATIONS: dict[str, tuple[str, ...]] = {
    "Ten clients, nothing else asked for": (),
    "An uplink of 3 kB a round": ("--uplink", "3kB"),
    "An uplink of 1 kB a round": ("--uplink", "1kB"),
    "Clients that cannot run backpropagation": ("--no-backprop",),
    "The server may see sums only": ("--secure", "--cohort", "10"),
    "ε = 8 for each record": (*EPSILON, "--cohort", "10"),
    "ε = 8 for each client, under the secure sum": (*EPSILON, "--unit", "client", "--secure", *MANY),
    "Two classes a client": ("--task", "digits/fedavg-classes"),
    "Two classes a client, all take part, five rounds at most": ("--task", "digits/fedavg-2class", "--rounds", "5"),
    "1,000 clients with 600 records, 100 kB, ε = 8, no backpropagation": (
        *("--uplink", "100kB", "--epsilon", "8", "--no-backprop", "--records", "600", "--clients", "1000"),
    ),
}  # fmt: skip


def asked(words: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """The first recipe of a situation, its forecast, and its run."""
    file = folder / "best.toml"
    command = [sys.executable, "-m", "fedveil", "choose", *words, "-o", str(file), "--format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    first = told["choices"][0]
    found = {
        "command": " ".join(["fedveil", "choose", *words]),
        "fits": len(told["choices"]),
        "recipe": first["recipe"],
    }
    found |= {"accuracy": first["accuracy"], "extrapolates": len(first["extrapolates"]), "forecast": forecast(first)}
    return found | {"run": trained(file, told["situation"]), "wish": limits(words)}


def forecast(first: dict[str, Any]) -> dict[str, Any]:
    cost = first["cost"]
    return {
        "up": cost["up"]["most"],
        "down": cost["down"]["most"],
        "epsilon": cost["epsilon"],
        "rounds": cost["rounds"],
    }


def trained(file: Path, situation: dict[str, Any]) -> dict[str, Any]:
    """What a run of a recipe takes: the most bytes of a client in a round, and ε."""
    plan = recipe.read(str(file))
    plan, task = choice.placed(plan, plan.load(), situation["records"] if situation["imagined"] else None)
    result = fv.run(task, plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=plan.seed)
    rows = result.ledger.rows
    took = {key: max(max(getattr(row, key).values()) for row in rows) for key in ("up", "down")}
    accuracy = None if situation["imagined"] else result.accuracy  # imagined clients all hold the same records
    return took | {"epsilon": rows[-1].epsilon, "rounds": len(rows), "accuracy": accuracy}


def limits(words: tuple[str, ...]) -> dict[str, float]:
    """What the options allow at most."""
    found = {}
    if "--uplink" in words:
        found["up"] = 1e3 * float(words[words.index("--uplink") + 1].removesuffix("kB"))
    if "--epsilon" in words:
        found["epsilon"] = float(words[words.index("--epsilon") + 1])
    return found


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    rows = []
    for name, words in SITUATIONS.items():
        with TemporaryDirectory() as folder:
            found = asked(words, Path(folder))
        exceeded = [key for key, most in found["wish"].items() if found["run"][key] > most]
        rows.append({"situation": name, **found, "exceeded": exceeded})
        print(f"{name}: {found['recipe']}{', exceeds ' + ', '.join(exceeded) if exceeded else ''}", flush=True)
    where = environment(device="cpu", commit=commit.stdout.strip())
    told = {"command": "python results/situations.py", **where, "rows": rows}
    (HOME / "situations.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
