"""How kernels are made and launched: compiled, captured once as a CUDA graph, or small ones on one thread."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fedveil.gpu import trace
from fedveil.gpu.context import Observer, current

PROGRAMS = 8  # of one step, each for its shapes; with more shapes than that compiling would never end
GRAPHS = 64  # of one function, each for its shapes
WARM_UP = 3  # real steps run before the capture, so that libraries have chosen their kernels and buffers
OFTEN = 0.5  # seconds between two calls, or less
CALLS, SECONDS = 100, 1.0  # of a function for some shapes before it is traced, which takes about a second
QUEUED = 16  # replays before the first: it waits for the GPU, and a short schedule should not

_one_at_a_time = threading.Lock()  # a tracer patches modules
_here = threading.local()  # whether a compiler looks on in this thread, and whether a step is taken or captured


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's kernels on one thread: faster for small ones, and they round the same whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Captured:
    """A step that is captured as a CUDA graph after a few runs, and replayed from then on, by any number of loops.

    It must work in place on tensors that outlive it and read nothing else that changes.

    pool: memory that it shares with other graphs, none of which needs anything from it after a replay
    """

    def __init__(self, step: Callable[[], object], pool: Any = None) -> None:
        self.step, self.ran, self._pool = step, 0, pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, capture: bool) -> None:
        """Take the step; without `capture` no graph is made of it yet."""
        if self._graph is None and (self.ran < WARM_UP or not capture):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), _capturing():
                self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.ran += 1
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            capture_of = torch.cuda.graph(self._graph, self._pool, capture_error_mode="thread_local")  # others may wait
            with capture_of, _capturing():
                self.step()
        self._graph.replay()


@contextmanager
def _capturing() -> Iterator[None]:
    """While a step is taken that is, or will be, captured: a graph has no other graphs in it."""
    before = getattr(_here, "captured", False)
    _here.captured = True
    try:
        yield
    finally:
        _here.captured = before


class Replayed:
    """A function of tensors that returns a tensor, captured as a CUDA graph for each set of shapes.

    Its operations may depend on shapes and not on values, and it must read nothing else that changes. On a CPU, without
    `capture`, inside a step that is captured itself, and for more than `most` sets of shapes, it is called as it is.
    """

    def __init__(self, function: Callable[..., Tensor], most: int = GRAPHS) -> None:
        self._function, self._graphs, self._most = function, dict[tuple[Any, ...], _Graph](), most
        self._pool: Any = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        key = tuple((t.shape, t.dtype) for t in tensors)
        if tensors[0].device.type != "cuda" or not current().capture or getattr(_here, "captured", False):
            return self._function(*tensors)
        if key not in self._graphs and len(self._graphs) == self._most:
            return self._function(*tensors)
        if key not in self._graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = _Graph(self._function, tensors, self._pool)
        return self._graphs[key](*tensors)


class _Graph:
    """A function for tensors of one set of shapes."""

    def __init__(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], pool: Any) -> None:
        self._function, self._given = function, [t.clone() for t in tensors]
        self._result: Tensor | None = None
        self._captured = Captured(self._step, pool)

    def _step(self) -> None:
        result = self._function(*self._given)
        if self._result is None:  # in the first run, outside the memory of the graph
            self._result = torch.empty_like(result)
        self._result.copy_(result)

    def __call__(self, *tensors: Tensor) -> Tensor:
        for own, given in zip(self._given, tensors, strict=True):
            own.copy_(given)
        self._captured.run(True)
        assert self._result is not None
        return self._result.clone()


class Loop:
    """A step that is run many times, a few at a time. On a GPU it is captured as a graph, once, and replayed.

    See `Captured` for what it may do. One that walks through a schedule keeps its position in a tensor
    (`cursor.add_(1)`), so that a replay moves on.

    step:  one that is `Captured` already keeps its graph for the next loop
    total: how often it will be run, or about
    part:  what of a longer schedule this is, for the observer: the steps before, and all there are; None tells nothing
    """

    def __init__(
        self,
        step: Callable[[], object] | Captured,
        total: int,
        device: torch.device,
        part: tuple[int, int] | None = None,
    ) -> None:
        here, self._done = current(), 0
        self._told = _teller(here.observer, *part, device) if here.observer and part else None
        self._step = step.step if isinstance(step, Captured) else step
        often = total > 2 * WARM_UP
        if device.type == "cuda" and here.capture:
            if isinstance(step, Captured):
                self._step = partial(step.run, often or step.ran > 0)
            elif often:
                self._step = partial(Captured(step).run, True)

    def run(self, times: int) -> None:
        for _ in range(times):
            self._step()
            self._done += 1
            if self._told:
                self._told(self._done)


def repeat(
    step: Callable[[], object] | Captured, times: int, device: torch.device, part: tuple[int, int] | None = None
) -> None:
    """Run a `Loop` at once. `part` says what of a longer schedule this is; by default it is all there is."""
    Loop(step, times, device, part or (0, times)).run(times)


class Fused:
    """A function of tensors that gives tensors, and that is called often.

    On a CPU, once calls for some shapes have taken a while, a trace of their operators takes the place of the function
    (see `trace.program`). It gives the same result, bit for bit.

    Compiled, elementwise work becomes few kernels, which round differently. Every operation that the function did once
    is compiled, those of derivatives included. So the operations may depend on shapes and not on values. Compiling
    takes up to a minute. There is a program for each of the first `PROGRAMS` sets of shapes.
    """

    def __init__(self, name: str, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._name, self._function = name, function
        self._programs: dict[tuple[Any, ...], Callable[..., tuple[Tensor, ...]]] = {}
        self._spent: dict[tuple[Any, ...], tuple[int, float]] = {}  # calls before a trace, and seconds

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        here = current()
        traceable = here.capture and tensors[0].device.type == "cpu" and not any(t.requires_grad for t in tensors)
        if not (here.compile or traceable):
            return self._function(*tensors)
        shapes = ((t.shape, t.stride(), t.dtype) for t in tensors)
        key = (here.compile, *shapes, *(() if here.compile else map(Tensor.storage_offset, tensors)))
        if key in self._programs:
            return self._programs[key](*tensors)
        if len(self._programs) == PROGRAMS:
            return self._function(*tensors)
        if not here.compile:
            return self._warm_up(key, *tensors)
        with _one_at_a_time:  # threads wait: without the program they would round differently
            if key not in self._programs:
                if here.announcer:
                    here.announcer(f"compiling {self._name}, up to a minute")
                self._programs[key] = compiled(self._function, *tensors)
        return self._programs[key](*tensors)

    def _warm_up(self, key: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the function. Trace it if it is called often and its calls have taken as long as a trace would."""
        began = time.perf_counter()
        result = self._function(*tensors)
        calls, seconds = self._spent.get(key, (0, 0.0))
        calls, seconds = self._spent[key] = calls + 1, seconds + time.perf_counter() - began
        if calls >= CALLS and seconds >= SECONDS:
            self._programs[key] = self._function  # for other threads, in the meantime
            with _one_at_a_time:
                self._programs[key] = trace.program(self._function, *tensors)
        return result


