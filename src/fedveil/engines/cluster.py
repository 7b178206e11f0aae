"""Ray for as long as a run lasts: one on this machine of which nothing is left afterwards, or a cluster that runs
already."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported

ENDING = 60.0  # seconds for processes and threads to end; a client that is still at work is waited for


note = logging.getLogger("fedveil").info


def load(who: str, extra: str) -> Any:
    """Import Ray, or say how to install it."""
    try:
        import ray
    except ImportError:
        raise ImportError(f"{who} needs Ray; run: pip install 'fedveil[{extra}]'") from None
    return ray


def level(debug: bool) -> int:
    """What Flower and Ray log."""
    return logging.INFO if debug else logging.CRITICAL


@contextmanager
def connected(
    address: str | None, cpus: int, *, debug: bool, tell: Callable[[str], object], **own: Any
) -> Iterator[None]:
    """Connect this process to Ray; every process that is started here ends with the block.

    address: HOST:PORT of a cluster that runs already; None starts one on this machine, on loopback
    cpus:    how many processes a cluster of one's own runs side by side
    debug:   let Ray log
    own:     further arguments of `ray.init` for a cluster of one's own
    """
    import ray
    from ray._private import ray_constants

    with _home() as (home, path):
        own |= {"num_cpus": cpus, "_temp_dir": home, "_node_ip_address": "127.0.0.1"}
        tell("starting Ray" if address is None else f"connecting to Ray at {address}")
        # Ray turns 127.0.0.1 into an address that others reach, except where, as on a Mac, it is for one machine only
        ray_constants.ENABLE_RAY_CLUSTER = address is not None and _beyond_loopback(address)
        ray.init(
            address=address or "local",
            include_dashboard=False,
            log_to_driver=debug,
            logging_level=level(debug),
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            **({} if address else own),
        )
        try:
            yield
        finally:
            ray.shutdown()


def _beyond_loopback(address: str) -> bool:
    """Whether the Ray at HOST:PORT serves other machines too. Raises ConnectionError where there is none: Ray itself
    would look for it for minutes."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the Ray address is '{address}'; it is HOST:PORT, as 'ray start --head' prints it")
    if not _listens(host, int(port)):
        raise ConnectionError(
            f"there is no Ray at {address}; start one with 'ray start --head', or leave the address out"
        )
    return not host.startswith(("127.", "localhost")) or _listens(get_node_ip_address(), int(port))


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _home() -> Iterator[tuple[str, str]]:
    """A folder and an environment for Flower's and Ray's processes, and a warden that ends them and removes the folder
    when this process is done with them or killed. Yields the folder and the import path."""
    home, path = tempfile.mkdtemp(prefix="fv-"), os.pathsep.join(p for p in sys.path if p)
    mine = {"FLWR_HOME": home, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    before = {name: os.environ.get(name) for name in mine}
    program = [sys.executable, "-S", str(Path(__file__).with_name("warden.py")), home, str(os.getpid())]
    warden = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
    os.environ.update(mine)
    try:
        yield home, path
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        warden.communicate(timeout=ENDING)
