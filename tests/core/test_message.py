"""Records become bytes and bytes become records, bit for bit; whatever else arrives is refused and costs nothing."""

import hashlib
import pickle
import random
import resource
import struct
import sys
import tracemalloc
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.raw import Update
from fedveil.core import message
from fedveil.core.loose import Loose
from fedveil.core.message import (
    DTYPES,
    KINDS,
    PREFIX_BYTES,
    VERSION,
    Answer,
    Count,
    Envelope,
    Record,
    Refused,
    Shape,
    Slots,
    Weights,
    frame,
    loose,
    pack,
    prefix,
    size,
    unframe,
    unpack,
)
from fedveil.core.method import State
from fedveil.core.moving import moved
from fedveil.core.schema import check, check_all, size_limit, stack
from fedveil.links.down import Train
from fedveil.methods.qfedavg import QFedAvg
from fedveil.methods.scaffold import Control
from fedveil.train.optimizers import Moments

REASONS = {
    *("truncated", "trailing bytes", "too large", "malformed", "not a frame", "wrong version", "wrong kind"),
    *("wrong field", "wrong dtype", "wrong shape"),
}
LIMIT = 1 << 20
FairUpdate = QFedAvg().parts.up.payloads.record  # an update and a number


@message.kind
class Everything(Answer, frozen=True):
    """One field of every form that a record can have."""

    first: Annotated[Tensor, Shape(("any",))]
    several: list[Annotated[Tensor, Shape(("any",))]]
    maybe: Annotated[Tensor, Shape(("any",))] | None
    count: Count
    share: Annotated[float, Meta(ge=0)]
    rates: list[float]
    seal: bytes
    inner: list[Update]


