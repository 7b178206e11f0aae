"""The documentation is true: its code runs, its links lead somewhere, and what it lists is what there is."""

import dataclasses
import importlib.util
import json
import re
import shlex
import sys
import tomllib
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli import app
from fedveil.core import message
from fedveil.core.ledger import Ledger, Row
from fedveil.runs import recipe
from fedveil.runs.recipe import SplitSpec, TaskSpec

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = {
    f"{name} {part}".strip(): inner
    for name, command in get_command(app).commands.items()
    for part, inner in getattr(command, "commands", {"": command}).items()
}
OPTIONS = {name: {o for p in command.params for o in p.opts if o.startswith("-")} for name, command in COMMANDS.items()}
EVERYWHERE = {"--help", "--import"}  # options that every command has
OWN = {name: kind for name, kind in fv.METHODS.items() if kind.__module__.startswith("fedveil.")}
CODECS = {name: kind for name, kind in fv.Codec.registry.items() if kind.__module__.startswith("fedveil.")}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """What stands below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", read(page), re.DOTALL | re.MULTILINE)
    assert found, f"{name_of(page)} has no heading '{heading}'"
    return found[1]


def rows(part: str) -> dict[str, list[str]]:
    """The rows of the tables in a text by what stands in their first cell, without backquotes."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("|")]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in lines}


# ---------------------------------------------------------------------------------------------------- code


@pytest.fixture
def registries():
    """Methods, codecs and kinds that a page enters are gone afterwards."""
    kept = [(registry, dict(registry)) for registry in (fv.METHODS, fv.Codec.registry, message.KINDS)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for registry, before in kept:
        registry.clear()
        registry.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "python")], ids=name_of)
