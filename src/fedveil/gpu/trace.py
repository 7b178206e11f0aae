"""A step as a flat list of operators, for CPUs.

In every step, `vmap` and autograd decide again which operators to call. A trace decides once. It calls the same
operators on the same numbers, so its result is the same, bit for bit, and it costs less:

- a view of a view is one view, and a copy with the layout of its input is left out;
- a product that is transposed and then copied is computed in the layout of the copy;
- a pool whose tiles do not overlap is a few operators on whole rows. PyTorch's kernels visit one number at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, ...]]
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and offset of a tensor in its storage

aten = torch.ops.aten
VIEWS = {
    torch.as_strided,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def program(function: Function, *tensors: Tensor) -> Function:
    """Return the operators that `function` calls for tensors of these shapes and strides, as one function.

    Return `function` itself if its operators draw random numbers or write in place, if they depend on the values of
    the tensors, or if the program gives another result for these tensors.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    expected = function(*tensors)
    try:
        operations = make_fx(partial(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        if any(_impure(node.target) or _dynamic(node) for node in operations.graph.nodes):
            return function
        simplify(operations)
        run: Function = torch.no_grad()(operations.forward)
        found = run(*tensors)
    except Exception:  # whatever a model may do; it works without a trace
        return function
    same = _aliases(*found, *tensors) == _aliases(*expected, *tensors)
    return run if same and all(map(_identical, found, expected)) else function


def simplify(operations: GraphModule) -> None:
    """Rewrite a trace so that it does less and gives the same numbers."""
    graph = operations.graph
    _pools(graph)
    _views(graph)
    _products(graph)
    _views(graph)
    graph.eliminate_dead_code()
    operations.recompile()


def _impure(target: Any) -> bool:
    """Return whether an operator writes into its arguments or draws random numbers."""
    schema, tags = getattr(target, "_schema", None), getattr(target, "tags", ())
    return bool(schema and schema.is_mutable) or torch.Tag.nondeterministic_seeded in tags


def _dynamic(node: Node) -> bool:
    """Return whether a result or its shape is a number that depends on the values of the tensors."""
    values = tree_leaves(node.meta.get("val"))
    sizes = [size for value in values for size in (value.shape if isinstance(value, Tensor) else (value,))]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def _aliases(*tensors: Tensor) -> list[int]:
    """Return for each tensor the first one that shares its storage."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return [storages.index(own) for own in storages]


def _place(node: Node) -> Place:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), int(value.storage_offset())


def _views(graph: Graph) -> None:
    """Take every view from its base directly, and each one once."""
    bases: dict[Node, Node] = {}
    taken: dict[tuple[Node, Place], Node] = {}
    for node in list(graph.nodes):
        source = _source(node)
        if source is None:
            continue
        base, place = bases.get(source, source), _place(node)
        view = base if place == _place(base) else taken.get((base, place))
        if view is None:
            with graph.inserting_before(node):
                view = taken[base, place] = graph.call_function(torch.as_strided, (base, *place))
            view.meta["val"], bases[view] = node.meta["val"], base
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _source(node: Node) -> Node | None:
    """Return the tensor that a node is a view of, or that it copies for nothing; None for other nodes."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.target in VIEWS:
        return first
    if node.target is operator.getitem and first.target == aten.split_with_sizes.default:
        return _node(first.args[0])
    copies = node.target == aten.clone.default or (node.target == aten.mul.Scalar and node.args[1] == 1)
    own = first.op == "call_function"  # and not an argument, which the caller may overwrite
    return first if copies and own and _place(first) == _place(node) else None


def _products(graph: Graph) -> None:
    """Compute (A B)ᵀ as Bᵀ Aᵀ where the transpose is all that is used, and copied, if both round alike."""
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        view = _node(copy.args[0])
        if view.target is not torch.as_strided or len(view.users) > 1:
            continue
        whole = _node(view.args[0])
        if whole.target != aten.bmm.default or len(whole.users) > 1:
            continue
        stack, rows, columns = whole.meta["val"].shape
        transposed = _place(view) == ((stack, columns, rows), (rows * columns, 1, columns), 0)
        if not (transposed and _round_alike(*map(_node, whole.args))):
            continue
        with graph.inserting_before(copy):
            factors = [graph.call_function(aten.transpose.int, (_node(m), 1, 2)) for m in reversed(whole.args)]
            for factor in factors:
                factor.meta["val"] = _node(factor.args[0]).meta["val"].transpose(1, 2)
            result = graph.call_function(aten.bmm.default, tuple(factors))
        result.meta["val"] = copy.meta["val"]
        copy.replace_all_uses_with(result)
        for node in (copy, view, whole):
            graph.erase_node(node)


def _round_alike(*factors: Node) -> bool:
    """Return whether A B and (Bᵀ Aᵀ)ᵀ are the same, bit for bit: a library may add in another order for another shape.
    The order does not depend on the numbers, so any that fill the shapes and strides of the factors will tell."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.empty_strided(*_place(factor)[:2]).normal_(generator=draw) for factor in factors)
    return torch.equal(torch.bmm(a, b), torch.bmm(b.mT, a.mT).mT)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _pools(graph: Graph) -> None:
    """Replace pools of contiguous pictures whose tiles do not overlap and leave no rest."""
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        if node.target == aten.avg_pool2d.default and _tiled(*node.args):
            node.target, node.args = mean_tiles, (first, *node.args[1])
        elif node.target == aten.avg_pool2d_backward.default and _tiled(*node.args[1:]):
            node.target, node.args = spread_tiles, (first, *node.args[2])
        elif node.target == aten.max_pool2d_with_indices.default and node.args[1] == [2, 2] and _tiled(*node.args):
            node.target, node.args = max_tiles, (first,)


def _tiled(x: Node, tile: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (), *more: Any) -> bool:
    """Return whether the arguments of a pool give tiles of `x` [..., H, W]. `more` follows padding: dilation, how to
    round and count at the border, and another divisor."""
    value = x.meta["val"]
    plain = not any(padding) and all(m is None or isinstance(m, bool) or m == [1, 1] for m in more)
    whole = all(size % k == 0 for size, k in zip(value.shape[-2:], tile, strict=True))
    tiles = list(stride or tile) == list(tile) != [1, 1]
    return plain and whole and tiles and value.is_contiguous() and value.dtype in (torch.float32, torch.float64)


def mean_tiles(x: Tensor, kh: int, kw: int) -> Tensor:
    """Return `F.avg_pool2d` of [..., H, W] by tiles of kh × kw. The order of each sum is that of PyTorch's kernel."""
    *some, height, width = x.shape
    tiles = x.view(-1, height // kh, kh, width // kw, kw)
    first, second, *rest = (tiles[:, :, row, :, column] for row in range(kh) for column in range(kw))
    total = first + second
    for part in rest:
        total += part
    return total.div_(kh * kw).view(*some, height // kh, width // kw)


def spread_tiles(gradient: Tensor, kh: int, kw: int) -> Tensor:
    """Return the derivative of `mean_tiles` for its gradient [..., h, w], of shape [..., h · kh, w · kw]."""
    *some, rows, columns = gradient.shape
    share = (gradient / (kh * kw)).view(-1, rows * columns)
    return share.index_select(1, _tile_of_each(rows, columns, kh, kw)).view(*some, rows * kh, columns * kw)


@cache
def _tile_of_each(rows: int, columns: int, kh: int, kw: int) -> Tensor:
    """Return the number of the tile that each place of a picture is in."""
    numbers = torch.arange(rows * columns).view(rows, columns)
    return numbers.repeat_interleave(kh, 0).repeat_interleave(kw, 1).view(-1)


def max_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `F.max_pool2d` of [..., H, W] by tiles of 2 × 2, and the index of each maximum in its picture.

    Of several maxima it is the first in reading order, as in PyTorch's kernel.
    """
    *some, height, width = x.shape
    left, right = x.view(*some, height, width // 2, 2).unbind(-1)
    above, below = torch.maximum(left, right).view(*some, height // 2, 2, width // 2).unbind(-2)
    in_above, in_below = (right > left).view(*some, height // 2, 2, width // 2).unbind(-2)
    lower = below > above
    second = in_above ^ (lower & (in_above ^ in_below))  # `torch.where` of three masks is slower
    return torch.maximum(above, below), lower.long().mul_(width).add_(second).add_(_corners(height, width))


@cache
def _corners(height: int, width: int) -> Tensor:
    """Return the index of the first place of each 2 × 2 tile in a picture, [height / 2, width / 2]."""
    return torch.arange(height * width).view(height, width)[::2, ::2].contiguous()
