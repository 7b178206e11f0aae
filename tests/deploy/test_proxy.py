"""The nginx in front of a SuperLink: what its configuration lets pass, and a run through the real program."""

import contextlib
import getpass
import http.client
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli import app
from fedveil.core import message
from fedveil.deploy import deployment, proxy, scaffold
from fedveil.engines import LocalEngine
from fedveil.runs import recipe

pytest.importorskip("flwr")

from fedveil.deploy import rehearse

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
LONG = 240.0  # seconds after which a test gives up waiting


def written(folder, source="digits/fedavg", *changes, clients=2):
    scaffold.init(folder, recipe.read(source, changes), clients)
    return folder


def limit(folder):
    """The bytes that the configuration lets pass."""
    return 1024 * int(re.search(r"client_max_body_size (\d+)k;", (folder / "nginx.conf").read_text())[1])


def test_the_limit_follows_from_the_recipe(tmp_path):
    plain = limit(written(tmp_path / "plain"))
    halved = limit(written(tmp_path / "halved", "digits/fedavg-half"))
    masked = limit(written(tmp_path / "masked", "digits/fedavg-secure", clients=4))
    d = recipe.read("digits/fedavg").build().layout.size
    assert plain - 4 * d == pytest.approx(proxy.SLACK, abs=3000)
    assert halved - 2 * d == pytest.approx(proxy.SLACK, abs=3000)
    assert masked - 8 * d == pytest.approx(proxy.SLACK, abs=3000)  # a masked vector takes eight bytes a weight here


def test_a_client_that_holds_every_class_sends_the_most(tmp_path):
    """The server does not know who holds what, so the limit is for all classes."""
    plan, loaded = scaffold.fitted(recipe.read("digits/fedlap"), 5)
    one = (loaded.y == loaded.y[0]).nonzero()[:, 0]
    alike = loaded.__class__(**{**vars(loaded), "x": loaded.x[one], "y": loaded.y[one], "groups": None})
    assert proxy.longest(plan, alike) == proxy.longest(plan, loaded)
    points = plan.method.images * loaded.classes
    assert proxy.longest(plan, loaded) > 4 * points * loaded.x[0].numel()


def test_no_answer_of_a_run_is_longer_than_the_limit_is_for(monkeypatch):
    sent, frame = [], message.frame
    for name in ("digits/fedavg-secure", "digits/fedsynth-8bit", "digits/fedlap", "digits/scaffold"):
        plan, loaded = scaffold.fitted(recipe.read(name, ["rounds=1"]), 4)
        sent.clear()
        monkeypatch.setattr(
            message, "frame", lambda r, e: sent.append(len(frame(r, e)) * isinstance(r, fv.Answer)) or frame(r, e)
        )
        fv.run(plan.on(loaded), plan.method, rounds=1, cohort=plan.cohort, engine=LocalEngine(wire="bytes"))
        assert 0 < max(sent) <= proxy.longest(plan, loaded)