def test_the_python_on_a_page_runs(page, tmp_path, monkeypatch, registries):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = types.ModuleType(f"documented_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in fenced(page, "python"):
        if file := re.match(r"# (\w+)\.py\n", block):  # a recipe may name what is in it
            (tmp_path / f"{file[1]}.py").write_text(block)
            monkeypatch.delitem(sys.modules, file[1], raising=False)
        exec(compile(block, name_of(page), "exec"), module.__dict__)
    for block in fenced(page, "toml"):  # it may name what the page defines
        (tmp_path / "own.toml").write_text(block)
        assert recipe.read(str(tmp_path / "own.toml")).rounds


def test_what_a_page_says_its_code_prints_is_what_it_prints(tmp_path, monkeypatch, registries, capsys):
    pages = ("how-to/drop-outs", "how-to/answer-late", "explanation/hostile-messages")
    for page in (DOCS / f"{name}.md" for name in pages):
        (block,) = fenced(page, "python")
        exec(compile(block, name_of(page), "exec"), {"__name__": "documented"})
        printed = capsys.readouterr().out
        assert "".join(f"    {line}\n" for line in printed.splitlines()) in read(page)


def test_the_toml_on_a_page_is_a_recipe(tmp_path):
    found = [block for page in PAGES if not fenced(page, "python") for block in fenced(page, "toml")]
    for block in found:
        (tmp_path / "own.toml").write_text(block)
        assert recipe.read(str(tmp_path / "own.toml")).rounds


# ---------------------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    outside = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    for target, fragment in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", read(page)):
        if target.startswith(("http:", "https:")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {target}"
        if fragment:
            assert fragment in anchors(path), f"{name_of(page)} links to #{fragment} of {name_of(path)}"


def test_every_page_can_be_reached_from_the_first_one():
    seen, ahead = set(), [PAGES[0]]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        links = [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+\.md)", read(page))]
        ahead += [link for link in links if link not in seen and link.exists()]
    assert seen >= set(PAGES) - {DOCS / "README.md"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_no_place_on_somebodys_machine(page):
    assert not re.search(r"(?:^|[\s\"'`(=])/[a-z]+/", read(page))


# ---------------------------------------------------------------------------------------------------- commands


def commands(page: Path) -> list[list[str]]:
    """Every `fedveil …` in code on a page, in words."""
    outside = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in outside.splitlines() if line.startswith("    ")] + re.findall(r"`([^`\n]+)`", outside)
    found = []
    for line in lines:
        line = line.strip().removeprefix("- ").removeprefix(".venv/bin/")
        if re.match(r"fedveil( |$)", line):
            found.append(shlex.split(line.replace("\\|", "|"), comments=True)[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_on_a_page_exists(page):
    for words in commands(page):
        if not words or words[0].startswith("--") or words[0].isupper():
            continue
        name, *rest = words
        if rest and f"{name} {rest[0]}" in COMMANDS:
            name, *rest = f"{name} {rest[0]}", *rest[1:]
        assert name in COMMANDS, f"there is no command {name}"
        assert {word for word in rest if word.startswith("-")} - EVERYWHERE <= OPTIONS[name], words
        changes = [rest[i + 1] for i, word in enumerate(rest) if word == "--set" and "=" in rest[i + 1]]
        built_in = [word for word in rest if word in recipe.names()]
        meant = [word for word in rest if re.fullmatch(r"(digits|mnist|fashion|cifar10|shakespeare)/[a-z0-9-]+", word)]
        assert built_in == meant
        for source in built_in if "VALUE" not in " ".join(changes) and "--import" not in rest else []:
            recipe.read(source, changes)


def test_every_option_that_stands_alone_is_one_of_some_command():
    known = {option for options in OPTIONS.values() for option in options} | {"--version", *EVERYWHERE}
    edge = ROOT / "src" / "fedveil" / "methods" / "baffle" / "edge" / "__main__.py"  # the client without PyTorch
    known |= set(re.findall(r'"(--[a-z-]+)"', read(edge)))
    for page in PAGES:
        for option in re.findall(r"`(--[a-z-]+)", read(page)):
            assert option in known, f"{name_of(page)} names {option}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_command_with_every_option(name):
    page = DOCS / "reference" / "cli.md"
    (heading,) = re.findall(rf"^## (fedveil {name}\b.*)$", read(page), re.MULTILINE)
    listed = re.findall(r"^\| `(-[a-z-]+)", section(page, heading), re.MULTILINE)
    assert set(listed) == OPTIONS[name] - {"--help"}


def test_every_make_target_is_in_the_reference():
    targets = set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))
    listed = rows(section(DOCS / "reference" / "cli.md", "make"))
    assert {f"make {target}" for target in targets} == set(listed) - {"target", "---"}


# ---------------------------------------------------------------------------------------------------- recipe

RECIPE = DOCS / "reference" / "recipe.md"


def keys(kind: type, prefix: str) -> dict[str, object]:
    """What a dataclass can be given in a recipe, with its defaults."""
    blank = kind()
    return {f"{prefix}{field.name}": getattr(blank, field.name) for field in dataclasses.fields(kind)}


def hold(listed: dict[str, list[str]], expected: dict[str, object]) -> None:
    """A table has exactly these keys, with these defaults."""
    assert {key for key in listed if key not in ("key", "---")} == set(expected)
    for key, default in expected.items():
        said = listed[key][0]
        if isinstance(default, fv.Codec):
            assert said == f'codec "{default.name}"', key
        elif dataclasses.is_dataclass(default):
            assert said == "a table", key
        elif default is None:
            assert said == "none", key
        else:
            default = list(default) if isinstance(default, tuple) else default
            assert tomllib.loads(f"v = {said}")["v"] == default, f"the default of {key} is {default}, not {said}"


SECTIONS = {
    "The task": (TaskSpec, "task."),
    "The split": (SplitSpec, "split."),
    "The cohort": (fv.CohortSampler, "cohort."),
    "Local training": (fv.LocalTraining, "method.local."),
    "Local steps": (fv.LocalSteps, "method.local."),
    "The server's optimizer": (fv.ServerOptimizer, "method.server."),
    "The aggregator": (fv.Aggregator, "method.aggregator."),
    "The secure sum": (fv.SecureSum, "method.secure."),
    "Differential privacy": (fv.DpSgd, "method.privacy."),
    "User-level privacy": (fv.UserLevel, "method.user_privacy."),
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_has_every_key_of_a_recipe_with_its_default(heading):
    hold(rows(section(RECIPE, heading)), keys(*SECTIONS[heading]))


def test_the_reference_has_every_key_of_the_run():
    plain = {key: value for key, value in keys(fv.Recipe, "").items() if not dataclasses.is_dataclass(value)}
    hold(rows(section(RECIPE, "The run")), plain)


@pytest.mark.parametrize("name", OWN)
def test_the_reference_has_every_key_of_a_method(name):
    kind, base = OWN[name], {}
    if issubclass(kind, fv.Averaging) and kind is not fv.FedAvg:
        base = keys(fv.FedAvg, "method.")
        assert "The keys of `fedavg`" in section(RECIPE, name)
    own = {k: v for k, v in keys(kind, "method.").items() if k not in base}
    hold(rows(section(RECIPE, name)), own)
    for key, default in keys(kind, "method.").items():
        if key in base and default != base[key]:
            said = f'`{key}.name` "{default.name}" by default' if isinstance(default, fv.Codec) else f"`{key}` is "
            assert said in section(RECIPE, name)


@pytest.mark.parametrize("name", CODECS)
def test_the_reference_has_every_key_of_a_codec(name):
    heading = f"{name} (codec)" if name in OWN else name
    hold(rows(section(RECIPE, heading)), keys(CODECS[name], "method.up."))


# ---------------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(("heading", "names"), [("Methods", OWN), ("Codecs", CODECS)])
def test_the_threat_model_has_a_row_for_each_with_a_kind(heading, names):
    listed = rows(section(DOCS / "explanation" / "threat-model.md", heading))
    assert set(listed) - {"method", "codec", "---"} == set(names)
    for name in names:
        assert re.match(r"(proved|measured|heuristic)\b", listed[name][-1]), f"{name} has no kind"


def test_the_first_page_names_every_method_and_codec():
    for name in [*OWN, *CODECS]:
        assert f"`{name}`" in section(PAGES[0], "Methods and codecs")


def test_the_reference_has_every_kind_of_record_with_its_fields():
    listed = rows(section(DOCS / "reference" / "messages.md", "Kinds"))
    own = [kind for kind in message.KINDS.values() if kind.__module__.startswith("fedveil.")]
    kinds = {kind.__name__: kind for kind in own if "+" not in kind.__name__}  # others are derived from these
    assert set(listed) - {"record", "---"} == set(kinds)
    for name, kind in kinds.items():
        assert set(kind.__struct_fields__) <= set(re.findall(r"`(\w+)`", listed[name][-1])), name


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"`fv\.(\w+)`", read(DOCS / "reference" / "parts.md")))
    assert listed >= set(fv.__all__) - {"__version__"}


def test_the_reference_has_the_dtypes_in_order():
    listed = rows(read(DOCS / "reference" / "messages.md"))["dtype"]
    assert listed == [str(dtype).removeprefix("torch.") for dtype in message.DTYPES]


def test_the_reference_has_every_field_of_the_ledger():
    page = DOCS / "reference" / "ledger.md"
    assert set(rows(section(page, "A row"))) - {"field", "---"} == set(Row.__struct_fields__)
    assert set(Ledger().summary("")) <= set(re.findall(r"`(\w+)`", section(page, "A summary")))


def test_the_page_on_hostile_messages_has_every_reason():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    reasons = set(re.findall(r"Refused\(\s*(?:rf?|f)?\"([a-z ]+)\"", sources))
    reasons |= {f"wrong {part}" for part in ("run", "round", "client", "serial")}
    assert len(reasons) > 15
    listed = set(re.findall(r"`([a-z ]+)`", section(DOCS / "explanation" / "hostile-messages.md", "What is refused")))
    assert reasons <= listed


def test_the_reference_has_every_file_of_a_run_folder(tmp_path):
    folder = tmp_path / "run"
    options = ["--set", "rounds=2", "--set", "method.up.steps=2", "--set", "method.local.epochs=1", "--device", "cpu"]
    assert CliRunner().invoke(app, ["run", "digits/tofu", *options, "--out", str(folder)]).exit_code == 0
    page = DOCS / "reference" / "run-folder.md"
    listed = set(rows(section(page, "Run folder")))
    names = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    assert {re.sub(r"\d{8}", "00000020", name) for name in names} <= listed
    environment = json.loads((folder / "environment.json").read_text())
    assert set(environment) <= set(re.findall(r"`(\w+)`", section(page, "environment.json")))
    metrics = Ledger.read(folder / "ledger.jsonl").rows[0].metrics
    known = set(rows(section(DOCS / "reference" / "ledger.md", "Metrics")))
    assert {re.sub(r"/.*", "/LAYER", name) for name in metrics} <= known


# ---------------------------------------------------------------------------------------------------- results


def script(name):
    """A script of results/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures():
    return script("figures")


@pytest.fixture(scope="module")
def ablations():
    return script("ablations")


def test_the_page_of_ablations_is_that_of_their_results(ablations):
    """If not: python results/ablations.py --write"""
    assert ablations.page() == read(ROOT / "results" / "ablations" / "README.md")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "results" / "ablations").glob("*.toml")))
def test_every_variant_of_an_ablation_is_a_recipe_and_has_all_its_seeds(name, ablations):
    ablation = ablations.Ablation.read(name)
    for variant in ablation.variants:
        assert ablation.plan(variant, 1).seed == 1
    told = ablation.results
    seeds = {str(seed) for seed in ablation.seeds}
    assert len(seeds) >= 3 or ablation.choose  # a search may have fewer: what it chooses is measured with others
    assert {variant: seeds <= set(runs) for variant, runs in told["runs"].items()} == dict.fromkeys(
        ablation.variants, True
    )
    assert told["commit"]


def test_the_table_of_late_answers_is_that_of_its_results():
    """If not: paste what python results/late.py prints."""
    told = json.loads((ROOT / "results" / "late.json").read_text(encoding="utf-8"))
    page = read(DOCS / "how-to" / "answer-late.md")
    assert script("late").table(told["figures"]) in page
    assert f"over {told['seconds']:g} simulated seconds" in page


@pytest.mark.parametrize("page", PAGES[:2], ids=name_of)
def test_tables_of_results_are_those_of_the_ledgers(page, figures):
    """If not: python results/figures.py --write"""
    assert figures.filled(read(page)) == read(page)


def test_every_result_is_in_a_table_and_names_nobodys_folders(figures):
    found = {path.parent.relative_to(ROOT / "results").as_posix() for path in ROOT.glob("results/*/*/ledger.jsonl")}
    assert {name.removeprefix("digits/") for name in found if name.startswith("digits/")} == {
        *figures.DIGITS,
        *figures.CLASSES,
        *figures.SUMMED,
        *figures.SURROGATES,
    }
    for name in found:
        text = (ROOT / "results" / name / "environment.json").read_text(encoding="utf-8")
        assert "data_dir" not in text
        assert not re.search(r"[\s\"'=]/[a-z]+/", text)


@pytest.mark.parametrize("name", [name for name in recipe.names() if (ROOT / "results" / name).is_dir()])
def test_a_result_that_has_a_recipes_name_is_of_that_recipe(name):
    """If not: run the recipe again, with the command in results/README.md."""
    migrated = ROOT / "results" / name / "recipe.migrated.toml"
    kept = recipe.read(str(migrated if migrated.is_file() else migrated.with_name("recipe.toml")))
    assert kept == recipe.read(name, [f"rounds={kept.rounds}"])


def test_benchmarks_are_shown_once_there_are_some(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "HERE", tmp_path)
    assert "python -m benchmarks -o" in figures.bench()
    one = {"command": "python -m benchmarks digits", "gpu": None, "torch": "2.13.0+cpu"}
    (tmp_path / "bench.json").write_text(json.dumps(one | {"figures": {"digits": {"fedveil / loop": 0.41234}}}))
    assert "| digits | fedveil / loop | 0.4123 |" in figures.bench()


def test_rivals_are_shown_once_there_are_some(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "HERE", tmp_path)
    assert "python -m benchmarks.rivals -o" in figures.rivals()
    asked = {"clients": 1000, "cohort": 50}
    found = {"weights": 24195, "milliseconds": 12.345, "least": 11, "most": 14, "milliseconds a client": 0.2469}
    found |= {"/ plain loop": 0.25, "MiB": {"host": 300.4}, "accuracy": 0.5}
    players = {"fedveil": asked | found, "pfl-research": asked | {"failed": "ImportError: no scipy"}}
    one = {"command": "python -m benchmarks.rivals small", "gpu": None, "device": "cpu", "threads": 2}
    one |= {"torch": "2.13.0+cpu", "opponents": {"pfl": "0.6.0"}, "commit": "abc1234"}
    one |= {"parts": {"small": {"what": "a small CNN", "players": players}}}
    (tmp_path / "rivals-cpu.json").write_text(json.dumps(one))
    shown = figures.rivals()
    assert "(CPU, 2 threads; PyTorch 2.13.0, pfl 0.6.0, commit abc1234):" in shown
    assert "**small**: a small CNN, 24,195 weights" in shown
    assert "| fedveil | 50 of 1,000 | 12.35 | 11 to 14 | 0.247 | 0.25 |  |  | 300 | 50.00 |" in shown
    assert "| pfl-research | 50 of 1,000 | failed |" in shown
