"""The page: HTML from runs.

Every text that comes from a file goes through `escape`; pictures from files are shown as images, which run nothing.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from fedveil import __version__
from fedveil.ledger import Ledger, Row, figure
from fedveil.report.figures import curves, look, size, svg
from fedveil.report.folder import Run
from fedveil.report.words import duration, percent, secured, verdict

BLOCKS = 50  # rows of a table of rounds
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # of the table of runs: head, key of the summary, form
    ("accuracy", "accuracy", percent),
    ("mean of last 3", "accuracy_last3", percent),
    ("loss", "loss", "{:.4g}".format),
    ("bytes up", "bytes_up", size),
    ("bytes down", "bytes_down", size),
    ("up per client and round", "bytes_up_per_client_round", size),
    ("failed answers", "clients_failed", figure),
    ("ε", "epsilon", "{:.4g}".format),
    ("time", "seconds", duration),
)
ATTACKED = {  # columns of the table of attacks: name in the file, head
    "control": "control",
    "direct": "decoded by itself",
    "differential": "left out of the mean",
    "baseline": "baseline",
    "own": "own part",
}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    shared = all(run.setting == runs[0].setting for run in runs)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · fedveil</title>
<style>
{resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<p>fedveil report</p>
<h1>{escape(title)}</h1>
<p class="setting">{escape(_setting(runs[0])) if shared else ""}</p>
{_warning(runs)}<p class="verdict">{escape(verdict(runs))}</p>
</header>
<main>
<h2>Accuracy</h2>
<div class="figures">
{_curves(runs, "rounds", "Test accuracy after each round.")}
{_curves(runs, "bytes", "The same against what all clients together have sent so far; further left is cheaper.")}
</div>
<h2>Numbers</h2>
{_summaries(runs)}
{_fidelity(runs)}
{_attacks(runs)}
{_secured(runs)}
{_splits(runs)}
<h2>Details</h2>
{"".join(_details(run, opened=len(runs) == 1) for run in runs)}
</main>
<footer>Written by fedveil {__version__}. Bytes are those of encoded messages; 1 MB is a million bytes.</footer>
</body>
</html>
"""


def _setting(run: Run) -> str:
    """The task in a few words, of what the recipe says about it."""
    task, split = (part if isinstance(part, dict) else {} for part in run.setting)
    words = [task.get("data"), task.get("model"), f"{split['kind']} split" if "kind" in split else None]
    words.append(f"{split['clients']} clients" if "clients" in split else None)
    return " · ".join(str(word) for word in words if word)


def _warning(runs: Sequence[Run]) -> str:
    names = ", ".join(run.name for run in runs if run.environment.get("insecure_test_noise"))
    said = f"Insecure test noise: the private randomness of {names} was fixed, so noise protects nobody there."
    return f'<p class="warning" role="note">{escape(said)}</p>\n' if names else ""


def _curves(runs: Sequence[Run], against: str, caption: str, metric: str = "accuracy") -> str:
    drawn = svg(curves({run.name: run.ledger for run in runs}, [against], metric))
    return _figure(drawn.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1), caption)


def _summaries(runs: Sequence[Run]) -> str:
    """A row a run, without columns that are empty; of several runs the best accuracy and the fewest bytes stand out."""
    columns = [column for column in COLUMNS if any(run.summary[column[1]] is not None for run in runs)]
    best: dict[str, float] = {}
    if len(runs) > 1:
        best["accuracy"] = max((a for run in runs for a in run.accuracies[-1:]), default=0)
        best["bytes_up"] = min(run.summary["bytes_up"] for run in runs)
    body = []
    for i, run in enumerate(runs):
        line = "border-top-style:{linestyle};border-top-color:{color}".format(**look(i))
        cells = [
            f'<th scope="row"><span class="key" style="{line}"></span><span class="name">{escape(run.name)}</span></th>'
        ]
        cells.append(_cell(run.rounds))
        for _, key, form in columns:
            value = run.summary[key]
            cells.append(_cell("–" if value is None else form(value), "best" if value == best.get(key, ...) else ""))
        body.append("".join(cells))
    return _table(["run", "rounds", *(head for head, _, _ in columns)], body, "Numbers of each run")


def _fidelity(runs: Sequence[Run]) -> str:
    """How near what was decoded was to what was meant, of the runs that encode."""
    captions = {
        "cosine": "Cosine of the update that a client means and the one that the server decodes, mean over clients.",
        "cosine_down": "Cosine of the step that the server means and the one that clients decode.",
    }
    drawn = [_curves(runs, "rounds", captions[m], m) for m in captions if any(r.ledger.series(m)[0] for r in runs)]
    return f'<h2>Fidelity</h2>\n<div class="figures halves">\n{"".join(drawn)}</div>' if drawn else ""


def _attacks(runs: Sequence[Run]) -> str:
    """How near a server that averages codes comes to single updates: means over the clients attacked."""
    body = []
    for run in runs:
        if run.attack and run.attack.clients:
            figures = (getattr(run.attack, name) for name in ATTACKED)
            cells = [_cell(f"{sum(values) / max(len(values), 1):.3f}") for values in figures]
            name = f'<th scope="row"><span class="name">{escape(run.name)}</span></th>'
            body.append("".join([name, _cell(str(run.attack.round)), _cell(str(len(run.attack.clients))), *cells]))
    if not body:
        return ""
    said = (
        "Measured: a server that holds the decoder decodes one client's codes, or leaves the client out of the mean. "
        "Cosines with the client's true update, means over a cohort: 1 is all of it. The control is the same attack on "
        "a code that loses nothing, the baseline another client's update, and the own part is what remains of both "
        "when the cohort's mean is taken away: 0 would be nothing."
    )
    table = _table(["run", "round", "clients", *ATTACKED.values()], body, "Attacks on codes")
    return f'<h2>Attacks</h2>\n<p class="note">{said}</p>\n{table}'


