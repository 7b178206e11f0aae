"""A deployment as processes of this machine: SuperLink, nodes and a run, over TLS, with nodes known by their keys.

Everything listens on 127.0.0.1 on free ports, keeps its files in a private FLWR_HOME, and ends with the rehearsal. That
FLWR_HOME is also the mark by which every descendant is found again: Flower's own processes leave their parent's group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedveil.core.ledger import Row
from fedveil.data.files import data_directory
from fedveil.deploy import keys
from fedveil.deploy.deployment import finished, held, lock
from fedveil.deploy.scaffold import ABSENT
from fedveil.engines.claims import Roster, Seat
from fedveil.privacy.account import SPENT
from fedveil.runs.recipe import Recipe

NAME = "rehearsal"  # of the connection in Flower's configuration
START = 90.0  # seconds for a process to listen or a command to be done
GRACE = 5.0  # seconds to end in peace
TAIL = 15  # lines of a log that tell what went wrong
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "NO_PROXY": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",  # a process a message and node: threads would only be in each other's way
    "PYTHONUNBUFFERED": "1",
}


class Failed(RuntimeError):
    """A process gave up: what happened in a sentence, and the end of its log."""

    def __init__(self, sentence: str, log: Path) -> None:
        super().__init__(f"{sentence}; the end of {log} is above")
        self.lines = tail(log)


def tail(log: Path) -> list[str]:
    """The last lines of a log, without colours and without what went well."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace") if log.exists() else "")
    return [line.rstrip() for line in text.splitlines() if line.strip() and "INFO" not in line][-TAIL:]