def tensors():
    """Tensors of every dtype and of every bit pattern, NaNs of all kinds among them."""

    def fill(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        return raw.view(dtype).view(torch.Size(shape))

    shapes = st.lists(st.integers(1, 6), max_size=4) | st.tuples(st.integers(1, 127), st.integers(1, 20))
    return st.builds(fill, st.sampled_from(DTYPES), shapes, st.integers(0, 2**32))


def everythings():
    return st.builds(
        Everything,
        first=tensors(),
        several=st.lists(tensors(), max_size=4),
        maybe=st.none() | tensors(),
        count=st.integers(1, 10**9),
        share=st.floats(0, allow_infinity=True),
        rates=st.lists(st.floats(), max_size=4),
        seal=st.binary(max_size=40),
        inner=st.lists(st.builds(Update, tensors(), st.integers(1, 9)), max_size=2),
    )


envelopes = st.builds(
    Envelope,
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
)


def bits(value):
    """A record as something that `==` compares bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Record):
        return type(value), [bits(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, Slots):
        return {name: bits(record) for name, record in value.items()}
    return struct.pack("<d", value) if isinstance(value, float) else value


def read(data: bytes, record: type[Record] = Everything) -> Record:
    return unframe(data, {record.kind: record}, LIMIT)[0]


def with_head(head: bytes, body: bytes = b"", record: type[Record] = Update) -> bytes:
    """A frame with any head."""
    padding = bytes(-(4 + len(head)) % 8)
    return prefix(record.kind, Envelope()) + struct.pack("<I", len(head)) + head + padding + body


def of_kind(data: bytes, number: int) -> bytes:
    """The bytes with the number of another kind."""
    low, high = bytes([number & 0xFF]), (number >> 8).to_bytes(2, "little")
    return data[:3] + low + data[4:22] + high + data[24:]


def refusal(data: bytes, record: type[Record] = Update) -> str:
    with pytest.raises(Refused) as caught:
        read(data, record)
    assert caught.value.reason in REASONS
    assert len(str(caught.value)) < 400
    return caught.value.reason


# ---------------------------------------------------------------------------------------------- there and back


@given(everythings(), envelopes)
@settings(max_examples=200, deadline=None)
def test_every_record_comes_back_bit_for_bit(record, where):
    found, there = unframe(frame(record, where), {Everything.kind: Everything}, LIMIT)
    assert bits(found) == bits(record)
    assert there == where
    assert frame(found, there) == frame(record, where)


@given(everythings())
@settings(max_examples=200, deadline=None)
def test_a_record_within_a_process_is_the_one_that_travels_without_a_copy(record):
    within = loose(record)
    assert within.payload == pack(record)
    assert len(within) == len(within.payload)
    assert size(record) == len(frame(record, Envelope()))
    found = unpack(within, Everything)
    assert bits(found) == bits(record)
    mine = {tensor.data_ptr() for tensor in within.tensors}
    assert mine == {tensor.data_ptr() for tensor in loose(found).tensors}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((), "truncated"),
        ((torch.ones(4),), "malformed"),
        ((torch.ones(3).double(),), "malformed"),
        ((torch.ones(3), torch.ones(3)), "trailing bytes"),
    ],
    ids=["none", "another shape", "another dtype", "too many"],
)
def test_tensors_within_a_process_must_be_those_that_the_head_describes(tensors, reason):
    head = loose(Update(torch.ones(3), 1)).head
    with pytest.raises(Refused) as caught:
        unpack(Loose(head, tensors), Update)
    assert caught.value.reason == reason


def test_a_tensor_that_is_a_view_of_another_comes_back_as_its_own_elements():
    grid = torch.arange(24.0).view(4, 6)
    for view in (grid.T, grid[::2, 1::3], grid[0].expand(3, 6), grid[1, 2]):
        assert torch.equal(read(frame(Update(view, 1), Envelope()), Update).update, view)


def test_tensors_that_are_read_are_views_of_the_frame():
    data = frame(Update(torch.ones(1000), 1), Envelope())
    start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    assert start < read(data, Update).update.data_ptr() < start + len(data)


@given(st.integers(1, 70_000), st.integers(1, 10**9))
@settings(max_examples=50, deadline=None)
def test_an_update_costs_at_most_64_bytes_and_16_a_tensor_beyond_its_numbers(size, records):
    assert len(frame(Update(torch.zeros(size), records), Envelope())) - 4 * size <= 64 + 16


@given(st.lists(tensors(), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_record_of_several_tensors_costs_at_most_64_bytes_and_16_a_tensor_beyond_its_numbers(several):
    record = Everything(several[0], several[1:], None, 1, 0.0, [], b"", [])
    numbers = sum(t.numel() * t.dtype.itemsize for t in several)
    assert len(frame(record, Envelope())) - numbers <= 64 + 16 * len(several)


@given(everythings(), envelopes)
@settings(max_examples=30, deadline=None)
def test_a_broadcast_is_packed_once_and_gets_a_prefix_for_each_client(record, where):
    assert frame(record, where) == prefix(record.kind, where) + pack(record)


def test_the_format_is_this_one():
    """If this fails, the format has changed: raise VERSION, and say what becomes of old run folders."""
    where = Envelope(run=bytes(range(8)), round=258, client=7, serial=3)
    golden = bytes.fromhex(
        "4656 02 77 0001020304050607 02010000 07000000 0300 3664"  # FV, version, kind, run, round, client, serial
        "06000000 92 92 00 91 03 2a 000000000000"  # head: [[float32, [3]], 42], padded
        "0000803f 000000c0 0000003f 00000000"  # body: 1, -2, 0.5, padded
    )
    record = Update(torch.tensor([1.0, -2.0, 0.5]), 42)
    assert frame(record, where) == golden
    found, there = unframe(golden, {Update.kind: Update}, 1000)
    assert (bits(found), there) == (bits(record), where)
    assert DTYPES.index(torch.uint32) == 9, "the codes of dtypes are part of the format"


# ---------------------------------------------------------------------------------------------- slots


@message.kind
class Nested(State, frozen=True):
    """A record with slots of its own, to lie in a slot of another."""


def test_slots_come_back_bit_for_bit_also_from_within_a_slot():
    inner = Nested(torch.tensor([float("nan"), -0.0]), Slots({"own": Control(torch.ones(3))}))
    state = State(torch.arange(3.0)).put("server", Moments(torch.ones(2), None)).put("a part: ä", inner)
    data = frame(state, Envelope(round=4))
    found, where = unframe(data, {State.kind: State}, len(data))
    assert bits(found) == bits(state)
    assert list(found.slots) == ["server", "a part: ä"]
    assert type(found.slots["a part: ä"].slots["own"]) is Control
    assert where.round == 4
    assert frame(found, where) == data
    assert message.size(state) == len(data)
    assert bits(moved(state, "cpu")) == bits(state)
    assert not unframe(frame(State(torch.ones(2)), Envelope()), {State.kind: State}, LIMIT)[0].slots


def test_slots_may_be_longer_than_other_heads():
    state = State(torch.ones(1)).put("server", Moments(torch.arange(40_000.0)))
    assert bits(read(frame(state, Envelope()), State)) == bits(state)


def test_putting_a_record_into_a_slot_leaves_the_other_slots_and_the_state_before():
    before = State(torch.ones(1)).put("one", Control(torch.zeros(1)))
    after = before.put("two", Control(torch.ones(1))).put("one", Control(torch.ones(1)))
    assert (list(before.slots), list(after.slots)) == (["one"], ["one", "two"])
    assert before.slots["one"].control == 0
    assert after.slots["one"].control == 1
    assert after.slots.get("three") is None


BROKEN_SLOTS = {
    "no map": ([], "wrong field"),
    "nil": (None, "wrong field"),
    "a number in a frame's place": ({"one": 3}, "wrong field"),
    "a number for a name": ({3: frame(Control(torch.ones(1)), Envelope())}, "wrong field"),
    "an empty frame": ({"one": b""}, "truncated"),
    "a frame cut off": ({"one": frame(Control(torch.ones(1)), Envelope())[:-1]}, "truncated"),
    "a kind that nobody has": ({"one": prefix(0, Envelope()) + pack(Control(torch.ones(1)))}, "wrong kind"),
}


@pytest.mark.parametrize(("slots", "reason"), BROKEN_SLOTS.values(), ids=BROKEN_SLOTS)
def test_broken_slots_are_refused(slots, reason):
    assert refusal(with_head(msgspec.msgpack.encode([[0, [1]], slots]), bytes(8), State), State) == reason


# ---------------------------------------------------------------------------------------------- what cannot be sent

UNWRITABLE = {
    "a boolean": torch.ones(2, dtype=torch.bool),
    "a complex": torch.ones(2, dtype=torch.complex64),
    "an empty": torch.ones(0),
    "an empty dimension": torch.ones(3, 0),
    "nine dimensions": torch.ones([1] * 9),
}


@pytest.mark.parametrize("tensor", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_tensor_that_no_reader_takes_is_not_written(tensor):
    with pytest.raises(ValueError, match="Update: no reader takes a torch"):
        pack(Update(tensor, 1))


def test_objects_and_long_lists_are_not_written():
    with pytest.raises(TypeError, match="cannot hold a complex"):
        pack(Everything(torch.ones(1), [], None, 1, 1j, [], b"", []))
    with pytest.raises(ValueError, match="put long lists into a tensor"):
        pack(Everything(torch.ones(1), [], None, 1, 1.0, [0.5] * 10_000, b"", []))


# ---------------------------------------------------------------------------------------------- the table of kinds


def test_a_kind_is_derived_from_the_top_package_and_the_name():
    """A record may move within its package. If this fails, the format has changed: raise VERSION."""
    assert (Update.kind, State.kind) == (0x643677, 0x99265A)
    assert Update.kind == int.from_bytes(hashlib.blake2b(b"fedveil.Update", digest_size=3).digest(), "little")


def named(name: str, module: str = "elsewhere.here") -> type[Answer]:
    return type(name, (Answer,), {"__module__": module, "__qualname__": name}, frozen=True)


def test_two_records_of_one_name_in_a_package_collide():
    before = dict(KINDS)
    told = (
        f"the records fedveil.codecs.raw.Update and fedveil.mine.Update have the same kind, {Update.kind}, "
        "because of their names; rename one of them"
    )
    with pytest.raises(ValueError, match=told):
        message.kind(named("Update", "fedveil.mine"))
    assert before == KINDS
    assert KINDS[Update.kind] is Update


def test_records_of_one_name_in_two_packages_have_two_kinds():
    other = message.kind(named("Update"))
    try:
        assert other.kind != Update.kind
        assert (KINDS[other.kind], KINDS[Update.kind]) == (other, Update)
    finally:
        del KINDS[other.kind]


def test_a_module_that_is_loaded_again_keeps_its_kinds():
    for _ in range(2):
        again = message.kind(named("Again"))
    assert KINDS.pop(again.kind) is again


def test_every_kind_of_the_table_knows_its_number():
    assert all(record.kind == number < 2**24 for number, record in KINDS.items())


# ---------------------------------------------------------------------------------------------- what must be refused

HONEST = frame(Update(torch.tensor([1.0, -2.0, 0.5]), 42), Envelope())

BROKEN = {
    "nothing": (b"", "truncated"),
    "half a prefix": (HONEST[:20], "truncated"),
    "a prefix alone": (HONEST[:PREFIX_BYTES], "truncated"),
    "a head cut off": (HONEST[:30], "truncated"),
    "a body cut off": (HONEST[:-8], "truncated"),
    "a padding cut off": (HONEST[:-1], "truncated"),
    "a byte too many": (HONEST + b"\0", "trailing bytes"),
    "a second frame behind": (HONEST + HONEST, "trailing bytes"),
    "other magic": (b"PK" + HONEST[2:], "not a frame"),
    "a pickle": (pickle.dumps(list(range(20))), "not a frame"),
    "another version": (HONEST[:2] + bytes([VERSION + 1]) + HONEST[3:], "wrong version"),
    "another kind": (of_kind(HONEST, Train.kind), "wrong kind"),
    "a kind that nobody has": (of_kind(HONEST, 0xFEFEFE), "wrong kind"),
    "a kind with another high byte": (of_kind(HONEST, Update.kind ^ 1 << 16), "wrong kind"),
    "a kind with another middle byte": (of_kind(HONEST, Update.kind ^ 1 << 8), "wrong kind"),
    "a kind with another low byte": (of_kind(HONEST, Update.kind ^ 1), "wrong kind"),
    "something in the head's padding": (HONEST[:38] + b"\1" + HONEST[39:], "malformed"),
    "something in the body's padding": (HONEST[:-1] + b"\1", "malformed"),
    "more than was expected": (HONEST + bytes(LIMIT), "too large"),
    "a head of 4 GiB": (HONEST[:24] + b"\xff\xff\xff\xff" + HONEST[28:], "truncated"),
    "a head longer than any": (with_head(b"\xc4" * 70_000), "too large"),
    "an empty head": (with_head(b""), "malformed"),
    "a head that is no array": (with_head(b"\xc0"), "wrong field"),
    "a head that is a map": (with_head(b"\x81\xa6update\x01"), "wrong field"),
    "a second record in the head": (with_head(b"\x92\x92\x00\x91\x01\x01\x90", bytes(8)), "malformed"),
    "a field missing": (with_head(b"\x91\x92\x00\x91\x01", bytes(8)), "wrong field"),
    "a field too many": (with_head(b"\x93\x92\x00\x91\x01\x01\x01", bytes(8)), "wrong field"),
    "nesting without end": (with_head(b"\x92" * 60_000), "malformed"),
    "a list of 4 billion": (with_head(b"\xdd\xff\xff\xff\xff"), "malformed"),
    "a shape of 4 billion dimensions": (with_head(b"\x92\x92\x00\xdd\xff\xff\xff\xff"), "malformed"),
    "a map of 4 billion": (with_head(b"\x92\xdf\xff\xff\xff\xff"), "malformed"),
    "a string of 4 GiB": (with_head(b"\x92\xdb\xff\xff\xff\xff"), "malformed"),
    "bytes of 4 GiB": (with_head(b"\x92\xc6\xff\xff\xff\xff"), "malformed"),
    "a map whose key is a map": (with_head(b"\x92\x81\x80\x01\x01"), "malformed"),
    "a string that is not UTF-8": (with_head(b"\x92\xa2\xff\xfe\x01"), "malformed"),
    "a date": (with_head(b"\x92\xd6\xff\x00\x00\x00\x00\x01"), "wrong dtype"),
    "a date beyond all calendars": (
        with_head(b"\x92\xc7\x0c\xff\x00\x00\x00\x00" + b"\x7f" * 8 + b"\x01"),
        "wrong field",
    ),
    "a number in a tensor's place": (with_head(b"\x92\x01\x01"), "wrong dtype"),
    "nil in a tensor's place": (with_head(b"\x92\xc0\x01"), "wrong dtype"),
    "a dtype that does not exist": (with_head(b"\x92\x92\x0a\x91\x01\x01", bytes(8)), "wrong dtype"),
    "a dtype by name": (with_head(b"\x92\x92\xa1O\x91\x01\x01", bytes(8)), "wrong dtype"),
    "a negative dtype": (with_head(b"\x92\x92\xff\x91\x01\x01", bytes(8)), "wrong dtype"),
    "a dtype that is true": (with_head(b"\x92\x92\xc3\x91\x01\x01", bytes(8)), "wrong dtype"),
    "a shape that is a number": (with_head(b"\x92\x92\x00\x01\x01", bytes(8)), "wrong dtype"),
    "an empty dimension": (with_head(b"\x92\x92\x00\x91\x00\x01"), "wrong shape"),
    "a negative dimension": (with_head(b"\x92\x92\x00\x91\xff\x01"), "wrong shape"),
    "a dimension of a half": (with_head(b"\x92\x92\x00\x91\xca\x3f\x00\x00\x00\x01"), "wrong shape"),
    "a dimension that is true": (with_head(b"\x92\x92\x00\x91\xc3\x01", bytes(8)), "wrong shape"),
    "a dimension of 10,000 letters": (
        with_head(b"\x92\x92\x00\x91\xda\x27\x10" + b"x" * 10_000 + b"\x01"),
        "wrong shape",
    ),
    "nine dimensions": (with_head(b"\x92\x92\x00\x99" + b"\x01" * 10, bytes(8)), "wrong shape"),
    "1e13 elements": (with_head(msgspec.msgpack.encode([[0, [10**13]], 1])), "wrong shape"),
    "1e12 elements": (with_head(msgspec.msgpack.encode([[0, [10**12]], 1])), "truncated"),
    "a size that overflows 64 bits": (with_head(msgspec.msgpack.encode([[0, [2**32, 2**32]], 1])), "truncated"),
    "a size that overflows to the right one": (
        with_head(msgspec.msgpack.encode([[0, [2**39, 2**25, 3]], 1]), bytes(16)),
        "truncated",
    ),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_bytes_are_refused_by_name_and_nothing_is_allocated_for_them(data, reason):
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        assert refusal(data) == reason
        assert tracemalloc.get_traced_memory()[1] < 500_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 50_000, "KiB outside of Python"
    finally:
        tracemalloc.stop()


def test_a_head_full_of_lists_costs_no_more_than_its_own_length_allows():
    """64 KiB of empty lists are the dearest head there is: some 72 bytes of memory for each byte."""
    tracemalloc.start()
    try:
        refusal(with_head(b"\x92\xdc\xff\xf0" + b"\x90" * 0xFFF0 + b"\x01"))
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


def hold(data: bytes) -> None:
    """Read bytes as each kind of record; only `Refused` may come of it."""
    reasons = []
    for record in (Update, FairUpdate, Everything, State):
        try:
            check(read(of_kind(data, record.kind), record), {"weights": 3, "any": (2, 2), "records": 9})
        except Refused as error:
            reasons.append(error.reason)
    assert set(reasons) <= REASONS | {"not finite", "out of range"}


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(data):
    hold(data)
    hold(HONEST[:PREFIX_BYTES] + data)
    hold(with_head(data, bytes(64)))


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(), st.binary(), st.dates()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3),
    max_leaves=12,
)
descriptions = st.tuples(st.integers(-1, 11), st.lists(st.integers(-1, 6) | st.integers(2**31, 2**64 - 1), max_size=9))


@given(st.lists(plain | descriptions, max_size=9), st.integers(0, 12))
@settings(max_examples=300, deadline=None)
@example([[0, [3]], float("nan")], 2)
def test_heads_with_any_contents_are_refused_or_right(values, words):
    hold(with_head(msgspec.msgpack.encode(values), bytes(8 * words)))


@given(everythings(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_damaged_frames_are_refused_or_right(record, rng):
    data = frame(record, Envelope())
    for _ in range(5):
        hold(damaged(data, rng))


def test_thousands_of_damaged_frames_are_refused_or_right():
    rng = random.Random(0)
    seeds = [HONEST, frame(FairUpdate(torch.ones(3), 0.5), Envelope())]
    seeds.append(frame(Everything(torch.ones(2, 2), [torch.ones(4)], None, 7, 0.5, [1.0], b"x", []), Envelope()))
    seeds.append(frame(State(torch.ones(3)).put("server", Moments(torch.ones(3))), Envelope()))
    for i in range(30_000):
        hold(damaged(seeds[i % len(seeds)], rng))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to three of: a bit flipped, a byte replaced, bytes cut out, put in, repeated, or the end cut off."""
    damage = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(damage) + 1)
        stretch = rng.randint(1, 9)
        match rng.randrange(6):
            case 0:
                damage[at : at + 1] = bytes(b ^ (1 << rng.randrange(8)) for b in damage[at : at + 1])
            case 1:
                damage[at : at + 1] = rng.choice([b"\x00", b"\xff", b"\x7f", b"\x80", b"\xdd", b"\xc6", b"\x91"])
            case 2:
                del damage[at : at + stretch]
            case 3:
                damage[at:at] = rng.randbytes(stretch)
            case 4:
                damage[at:at] = damage[at : at + stretch]
            case 5:
                del damage[at:]
    return bytes(damage)