def _secured(runs: Sequence[Run]) -> str:
    """What the server saw of runs with secure sums."""
    said = "".join(f'<p class="note">{escape(text)}</p>\n' for run in runs if (text := secured(run)))
    return f"<h2>What the server saw</h2>\n{said}" if said else ""


def _splits(runs: Sequence[Run]) -> str:
    """The picture of each split, once."""
    shown: dict[str, list[str]] = {}
    for run in runs:
        if (path := run.folder / "split.svg").is_file():
            shown.setdefault(_image(path, "How the records are split over the clients"), []).append(run.name)
    if not shown:
        return ""
    figures = ""
    for image, names in shown.items():
        whose = f" of {', '.join(names)}" if len(shown) > 1 else ""
        figures += _figure(image, f"What each client{whose} holds.")
    return f'<h2>Split</h2>\n<div class="figures split">{figures}</div>'


def _details(run: Run, opened: bool) -> str:
    environment = " · ".join(f"{key} {value}" for key, value in run.where.items())
    drawn = [_figure(_image(path, path.stem), path.stem) for path in _pictures(run.folder / "figures")]
    drawn += [_strips(path) for path in sorted((run.folder / "figures").glob("*/"))]
    figures = "".join(drawn)
    return f"""<details{" open" if opened else ""}>
<summary>{escape(run.name)}<span>{escape(run.rounds)} rounds</span></summary>
<div class="run">
<p class="note">{escape(environment) or "The environment was not recorded."}</p>
{f'<div class="figures">{figures}</div>' if figures else ""}
{_layers(run.ledger)}
<h3>Rounds</h3>
{_rounds(run.ledger.rows)}
<h3>Recipe</h3>
<div class="scroll" tabindex="0"><pre>{escape(run.text)}</pre></div>
</div>
</details>
"""


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in (".svg", ".png") and path.is_file())


def _strips(folder: Path) -> str:
    """A folder of pictures as one figure, a row a picture; rounds are told by their numbers."""
    rows = ""
    for path in _pictures(folder):
        name = f"round {int(path.stem)}" if path.stem.isdecimal() else path.stem
        rows += f'<div class="strip"><span>{escape(name)}</span>{_image(path, f"{folder.name}, {name}")}</div>'
    return _figure(rows, f"{folder.name} of one client, and real ones of the same classes") if rows else ""


def _layers(ledger: Ledger) -> str:
    """The cosine of decoded and true update of each layer."""
    body = []
    for name in dict.fromkeys(name for row in ledger.rows for name in row.metrics if name.startswith("cosine/")):
        _, values = ledger.series(name)
        seen = (values[0], sum(values) / len(values), values[-1])
        cells = "".join(_cell(f"{value:.3f}") for value in seen)
        body.append(f'<th scope="row">{escape(name.removeprefix("cosine/"))}</th>{cells}')
    head = ["layer", "cosine in the first round", "mean", "in the last round"]
    return f"<h3>Layers</h3>\n{_table(head, body, 'Cosine of each layer')}" if body else ""


def _rounds(rows: Sequence[Row]) -> str:
    """The ledger in at most `BLOCKS` rows: of a long one, several rounds share a row."""
    step = -(-len(rows) // BLOCKS) or 1
    body = []
    for block in (rows[i : i + step] for i in range(0, len(rows), step)):
        first, last = block[0].round, block[-1].round
        accuracy = [row.metrics["accuracy"] for row in block if "accuracy" in row.metrics]
        missing = _tally(reason for row in block for reason in row.missing.values())
        events = _tally(event for row in block for event in row.events)
        cells = [f'<th scope="row">{first if first == last else f"{first}–{last}"}</th>']
        cells.append(_cell(percent(accuracy[-1]) if accuracy else "–"))
        cells += [_cell(size(sum(row.bytes_up for row in block))), _cell(size(sum(row.bytes_down for row in block)))]
        cells += [_cell(missing, "words"), _cell(events, "words")]
        body.append("".join(cells))
    head = ["round", "accuracy", "bytes up", "bytes down", "missing", "events"]
    return _table(head, body, "Rounds") if body else '<p class="note">No round is done yet.</p>'


def _tally(texts: Iterable[str], most: int = 4) -> str:
    """Each different text with how often it occurs, the frequent ones first."""
    seen = Counter(text if len(text) <= 120 else text[:119] + "…" for text in texts)
    said = [text if n == 1 else f"{n} × {text}" for text, n in seen.most_common(most)]
    rest = sum(seen.values()) - sum(n for _, n in seen.most_common(most))
    return "; ".join([*said, f"{rest} more"] if rest else said)


def _table(head: Sequence[str], body: Sequence[str], label: str) -> str:
    """A table in a box of its own to scroll in, from HTML rows."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    rows = "\n".join(f"<tr>{row}</tr>" for row in body)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _figure(picture: str, caption: str) -> str:
    return f'<figure><div class="figure">{picture}</div><figcaption>{escape(caption)}</figcaption></figure>\n'


def _image(path: Path, alt: str) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}">'
