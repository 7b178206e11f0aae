"""File formats and fetching: well-formed files round-trip, anything else is one ValueError that names the file."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data import DataMissing, files, load


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


def write_mnist(folder: Path, n: int = 20, tests: int = 10, compress: bool = True) -> dict[str, bytes]:
    """Small MNIST files with real headers; returns what was written, by name."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for part, count in (("train", n), ("t10k", tests)):
        arrays = {
            f"{part}-images-idx3-ubyte": rng.integers(0, 256, (count, 28, 28), np.uint8),
            f"{part}-labels-idx1-ubyte": (np.arange(count) % 10).astype(np.uint8),
        }
        for name, array in arrays.items():
            name, raw = (f"{name}.gz", gzip.compress(idx(array))) if compress else (name, idx(array))
            (folder / name).write_bytes(raw)
            written[name] = raw
    return written


def cifar_batches(n: int = 4) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    batches = {}
    for name in names:
        records = rng.integers(0, 256, (n, 3073), np.uint8)
        records[:, 0] %= 10
        batches[name] = records.tobytes()
    return batches


# --- IDX ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=64), st.integers(1, 3), st.booleans())
def test_random_bytes_are_never_more_than_a_value_error(raw: bytes, dims: int, with_magic: bool) -> None:
    raw = (bytes([0, 0, 8, dims]) if with_magic else b"") + raw
    try:
        array = files.parse_idx(raw, dims, "some-file")
    except ValueError as error:
        assert "some-file" in str(error)  # noqa: PT017
    else:
        assert idx(array) == raw


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_idx_round_trip(shape: list[int], random) -> None:
    array = np.frombuffer(random.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
    np.testing.assert_array_equal(files.parse_idx(idx(array), len(shape), "f"), array)


GOOD = idx(np.zeros((2, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b"", "starts with nothing"),
        (b"\0\0\x0d\x03" + GOOD[4:], "starts with 00000d03"),
        (idx(np.zeros(9, np.uint8)), "starts with 00000801, not with 00000803"),
        (GOOD[:9], "ends within its header, after 9 of 16"),
        (GOOD[:-1], "claims 1,568 values but holds 1,567"),
        (GOOD + b"\0", "claims 1,568 values but holds 1,569"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "claims 79,228,162,458,924,105,385,300,197,375 values but holds 0"),
        (b"\0\0\x08\x03" + b"\xff" * 8 + b"\0" * 4, "is empty"),
    ],
)
def test_a_broken_idx_file_says_what_is_wrong(raw: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"images.* {wrong}"):
        files.parse_idx(raw, 3, "images")


def break_and_load(folder: Path, name: str, raw: bytes) -> None:
    write_mnist(folder / "mnist")
    (folder / "mnist" / name).write_bytes(raw)
    load("mnist", folder)


@pytest.mark.parametrize(
    ("name", "raw", "wrong"),
    [
        ("train-images-idx3-ubyte.gz", GOOD, "is no whole gzip file"),
        ("train-images-idx3-ubyte.gz", gzip.compress(GOOD)[:-9], "is no whole gzip file"),
        ("train-images-idx3-ubyte.gz", gzip.compress(GOOD)[:12] + b"\xff" * 40, "is no whole gzip file"),
        ("train-images-idx3-ubyte.gz", gzip.compress(GOOD), "holds 2 pictures but .* 20 labels"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(np.zeros((20, 28, 27), np.uint8))), "28 × 27"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.full(10, 10, np.uint8))), "holds the label 10"),
    ],
    ids=["not gzip", "cut", "damaged", "other length", "other size", "label"],
)
def test_broken_mnist_files(tmp_path: Path, name: str, raw: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .*{wrong}|{wrong}.*{name}"):
        break_and_load(tmp_path, name, raw)


def test_decompression_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * 5000))
    assert len(files.read(path, 5000)) == 5000
    with pytest.raises(ValueError, match="more than 4,999 bytes"):
        files.read(path, 4999)


