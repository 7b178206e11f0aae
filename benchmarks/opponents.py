"""FedAvg by fedveil and by others, one round at a time, each in a process of its own.

All take the same steps: the same initial weights, the same cohorts and the same order of each client's records. A
process of its own keeps settings that one opponent makes for a whole process (threads, precision) from the others, and
makes memory comparable.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil as fv
from benchmarks.federation import Loop, _blobs
from fedveil import models
from fedveil.core.data import Split
from fedveil.core.loop import Federation
from fedveil.core.sampling import CohortSampler
from fedveil.engines import LocalEngine

RECORDS = 50  # of each client
BATCH, LR = 10, 0.1
# Of central differential privacy. The noise, a multiple of the clip, is what pfl-research's accountant finds for its
# benchmark: ε = 2 after 1,500 rounds with 1,000 of 10^6 clients, scaled to the 50 clients of a round.
CLIP, NOISE, DELTA = 0.4, 0.031, 1e-6
SEED = fv.Seed.root(0)


def cifar_cnn() -> nn.Sequential:
    """pfl-research's `simple_cnn` for CIFAR-10, without its dropout: 1,626,442 weights."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def wide_cnn() -> nn.Sequential:
    """Four normalised convolutions and a hidden layer of 512: 2,168,746 weights."""
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 10))


def small_cnn() -> nn.Sequential:
    """One convolution and a hidden layer for 8×8 images: 24,195 weights. Launching its operators takes most time."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * 3 * 3, 155), nn.ReLU(), nn.Linear(155, 10)),
    )


def lenet5() -> nn.Module:
    return models.build("lenet5", (1, 28, 28), 10)


NETWORKS = {
    "cifar-cnn": (cifar_cnn, (3, 32, 32)),
    "wide-cnn": (wide_cnn, (3, 32, 32)),
    "small-cnn": (small_cnn, (1, 8, 8)),
    "lenet5": (lenet5, (1, 28, 28)),
}


@dataclass(frozen=True)
class Workload:
    """What is trained. From 1,000 clients on, clients share records, so that the data stay small."""

    network: str
    device: str = "cpu"
    clients: int = 1000
    cohort: int = 50
    private: bool = False

    @cached_property
    def model(self) -> nn.Module:
        """On the CPU, with the initial weights that all opponents have."""
        model = NETWORKS[self.network][0]()
        models.initialise(model, SEED.child("weights"))
        return model

    @cached_property
    def task(self) -> fv.Task:
        data = _blobs(RECORDS * min(self.clients, 1000), NETWORKS[self.network][1])
        order = np.arange(RECORDS * self.clients) % len(data.x)
        starts = np.arange(self.clients + 1) * RECORDS
        return fv.Task(self.model, data, Split(order, starts, "shared"), device=self.device)

    @property
    def method(self) -> fv.FedAvg:
        local = fv.LocalTraining(lr=LR, epochs=1, batch=BATCH)
        private = fv.UserLevel(noise=NOISE, clip=CLIP, delta=DELTA) if self.private else None
        return fv.FedAvg(local=local, user_privacy=private)

    @property
    def sampler(self) -> CohortSampler:
        return CohortSampler(size=self.cohort)

    def orders(self, number: int) -> dict[int, np.ndarray]:
        """The clients of a round, and the order in which each takes its records."""
        seed = SEED.child("round", number)
        chosen = self.sampler.draw(self.task, seed.child("cohort"))
        own = {client: seed.child("client", client, "shuffle").numpy() for client in chosen}
        return {client: rng.permutation(self.task.clients[client]) for client, rng in own.items()}


class Opponent:
    """One implementation of FedAvg. `prepare` is not timed, `round` is."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        self.work, self.task = work, work.task

    def prepare(self, number: int) -> None: ...

    def round(self, number: int) -> None:
        raise NotImplementedError

    def timed(self, number: int) -> float:
        """Seconds of round `number`."""
        wait = torch.cuda.synchronize if self.work.device == "cuda" else lambda: None
        self.prepare(number)
        wait()
        began = time.perf_counter()
        self.round(number)
        wait()
        return time.perf_counter() - began

    def flat(self) -> Tensor:
        """The weights, [d], in the order of the task's layout."""
        raise NotImplementedError

    def processes(self) -> Sequence[int]:
        """Those whose memory counts."""
        return [os.getpid()]

    def close(self) -> None: ...