class Stage:
    """The processes of one rehearsal of the deployment in `folder`. Leaving the block ends every one of them."""

    def __init__(self, folder: Path) -> None:
        self.scripts = Path(sysconfig.get_path("scripts"))
        if not (self.scripts / "flower-superlink").exists():
            raise ImportError(ABSENT)
        self.folder = folder.absolute()
        self.certificates, self.logs = self.folder / "certificates", self.folder / "logs"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.superlink: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self.roster = Roster()

    def __enter__(self) -> Stage:
        self._lock = lock(self.folder)
        self.home = Path(tempfile.mkdtemp(prefix="fedveil-"))
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        with _undisturbed():
            self.close()

    # ------------------------------------------------------------------------------------------------ what is started

    def start_superlink(self) -> None:
        """Start the server's process and wait until it listens. Nodes call its `port`, or a proxy at `gate`."""
        self.port = self.gate = free_port()
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\n'
            f"root-certificates = {json.dumps(str(self.certificates / 'ca.crt'))}\n"
        )
        self.superlink = self._start(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", self.certificates / "ca.crt"),
            *("--ssl-certfile", self.certificates / "server.crt"),
            *("--ssl-keyfile", self.certificates / "server.key"),
            *("--host", "127.0.0.1", "--port", self.port),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        until = time.monotonic() + START
        while not listening(self.port):
            if self.superlink.poll() is not None or time.monotonic() > until:
                raise Failed("the SuperLink did not start", self.logs / "superlink.log")
            time.sleep(0.1)

    def register(self, *clients: int) -> None:
        """Tell the SuperLink the nodes' public keys, and the run's server which of them is which client."""
        paths = {k: self.folder / "keys" / f"node-{k}.pub" for k in clients}
        words = "supernode", "register"
        running = {k: self._flwr(f"register-{k}", *words, path, NAME, "--format", "json") for k, path in paths.items()}
        for k, process in running.items():
            log = self.logs / f"register-{k}.log"
            if self._wait(process) or not (answer := answered(log.read_text(errors="replace"))).get("success"):
                raise Failed(f"the SuperLink did not register {paths[k].name}", log)
            self.roster.clients[k] = Seat(answer["node-id"], keys.fingerprint(paths[k]))
        self.roster.write(self.home / "roster.json")

    def start_node(self, client: int, key: Path | None = None, authority: Path | None = None) -> None:
        """Start the process of one client's machine; `key` and `authority` are by default the right ones."""
        self.nodes[client] = self._start(
            f"node-{client}",
            "flower-supernode",
            *("--root-certificates", authority or self.certificates / "ca.crt"),
            *("--superlink", f"127.0.0.1:{self.gate}"),
            *("--auth-supernode-private-key", key or self.folder / "keys" / f"node-{client}"),
            *("--host", "127.0.0.1", "--port", free_port()),
            *("--node-config", self._node_config(client)),
            home=self.home / f"node-{client}",
        )

    def _node_config(self, client: int) -> str:
        known = f'identity="keys/identity-{client}" identities="keys"'
        return f'partition-id={client} memory="clients/{client}" {known}'

    def start_run(self, **config: int | float | str) -> subprocess.Popen[bytes]:
        """Start the app; the process that is returned ends when the run has."""
        config = {"roster": str(self.home / "roster.json"), **config}
        chosen = [option for key, value in config.items() for option in ("--run-config", f"{key}={value!r}")]
        return self._flwr("run", "run", self.folder, NAME, "--stream", *chosen)

    def _flwr(self, log: str, *words: object) -> subprocess.Popen[bytes]:
        return self._start(log, "flwr", *words)

    def _start(self, log: str, program: str, *words: object, home: Path | None = None) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{log}.log", "wb") as file:
            process = subprocess.Popen(
                [str(self.scripts / program), *map(str, words)],
                cwd=self.folder,
                env=self._environment() | {"FLWR_HOME": str(home or self.home)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us alone
                preexec_fn=_end_with_parent(),
            )
        self._started.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        """This process's own, with nothing in it that depends on the folder one is in."""
        modules = [str(Path(part).absolute()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        own = {"FEDVEIL_DATA": str(data_directory(None).absolute()), "PYTHONPATH": os.pathsep.join(modules)}
        path = os.pathsep.join([str(self.scripts), os.environ.get("PATH", os.defpath)])
        return {**os.environ, **QUIET, **own, "PATH": path}

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(START)
        except subprocess.TimeoutExpired:
            return -1

    # ------------------------------------------------------------------------------------------------ how it goes

    def check(self) -> None:
        """Raise `Failed` if the server is gone or a node has given up. A node that was killed is a fault that the run
        must survive, and does."""
        if self.superlink and self.superlink.poll() is not None:
            raise Failed(f"the SuperLink ended with code {self.superlink.returncode}", self.logs / "superlink.log")
        for client, process in self.nodes.items():
            if (process.poll() or 0) > 0:
                raise Failed(f"node {client} ended with code {process.returncode}", self.logs / f"node-{client}.log")

    def words(self) -> list[str]:
        """What the server's app has said so far, but for its rounds, which are in the ledger."""
        lines = (self.logs / "run.log").read_text(errors="replace").splitlines()
        said = [line.removeprefix("fedveil: ") for line in lines if line.startswith("fedveil: ")]
        return [sentence for sentence in said if not sentence.startswith("round ")]

    def pids(self) -> list[int]:
        """Every process that the rehearsal started, or that one of those started, and that still runs."""
        own = {process.pid for process in self._started if process.poll() is None}
        mark = f"FLWR_HOME={self.home}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
                if mark in (entry / "environ").read_bytes():
                    own.add(int(entry.name))
        return sorted(own)

    def close(self) -> None:
        """End every process, in peace if it can be."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + GRACE
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while self.pids() and time.monotonic() < until:
                time.sleep(0.05)
        for process in self._started:
            process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        self._lock.close()


def answered(text: str) -> dict[str, Any]:
    """What `flwr --format json` said; nothing where it said something else."""
    try:
        found: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return found
    except ValueError:
        return {}


def rehearse(
    folder: Path,
    plan: Recipe,
    clients: Sequence[int],
    observer: Callable[[Row], object],
    say: Callable[[str], object],
) -> str:
    """Run the deployment in `folder` to the end of `plan`, with these of its clients; why it ended.

    Raises `Failed` with the end of the log of the process that gave up.
    """
    told = len(held(folder).rows)
    with Stage(folder) as stage:
        say("starting the SuperLink")
        stage.start_superlink()
        say(f"registering and starting the nodes, {len(clients)} of them")
        stage.register(*clients)
        for client in clients:
            stage.start_node(client)
        run, gone = stage.start_run(rounds=plan.rounds, nodes=len(clients)), set[int]()
        say("the run begins as soon as the nodes are there")
        heard = 0
        while True:
            over = run.poll() is not None
            words = stage.words()
            for sentence in words[heard:]:
                say(sentence)
            heard = len(words)
            for row in held(folder).rows[told:]:
                observer(row)
                told += 1
            stage.check()
            for client, process in stage.nodes.items():
                if process.poll() is not None and client not in gone:
                    gone.add(client)
                    say(f"node {client} was killed; the run goes on without it")
            if over:
                break
            time.sleep(0.2)
        if reason := "budget" if any(SPENT in sentence for sentence in words) else finished(held(folder), plan):
            return reason
        raise Failed("the run ended early", stage.logs / "run.log")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end_with_parent() -> Callable[[], Any] | None:
    """Linux only: a process that dies without a word takes its children with it."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No second Ctrl-C while processes are being ended; that takes seconds at most."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