@pytest.mark.parametrize("compress", [True, False])
def test_mnist_files_load_plain_and_gzipped(tmp_path: Path, compress: bool) -> None:
    written = write_mnist(tmp_path / "mnist", compress=compress)
    data = load("mnist", tmp_path)
    raw = written["train-images-idx3-ubyte" + ".gz" * compress]
    raw = gzip.decompress(raw) if compress else raw
    pixels = (data.x * 0.3081 + 0.1307) * 255
    assert data.input == (1, 28, 28)
    assert (len(data.x), len(data.test_x), data.classes) == (20, 10, 10)
    assert pixels.round().byte().numpy().tobytes() == raw[16:]
    assert data.y.tolist() == [*range(10), *range(10)]


# --- CIFAR-10 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", files.CIFAR10_FOLDER])
def test_cifar10_batches_load(tmp_path: Path, below: str) -> None:
    folder = tmp_path / "cifar10" / below
    folder.mkdir(parents=True)
    batches = cifar_batches()
    for name, raw in batches.items():
        (folder / name).write_bytes(raw)
    data = load("cifar10", tmp_path)
    assert data.input == (3, 32, 32)
    assert (len(data.x), len(data.test_x)) == (20, 4)
    record = np.frombuffer(batches["data_batch_2.bin"], np.uint8)[:3073]  # the fifth picture
    assert data.y[4] == record[0]
    blue = data.x[4, 2] * data.std[2] + data.mean[2]
    np.testing.assert_allclose(blue.numpy() * 255, record[-1024:].reshape(32, 32), atol=1e-3)


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b"", "holds 0 bytes"),
        (b"\0" * 3072, "holds 3,072 bytes, not some records of 3,073"),
        (b"\x0a" + b"\0" * 3072, "holds the label 10"),
    ],
)
def test_a_broken_cifar10_batch_says_what_is_wrong(raw: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"batch {wrong}"):
        files.parse_cifar10(raw, "batch")


# --- Shakespeare's roles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"user_lines": [1]}',
        b'{"user_lines": {"a": "b"}}',
        b'{"other": ' + b"[" * 9999,
    ],
)
def test_a_broken_roles_file_says_so(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"roles.json is not a JSON of roles"):
        files.parse_roles(raw, "roles.json")


@given(st.binary(max_size=40))
def test_random_roles_are_never_more_than_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match="is not a JSON of roles"):
        files.parse_roles(b'{"user_lines": ' + raw, "f")


# --- .npz --------------------------------------------------------------------------------------------------------


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in members.items():
            archive.writestr(f"{name}.npy", raw)
    return path


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.asfortranarray(np.eye(3)[:2]), np.arange(3, dtype=">i4")]
)
def test_npz_arrays_are_read_as_written(tmp_path: Path, array: np.ndarray) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=array)
    np.testing.assert_array_equal(files.read_npz(tmp_path / "a.npz")["a"], array)


def test_an_npz_array_that_claims_more_than_it_holds_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    raw = npy(np.zeros((10, 4), np.float32)).replace(b"(10, 4), }" + b" " * 14, b"(10, 4000000000000), }  ")
    with pytest.raises(ValueError, match=r"'a.npy', claims the shape \(10, 4000000000000\).* holds 160 bytes"):
        files.read_npz(npz(tmp_path / "a.npz", a=raw))


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b"hello", "is no .npy array"),
        (npy(np.zeros(3))[:40], "is no .npy array"),
        (npy(np.zeros(3))[:-1], "claims the shape"),
        (npy(np.zeros(3)) + b"\0", "claims the shape"),
        (npy(np.array([{}]), allow_pickle=True), "has type object, not numbers"),
        (npy(np.array(["text"])), "has type <U4, not numbers"),
    ],
)
def test_a_broken_npz_array_says_what_is_wrong(tmp_path: Path, raw: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"a.npz, array 'a.npy', {wrong}"):
        files.read_npz(npz(tmp_path / "a.npz", a=raw))