def test_reading_in_threads_leaves_the_programs_warnings_alone():
    """`warnings.catch_warnings` in two threads at once leaves its filters behind."""
    before, pause = list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: [read(HONEST, Update) for _ in range(200)], range(8)))
    finally:
        sys.setswitchinterval(pause)
    assert warnings.filters == before


# ---------------------------------------------------------------------------------------------- schemas


class Picture(Answer, frozen=True):
    """Names that stand for several dimensions or a dtype, every kind of range, and a probability vector."""

    images: Annotated[Tensor, Shape(("points", "input"), low=0, high=1)]
    labels: Annotated[Tensor, Shape(("points", "classes"), simplex=True)]
    codes: Annotated[Tensor, Shape((2,), "code", high=2**32 - 1)]
    records: Count = 1
    rate: float = 0.5
    rates: list[float] = msgspec.field(default_factory=list)
    steps: list[Weights] = msgspec.field(default_factory=list)
    inner: Update | None = None


SIZES = {"points": 2, "input": (1, 2, 2), "classes": 2, "weights": 3, "records": 50, "code": torch.uint32}


def picture(**changes) -> Picture:
    codes = torch.tensor([0, 2**32 - 1]).to(torch.uint32)
    honest = {"images": torch.ones(2, 1, 2, 2), "labels": torch.eye(2), "codes": codes}
    return Picture(**{**honest, **changes})


