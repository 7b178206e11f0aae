"""Records of several tensors: packed into rows, unpacked for the model, and trained like any other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

import fedveil as fv
from fedveil.core.structure import Structure
from fedveil.data import from_dataset, from_tensors

DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@given(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=4), st.integers(0, 2**32))
def test_what_is_packed_comes_back(leaves, seed):
    draw = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(3, *shape, generator=draw) * 1e9).to(dtype) for dtype, shape in leaves]
    records = {"first": parts[0], "rest": tuple(parts[1:])}
    structure = Structure.of(records)
    rows = structure.pack(records)
    assert rows.shape[0] == 3
    for back in (structure.unpack(rows), vmap(structure.unpack)(rows)):
        found = [back["first"], *back["rest"]]
        for before, after in zip(parts, found, strict=True):
            assert after.dtype == before.dtype
            assert torch.equal(before, after)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(5, 3)

    def forward(self, tokens, mask, age):
        mean = (self.words(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.out(torch.cat([mean, age], 1))


class Positions(Keywords):
    def forward(self, *records):
        return super().forward(*records)


class Whole(Keywords):
    def forward(self, batch, /):
        return super().forward(*(batch.values() if isinstance(batch, dict) else batch))


def records(n=24):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (n, 5), generator=draw)
    return {"tokens": tokens, "mask": torch.arange(5) < 1 + tokens[:, :1] % 5, "age": torch.randn(n, 1, generator=draw)}


def task_of(model, x):
    y = torch.arange(24) % 3
    data = from_tensors(x, y, x, y)
    torch.manual_seed(0)
    return fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)))


def test_a_model_gets_records_as_its_forward_takes_them():
    torch.manual_seed(0)
    model, x = Keywords(), records()
    expected = model(**x).detach()
    for other, given_ in ((Keywords, x), (Positions, tuple(x.values())), (Whole, x), (Whole, [*x.values()])):
        same = other()
        same.load_state_dict(model.state_dict())
        task = task_of(same, given_)
        assert task.stackable
        torch.testing.assert_close(task.f(task.initial, task.x), expected)


@pytest.mark.parametrize(
    "method", [fv.FedAvg(), fv.Baffle(directions=3), fv.FedAvg(up=fv.Qsgd())], ids=lambda m: m.name
)
def test_methods_train_on_such_records(method):
    result = fv.run(task_of(Keywords(), records()), method, rounds=2, cohort=3)
    assert not result.ledger.rows[-1].missing
    assert not torch.equal(result.weights, result.task.initial)


def test_a_dataset_of_such_records():
    x = records()
    items = [({name: part[i] for name, part in x.items()}, i % 3) for i in range(24)]
    data = from_dataset(items, items)
    assert torch.equal(data.x, from_tensors(x, torch.arange(24) % 3, x, torch.arange(24) % 3).x)


def test_wrong_records_are_one_sentence():
    y = torch.arange(24) % 3
    with pytest.raises(ValueError, match="a record holds str"):
        from_tensors({"tokens": "abc"}, y, {"tokens": "abc"}, y)
    with pytest.raises(ValueError, match=r"have \[24, 20\] rows"):
        from_tensors({"a": torch.zeros(24, 1), "b": torch.zeros(20, 1)}, y, records(), y)
    other = records() | {"age": torch.zeros(24, 2)}
    with pytest.raises(ValueError, match="the same tensors, of the same shapes and types"):
        from_tensors(records(), y, other, y)
    with pytest.raises(ValueError, match=r"does not take inputs of the shapes tokens \[5\], mask \[5\]"):
        task_of(Keywords(), records() | {"tokens": torch.zeros(24, 5)})


def test_a_model_with_several_inputs_goes_to_onnx(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    task = task_of(Keywords(), records())
    result = fv.run(task, fv.FedAvg(), rounds=1, cohort=3)
    result.export(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {name: part[:7].numpy() for name, part in records().items()})
    torch.testing.assert_close(torch.from_numpy(found), task.f(result.weights, task.x[:7]), rtol=1e-4, atol=1e-5)
