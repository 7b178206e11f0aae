"""What messages give away, on the digits.

python results/exposure.py matrix     # as fedveil audit --matrix digits --victims 10 --budget-seconds 900
python results/exposure.py candidates # the same messages, by a server that has a list of candidates
python results/exposure.py slopes     # pictures rebuilt from K slopes a round, against K and the number of rounds
python results/exposure.py histograms # slopes on records and on noise, as in figure 5 of the paper on BAFFLE
python results/exposure.py papers     # the attacks with which the papers on FedAGE and TOFU argue, beside stronger ones

They write into results/exposure. For `slopes`, BAFFLE trains the small network of the matrix. Each of ten clients holds
one record, and the server solves for its gradient and inverts it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from scipy import stats

import fedveil as fv
from fedveil.attacks import matrix
from fedveil.attacks.candidates import picked
from fedveil.attacks.estimate import estimates
from fedveil.attacks.exposure import MATCHING, Attack, attempts, scored, victims
from fedveil.attacks.inversion import Inversion
from fedveil.cli.matrix import run
from fedveil.runs.fingerprint import environment

HERE = Path(__file__).parent / "exposure"
SHARES = (0.01, 0.03, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the weights: K / d
ROUNDS = (1, 5, 20)
PLAIN_DLG = Inversion("dlg", steps=600, lr=1.0, tv=0.0, restarts=4, screen=100, boxed=False)  # as in its paper


def point(data: fv.Data, share: float, rounds: int, how: Attack, seed: fv.Seed) -> dict[str, Any]:
    """One point of a curve: K = share × d directions a round, for so many rounds."""
    case = matrix.Case("slopes", fv.FedSGD(), small=True)
    task = matrix.task_of(case, data, seed)
    directions = max(1, round(share * task.layout.size))
    method = fv.Baffle(directions=directions)
    case = matrix.Case("slopes", method, 1, rounds, small=True)
    with TemporaryDirectory() as folder:
        seen, truths, _ = matrix.played(case, task, seed, Path(folder))
        made = attempts(seen, how, chosen_kinds=("slopes" if rounds == 1 else "slopes over rounds",))
        (found,), _ = scored(task, seen, made, truths, None)
    near = found.reached
    assert near
    assert near.psnr
    told = {
        "d": task.layout.size,
        "K": directions,
        "rounds": rounds,
        "slopes / d": directions * rounds / task.layout.size,
    }
    told |= {
        "cosine": found.cosine.value,
        "psnr": near.psnr.value,
        "psnr low": near.psnr.low,
        "psnr high": near.psnr.high,
    }
    told |= {"identified": near.identified.value, "exact": near.exact.value}
    for name, guess in found.baselines.items():
        assert guess.psnr
        told[f"{name}: psnr"] = guess.psnr.value
    return told


def candidates() -> None:
    """Test candidates on the messages of the matrix, and write a row for each kind of estimate."""
    data, seed = fv.load("digits"), fv.Seed.root(0)
    told = {"command": "python results/exposure.py candidates", **environment(device="cpu", commit=_commit())}
    rows: list[dict[str, Any]] = []
    for case in matrix.cases():
        task = matrix.task_of(case, data, seed)
        with TemporaryDirectory() as folder:
            seen, truths, rounds = matrix.played(case, task, seed, Path(folder))
        found = [each for each in estimates(seen) if not case.kinds or each.kind in case.kinds]
        for kind in dict.fromkeys(each.kind for each in found):
            chosen, records = victims([each for each in found if each.kind == kind], seen, Attack(victims=10))
            tested = picked(task, seen, chosen, truths)
            row = {"case": case.name, "kind": kind, "records": records, "epsilon": rounds[-1].epsilon}
            rows.append({**row, "picked": msgspec.to_builtins(tested)})
            print(case.name, kind, records, tested and (tested.share, tested.auc), flush=True)
    (HERE / "candidates.json").write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def slopes() -> None:
    """Write every point of the curves."""
    data, how, seed = fv.load("digits"), Attack(victims=10, seconds=600), fv.Seed.root(0)
    told = {"command": "python results/exposure.py slopes", **environment(device="cpu", commit=_commit()), "seed": 0}
    points: list[dict[str, Any]] = []
    for rounds in ROUNDS:
        for share in SHARES:
            points.append(point(data, share, rounds, how, seed))
            print(json.dumps(points[-1]), flush=True)
            (HERE / "slopes.json").write_text(json.dumps(told | {"points": points}, indent=2) + "\n", encoding="utf-8")


def histograms() -> None:
    """Compare 500 slopes on single records with those on noise, and write what else 500 slopes give away."""
    data, seed, count = fv.load("digits"), fv.Seed.root(0), 500
    task = matrix.task_of(matrix.Case("slopes", fv.FedSGD(), small=True), data, seed)
    prober = fv.Baffle(directions=count).prober(task)
    pairs, w = 50, task.initial[None]
    noise = torch.randn(pairs, *data.input, generator=seed.child("noise").torch())
    labels = torch.from_numpy(seed.child("labels").numpy().integers(data.classes, size=pairs))
    found = dict[str, torch.Tensor]()
    for name, x, y in (("records", task.test_x[:pairs], task.test_y[:pairs]), ("noise", noise, labels)):
        key = torch.tensor([seed.child(name).word])
        found[name] = prober.slopes(w, key, x[None], y[None], torch.eye(pairs)[None], count)[0]
    scaled = {name: each / each.std(1, keepdim=True) for name, each in found.items()}
    apart = [
        sum(stats.ks_2samp(a, b).pvalue < 0.05 for a, b in zip(each["records"], each["noise"], strict=True)) / pairs
        for each in (found, scaled)
    ]
    near = point(data, count / task.layout.size, 1, Attack(victims=10, seconds=600), seed)
    told = {
        "command": "python results/exposure.py histograms",
        **environment(device="cpu", commit=_commit()),
        "seed": 0,
    }
    told |= {"pairs": pairs, "told apart": apart[0], "told apart after scaling": apart[1], "inverted": near}
    (HERE / "histograms.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=2))


def papers() -> None:
    """Attack the same messages with the papers' attacks and with others, and write a row for each."""
    data, seed = fv.load("digits"), fv.Seed.root(0)
    by_name = {(case.name, case.records): case for case in matrix.cases()}
    local = fv.LocalTraining(lr=0.1, batch=2)
    tofu = fv.TofuCodec(points=32, steps=200, lr=0.15, decay="late")
    asked = [
        (by_name["raw gradient", 1], {"DLG": PLAIN_DLG, "Inverting Gradients": MATCHING}),
        (by_name["FedAGE", 1], {"DLG": PLAIN_DLG, "Inverting Gradients": MATCHING}),
        (by_name["FedAvg, 1 epoch in batches of 2", 8], {"Inverting Gradients": MATCHING}),
        (matrix.Case("TOFU, 1 epoch in batches of 2", fv.FedAvg(local, up=tofu), 8), {"Inverting Gradients": MATCHING}),
    ]
    told = {"command": "python results/exposure.py papers", **environment(device="cpu", commit=_commit()), "seed": 0}
    rows: list[dict[str, Any]] = []
    for case, attacks in asked:
        for name, inversion in attacks.items():
            how = Attack(inversion, victims=10, seconds=600)
            checked = matrix.checked(data, seed, how, lambda sentence: None)
            made, _ = matrix.attacked(case, matrix.task_of(case, data, seed), seed, how, checked, lambda sentence: None)
            rows += [{"attack": name, **msgspec.to_builtins(row)} for row in made]
            print(case.name, name, [row.exposure and row.exposure.why for row in made], flush=True)
            (HERE / "papers.json").write_text(json.dumps(told | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("matrix", "candidates", "slopes", "histograms", "papers"))
    HERE.mkdir(exist_ok=True)
    chosen = parser.parse_args().part
    if chosen != "matrix":
        parts = {"candidates": candidates, "slopes": slopes, "histograms": histograms, "papers": papers}
        return parts[chosen]()
    where = environment(command="python results/exposure.py matrix", device="cpu", commit=_commit())
    run("digits", HERE, (), Attack(victims=10, seconds=900), 0, where, lambda sentence: None)


if __name__ == "__main__":
    main()