def poked(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


nan, inf = float("nan"), float("inf")
UNFIT = {
    "another dtype": ({"images": torch.ones(2, 1, 2, 2).double()}, "wrong dtype"),
    "another dtype than the one agreed on": ({"codes": torch.zeros(2, dtype=torch.int32)}, "wrong dtype"),
    "a flat image": ({"images": torch.ones(2, 4)}, "wrong shape"),
    "a broadcastable image": ({"images": torch.ones(1, 1, 2, 2)}, "wrong shape"),
    "a number for a matrix": ({"labels": torch.tensor(1.0)}, "wrong shape"),
    "NaN": ({"images": poked(torch.ones(2, 1, 2, 2), nan)}, "not finite"),
    "infinity": ({"images": poked(torch.ones(2, 1, 2, 2), inf)}, "not finite"),
    "minus infinity": ({"images": poked(torch.ones(2, 1, 2, 2), -inf)}, "not finite"),
    "a pixel above the range": ({"images": poked(torch.ones(2, 1, 2, 2), 1.001)}, "out of range"),
    "a pixel below the range": ({"images": poked(torch.ones(2, 1, 2, 2), -0.001)}, "out of range"),
    "a row that sums to 2": ({"labels": torch.ones(2, 2)}, "out of range"),
    "a negative probability": ({"labels": torch.tensor([[1.5, -0.5], [1.0, 0.0]])}, "out of range"),
    "more records than anybody has": ({"records": 51}, "out of range"),
    "a float NaN": ({"rate": nan}, "not finite"),
    "a float infinity": ({"rate": -inf}, "not finite"),
    "NaN in a list of floats": ({"rates": [0.0, nan]}, "not finite"),
    "a wrong shape in a list of tensors": ({"steps": [torch.ones(3), torch.ones(1)]}, "wrong shape"),
    "NaN in a list of tensors": ({"steps": [torch.ones(3), torch.full((3,), nan)]}, "not finite"),
    "a fault in a record within": ({"inner": Update(torch.full((3,), 1e7), 1)}, "out of range"),
}


@pytest.mark.parametrize(("changes", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_record_that_does_not_fit_its_schema_is_refused_by_name(changes, reason):
    check(picture(), SIZES)
    with pytest.raises(Refused) as caught:
        check(picture(**changes), SIZES)
    assert caught.value.reason == reason


@pytest.mark.parametrize("together", [True, False], ids=["rows of a stack", "apart"])
def test_records_are_checked_together_as_they_are_one_by_one(together):
    changes = [changes for changes, _ in UNFIT.values()]
    fine = [picture(), picture(images=torch.zeros(2, 1, 2, 2))]
    records = [fine[0], *(picture(**each) for each in changes), fine[1]]
    if together:
        rows = torch.stack([r.images if r.images.shape == (2, 1, 2, 2) else r.images[:1].new_ones(2, 1, 2, 2)
                            for r in records if r.images.dtype == torch.float32])  # fmt: skip
        like = [r for r in records if r.images.dtype == torch.float32]
        records = [replace(r, images=row) for r, row in zip(like, rows, strict=True)]
    found = check_all(records, [SIZES] * len(records))
    for record, problem in zip(records, found, strict=True):
        if problem is None:
            check(record, SIZES)
        else:
            with pytest.raises(Refused) as alone:
                check(record, SIZES)
            assert (alone.value.reason, alone.value.detail) == (problem.reason, problem.detail)
    assert found[0] is None
    assert found[-1] is None
    assert sum(problem is not None for problem in found) > 10


def test_rows_of_a_stack_are_stacked_without_a_copy():
    rows = torch.randn(5, 3)
    records = [Update(row, 1) for row in rows]
    assert stack(records, "update").data_ptr() == rows.data_ptr()
    assert torch.equal(stack(records, "update"), rows)
    for others in (records[::-1], records[::2], [records[0], records[0]], [Update(r.clone(), 1) for r in rows][1:]):
        expected = torch.stack([record.update for record in others])
        assert torch.equal(stack(others, "update"), expected)
    assert torch.equal(stack([Update(column, 1) for column in rows.T], "update"), rows.T)


def test_a_record_at_the_edges_of_its_schema_is_taken():
    check(picture(images=torch.zeros(2, 1, 2, 2), records=50, rates=[0.0], steps=[torch.full((3,), -1e6)]), SIZES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_held_against_a_schema(dtype):
    class One(Answer, frozen=True):
        value: Annotated[Tensor, Shape((2,), dtype, high=100)]

    check(One(torch.tensor([3, 100]).to(dtype)), {})
    with pytest.raises(Refused, match="out of range: value reaches from 3 to 120, allowed is"):
        check(One(torch.tensor([3, 120]).to(dtype)), {})


@given(st.integers(1, 5000), st.integers(1, 10**9))
@settings(max_examples=30, deadline=None)
def test_no_honest_frame_is_over_the_limit_and_no_limit_is_far_over_the_frame(size, records):
    honest = len(frame(Update(torch.zeros(size), records), Envelope()))
    assert honest <= size_limit(Update, {"weights": size}) <= honest + 1100


def test_payloads_are_read_without_a_prefix_too():
    assert bits(unpack(HONEST[PREFIX_BYTES:], Update)) == bits(read(HONEST, Update))
