"""Models of Hugging Face and peft as they come: outputs, masks, tied weights, adapters."""

import pytest
import torch

import fedveil as fv
from fedveil.data import from_tensors

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
LOCAL = fv.LocalTraining("adam", lr=0.01, batch=8)
SMALL = {"vocab_size": 50, "attn_implementation": "sdpa"}


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SMALL, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**SMALL, **ends, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def lora():
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.1)
    torch.manual_seed(1)
    return peft.get_peft_model(bert(), config)


def sentences(n=64):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (n, 8), generator=draw)
    mask = (torch.arange(8) < torch.randint(3, 9, (n, 1), generator=draw)).long()
    return {"input_ids": ids, "attention_mask": mask}, (ids[:, 0] > 25).long()


def classified(model, **options):
    x, y = sentences()
    data = from_tensors(x, y, x, y)
    return fv.Task(model, data, fv.split("iid", data, 4, fv.Seed.root(0)), **options)


def test_bert_learns_from_tokens_with_a_mask():
    model = bert()
    task = classified(model)
    assert task.stackable
    assert task.noisy, "a model in training mode drops units"
    x, _ = sentences()
    with torch.no_grad():
        expected = model.eval()(**x).logits
    torch.testing.assert_close(task.f(task.initial, task.x), expected, rtol=1e-4, atol=1e-5)
    assert fv.run(task, fv.FedAvg(local=LOCAL), rounds=8, cohort=4).accuracy > 0.8


def test_one_client_of_a_stack_is_that_client_alone():
    task = classified(bert().eval())
    w, rows = task.initial.expand(2, -1), torch.tensor([[0, 1, 2], [5, 6, 7]])
    x, y, mask = task.x[rows], task.y[rows], torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    together, _ = task.gradient(w, x, y, mask)
    task.stackable = False
    alone, _ = task.gradient(w, x, y, mask)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_gpt2_has_tied_weights_and_a_next_token():
    x = sentences()[0]["input_ids"]
    y = torch.cat([x[:, 1:], x[:, :1]], 1)
    data = from_tensors(x, y, x, y, classes=50)
    model = gpt2()
    task = fv.Task(model, data, fv.split("iid", data, 4, fv.Seed.root(0)), loss="next-character")
    assert task.stackable
    assert task.layout.size == sum(p.numel() for p in model.parameters())
    rows = fv.run(task, fv.FedAvg(local=LOCAL), rounds=3, cohort=4).ledger.rows
    assert rows[-1].metrics["loss"] < rows[0].metrics["loss"]


@pytest.mark.parametrize("method", [fv.FedAvg(local=LOCAL), fv.Baffle(directions=20)], ids=lambda m: m.name)
def test_an_adapter_is_all_that_is_sent(method):
    model = lora()
    task = classified(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [layer.name for layer in task.layout.layers] == trained
    assert task.layout.size == 290
    result = fv.run(task, method, rounds=2, cohort=4)
    assert not result.ledger.rows[-1].missing
    assert not torch.equal(result.weights, task.initial)
    assert result.summary()["bytes_up_per_client_round"] < 1250


def test_patterns_pick_the_adapter():
    task = classified(bert(), trainable=["*query*", "classifier.*"])
    assert {layer.name.split(".")[-2] for layer in task.layout.layers} == {"query", "classifier"}
