"""The operator's commands for who takes part: add a client, remove one, revoke a key.

With a SuperLink they register and unregister keys there, through Flower's own command line, and keep the roster by
which the run's server knows which key is which client. Without one they change the keys of the rehearsal, which
registers them whenever it starts.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from fedveil.deploy import deployment, keys, rehearse
from fedveil.deploy.scaffold import ABSENT
from fedveil.engines.claims import Roster, Seat

FILE = "roster.json"


def add(folder: Path, client: int, key: Path | None = None, superlink: str | None = None) -> Seat:
    """Bind `client` to a public key that is new to the SuperLink; in a rehearsal, to a new key."""
    clients = deployment.planned(folder)[0].split.clients
    if not 0 <= client < clients:
        told = f"there is no client {client}: split.clients is {clients} in {folder / 'app' / 'recipe.toml'}"
        raise ValueError(f"{told}; raise it first, and begin a new run with another 'out'")
    if (key is None) != (superlink is None):
        raise ValueError("a client is added with --key and --superlink; without both, the rehearsal makes its own key")
    with deployment.lock(folder):
        if key is None or superlink is None:
            return _rehearsed(folder, client)
        roster, mark = _read(folder), keys.fingerprint(key)
        whose = next((k for k, seat in roster.clients.items() if seat.key == mark), None)
        if mark in roster.revoked:
            raise ValueError(f"{key} was revoked; make a new key with: ssh-keygen -t ecdsa -b 384")
        if client in roster.clients:
            raise ValueError(f"client {client} has a key; revoke it first with 'fedveil deploy revoke'")
        if whose is not None:
            raise ValueError(f"{key} is the key of client {whose}; a client needs one of its own")
        seat = Seat(_flwr("register", str(key), superlink), mark)
        roster.clients[client] = seat
        roster.write(folder / FILE)
        return seat


def remove(folder: Path, client: int, superlink: str | None = None, revoke: bool = False) -> Seat:
    """Free the number of `client` and unregister its key; with `revoke`, never take this key again."""
    deployment.planned(folder)  # says that it is no deployment
    with deployment.lock(folder):
        if superlink is None:
            return _unrehearsed(folder, client, revoke)
        roster = _read(folder)
        if not (seat := roster.clients.pop(client, None)):
            raise ValueError(f"client {client} has no key in {folder / FILE}; add one with 'fedveil deploy add'")
        if revoke:
            roster.revoked.append(seat.key)
        roster.write(folder / FILE)  # first: from now on the run's server does not ask it, whatever comes next
        try:
            _flwr("unregister", str(seat.node), superlink)
        except ValueError as error:
            again = f"flwr supernode unregister {seat.node} {superlink}"
            raise ValueError(f"client {client} is asked nothing any more, but {error}; try: {again}") from None
        return seat


def _read(folder: Path) -> Roster:
    return Roster.read(folder / FILE) if (folder / FILE).exists() else Roster()


def _flwr(verb: str, what: str, superlink: str) -> int:
    """Run `flwr supernode VERB`; the node's id. Raises ValueError with what Flower says."""
    program = Path(sysconfig.get_path("scripts")) / "flwr"
    if not program.exists():
        raise ImportError(ABSENT)
    words = [str(program), "supernode", verb, what, superlink, "--format", "json"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={**rehearse.QUIET, **os.environ},
        stdin=subprocess.DEVNULL,
        timeout=rehearse.START,
    )
    answer = rehearse.answered(done.stdout)  # Flower's exit code is 0 also where it refused
    if answer.get("success"):
        return int(answer["node-id"])
    told = str(answer.get("error-message") or done.stderr or done.stdout or f"it ended with code {done.returncode}")
    why = " ".join(told.strip().split("\n\n")[-1].split()).rstrip(".")
    fix = "; it takes a key only once, so make a new one" if "already in use" in why else ""
    raise ValueError(f"the SuperLink '{superlink}' did not {verb} {what}: {why}{fix}")


def _rehearsed(folder: Path, client: int) -> Seat:
    node, identity = (folder / "keys" / f"{name}-{client}" for name in ("node", "identity"))
    if node.exists():
        raise ValueError(f"client {client} has a key; revoke it first with 'fedveil deploy revoke {folder} {client}'")
    keys.node_key(node)
    if not identity.exists():
        keys.identity(identity)
    return Seat(0, keys.fingerprint(node.with_name(f"{node.name}.pub")))


def _unrehearsed(folder: Path, client: int, revoke: bool) -> Seat:
    path = folder / "keys" / f"node-{client}.pub"
    if not path.exists():
        raise ValueError(f"client {client} has no key; add one with 'fedveil deploy add {folder} {client}'")
    seat = Seat(0, keys.fingerprint(path))
    for name in ("node",) if revoke else ("node", "identity"):
        for end in ("", ".pub"):
            (folder / "keys" / f"{name}-{client}{end}").unlink(missing_ok=True)
    return seat
