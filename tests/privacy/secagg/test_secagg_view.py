"""What the server sees: masked vectors look uniform, and from all of it two inputs with one sum look the same."""

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn

import fedveil as fv
from fedveil.data import from_tensors
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.records import Masked
from privacy.secagg.sums import LAST, Only, Summand, Summed, Transport

CLIENTS = 4
TINY = 1e-6  # a p-value below this is no accident


def task(features: int) -> fv.Task:
    x, y = torch.zeros(8, features), torch.arange(8) % 2
    data = from_tensors(x, y, x, y, classes=2)
    return fv.Task(nn.Linear(features, 2), data, fv.split("iid", data, CLIENTS, fv.Seed.root(0)))


class Chosen(Summed):
    """Clients give what the test chooses, [clients, weights]."""

    def give(self, stack, question):
        return [Summand(CHOICE[0][k], 2) for k in stack.clients]


CHOICE: list[torch.Tensor] = []


@pytest.fixture(params=[True, False], ids=["masked", "not masked"])
def masked(request, monkeypatch):
    """With masks, and as a control without them."""
    if not request.param:
        monkeypatch.setattr("fedveil.privacy.secagg.masks.mask", lambda vector, added, subtracted=(): None)
    return request.param


def seen(vectors: torch.Tensor, features: int, how: SecureSum) -> Transport:
    CHOICE[:] = [vectors]
    LAST.clear()
    engine = Transport()
    fv.run(task(features), Chosen(how), rounds=1, cohort=Only(size=CLIENTS), engine=engine, evaluate_every=9)
    assert LAST
    return engine


def test_masked_vectors_are_uniform(masked):
    """Bytes by chi-square, at each place of an element, and neighbours by their joint bits."""
    engine = seen(torch.linspace(-0.3, 0.2, 8002).repeat(CLIENTS, 1), 4000, SecureSum())
    elements = np.concatenate([a.vector.numpy().view(np.uint8).reshape(-1, 4) for a in engine.heard(Masked).values()])
    places = [_uniform(elements[:, place], 256) for place in range(4)]
    whole = elements.copy().view(np.uint32)[:, 0]
    pairs = _uniform((whole[:-1] >> 28) << 4 | whole[1:] >> 28, 256)
    ones = np.unpackbits(elements).mean()
    fair = abs(ones - 0.5) < 6 * 0.5 / np.sqrt(8 * elements.size)
    assert all(p > TINY for p in places) == masked
    assert (pairs > TINY) == masked
    assert fair == masked


def _uniform(values: np.ndarray, kinds: int) -> float:
    """The p-value of the chi-square test against equal frequencies."""
    counts, share = np.bincount(values, minlength=kinds), len(values) / kinds
    return float(chi2.sf(((counts - share) ** 2 / share).sum(), kinds - 1))


@pytest.mark.parametrize("server", ["curious", "malicious"])
def test_two_inputs_with_one_sum_cannot_be_told_apart(masked, server):
    """Two clients' vectors are exchanged or not. Somebody who has every byte that passed guesses which: by a matched
    filter on the first client's vector, and by a classifier that learnt from other rounds' transcripts."""
    rng = np.random.default_rng(7)
    a, b, *others = torch.from_numpy(rng.uniform(-1, 1, (CLIENTS, 14)).astype(np.float32))
    worlds = [torch.stack([a, b, *others]), torch.stack([b, a, *others])]
    fixed = FixedPoint(CLIENTS, 1.0, 20, 2)
    candidates = [
        fixed.encode(v.numpy(), 2, np.random.default_rng(0))[:-2].view(np.int32).astype(np.float64) for v in (a, b)
    ]
    truth = np.arange(160) % 2
    guesses, transcripts = [], []
    for world in truth:
        engine = seen(worlds[world], 6, SecureSum(server=server))
        vector = engine.heard(Masked)[0].vector.numpy()[:-2].astype(np.float64)
        guesses.append(int(np.abs(vector - candidates[0]).sum() > np.abs(vector - candidates[1]).sum()))
        frames = [*(letter.frame for letter in engine.letters), *(reply.frame for reply in engine.replies)]
        transcripts.append(np.frombuffer(b"".join(frames), np.uint8))
    matched = float(np.mean(np.array(guesses) == truth))
    learnt = _learnt(np.array(transcripts), truth)
    if masked:
        low, high = binom.ppf([TINY / 2, 1 - TINY / 2], len(truth), 0.5) / len(truth)
        assert low <= matched <= high
        low, high = binom.ppf([TINY / 2, 1 - TINY / 2], len(truth) // 2, 0.5) / (len(truth) // 2)
        assert low <= learnt <= high
    else:
        assert matched == 1
        assert learnt > 0.9  # keys and signatures are drawn anew, and among them a classifier may stumble once


def _learnt(transcripts: np.ndarray, truth: np.ndarray) -> float:
    """The accuracy of a linear classifier on every byte, learnt on one half of the transcripts, tried on the other."""
    bytes_ = StandardScaler().fit_transform(transcripts)
    half = len(truth) // 2
    return float(LogisticRegression(max_iter=1000).fit(bytes_[:half], truth[:half]).score(bytes_[half:], truth[half:]))
