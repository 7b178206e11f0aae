"""The page: HTML from runs.

Every text that comes from a file goes through `escape` or `markup`; pictures from files are shown as images, which run
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from fedveil.core.ledger import Ledger
from fedveil.core.measures import METRICS
from fedveil.core.metrics import VALIDATION, Primary, primary_of
from fedveil.core.version import __version__
from fedveil.report.audits import audits
from fedveil.report.figures import look, size, svg
from fedveil.report.folder import Run
from fedveil.report.grid import heat_map, panels
from fedveil.report.groups import Group, grouped
from fedveil.report.leaks import attacks, privacy, sums
from fedveil.report.markup import cell, charts, figure, image, name, table
from fedveil.report.words import conclusion, duration, percent, verdict
from fedveil.runs import statistics

BLOCKS = 50  # rows of a table of rounds
Column = tuple[str, str, Callable[[Any], str]]
COLUMNS: tuple[Column, ...] = (  # of the table of runs: head, key of the summary, form
    ("loss", "loss", "{:.4g}".format),
    ("bytes up", "bytes_up", size),
    ("bytes down", "bytes_down", size),
    ("up per client and round", "bytes_up_per_client_round", size),
    ("failed answers", "clients_failed", "{:,}".format),
    ("ε", "epsilon", "{:.4g}".format),
    ("ε by PLD", "epsilon_pld", "{:.4g}".format),
    ("relation", "relation", str),
    ("time", "seconds", duration),
)
FIDELITY = {  # metrics of runs that encode, and what they are
    "cosine": "Cosine of the update that a client means and the one that the server decodes, mean over clients.",
    "cosine_down": "Cosine of the step that the server means and the one that clients decode.",
}
SURROGATES = {  # and of runs whose server trains on clients' synthetic sets
    "matching": "How far synthetic sets are from the records they stand for, in the method's own measure (gradients or "
    "features), mean over clients; with privacy the records' gradients are noised.",
    "cosine_real": "Cosine between the gradients of synthetic sets and of records at the weights that clients were "
    "sent, mean over clients; not measured with privacy.",
    "radius": "The radius of the server's trust region; shaded: from the smallest to the largest of the clients.",
    "moved": "How far the server's weights moved in a round.",
    "server_steps": "How many steps the server took in a round.",
}
SEARCHES = {  # pictures of a search, and what they show
    "parallel": "Every trial of the search as a line through its settings; the best one stands out.",
    "importance": "How much of the variance of the validation metric each setting explains.",
}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(runs: Sequence[Run], searches: Sequence[Path] = ()) -> str:
    """The whole document; `searches` are folders of searches whose best runs are among the runs."""
    title, groups = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared", grouped(runs)
    repeated = any(len(group.runs) > 1 for group in groups)
    if repeated:
        title = groups[0].name if len(groups) == 1 else f"{len(groups)} recipes compared"
        title += f", {len(runs)} runs"
    shared = all(run.setting == runs[0].setting for run in runs)
    words = runs[0].primary.words
    held = f"The {words} of the validation records, which decide about early stopping and the best weights."
    validation = {VALIDATION + runs[0].primary.name: held}
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
{_warning(runs)}<p class="verdict">{escape(conclusion(groups) if repeated else verdict(runs))}</p>
</header>
<main>
<h2>{escape(words[:1].upper() + words[1:])}</h2>
<div class="figures">
{charts(runs, "rounds", f"Test {words} after each round.")}
{charts(runs, "bytes", "The same against what all clients together have sent so far; further left is cheaper.")}
</div>
{_measured(runs, "Validation", validation)}
<h2>Numbers</h2>
{_repeats(groups) if repeated else _summaries(runs)}
{_grid(groups)}
{_searches(searches)}
{privacy(runs)}
{audits(runs)}
{_measured(runs, "Fidelity", FIDELITY)}
{_measured(runs, "Surrogates", SURROGATES)}
{_exhibits(runs)}
{attacks(runs)}
{sums(runs)}
{_splits(runs)}
<h2>Details</h2>
{_summaries(runs) if repeated else ""}
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
    names = ", ".join(run.name for run in runs if run.fixed_noise)
    said = f"Insecure test noise: the private randomness of {names} was fixed, so noise protects nobody there."
    return f'<p class="warning" role="note">{escape(said)}</p>\n' if names else ""


def _repeats(groups: Sequence[Group]) -> str:
    """A row a recipe: means over seeds, and differences to the first one."""
    found = [repeats for group in groups if (repeats := group.repeats()).ledgers]
    if not found:
        return ""
    head, *rows = statistics.table(found)
    body = [name(row[0]) + "".join(cell(text.replace("\n", ", ")) for text in row[1:]) for row in rows]
    heads = [escape(text.replace("\n", " ")) for text in head]
    return f'{table(heads, body, "Numbers of each recipe")}\n<p class="note">{escape(statistics.note(found))}</p>'


def _grid(groups: Sequence[Group]) -> str:
    """The pictures of a sweep: a heat map if all combinations of two settings are there, and a panel for each value."""
    words, pictures = groups[0].runs[0].primary.words, ""
    if (drawn := heat_map(groups)) is not None:
        caption = f"Mean test {words} at the end, by two settings."
        pictures += f'<div class="figures halves">{figure(svg(drawn), caption)}</div>'
    if (drawn := panels(groups)) is not None:
        caption = f"Test {words} by round for each combination of settings, beside the others in grey."
        pictures += f'<div class="figures split">{figure(svg(drawn), caption)}</div>'
    return f"<h2>Sweep</h2>\n{pictures}" if pictures else ""


def _searches(folders: Sequence[Path]) -> str:
    """The pictures of searches for settings, which are in `figures` of their folders."""
    found = [(folder / "figures" / f"{name}.svg", caption) for folder in folders for name, caption in SEARCHES.items()]
    pictures = "".join(figure(image(path, caption), caption) for path, caption in found if path.is_file())
    return f'<h2>Search</h2>\n<div class="figures halves">{pictures}</div>' if pictures else ""


def _summaries(runs: Sequence[Run]) -> str:
    """A row a run, without columns that are empty; of several runs the best primary metric and the fewest bytes stand
    out."""
    figures = [_figures(run) for run in runs]
    columns = [column for column in _columns(runs[0].primary) if any(told[column[1]] is not None for told in figures)]
    best: dict[str, float] = {}
    if len(runs) > 1:
        pick = max if runs[0].primary.maximise else min
        best[runs[0].primary.name] = pick((a for run in runs for a in run.values[-1:]), default=0)
        best["bytes_up"] = min(run.summary["bytes_up"] for run in runs)
    body = []
    for i, (run, told) in enumerate(zip(runs, figures, strict=True)):
        line = "border-top-style:{linestyle};border-top-color:{color}".format(**look(i))
        cells = [
            f'<th scope="row"><span class="key" style="{line}"></span><span class="name">{escape(run.name)}</span></th>'
        ]
        cells.append(cell(run.rounds))
        for _, key, form in columns:
            value = told[key]
            cells.append(cell("–" if value is None else form(value), "best" if value == best.get(key, ...) else ""))
        body.append("".join(cells))
    return table(["run", "rounds", *(escape(head) for head, _, _ in columns)], body, "Numbers of each run")


def _figures(run: Run) -> dict[str, Any]:
    """A run's summary, and the metrics of `METRICS` and the primary one when they were last measured."""
    seen = {name: run.ledger.series(name)[1] for name in (run.primary.name, *METRICS)}
    return run.summary | {name: values[-1] if values else None for name, values in seen.items()}