def test_after_a_change_of_the_recipe_the_limit_is_written_anew(tmp_path):
    folder = written(tmp_path / "federation")
    before, path = limit(folder), folder / "app" / "recipe.toml"
    path.write_text(path.read_text().replace('up]\nname = "raw"', 'up]\nname = "half"'))
    result = CliRunner().invoke(app, ["deploy", "proxy", str(folder)])
    assert result.exit_code == 0, result.output
    assert limit(folder) < before - 30000
    assert f"{folder / 'nginx.conf'} is written for answers of at most 41,0" in " ".join(result.stderr.split())
    result = CliRunner().invoke(app, ["deploy", "proxy", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no deployment" in result.stderr


# ---------------------------------------------------------------------------------------------------- the real one

MAIN = """
user {user};
daemon off;
pid {home}/pid;
error_log {home}/error.log;
events {{}}
http {{
    log_format lengths "$request_method $uri $status $request_length";
    access_log {home}/access.log lengths;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
    include {home}/site.conf;
}}
"""


@contextlib.contextmanager
def nginx(stage, home):
    """The program with the deployment's configuration, but for its two ports; the port at which it listens."""
    port, site = rehearse.free_port(), (stage.folder / "nginx.conf").read_text()
    home.mkdir()
    assert site.count("listen 9443 ssl;") == site.count("127.0.0.1:8000") == 1
    site = site.replace("listen 9443", f"listen 127.0.0.1:{port}").replace(":8000", f":{stage.port}")
    (home / "site.conf").write_text(site)
    (home / "nginx.conf").write_text(MAIN.format(home=home, user=getpass.getuser()))
    for name in ("server.crt", "server.key"):
        shutil.copy(stage.certificates / name, home)
    words = [PROGRAM, "-p", str(home), "-c", "nginx.conf", "-e", str(home / "error.log")]
    with subprocess.Popen(words, preexec_fn=rehearse._end_with_parent()) as process:
        try:
            until = time.monotonic() + LONG
            while not rehearse.listening(port):
                assert process.poll() is None, (home / "error.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    assert not rehearse.listening(port)


def status(stage, port, path, body=b""):
    """What a port answers to a POST by somebody without a key."""
    trusting = ssl.create_default_context(cafile=stage.certificates / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/x-protobuf", "Content-Length": str(len(body))}
        connection.putrequest("POST", path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
            connection.send(body)
        return connection.getresponse().status


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a rehearsal counts processes in /proc")
def test_a_run_through_nginx_with_the_configuration_that_init_wrote(tmp_path):
    folder = written(tmp_path / "federation", "digits/fedavg", "rounds=2")
    with rehearse.Stage(folder) as stage:
        stage.start_superlink()
        with nginx(stage, tmp_path / "nginx") as stage.gate:
            assert stage.gate != stage.port
            stage.register(0, 1)
            for client in (0, 1):
                stage.start_node(client)
            run, until = stage.start_run(), time.monotonic() + LONG
            while run.poll() is None:
                stage.check()
                assert time.monotonic() < until
                time.sleep(0.2)
            rows = deployment.held(folder).rows
            assert [(sorted(row.up), row.missing, row.events) for row in rows] == [(["0", "1"], {}, [])] * 2

            # what is closed through the proxy is open behind it
            for path in ("/v1/control/list-nodes", "/v1/runtime/pull-messages", "/", "/docs", "/v1/fleetx"):
                assert status(stage, stage.gate, path) == 403
            for path in ("/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", "//v1/control/x"):
                assert status(stage, stage.gate, path) == 403
            assert status(stage, stage.port, "/v1/control/list-nodes") not in (403, 404)

            most = limit(folder)
            assert status(stage, stage.gate, "/v1/fleet/push-object", bytes(most + 1)) == 413
            assert status(stage, stage.gate, "/v1/fleet/push-object", bytes(most)) not in (403, 413)
            chunked(stage, most + 1)
        said = [line.split() for line in (tmp_path / "nginx" / "access.log").read_text().splitlines()]
        pushed = [int(length) for _, path, code, length in said if (path, code) == ("/v1/fleet/push-object", "200")]
        assert len([1 for _, path, code, _ in said if (path, code) == ("/v1/fleet/activate-node", "200")]) == 2
        weights = 4 * recipe.read("digits/fedavg").build().layout.size
        assert weights < max(pushed) < most - proxy.SLACK // 2  # what Flower adds is well below the slack
    assert not rehearse.listening(stage.port)
    assert not stage.pids()


def chunked(stage, length):
    """A body whose length is not told before is refused too."""
    trusting = ssl.create_default_context(cafile=stage.certificates / "ca.crt")
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    plain = socket.create_connection(("127.0.0.1", stage.gate), 30)
    with trusting.wrap_socket(plain, server_hostname="localhost") as link:
        link.sendall(head)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            link.sendall(b"%x\r\n" % length + bytes(length) + b"\r\n0\r\n\r\n")
        assert b" 413 " in link.recv(100)