class Fedveil(Opponent):
    """options: of the engine."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        engine = LocalEngine(**options)
        self.federation = Federation(self.task, work.method, engine, work.sampler, SEED, evaluate_every=10**8)
        if account := work.method.account(self.task, work.sampler):
            self.federation.tally = account.tally()
        self.state = work.method.init_state(self.task)

    def round(self, number: int) -> None:
        self.state, row = self.federation.step(self.state, number, 10**9)
        if row.missing:
            raise RuntimeError(f"clients without an answer in round {number}: {row.missing}")

    def flat(self) -> Tensor:
        return self.state.weights


class Run(Opponent):
    """Whole runs of `fedveil.run`, with a run folder and evaluation after every round, or without both.

    options: `saved`, and those of the engine
    """

    rounds = 10

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        self.saved, self.options = options["saved"], {k: v for k, v in options.items() if k != "saved"}

    def timed(self, number: int) -> float:
        """Seconds a round, from the end of the first round to the end of the run."""
        ends: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            how: dict[str, Any] = {"folder": Path(folder) / "run"} if self.saved else {"evaluate_every": 10**8}
            result = fv.run(
                self.task,
                self.work.method,
                rounds=self.rounds,
                cohort=self.work.sampler,
                engine=LocalEngine(**self.options),
                observer=lambda row: ends.append(time.perf_counter()),
                **how,
            )
            taken = time.perf_counter() - ends[0]
        self.weights = result.weights
        return taken / (self.rounds - 1)

    def flat(self) -> Tensor:
        return self.weights


class PlainLoop(Opponent):
    """The loop that one writes by hand."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        loop = PrivateLoop if work.private else Loop
        self.loop = loop(self.task, copy.deepcopy(work.model), BATCH, LR, work.cohort)

    def round(self, number: int) -> None:
        self.loop.round(number, SEED)

    def flat(self) -> Tensor:
        return self.loop.flat()


class PrivateLoop(Loop):
    """The same with clipped updates and noise on their sum."""

    @torch.no_grad()
    def add(self, total: list[Tensor], records: int) -> None:
        updates = [p - q for p, q in zip(self.model.parameters(), self.weights, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in updates]))
        scale = (CLIP / norm).clamp(max=1)
        for t, u in zip(total, updates, strict=True):
            t.add_(u * scale)

    def merged(self, total: list[Tensor], records: int) -> list[Tensor]:
        noised = [t + torch.randn_like(t) * (NOISE * CLIP) for t in total]
        return [q + t / self.cohort for q, t in zip(self.weights, noised, strict=True)]