def _columns(primary: Primary) -> list[Column]:
    """The columns of the table of runs; beside a primary metric other than accuracy, all metrics by name."""
    first: list[Column] = [(primary.words, primary.name, primary.show)]
    if primary.name == "accuracy":
        first.append(("mean of last 3", "accuracy_last3", percent))
    else:
        others = [primary_of(name) for name in METRICS if name not in ("loss", primary.name)]
        first += [(each.words, each.name, each.show) for each in others]
    return [*first, *(column for column in COLUMNS if column[1] != primary.name)]


def _measured(runs: Sequence[Run], title: str, captions: Mapping[str, str]) -> str:
    """A section of metrics by round, of those that any run has."""
    drawn = [charts(runs, "rounds", captions[m], m) for m in captions if any(r.ledger.series(m)[0] for r in runs)]
    return f'<h2>{title}</h2>\n<div class="figures halves">\n{"".join(drawn)}</div>' if drawn else ""


def _exhibits(runs: Sequence[Run]) -> str:
    """What the synthetic sets of each run look like, round after round."""
    folders = [(run, path) for run in runs for path in sorted((run.folder / "figures").glob("*/"))]
    drawn = "".join(_strips(path, run.name) for run, path in folders)
    if not drawn:
        return ""
    said = (
        "The first images that clients sent in some rounds, each in its own range from black to white, "
        "and real ones of the same classes from the test set."
    )
    return f'<h2>What clients sent</h2>\n<p class="note">{said}</p>\n<div class="figures halves">\n{drawn}</div>'