@given(st.data())
def test_a_damaged_npz_is_never_more_than_a_value_error(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    np.savez_compressed(path, a=np.arange(50))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    try:
        files.read_npz(path)
    except ValueError as error:
        assert "damaged.npz" in str(error)  # noqa: PT017


@given(st.lists(st.tuples(st.integers(0, 79), st.sampled_from(b"09(),-{}'[]\n<OL\\x\0")), min_size=1, max_size=4))
def test_a_damaged_npy_header_is_never_more_than_a_value_error(damage: list[tuple[int, int]]) -> None:
    raw = bytearray(npy(np.zeros((3, 4), np.float32)))
    for place, value in damage:
        raw[place] = value
    try:
        files.parse_npy(bytes(raw), "some-array")
    except ValueError as error:
        assert str(error).startswith("some-array ")  # noqa: PT017


# --- missing files and fetching ----------------------------------------------------------------------------------


def test_missing_files_say_which_where_and_how_to_fetch(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    assert f"needs t10k-labels-idx1-ubyte (plain or .gz) in {tmp_path / 'mnist'}" in message
    assert "fetch=True (--fetch on the command line)" in message
    assert message.count(". ") == 0


@pytest.mark.parametrize("fetch", [True, False])
def test_shakespeare_has_no_home_to_fetch_from(tmp_path: Path, fetch: bool) -> None:
    with pytest.raises(DataMissing, match=r"needs shakespeare_roles_mit.json .* no home to be fetched from"):
        load("shakespeare", tmp_path, fetch=fetch)


def test_the_directory_comes_from_the_argument_then_the_environment_then_the_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "env"))
    assert files.data_directory(tmp_path) == tmp_path
    assert files.data_directory(None) == tmp_path / "env"
    monkeypatch.delenv("FEDVEIL_DATA")
    assert files.data_directory(None) == Path.home() / ".cache" / "fedveil"


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Iterator[tuple[Path, str, list[str]]]:
    """A folder served on loopback, its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            asked.append(self.path)

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()
        thread.join(5)


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def test_missing_files_are_fetched_and_present_ones_left_alone(site, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("pooch")
    folder, url, asked = site
    home = files.Home(url, {name: md5(raw) for name, raw in write_mnist(folder).items()})
    monkeypatch.setitem(files.HOMES, "mnist", home)
    write_mnist(tmp_path / "mnist", compress=False)
    (tmp_path / "mnist" / "train-images-idx3-ubyte").unlink()
    assert len(load("mnist", tmp_path, fetch=True).x) == 20
    assert set(asked) == {"/train-images-idx3-ubyte.gz"}
    asked.clear()
    load("mnist", tmp_path, fetch=True)
    assert asked == []


def test_a_fetched_file_with_a_wrong_sum_is_refused_and_not_kept(site, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("pooch")
    folder, url, _ = site
    monkeypatch.setitem(files.HOMES, "mnist", files.Home(url, dict.fromkeys(write_mnist(folder), md5(b"other"))))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is not the published file"):
        load("mnist", tmp_path, fetch=True)
    assert not any((tmp_path / "mnist").iterdir())


def test_a_home_that_does_not_answer_is_data_missing(site, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("pooch")
    _, url, _ = site
    monkeypatch.setitem(files.HOMES, "mnist", files.Home(url, files.HOMES["mnist"].files))
    with pytest.raises(DataMissing, match=r"could not be fetched \(HTTPError\).* by hand"):
        load("mnist", tmp_path, fetch=True)


def test_cifar10_is_fetched_as_an_archive_of_which_only_the_batches_are_unpacked(
    site, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("pooch")
    folder, url, asked = site
    archive = folder / "cifar-10-binary.tar.gz"
    batches = cifar_batches()
    with tarfile.open(archive, "w:gz") as tar:
        for name, raw in {**batches, "../../evil": b"no"}.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    monkeypatch.setitem(files.HOMES, "cifar10", files.Home(url, {archive.name: md5(archive.read_bytes())}))
    assert len(load("cifar10", tmp_path / "data", fetch=True).x) == 20
    here = tmp_path / "data" / "cifar10"
    assert sorted(path.name for path in here.iterdir()) == sorted([*batches, archive.name])
    assert not list(tmp_path.rglob("evil"))
    (here / "test_batch.bin").unlink()
    load("cifar10", tmp_path / "data", fetch=True)
    assert asked == [f"/{archive.name}"]


def test_a_foreign_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"a.tar.gz is not CIFAR-10's archive"):
        files.unpack(tmp_path / "a.tar.gz", tmp_path, ["test_batch.bin"])


def test_fetching_without_pooch_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'fedveil\[fetch\]'"):
        load("mnist", tmp_path, fetch=True)
