"""The span check finds tokens and sequences exactly, in decoders and encoders, and nothing where there is nothing."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

import fedveil as fv
from fedveil.attacks import tokens
from fedveil.attacks.tokens import Projection, products, projections, recover, scored, touched
from fedveil.core.seeds import Seed
from fedveil.data import from_tensors
from fedveil.methods.fedsgd import FedSGD
from fedveil.models import drawing_from
from models import zoo

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of stacked attention
VOCABULARY, LENGTH, WIDTH = 200, 8, 64
SEED = Seed.root(0)
EXACT = {"recall": 1.0, "precision": 1.0, "sequences": 1.0}


class Block(nn.Module):
    """A block of GPT-2: attention to what came before, and a network of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.before(x)
        x = x + self.attention(h, h, h, attn_mask=later, need_weights=False)[0]
        return x + self.network(self.after(x))


class Decoder(nn.Module):
    """The next token at every position."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks, self.head = nn.Sequential(*(Block(width) for _ in range(layers))), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places.weight[: tokens.shape[1]]))


class Encoder(nn.Module):
    """A class for each sequence. `first`: the layers take [B, T, width], and not [T, B, width]."""

    def __init__(self, first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.dropout = first, nn.Dropout(dropout)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.places.weight)
        x = self.layers(x) if self.first else self.layers(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))


@functools.cache
def task(kind: str = "decoder", length: int = LENGTH, repeats: bool = False) -> fv.Task:
    """24 random sentences; without `repeats` no token comes twice."""
    draw = SEED.torch()
    x = torch.randint(VOCABULARY, (24, length), generator=draw)
    if not repeats:
        x = torch.randperm(VOCABULARY, generator=draw)[: 24 * length].view(24, length)
    made = {
        "decoder": Decoder,
        "one layer": lambda: Decoder(layers=1),
        "wide": lambda: Decoder(256),
        "encoder": Encoder,
        "encoder, time first": lambda: Encoder(False),
        "encoder, dropout": lambda: Encoder(dropout=0.1),
    }[kind]
    with drawing_from(SEED):
        model = made()
    if "encoder" in kind:
        data, loss = from_tensors(x, torch.arange(24) % 2, x, torch.arange(24) % 2), "cross-entropy"
    else:
        data, loss = from_tensors(x, x.roll(-1, 1), x, x.roll(-1, 1), classes=VOCABULARY), "next-character"
    return fv.Task(model, data, fv.split("iid", data, 2, SEED), loss=loss)


def gradient(of: fv.Task, records: int) -> Tensor:
    """Of the first records, [d]."""
    x, y = of.x[None, :records], of.y[None, :records]
    return of.gradient(of.initial[None], x, y, torch.ones(1, records))[0][0]


def attacked(of: fv.Task, records: int, **options) -> dict[str, float]:
    found = recover(of, of.initial, gradient(of, records), VOCABULARY, **options)
    return scored(found, of.x[:records])


# ---------------------------------------------------------------------------------------------------- it succeeds


@pytest.mark.parametrize("kind", ["decoder", "one layer", "encoder", "encoder, time first"])
def test_one_sentence_comes_out_exactly(kind):
    """The positive control."""
    for record in range(3):
        of = task(kind)
        g, _ = of.gradient(of.initial[None], of.x[None, [record]], of.y[None, [record]], torch.ones(1, 1))
        found = recover(of, of.initial, g[0], VOCABULARY)
        assert scored(found, of.x[[record]]) == EXACT
        assert found.rank == LENGTH
        assert not found.full


@pytest.mark.parametrize(("kind", "records"), [("decoder", 2), ("decoder", 4), ("encoder", 2), ("encoder", 3)])
def test_small_batches_come_out_exactly(kind, records):
    assert attacked(task(kind), records) == EXACT


def test_where_other_pairs_lie_in_the_span_too_the_second_layer_tells_sequences():
    """With many repeated tokens the first layer allows more than there were."""
    score = attacked(task("wide", repeats=True), 8)
    assert score["recall"] == score["sequences"] == 1
    assert score["precision"] < 1


def test_one_layer_gives_tokens_by_position_but_no_sequences():
    found = recover(task("one layer"), task("one layer").initial, gradient(task("one layer"), 3), VOCABULARY)
    assert found.tokens == [sorted({*column}) for column in task("one layer").x[:3].T.tolist()]
    assert found.sequences is None


def test_as_many_sequences_as_tokens():
    """Sizes of a batch and of sentences that could be mistaken for each other."""
    assert attacked(task("decoder", 4), 4) == EXACT
    assert attacked(task("encoder, time first"), 2) == EXACT


def test_bert_with_token_types_a_norm_before_its_projections_and_a_mask():
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=2, **sizes)
    tokens = task().x[:2]
    x, y = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, torch.tensor([0, 1])
    with drawing_from(SEED):
        data = from_tensors(x, y, x, y)
        of = fv.Task(transformers.BertForSequenceClassification(config), data, fv.split("iid", data, 1, SEED))

    def frame(tokens: Tensor) -> Tensor:
        assert data.structure
        return data.structure.pack({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    found = recover(of, of.initial, gradient(of, 2), VOCABULARY, length=LENGTH, frame=frame)
    assert scored(found, tokens) == EXACT


def test_gpt_2_with_tied_weights_that_are_transposed():
    of = zoo.task_of("GPT-2")
    assert scored(recover(of, of.initial, gradient(of, 1), 20), of.x[:1])["recall"] == 1


def test_the_projections_of_both_layers_are_found_by_themselves():
    of = zoo.task_of("BERT")
    first, second = projections(of, of.initial, of.x[:2])
    attention = "bert.encoder.layer.{}.attention.self.{}.weight"
    assert first == Projection(tuple(attention.format(0, part) for part in ("query", "key", "value")), True)
    assert second == Projection(tuple(attention.format(1, part) for part in ("query", "key", "value")), True)
    of = zoo.task_of("GPT-2")
    assert projections(of, of.initial, of.x[:2])[0] == Projection(("transformer.h.0.attn.c_attn.weight",), False)


class Written(nn.Module):
    """Products that are written out, with weights in either direction, and no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (nn.Parameter(torch.randn(shape) / 8) for shape in ((WIDTH, 90), (2, 90)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.words(tokens) @ self.first)
        return torch.matmul(x, self.second.T).mean(1)


def test_products_may_be_written_in_any_way():
    of = task("encoder")
    with drawing_from(SEED):
        own = fv.Task(Written(), of.data, of.clients)
    noted = products(own, own.initial, own.x[:2])
    assert [(each.name, each.rows) for each in noted] == [("first", False), ("second", True)]
    assert projections(own, own.initial, own.x[:2]) == (Projection(("first",), False), None)
    found = recover(own, own.initial, gradient(own, 2), VOCABULARY)
    assert found.tokens == [sorted({*own.x[:2].flatten().tolist()})] * LENGTH, "without positions, a bag of words"
    assert found.sequences is None
    given = Projection(("first",), False).inputs(own, own.initial, own.x[:LENGTH], lambda tokens: tokens)
    embedded = own.layout.split(own.initial)["words.weight"][own.x[:LENGTH]]
    assert torch.equal(given.float(), embedded), "as many sequences as tokens"


def after_a_round(method) -> dict[str, float]:
    """The server attacks the mean of three clients' updates, with two sentences each."""
    of = task("wide")
    split = fv.Split(torch.arange(6).numpy(), torch.tensor([0, 2, 4, 6]).numpy(), "by hand")
    own = fv.Task(of.model, of.data, split, loss="next-character")
    result = fv.run(own, method, rounds=1, cohort=3)
    assert not result.ledger.rows[0].missing
    return scored(recover(own, own.initial, own.initial - result.weights, VOCABULARY), of.x[:6])


@pytest.mark.parametrize(
    "method",
    [
        FedSGD(),
        FedSGD(secure=fv.SecureSum(bits=28)),
        FedSGD(up=fv.Qsgd(bits=8)),
        fv.FedAvg(fv.LocalTraining(batch=2)),
    ],
    ids=["fedsgd", "secure sum", "qsgd", "fedavg, one step"],
)
def test_what_clients_send_in_a_run_is_as_good(method):
    assert after_a_round(method) == EXACT


def test_ten_local_steps_do_not_hide_tokens():
    score = after_a_round(fv.FedAvg(fv.LocalTraining(batch=2, lr=0.01, epochs=10)))
    assert score["recall"] == score["precision"] == 1
    assert score["sequences"] < 1, "though not all sequences can be put together"


def test_an_embedding_that_is_trained_tells_the_tokens_by_itself():
    assert touched(task(), gradient(task(), 5), "words.weight") == sorted({*task().x[:5].flatten().tolist()})


def test_the_attack_does_not_look_at_records():
    of, g = task(), gradient(task(), 2)
    blind = copy.copy(of)
    blind.x, blind.y = torch.zeros_like(of.x), torch.zeros_like(of.y)
    blind.data = replace(of.data, x=blind.x, y=blind.y, test_x=blind.x, test_y=blind.y)
    assert scored(recover(blind, of.initial, g, VOCABULARY), of.x[:2]) == EXACT


@pytest.mark.parametrize(
    ("shares", "between"),
    [
        ([1e-8, 1e-7, 0.2, 0.4], (1e-7, 0.2)),
        ([1e-2, 2e-2, 0.3, 0.4], (2e-2, 0.3)),
        ([1e-8, 1e-2, 0.2, 0.4], (1e-2, 0.2)),
        ([0.3, 0.4, 0.5, 0.6], (9e-4, 1.1e-3)),
        ([1e-12, 1e-9, 1e-8, 1e-6], (9e-4, 1.1e-3)),
    ],
    ids=["exact", "blurred", "the highest gap", "nothing there", "everything there"],
)
def test_the_threshold_lies_in_the_highest_gap(shares, between):
    low, high = between
    assert low < tokens._threshold(torch.tensor(shares).view(2, 2).T) < high


# ---------------------------------------------------------------------------------------------------- it fails


def test_a_batch_of_more_pairs_than_the_layer_is_wide_tells_nothing():
    for kind, rank in (("decoder", WIDTH - 1), ("encoder", WIDTH)):  # a norm takes one direction away
        found = recover(task(kind), task(kind).initial, gradient(task(kind), 24), VOCABULARY)
        assert found.full, (kind, found.rank, rank)
        assert found.sequences is None


def test_a_random_gradient_gives_nothing():
    of = task()
    noise = torch.randn(of.layout.size, generator=SEED.torch())
    found = recover(of, of.initial, noise, VOCABULARY)
    assert found.full
    assert found.sequences is None
    few = {name: torch.zeros_like(part) for name, part in of.layout.split(noise).items()}
    few["blocks.0.attention.in_proj_weight"][:5] = of.layout.split(noise)["blocks.0.attention.in_proj_weight"][:5]
    found = recover(of, of.initial, of.layout.join(few), VOCABULARY)
    assert found.rank == 5
    assert not found.full
    assert not any(found.tokens)
    assert found.sequences is None
    found = recover(of, of.initial, torch.zeros_like(noise), VOCABULARY)
    assert found.rank == 0
    assert not any(found.tokens)


def test_noise_hides_the_span():
    g = gradient(task(), 1)
    noise = g.std() * torch.randn(g.shape, generator=SEED.torch())
    found = recover(task(), task().initial, g + noise, VOCABULARY)
    assert found.full
    assert not any(found.tokens)
    found = recover(task(), task().initial, g + noise / 1000, VOCABULARY)
    assert scored(found, task().x[:1]) == EXACT, "a little noise does not"


def test_dropout_moves_the_inputs():
    of = task("encoder, dropout")
    drawn = of.gradient(of.initial[None], of.x[None, :1], of.y[None, :1], torch.ones(1, 1), torch.tensor([7]))[0][0]
    assert attacked(of, 1) == EXACT, "without"
    found = recover(of, of.initial, drawn, VOCABULARY)
    assert not any(found.tokens)
    assert not found.full


def test_a_layer_that_sees_more_than_a_token_is_refused():
    of = task()
    second = projections(of, of.initial, of.x[:2])[1]
    with pytest.raises(
        ValueError, match=r"the input of blocks.1.attention.in_proj_weight depends on more than its own"
    ):
        recover(of, of.initial, gradient(of, 1), VOCABULARY, layers=(second, None))
    head = Projection(("head.weight",), True)
    with pytest.raises(ValueError, match=r"head.weight is given \[1, 64\] for 1 sequences of 8 tokens, not one input"):
        recover(task("encoder"), task("encoder").initial, gradient(task("encoder"), 1), VOCABULARY, layers=(head, None))


def test_without_weights_to_multiply_with_there_is_nothing_to_look_at():
    of = zoo.task_of("GPT-2")
    frozen = fv.Task(of.model, of.data, of.clients, loss="next-character", trainable=["*ln_f*"])
    with pytest.raises(ValueError, match="the model multiplies no trained weights with its inputs; train those"):
        projections(frozen, frozen.initial, frozen.x[:2])