def _splits(runs: Sequence[Run]) -> str:
    """The picture of each split, once."""
    shown: dict[str, list[str]] = {}
    for run in runs:
        if (path := run.folder / "split.svg").is_file():
            shown.setdefault(image(path, "How the records are split over the clients"), []).append(run.name)
    if not shown:
        return ""
    figures = ""
    for picture, names in shown.items():
        whose = f" of {', '.join(names)}" if len(shown) > 1 else ""
        figures += figure(picture, f"What each client{whose} holds.")
    return f'<h2>Split</h2>\n<div class="figures split">{figures}</div>'


def _details(run: Run, opened: bool) -> str:
    environment = " · ".join(f"{key} {value}" for key, value in run.where.items())
    pictures = [path for path in _pictures(run.folder / "figures") if not (run.audit and path.name == "audit.svg")]
    figures = "".join(figure(image(path, path.stem), path.stem) for path in pictures)
    return f"""<details{" open" if opened else ""}>
<summary>{escape(run.name)}<span>{escape(run.rounds)} rounds</span></summary>
<div class="run">
<p class="note">{escape(environment) or "The environment was not recorded."}</p>
{f'<div class="figures">{figures}</div>' if figures else ""}
{_layers(run.ledger)}
<h3>Rounds</h3>
{_rounds(run)}
<h3>Recipe</h3>
<div class="scroll" tabindex="0"><pre>{escape(run.text)}</pre></div>
</div>
</details>
"""


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in (".svg", ".png") and path.is_file())


def _strips(folder: Path, run: str) -> str:
    """A folder of pictures as one figure, a row a picture; rounds are told by their numbers."""
    rows = ""
    for path in _pictures(folder):
        name = f"round {int(path.stem)}" if path.stem.isdecimal() else path.stem
        rows += f'<div class="strip"><span>{escape(name)}</span>{image(path, f"{folder.name}, {name}")}</div>'
    return figure(rows, f"{folder.name} of {run}") if rows else ""


def _layers(ledger: Ledger) -> str:
    """The cosine of decoded and true update of each layer."""
    body = []
    for key in dict.fromkeys(key for row in ledger.rows for key in row.metrics if key.startswith("cosine/")):
        _, values = ledger.series(key)
        seen = (values[0], sum(values) / len(values), values[-1])
        cells = "".join(cell(f"{value:.3f}") for value in seen)
        body.append(f'<th scope="row">{escape(key.removeprefix("cosine/"))}</th>{cells}')
    head = ["layer", "cosine in the first round", "mean", "in the last round"]
    return f"<h3>Layers</h3>\n{table(head, body, 'Cosine of each layer')}" if body else ""


def _rounds(run: Run) -> str:
    """The ledger in at most `BLOCKS` rows: of a long one, several rounds share a row."""
    rows, primary = run.ledger.rows, run.primary
    step = -(-len(rows) // BLOCKS) or 1
    spent = any(row.epsilon is not None for row in rows)
    body = []
    for block in (rows[i : i + step] for i in range(0, len(rows), step)):
        first, last = block[0].round, block[-1].round
        values = [row.metrics[primary.name] for row in block if primary.name in row.metrics]
        missing = _tally(reason for row in block for reason in row.missing.values())
        events = _tally(event for row in block for event in row.events)
        cells = [f'<th scope="row">{first if first == last else f"{first}–{last}"}</th>']
        cells.append(cell(primary.show(values[-1]) if values else "–"))
        if spent:
            charged = [row.epsilon for row in block if row.epsilon is not None]
            cells.append(cell(f"{charged[-1]:.4g}" if charged else "–"))
        cells += [cell(size(sum(row.bytes_up for row in block))), cell(size(sum(row.bytes_down for row in block)))]
        cells += [cell(missing, "words"), cell(events, "words")]
        body.append("".join(cells))
    head = ["round", escape(primary.words), *(["ε"] if spent else []), "bytes up", "bytes down", "missing", "events"]
    return table(head, body, "Rounds") if body else '<p class="note">No round is done yet.</p>'


def _tally(texts: Iterable[str], limit: int = 4) -> str:
    """Each different text with how often it occurs, the frequent ones first."""
    seen = Counter(text if len(text) <= 120 else text[:119] + "…" for text in texts)
    said = [text if n == 1 else f"{n} × {text}" for text, n in seen.most_common(limit)]
    rest = sum(seen.values()) - sum(n for _, n in seen.most_common(limit))
    return "; ".join([*said, f"{rest} more"] if rest else said)