class TwoProcesses(PlainLoop):
    """The loop over half of a cohort in each of two processes."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        spawned = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(2, spawned, initializer=_start_half, initargs=(replace(work),))

    def round(self, number: int) -> None:
        cohort = self.work.sampler.draw(self.task, SEED.child("round", number, "cohort"))
        weights = [w.numpy() for w in self.loop.weights]
        halves = list(self.pool.map(_half, [(weights, cohort[i::2], number) for i in (0, 1)]))
        total = [torch.from_numpy(sum(parts)) for parts in zip(*(parts for parts, _ in halves), strict=True)]
        self.loop.weights = self.loop.merged(total, sum(records for _, records in halves))

    def processes(self) -> Sequence[int]:
        return [*super().processes(), *self.pool._processes]

    def close(self) -> None:
        self.pool.shutdown()


_OWN: list[Loop] = []


def _start_half(work: Workload) -> None:
    torch.set_num_threads(1)
    _OWN.append(PlainLoop(work, {}).loop)


def _half(question: tuple[list[np.ndarray], Sequence[int], int]) -> tuple[list[np.ndarray], int]:
    weights, cohort, number = question
    loop = _OWN[0]
    loop.weights = [torch.from_numpy(w) for w in weights]
    total, records = loop.summed(cohort, number, SEED)
    return [t.numpy() for t in total], records


class Pfl(Opponent):
    """pfl-research: federated averaging on its simulated backend, put together as its CIFAR-10 benchmark does."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        os.environ["PFL_PYTORCH_DEVICE"] = work.device
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel
        from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

        class Module(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def loss(self, x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(self.inner(x), y)

            @torch.no_grad()
            def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
                return {"accuracy": Weighted(int((self.inner(x).argmax(1) == y).sum()), len(x))}

        self.queue: list[int] = []
        self.rows: dict[int, Tensor] = {}
        self.module = Module(copy.deepcopy(work.model)).to(work.device)
        central = torch.optim.SGD(self.module.parameters(), 1.0)
        self.model = PyTorchModel(self.module, torch.optim.SGD, central)
        x, y = self.task.x, self.task.y

        def dataset(client: int) -> Any:
            return Dataset((x[self.rows[client]], y[self.rows[client]]), user_id=str(client))

        clients = FederatedDataset(dataset, lambda: self.queue.pop(0))
        mechanism = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, NOISE))] if work.private else []
        self.backend = SimulatedBackend(clients, clients, [WeightByUser(), *mechanism])
        self.algorithm = FederatedAveraging()
        self.until = lambda number: NNAlgorithmParams(number, 10**8, work.cohort, 0)
        self.train = NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH)

    def prepare(self, number: int) -> None:
        orders = self.work.orders(number)
        self.queue[:] = orders
        self.rows = {client: torch.from_numpy(rows).to(self.work.device) for client, rows in orders.items()}

    def round(self, number: int) -> None:
        # it goes on from the round before, up to this one
        self.algorithm.run(self.until(number), self.backend, self.model, self.train, send_metrics_to_platform=False)

    def flat(self) -> Tensor:
        return self.task.layout.join(dict(self.module.inner.named_parameters())).detach()


class FedJax(Opponent):
    """FedJAX's federated averaging, each client's epoch a compiled program. Images are [B, H, W, C] there."""

    def __init__(self, work: Workload, options: Mapping[str, Any]) -> None:
        super().__init__(work, options)
        import fedjax
        import jax
        from jax import lax
        from jax import numpy as jnp

        jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 uses the old name, which JAX has dropped
        layers = list(work.model.children())
        params = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.Conv2d):
                params[str(i)] = [layer.weight.detach().permute(2, 3, 1, 0).numpy(), layer.bias.detach().numpy()]
            elif isinstance(layer, nn.Linear):
                params[str(i)] = [layer.weight.detach().T.numpy(), layer.bias.detach().numpy()]
        shapes = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

        def scores(params: Any, x: Any) -> Any:
            for i, layer in enumerate(layers):
                if isinstance(layer, nn.Conv2d):
                    weight, bias = params[str(i)]
                    padding = [(side, side) for side in layer.padding]
                    x = lax.conv_general_dilated(x, weight, (1, 1), padding, **shapes) + bias
                elif isinstance(layer, nn.Linear):
                    weight, bias = params[str(i)]
                    x = x @ weight + bias
                elif isinstance(layer, nn.MaxPool2d):
                    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
                elif isinstance(layer, nn.Flatten):
                    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
                elif isinstance(layer, nn.ReLU):
                    x = jax.nn.relu(x)
                else:
                    raise TypeError(f"FedJAX's network has no {type(layer).__name__}; use another network")
            return x

        def loss(params: Any, batch: Any, rng: Any) -> Any:
            logs = jax.nn.log_softmax(scores(params, batch["x"]))
            return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()

        sgd = fedjax.optimizers.sgd
        batches = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, skip_shuffle=True)
        self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(jax.grad(loss), sgd(LR), sgd(1.0), batches)
        self.state = self.algorithm.init(jax.tree_util.tree_map(jnp.asarray, params))
        self.dataset, self.key, self.ready = fedjax.ClientDataset, jax.random.PRNGKey(0), jax.block_until_ready
        self.x, self.y = self.task.x.permute(0, 2, 3, 1).contiguous().numpy(), self.task.y.numpy()

    def prepare(self, number: int) -> None:
        orders = self.work.orders(number).items()
        self.clients = [(c, self.dataset({"x": self.x[o], "y": self.y[o]}), self.key) for c, o in orders]

    def round(self, number: int) -> None:
        self.state, _ = self.algorithm.apply(self.state, self.clients)
        self.ready(self.state.params)

    def flat(self) -> Tensor:
        parts = []
        for weight, bias in (self.state.params[key] for key in sorted(self.state.params, key=int)):
            weight = torch.from_numpy(np.array(weight))
            parts += [weight.permute(3, 2, 0, 1) if weight.ndim == 4 else weight.T, torch.from_numpy(np.array(bias))]
        return torch.cat([part.reshape(-1) for part in parts])