def compiled(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """A program for tensors of these shapes; the function itself, with a warning, where PyTorch cannot make one."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with tracing():
            traced = make_fx(partial(function), tracing_mode="fake", _allow_non_fake_inputs=True)  # constants are real
            operations = traced(*tensors)  # with the compiler's strides
        join(operations)
        program: Callable[..., tuple[Tensor, ...]] = torch.compile(operations, dynamic=False)
        program(*tensors)
    except Exception as error:  # whatever a compiler may say: what it was to speed up works without it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"a step runs uncompiled: {reason}", stacklevel=3)
        return function
    return program


@contextmanager
def tracing() -> Iterator[None]:
    """While a compiler looks on: what it throws away costs nothing, and it cannot look into kernels."""
    _here.traced = True
    try:
        yield
    finally:
        _here.traced = False


def traced() -> bool:
    """Whether a compiler looks on, in this thread."""
    return getattr(_here, "traced", False)


def join(operations: GraphModule) -> None:
    """A B + C D becomes [A C] [B; D] where that is larger than its factors: a gradient by the windows of a layer comes
    from its own gradient and from the one behind it, and would be written twice, read twice and written again."""
    graph, aten = operations.graph, torch.ops.aten
    if any(mutable(node.target) for node in graph.nodes):
        return  # factors might have other values when the sum is taken than when they were multiplied
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        factors = [_factors(term) for term in node.args]
        if [] in factors or node.kwargs or len({_shape(term) for term in node.args}) > 1:
            continue
        (a, b), (c, d) = factors
        if sum(_shape(factor).numel() for factor in (a, b, c, d)) > _shape(node).numel():
            continue
        with graph.inserting_before(node):
            left, right = (graph.call_function(aten.cat.default, pair) for pair in (([a, c], 2), ([b, d], 1)))
            node.replace_all_uses_with(graph.call_function(aten.bmm.default, (left, right)))
    graph.eliminate_dead_code()
    operations.recompile()


def mutable(function: Any) -> bool:
    """Whether an operator may change what it is given."""
    return bool(getattr(getattr(function, "_schema", None), "is_mutable", False))


def _factors(term: Any) -> list[Any]:
    """Of a stacked product that nothing else needs; of other things none."""
    aten = torch.ops.aten
    while isinstance(term, Node) and len(term.users) == 1:
        if term.target == aten.bmm.default:
            return list(term.args) if all(map(_shape, term.args)) else []
        inner = term.args[0] if term.target in (aten.view.default, aten._unsafe_view.default) else None
        term = inner if _shape(inner) == _shape(term) else None
    return []


def _shape(node: Any) -> Any:
    """None of what `join` has made, too."""
    return getattr(node.meta.get("val"), "shape", None) if isinstance(node, Node) else None


def _teller(observer: Observer, before: int, total: int, device: torch.device) -> Callable[[int], None]:
    """Pass the steps done on to an observer, of fast steps ever fewer: what is told lies about `OFTEN` apart."""
    queued = device.type == "cuda"
    gap, last = QUEUED if queued else 1, time.monotonic()
    due = gap

    def told(done: int) -> None:
        nonlocal gap, last, due
        if done < due:
            return
        if queued:
            torch.cuda.current_stream(device).synchronize()
        observer(before + done, total)
        now = time.monotonic()
        gap = 2 * gap if now - last < OFTEN else gap
        due, last = done + gap, now

    return told
