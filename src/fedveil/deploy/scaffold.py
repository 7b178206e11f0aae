"""A folder that holds a whole deployment: a Flower app, its recipe, and certificates and keys for a rehearsal."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from fedveil import data
from fedveil.core.setup import init_state
from fedveil.deploy.carried import Carried, carry
from fedveil.runs.own import by_party
from fedveil.runs.plugins import is_reference
from fedveil.runs.recipe import Recipe, SplitSpec

ABSENT = "Flower is not installed; run: pip install 'fedveil[flower]'"
COPIED = ("README.md", "pyproject.toml", "app/__init__.py", "app/server.py", "app/client.py", "app/data.py")
IGNORED = ("keys/", "certificates/", "clients/", "run/", "logs/", ".lock", "__pycache__/")
HEAD = """\
# Everybody has this file: the server and every client. Public are thus all of its keys, among them
# split.clients, how many clients there are, and split.max_records, the most records that one of them may hold.

"""


def init(folder: Path, plan: Recipe, clients: int) -> list[str]:
    """Write a deployment of `plan` with `clients` clients to `folder`, which must be new or empty.

    Return a sentence for each file of one's own that was copied, and for each package that every party must install.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose a new folder")
    if not importlib.util.find_spec("flwr"):
        raise ImportError(ABSENT)
    from fedveil.deploy import proxy

    plan, loaded = fitted(plan, clients)
    inside, carried = carry(plan)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(beside, inside, carried, proxy.longest(plan, loaded))
        beside.chmod(0o755)
        beside.rename(folder)  # all or nothing
    except BaseException:
        shutil.rmtree(beside)
        raise
    return carried.sentences


def fitted(plan: Recipe, clients: int) -> tuple[Recipe, data.Data]:
    """The recipe for so many clients, with the public bound on what one holds as it is in the rehearsal's data, and
    those data."""
    if clients < 1:
        raise ValueError(f"a deployment needs at least one client, not {clients}")
    name = plan.task.data
    if name not in data.SETS and not is_reference(name):
        name = str(Path(name).expanduser().absolute())
    plan = dataclasses.replace(
        plan,
        task=dataclasses.replace(plan.task, data=name),
        split=dataclasses.replace(plan.split, clients=clients),
        cohort=dataclasses.replace(plan.cohort, size=min(plan.cohort.size, clients)),
    )
    if by_party(name):  # clients' records are elsewhere
        public = SplitSpec("natural", clients, max_records=plan.split.max_records, held=plan.split.held)
        plan = dataclasses.replace(plan, split=public)
        loaded = plan.part(None)
        init_state(plan.party(loaded, None), plan.method, plan.cohort)
        return plan, loaded
    loaded = plan.load()
    task = plan.on(loaded)
    if len(task.clients) < clients:
        raise ValueError(f"{plan.task.data} has {len(task.clients)} natural clients, not {clients}; use fewer")
    plan = dataclasses.replace(
        plan,
        split=dataclasses.replace(
            plan.split, max_records=plan.split.max_records or task.largest, held=_listed(task.clients.held)
        ),
    )
    init_state(plan.party(loaded, None), plan.method, plan.cohort)  # says what does not suit
    return plan, loaded


def _listed(held: tuple[tuple[int, ...], ...] | None) -> list[list[int]] | None:
    return None if held is None else [list(each) for each in held]


def _write(folder: Path, plan: Recipe, carried: Carried, answer: int) -> None:
    from fedveil.deploy import keys, proxy

    source = resources.files("fedveil") / "deploy" / "template"
    for name in ("app", "certificates", "keys"):
        (folder / name).mkdir(mode=0o700 if name == "keys" else 0o755)
    for name in COPIED:
        (folder / name).write_bytes((source / name).read_bytes())
    for name, file in carried.files.items():
        (folder / "app" / name).write_bytes(file.read_bytes())
    if carried.packages:
        project = folder / "pyproject.toml"
        needed = json.dumps(["fedveil[flower]", *carried.packages])
        project.write_text(project.read_text().replace('["fedveil[flower]"]', needed))
    (folder / ".gitignore").write_text("".join(f"{name}\n" for name in IGNORED))
    (folder / "app" / "recipe.toml").write_text(HEAD + plan.toml(), encoding="utf-8")
    (folder / "nginx.conf").write_text(proxy.nginx(answer), encoding="utf-8")
    keys.certificates(folder / "certificates")
    for k in range(plan.split.clients):
        keys.node_key(folder / "keys" / f"node-{k}")
        keys.identity(folder / "keys" / f"identity-{k}")