KINDS: dict[str, type[Opponent]] = {
    "fedveil": Fedveil,
    "run": Run,
    "loop": PlainLoop,
    "two processes": TwoProcesses,
    "pfl": Pfl,
    "fedjax": FedJax,
}


@dataclass
class Player:
    """An opponent in a process of its own, which is asked for one round at a time."""

    kind: str
    work: Workload
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, there = spawned.Pipe()
        own = (there, self.kind, self.work, dict(self.options))
        self._process = spawned.Process(target=_serve, args=own, name="MainProcess")  # pfl-research insists on the name
        self._process.start()
        there.close()

    def ask(self, what: str, *arguments: Any) -> None:
        self._pipe.send((what, *arguments))

    def answer(self) -> Any:
        """Raise a RuntimeError with the reason if the opponent failed."""
        try:
            problem, answer = self._pipe.recv()
        except EOFError:
            problem, answer = "its process ended", None
        if problem:
            raise RuntimeError(problem)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.terminate()


def _serve(pipe: Connection, kind: str, work: Workload, options: Mapping[str, Any]) -> None:
    """Answer one question after the other, the first of which is whether the opponent is ready."""
    began, player = time.perf_counter(), None
    while True:
        try:
            if player is None:
                if kind in ("loop", "pfl"):  # one after another; all others use the cores as they choose
                    torch.set_num_threads(1)
                torch.set_float32_matmul_precision("high")  # for all opponents alike
                player = KINDS[kind](work, options)
                answer: Any = {"weights": player.task.layout.size, "seconds": time.perf_counter() - began}
            else:
                what, *arguments = pipe.recv()
                answer = getattr(_Answers, what)(player, *arguments)
            pipe.send(("", answer))
        except EOFError:
            break
        except Exception as error:
            pipe.send((f"{type(error).__name__}: {error}", None))
            if player is None:
                break
    if player:
        player.close()


class _Answers:
    """What a player can be asked for."""

    @staticmethod
    def timed(player: Opponent, number: int) -> float:
        return player.timed(number)

    @staticmethod
    def weights(player: Opponent) -> np.ndarray:
        return player.flat().detach().cpu().numpy()

    @staticmethod
    def accuracy(player: Opponent) -> float:
        return player.task.evaluate(player.flat().to(player.task.device))["accuracy"]

    @staticmethod
    def forget(player: Opponent) -> None:
        """Measure peaks of memory from here on."""
        with contextlib.suppress(OSError):  # where the kernel does not allow it, peaks are those of the whole process
            for process in player.processes():
                Path(f"/proc/{process}/clear_refs").write_text("5")
        if player.work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def memory(player: Opponent) -> dict[str, float]:
        """Peaks in MiB."""
        told = {"host": sum(_peak(process) for process in player.processes()) / 1024}
        if player.work.device == "cuda":
            told["GPU, allocated"] = torch.cuda.max_memory_allocated() / 2**20
            told["GPU, reserved"] = torch.cuda.max_memory_reserved() / 2**20
        return told


def _peak(process: int) -> float:
    """The most memory that a process had, in KiB."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("VmHWM")), math.nan)
