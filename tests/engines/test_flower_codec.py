"""The codec mod, as its page shows it: a Flower app and a Flower strategy that know nothing else of fedveil."""

import re
import types
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

import fedveil as fv
from engines.grids import Nodes
from fedveil.engines.flower import codec_mod, decode_replies, wire
from toys import linear_task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "flower-codec.md"


@pytest.fixture(scope="module")
def page():
    """What the example on the page defines."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(block.splitlines()) <= 36
    module = types.ModuleType("documented")
    exec(compile(block, PAGE.name, "exec"), module.__dict__)
    return module


def sent(task):
    return ArrayRecord({name: part.clone() for name, part in task.layout.split(task.initial).items()})


def trained(page, grid, rounds=1):
    strategy = page.Decoding(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    return strategy.start(grid, sent(page.task), num_rounds=rounds).arrays.to_torch_state_dict()


def test_a_flower_strategy_trains_on_decoded_updates(page):
    sizes = set()
    grid = Nodes(page.app, range(2), lambda node, reply: sizes.add(wire.size(reply)) or reply)
    after = page.task.layout.join(trained(page, grid))
    change = after - page.task.initial
    assert float(change.mean()) == pytest.approx(-0.01, rel=0.05)
    raw = wire.size(Message(RecordDict({"arrays": sent(page.task)}), 1, "train"))
    text = PAGE.read_text(encoding="utf-8")
    assert {f"{raw / 1000:.0f} kB without the mod and {size / 1000:.0f} kB with it" in text for size in sizes} == {True}


def test_the_raw_codec_changes_nothing(page):
    task = page.task
    mod, seen = codec_mod(fv.Raw(), task), sent(task)
    grid = Nodes(lambda message, context: mod(message, context, page.train), [0])
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": seen}), 1000, "train")])
    assert not reply.content.array_records
    assert reply.content.metric_records
    (decoded,) = decode_replies(fv.Raw(), task, seen, [reply])
    got = decoded.content["arrays"].to_torch_state_dict()
    assert list(got) == list(seen)
    torch.testing.assert_close(task.layout.join(got), task.initial - 0.01)


@pytest.mark.parametrize("frame", [b"", b"\x80\x04pickle" * 9, 3])
def test_a_hostile_reply_is_left_out_and_said(page, frame, caplog):
    def change(node, reply):
        if node == 1000:
            reply.content[wire.OURS] = ConfigRecord({"frame": frame})
        return reply

    after = trained(page, Nodes(page.app, range(2), change))
    assert float((page.task.layout.join(after) - page.task.initial).mean()) == pytest.approx(-0.01, rel=0.05)
    assert "the reply of node 1000 is left out" in caplog.text


def test_other_messages_pass_as_they_are(page):
    mod = codec_mod(fv.Raw(), page.task)
    Nodes(page.app, [])
    question = Message(RecordDict({"x": ConfigRecord({"y": 1})}), 1, "query")
    assert mod(question, None, lambda message, context: message) is question


def test_what_does_not_fit_is_one_sentence():
    task = linear_task()
    with pytest.raises(ValueError, match="tiers needs more of a client than its update"):
        codec_mod(fv.Tiers(), task)
    mod = codec_mod(fv.Raw(), task)
    Nodes(None, [])
    other = RecordDict({"arrays": ArrayRecord({"weight": torch.zeros(2, 3)})})
    with pytest.raises(ValueError, match="holds weight, but the parameters of the task's model are weight, bias"):
        mod(Message(other, 1, "train"), None, None)
    with pytest.raises(ValueError, match="one ArrayRecord, and this one has 0"):
        mod(Message(RecordDict(), 1, "train"), None, None)
