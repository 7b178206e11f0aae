"""The client without PyTorch: in a process of its own, against the one with it, and against hostile questions."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli import app
from fedveil.core import message, schema
from fedveil.core.clients import Reply
from fedveil.core.message import Envelope
from fedveil.core.refused import Refused
from fedveil.engines import LocalEngine
from fedveil.methods.baffle.baffle import Probe, Slopes
from fedveil.methods.baffle.edge import frames
from fedveil.methods.baffle.edge.__main__ import serve
from fedveil.methods.baffle.edge.client import Edge
from fedveil.methods.baffle.export import export
from methods.baffle.probes import stack

CLIENT = 3
WHERE = Envelope(b"run 1234", 7, CLIENT, 2)
HERE = frames.Where(b"run 1234", 7, CLIENT, 2)
ALONE = """
import sys
from fedveil_edge.__main__ import main
main(["--client", "3", "records.npz"])
(most,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
sys.stderr.write(f"{'torch' in sys.modules or 'fedveil' in sys.modules} {most}")
"""


@pytest.fixture(scope="module")
def task():
    data = fv.load("digits")
    model = fv.models.build("digits-cnn", data.input, 10)
    return fv.Task(model, data, fv.split("iid", data, 10, fv.Seed.root(0)))


@pytest.fixture(scope="module")
def exported(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("edge")
    export(task, fv.Baffle(directions=20), folder)
    own = task.clients[CLIENT]
    np.savez(folder / "records.npz", x=task.x[own].numpy(), y=task.y[own].numpy())
    return folder


def changed(exported, tmp_path, **settings):
    """The same export with other settings."""
    told = json.loads((exported / "settings.json").read_text())
    (tmp_path / "model.onnx").write_bytes((exported / "model.onnx").read_bytes())
    (tmp_path / "settings.json").write_text(json.dumps(told | settings))
    return tmp_path


def client(task, folder, number=CLIENT):
    own = task.clients[number]
    return Edge(folder, task.x[own].numpy(), task.y[own].numpy(), number)


def asked(task, key=-(2**62) + 12345, count=20):
    return Probe(task.initial, key, count)


def distance(a, b):
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))


def test_a_process_without_pytorch_gives_the_same_answer_in_100_megabytes(task, exported):
    question = message.frame(asked(task), WHERE)
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=exported, input=question, capture_output=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()
    with_pytorch, most = done.stderr.decode().split()
    assert with_pytorch == "False"
    assert int(most) < 100_000  # kB
    answer, where = message.unframe(done.stdout, {Slopes.kind: Slopes}, 10_000)
    assert where == WHERE
    (expected,) = fv.Baffle(directions=20).probe(stack(task, (CLIENT,)), task.initial, asked(task))
    assert answer.records == expected.records
    assert distance(expected.slopes, answer.slopes) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "central"},
        {"law": "rademacher", "seeds": "own"},
        {"law": "orthogonal", "batch": 40},
        {"batch": 17, "seeds": "own", "sigma": 1e-3},
    ],
)
def test_every_setting_is_answered_as_with_pytorch(task, exported, tmp_path, settings):
    found = client(task, changed(exported, tmp_path, **settings)).answer(message.frame(asked(task), WHERE))
    answer, _ = message.unframe(found, {Slopes.kind: Slopes}, 10_000)
    method = fv.Baffle(**{"directions": 20, **settings})
    (expected,) = method.probe(stack(task, (CLIENT,)), task.initial, asked(task))
    assert distance(expected.slopes, answer.slopes) < 3e-4  # of fewer records, so each rounding counts more


def test_a_federation_takes_an_edge_client_among_others(task, exported):
    class Mixed(LocalEngine):
        def deliver(self, letters, deadline):
            mine = [letter for letter in letters if letter.client == CLIENT]
            yield from super().deliver([letter for letter in letters if letter not in mine], deadline)
            for letter in mine:
                yield Reply(CLIENT, client(task, exported).answer(letter.frame))

    plain, mixed = (
        fv.run(task, fv.Baffle(directions=20), rounds=1, cohort=10, engine=e()) for e in (LocalEngine, Mixed)
    )
    assert not any(row.missing for row in mixed.ledger.rows)
    assert plain.ledger.rows[0].up == mixed.ledger.rows[0].up
    assert CLIENT in mixed.ledger.rows[0].cohort
    assert float((plain.weights - mixed.weights).abs().mean()) < 1e-3


# ---------------------------------------------------------------------------------------------------- frames


@pytest.mark.parametrize(("count", "records"), [(1, 1), (3, 127), (200, 128), (70_000, 65_535), (2, 10**6)])
def test_an_answer_is_byte_for_byte_what_the_library_writes(count, records):
    slopes = torch.randn(count, generator=fv.Seed.root(count).torch())
    mine = frames.write("Slopes", HERE, [slopes.numpy(), records])
    assert mine == message.frame(Slopes(slopes, records), WHERE)


@pytest.mark.parametrize("key", [0, 127, 128, -1, -32, -33, -129, 2**31, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("size", [1, 2, 300])
def test_a_question_is_read_as_the_library_wrote_it(key, size):
    weights = torch.arange(float(size))
    name, where, payload = frames.opened(message.frame(Probe(weights, key, 9), WHERE))
    assert (name, where) == ("Probe", HERE)
    found = frames.read(payload, name, {"weights": size})
    assert np.array_equal(found.pop("weights"), weights.numpy())
    assert found == {"key": key, "directions": 9}


def test_the_constants_are_the_librarys():
    assert frames.VERSION == message.VERSION
    assert frames.PREFIX.format == message._PREFIX.format
    assert frames.SERVER == message.SERVER
    for name, code in frames.CODES.items():
        assert message.DTYPES[code] == torch.from_numpy(np.zeros(1, name)).dtype
    for number, name in frames.NAMES.items():
        kind = message.KINDS[number]
        assert kind.__name__ == name
        assert list(kind.__struct_fields__) == list(frames.QUESTIONS[name])
        for label, field in frames.QUESTIONS[name].items():
            if isinstance(field, frames.Array):
                shape = schema.fields(kind)[label]
                assert [d for d in shape.dims if isinstance(d, int)] == [d for d in field.dims if isinstance(d, int)]
                assert shape.dtype == torch.from_numpy(np.zeros(1, field.dtype)).dtype


def read(frame):
    """A question as the client reads it."""
    name, _, payload = frames.opened(frame)
    return frames.read(payload, name, {"weights": 3})


def headed(head):
    """A question of three weights with a head of one's own."""
    return GOOD[:24] + struct.pack("<I", len(head)) + head + bytes(-(4 + len(head)) % 8) + bytes(16)


GOOD = message.frame(Probe(torch.arange(3.0), 5, 9), WHERE)
HEAD = GOOD[28 : 28 + struct.unpack_from("<I", GOOD, 24)[0]]
HOSTILE = {
    "nothing": b"",
    "pickle": b"\x80\x04pickle" * 9,
    "another kind": GOOD[:3] + b"\x04" + GOOD[4:],
    "another kind in its high bytes": GOOD[:22] + b"\x00\x00" + GOOD[24:],
    "another version": GOOD[:2] + b"\x01" + GOOD[3:],
    "cut off": GOOD[:-1],
    "trailing": GOOD + bytes(8),
    "a head of 2^32 bytes": GOOD[:24] + b"\xff" * 4 + GOOD[28:],
    "more weights": message.frame(Probe(torch.arange(4.0), 5, 9), WHERE),
    "another shape": message.frame(Probe(torch.zeros(1, 3), 5, 9), WHERE),
    "another dtype": message.frame(Probe(torch.zeros(3, dtype=torch.int32), 5, 9), WHERE),
    "no directions": message.frame(Probe(torch.arange(3.0), 5, 0), WHERE),
    "not a number": message.frame(Probe(torch.full((3,), torch.nan), 5, 9), WHERE),
    "infinite": message.frame(Probe(torch.full((3,), torch.inf), 5, 9), WHERE),
    "huge": message.frame(Probe(torch.full((3,), 1e38), 5, 9), WHERE),
    "padding that is not zero": GOOD[:-1] + b"\x01",
    "a text": GOOD[:28] + b"\xa1x" + GOOD[30:],
    "arrays in arrays": GOOD[:28] + b"\x91" * 8 + GOOD[36:],
    "arrays in a thousand arrays": headed(b"\x91" * 5000 + b"\x01"),
    "more behind the head's fields": headed(HEAD + b"\x01"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_question_is_refused(name):
    read(GOOD)
    read(headed(HEAD))
    with pytest.raises(Refused, match=r"^[a-z ]+: "):
        read(HOSTILE[name])


def test_no_bytes_make_the_reader_fail_in_another_way():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        frame = bytearray(GOOD)
        for place in rng.integers(0, len(frame), 3):
            frame[place] = rng.integers(0, 256)
        with contextlib.suppress(Refused):
            read(bytes(frame))


def test_a_question_of_too_much_work_is_refused(task, exported):
    with pytest.raises(Refused, match="too large: 21 directions are asked for, 20 are answered"):
        client(task, exported).answer(message.frame(asked(task, count=21), WHERE))


def test_a_question_to_another_client_and_records_of_another_shape_are_refused(task, exported):
    mine = client(task, exported)
    with pytest.raises(Refused, match="unknown client: this is client 3, not 4"):
        mine.answer(message.frame(asked(task), Envelope(b"run 1234", 7, 4, 2)))
    with pytest.raises(
        ValueError, match=r"the records have shape \(2, 8, 8\) and the labels \(2,\); the model takes \[1, 8, 8\]"
    ):
        Edge(exported, np.zeros((2, 8, 8), np.float32), np.zeros(2, np.int64), 3)
    for records, labels in ((2, 1), (0, 0)):
        with pytest.raises(ValueError, match=rf"the records have shape \({records}, 1, 8, 8\)"):
            Edge(exported, np.zeros((records, 1, 8, 8), np.float32), np.zeros(labels, np.int64), 3)
    with pytest.raises(ValueError, match="a label is not from 0 to 9"):
        Edge(exported, np.zeros((1, 1, 8, 8), np.float32), np.array([10]), 3)


# ---------------------------------------------------------------------------------------------------- export


def test_layers_that_are_not_trained_are_part_of_the_model_and_can_have_8_bits(task, tmp_path):
    method = fv.Baffle(directions=20, layers=["fc2*"])
    (expected,) = method.probe(stack(task, (CLIENT,)), task.initial, asked(task))
    sizes = []
    for quantise, error in ((False, 3e-4), (True, 0.03)):
        folder = tmp_path / str(quantise)
        told = export(task, method, folder, quantise)
        assert (told["trained"], told["frozen"]) == (1290, 18720)
        sizes.append(told["bytes"])
        found = client(task, folder).answer(message.frame(asked(task), WHERE))
        answer, _ = message.unframe(found, {Slopes.kind: Slopes}, 10_000)
        assert distance(expected.slopes, answer.slopes) < error
    assert sizes[1] < 0.5 * sizes[0]
    held = {tensor.name for tensor in onnx.load(folder / "model.onnx").graph.initializer}
    assert {
        f"model.{name}" for name in ("fc1.weight/codes", "fc1.weight/scale", "fc1.bias")
    } <= held  # a bias is too small to be worth it


def test_what_cannot_be_exported_is_said(task, tmp_path):
    def export_of(model, loss="cross-entropy"):
        export(fv.Task(model, task.data, task.clients, loss=loss), fv.Baffle(), tmp_path)

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x):
            return self.used(x.flatten(1))

    with pytest.raises(ValueError, match=r"ONNX has no weight 'unused\.weight'"):
        export_of(Unused())
    with pytest.raises(ValueError, match=r"^PyTorch cannot export this model to ONNX: "):
        export_of(task.model, lambda logits, y: torch.linalg.eigvals(torch.diag_embed(logits)).abs().sum(-1))
    with pytest.raises(ValueError, match="a secure sum goes by the public seed of the run"):
        export(task, fv.Baffle(secure=fv.SecureSum()), tmp_path / "e")
    server = fv.ServerOptimizer("adam", 0.01, schedule=lambda round_: 1 / round_)
    with pytest.raises(ValueError, match=r"server\.schedule is a function, which cannot be exported"):
        export(task, fv.Baffle(down="replay", server=server), tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_other_methods_and_folders_that_are_not_empty(tmp_path):
    def said(*arguments):
        result = CliRunner().invoke(app, ["export", *arguments])
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "is a recipe of fedavg, whose clients train" in said("digits/fedavg", "-o", str(tmp_path / "e"))
    (tmp_path / "file").touch()
    assert "is there already and not an empty folder" in said("digits/baffle-clear", "-o", str(tmp_path))


def test_the_command_writes_a_client(tmp_path):
    told = CliRunner().invoke(app, ["export", "digits/baffle-clear", "-o", str(tmp_path / "e"), "--format", "json"])
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["weights"] == 20_010
    names = {path.relative_to(tmp_path / "e").as_posix() for path in (tmp_path / "e").rglob("*") if path.is_file()}
    modules = ("__init__", "__main__", "client", "frames", "model", "probing", "refused", "seeds", "directions")
    assert names == {"model.onnx", "settings.json", *(f"fedveil_edge/{name}.py" for name in modules)}
    source = "".join(path.read_text() for path in (tmp_path / "e" / "fedveil_edge").iterdir())
    assert "from fedveil." not in source


@pytest.mark.parametrize(("given", "sigma"), [({}, 1e-4), ({"precision": "float16"}, 1e-3), ({"sigma": 0.5}, 0.5)])
def test_an_edge_client_moves_weights_as_far_as_the_method_does(task, tmp_path, given, sigma):
    export(task, fv.Baffle(directions=2, **given), tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["sigma"] == sigma


def test_of_a_question_that_is_too_long_no_more_than_the_limit_is_held():
    class Edge:
        limit = 10

        def answer(self, question):
            if len(question) > self.limit:
                raise Refused("too large", "more than the 10 bytes that were expected")
            return question

    class Questions(io.BytesIO):
        most = 0

        def read(self, size=-1):
            self.most = max(self.most, size)
            return super().read(size)

    replies = io.BytesIO()
    questions = Questions(b"".join(len(q).to_bytes(4, "little") + q for q in (b"a", bytes(200_000), b"b")))
    serve(Edge(), questions, replies)
    refusal = b"\1too large: more than the 10 bytes that were expected"
    assert replies.getvalue() == b"".join(len(r).to_bytes(4, "little") + r for r in (b"\0a", refusal, b"\0b"))
    assert questions.most <= 1 << 16
    claimed = Questions((2**32 - 1).to_bytes(4, "little") + b"cut off")
    serve(Edge(), claimed, io.BytesIO())
    assert claimed.most <= 1 << 16
