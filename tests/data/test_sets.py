"""`Data`, the named sets that need no files, and a user's own data."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedveil.data import Data, DataMissing, from_dataset, from_folder, from_tensors, load
from fedveil.data.sets import VOCABULARY

X, Y = torch.zeros(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def make(**changes) -> Data:
    fields = {"name": "toy", "x": X, "y": Y, "test_x": X[:2], "test_y": Y[:2], "classes": 3, "labels": ("a", "b", "c")}
    return Data(**{**fields, "mean": (0.0,), "std": (1.0,), **changes})


def test_data_knows_its_input() -> None:
    assert make().input == (1, 4, 4)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"x": X[:5]}, "5 records but 6 labels in the training part of 'toy'"),
        ({"test_y": Y[:1]}, "2 records but 1 labels in the test part of 'toy'"),
        ({"x": X[:0], "y": Y[:0]}, "no record in the training part"),
        ({"x": X[:, 0, 0, 0]}, r"x is \[6\]"),
        ({"x": X.double()}, "x is torch.float64 and y torch.int64"),
        ({"y": Y.float()}, "x is torch.float32 and y torch.float32"),
        ({"x": X.long()}, r"so tokens \[n, T\], but is \[6, 1, 4, 4\]"),
        ({"x": X / 0}, "not finite"),
        ({"y": Y[:, None]}, "neither a label a record"),
        ({"y": Y - 1}, "labels go from -1 to 1, but there are 3 classes"),
        ({"test_y": Y[:2] + 2}, "labels go from 2 to 3, but there are 3 classes"),
        ({"test_x": X[:2, :, 1:]}, r"training records are torch.float32 \[1, 4, 4\] but test records .*\[1, 3, 4\]"),
        ({"labels": ("a", "b")}, "3 classes but 2 labels"),
        ({"groups": Y[:5]}, r"groups .* torch.int64 \[5\], not torch.int64 \[6\]"),
        ({"mean": ()}, "1 picture channels, but 0 means and 1 stds"),
        ({"std": (0.0,)}, "std must be above 0"),
    ],
)
def test_data_that_does_not_fit_together_is_refused(changes, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as caught:
        make(**changes)
    assert str(caught.value).endswith(".")


# --- digits ------------------------------------------------------------------------------------------------------


def sixteen(x: torch.Tensor, data: Data) -> torch.Tensor:
    """Standardised pixels back to scikit-learn's 0 to 16."""
    return ((x * data.std[0] + data.mean[0]) * 16).round()


def test_digits_are_the_same_everywhere() -> None:
    data = load("digits")
    assert (data.x.shape, data.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (float(data.x.mean()), float(data.x.std())) == pytest.approx((0, 1), abs=0.01)
    sixteenths = sixteen(data.test_x, data).byte().numpy().tobytes() + data.test_y.byte().numpy().tobytes()
    assert hashlib.sha256(sixteenths).hexdigest()[:16] == "94c1f7e048dc0589"


def test_digits_split_is_stratified_and_leaves_nothing_out() -> None:
    from sklearn.datasets import load_digits

    data = load("digits")
    tested, all_ = data.test_y.bincount(), data.test_y.bincount() + data.y.bincount()
    assert ((tested - all_ / 5).abs() < 1).all()
    rows = sixteen(torch.cat([data.x, data.test_x]), data).flatten(1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, load_digits().data.tolist()))


# --- Shakespeare -------------------------------------------------------------------------------------------------


def write_roles(folder: Path, roles: dict[str, list[str]]) -> None:
    (folder / "shakespeare").mkdir()
    raw = json.dumps({"source": "x", "users": list(roles), "user_lines": roles}).encode()
    (folder / "shakespeare" / "shakespeare_roles_mit.json.gz").write_bytes(gzip.compress(raw))


def spell(tokens: torch.Tensor) -> str:
    return "".join(VOCABULARY[i] for i in tokens)


def test_a_role_becomes_windows_and_the_last_fifth_is_for_testing(tmp_path: Path) -> None:
    hamlet = ["To be, or not", "to be: that"]  # 25 characters: 6 windows of 4, 2 of them for testing
    write_roles(tmp_path, {"HAMLET": hamlet, "Ghost": ["Mark me."], "Clown": ["A pestilence"]})
    data = load("shakespeare", tmp_path, length=4)
    text = "\n".join(hamlet)
    assert [spell(x) for x in data.x[data.groups == 0]] == ["To b", "e, o", "r no", "t\nto"]
    assert [spell(y) for y in data.y[data.groups == 0]] == [text[i + 1 : i + 5] for i in (0, 4, 8, 12)]
    assert [spell(x) for x in data.test_x[:2]] == [" be:", " tha"]
    assert [spell(x) for x in data.x[data.groups == 1]] == ["A pe"]  # Ghost has a single window
    assert data.x.dtype == data.y.dtype == torch.int64
    assert (data.classes, data.labels, data.mean) == (len(VOCABULARY), tuple(VOCABULARY), ())


def test_characters_outside_the_vocabulary_become_spaces(tmp_path: Path) -> None:
    write_roles(tmp_path, {"A": ["a\té\U0001f600\x7fz~bcd"]})
    assert spell(load("shakespeare", tmp_path, length=4).x[0]) == "a   "
    assert spell(load("shakespeare", tmp_path, length=4).test_x[0]) == " z b"


def test_shakespeare_options_are_checked(tmp_path: Path) -> None:
    write_roles(tmp_path, {"A": ["short"]})
    with pytest.raises(ValueError, match=r"No role in .* has 2 windows of 80 characters"):
        load("shakespeare", tmp_path)
    with pytest.raises(ValueError, match="length 0"):
        load("shakespeare", tmp_path, length=0)
    with pytest.raises(ValueError, match=r"unknown option of data set 'shakespeare' 'lenght'; did you mean 'length'\?"):
        load("shakespeare", tmp_path, lenght=3)


# --- names -------------------------------------------------------------------------------------------------------


def test_unknown_names_get_the_nearest_spelling(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown data set 'fashon-mnist'; did you mean 'fashion-mnist'\?"):
        load("fashon-mnist")
    with pytest.raises(ValueError, match="known: digits, mnist, fashion-mnist, cifar10, shakespeare"):
        load("xyzzy")
    with pytest.raises(ValueError, match="unknown option of data set 'digits' 'least'; known: none"):
        load("digits", least=3)
    with pytest.raises(ValueError, match="unknown option of data set 'mnist' 'mean'; known: none"):
        load("mnist", mean=0.5)
    with pytest.raises(DataMissing, match=r"no folder or .npz file at"):
        load("my.npz")
    with pytest.raises(DataMissing, match=r"no folder or .npz file at"):
        load(tmp_path / "nowhere")


# --- a user's own data -------------------------------------------------------------------------------------------


def test_tensors_are_converted() -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), np.uint8)
    data = from_tensors(x, Y.numpy(), x[:2], Y[:2], mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), groups=Y)
    shown = data.x * torch.tensor(data.std).view(3, 1, 1) + torch.tensor(data.mean).view(3, 1, 1)
    np.testing.assert_allclose(shown.numpy() * 255, x, atol=1e-3)
    assert (data.classes, data.labels, data.name) == (3, ("0", "1", "2"), "tensors")
    features = from_tensors(np.eye(6), Y, np.eye(6)[:2], Y[:2], classes=5)
    assert (features.x.dtype, features.input, features.classes, features.mean) == (torch.float32, (6,), 5, ())
    tokens = from_tensors(x[:, 0, 0], x[:, 0, 1], x[:, 1, 0], x[:, 1, 1], classes=256)
    assert (tokens.x.dtype, tokens.y.shape) == (torch.int64, (6, 4))


def test_the_users_tensors_are_not_touched() -> None:
    x = torch.ones(6, 1, 4, 4)
    data = from_tensors(x, Y, x, Y, mean=(1.0,), std=(0.5,))
    assert x.unique().tolist() == [1]
    assert data.x.unique().tolist() == [0]


def test_labels_must_be_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"test_y holds torch.float32, but must hold whole numbers\."):
        from_tensors(X, Y, X, Y.float())


def test_datasets_are_collected() -> None:
    x = torch.rand(6, 1, 4, 4)
    data = from_dataset(TensorDataset(x, Y), TensorDataset(x[:2], Y[:2]), labels="abc")
    assert torch.equal(data.x, x)
    assert torch.equal(data.y, Y)
    assert data.labels == ("a", "b", "c")
    plain = from_dataset([(np.zeros(3), 0), (np.ones(3), 1)], [(np.zeros(3), 1)])  # any sequence of pairs will do
    assert (plain.input, plain.y.tolist()) == ((3,), [0, 1])


@pytest.mark.parametrize("items", [[], [1, 2], [(X[0], 0, 0)], [(X[0], 0), (X[0, 0], 0)], [("text", 0)]])
def test_datasets_of_anything_else_are_refused(items) -> None:
    with pytest.raises(ValueError, match="dataset"):
        from_dataset(items, items)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def fill(folder: Path, *, colour: bool = False) -> Path:
    """Two classes, two training pictures each and a test picture, numbered by their grey value."""
    for part, numbers in (("train", (0, 1)), ("test", (2,))):
        for c, name in enumerate(("cat", "dog")):
            for i in numbers:
                shape = (4, 5, 3) if colour and i else (4, 5)
                save(folder / part / name / f"{i}.png", np.full(shape, 10 * c + i, np.uint8))
    (folder / "train" / "cat" / "notes.txt").write_text("not a picture")
    return folder


@pytest.mark.parametrize("colour", [True, False])
def test_a_folder_of_pictures(tmp_path: Path, colour: bool) -> None:
    data = load(fill(tmp_path / "pets", colour=colour))
    assert (data.name, data.labels, data.input) == ("pets", ("cat", "dog"), (3 if colour else 1, 4, 5))
    assert (data.x[:, -1, 0, 0] * 255).round().tolist() == [0, 1, 10, 11]
    assert data.y.tolist() == [0, 0, 1, 1]
    assert (data.test_x[:, 0, 0, 0] * 255).round().tolist() == [2, 12]


def test_pictures_are_resized_and_standardised_when_asked(tmp_path: Path) -> None:
    fill(tmp_path)
    save(tmp_path / "train" / "dog" / "9.png", np.full((8, 8), 50, np.uint8))
    with pytest.raises(ValueError, match=r"9.png is 8 × 8 but pictures before it are 4 × 5; give size=\(4, 5\)"):
        from_folder(tmp_path)
    data = from_folder(tmp_path, size=(2, 3), mean=[0.5], std=[0.25])
    assert data.input == (1, 2, 3)
    assert ((data.x[-1] * 0.25 + 0.5) * 255).round().unique().tolist() == [50]


def test_folders_that_are_no_data_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="train holds no class folders"):
        from_folder(tmp_path)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "test" / "cow").mkdir(parents=True)
    with pytest.raises(ValueError, match="has the class 'cow'"):
        from_folder(tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    with pytest.raises(DataMissing, match="train holds no pictures"):
        from_folder(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", "cut", "deep"])
def test_a_broken_picture_names_its_file(tmp_path: Path, raw: bytes | str) -> None:
    path = fill(tmp_path) / "train" / "dog" / "1.png"
    if raw == "cut":
        raw = path.read_bytes()[:-30]
    if raw == "deep":
        save(path, np.zeros((4, 5), np.uint16))
    else:
        path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"1.png is no picture of 8-bit pixels"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("shape", "input_"),
    [((4, 7, 8), (1, 7, 8)), ((4, 7, 8, 3), (3, 7, 8)), ((4, 7, 8, 1), (1, 7, 8)), ((4, 3, 7, 8), (3, 7, 8))],
)
def test_pictures_in_an_npz(tmp_path: Path, shape: tuple[int, ...], input_: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    y = np.array([[0], [1], [2], [0]])
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, groups=np.array([5, 5, 1, 1]))
    data = load(str(tmp_path / "mine.npz"))
    assert (data.name, data.input, data.classes, data.y.shape) == ("mine", input_, 3, (4,))
    assert data.groups is not None
    assert data.groups.tolist() == [5, 5, 1, 1]
    pixels = (data.x * 255).round().byte().numpy()
    assert pixels[0, 0, 2, 3] == (x[0, 2, 3] if len(shape) == 3 else x[0, 2, 3, 0] if shape[3] < 7 else x[0, 0, 2, 3])


def test_an_npz_without_an_array_or_with_a_strange_one_says_which(tmp_path: Path) -> None:
    arrays = {"x_train": np.eye(3), "y_train": np.arange(3), "x_test": np.eye(3)}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match="has no array 'y_test'"):
        load(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **arrays, y_test=np.arange(3), group=np.arange(3))
    with pytest.raises(ValueError, match=r"unknown array in .* 'group'; did you mean 'groups'"):
        load(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="size= is for folders"):
        load(tmp_path / "a.npz", size=(2, 2))
    with pytest.raises(ValueError, match=r"unknown option of data in .* 'sise'; did you mean 'size'"):
        load(tmp_path / "a.npz", sise=(2, 2))


def test_targets_may_be_real_numbers_bits_or_maps() -> None:
    real = from_tensors(X, np.arange(6.0), X, np.arange(6.0))
    assert (real.y.dtype, real.classes, real.labels, real.labelled) == (torch.float32, 0, (), False)
    bits = from_tensors(X, np.eye(6, 3), X, np.eye(6, 3), labels="abc")
    assert (bits.y.shape, bits.classes, bits.labels) == ((6, 3), 3, ("a", "b", "c"))
    maps = torch.zeros(6, 4, 4, dtype=torch.int32)
    maps[0, 0, 0], maps[1, 1, 1] = -100, 2
    found = from_tensors(X, maps, X, maps)
    assert (found.y.dtype, found.classes, found.labelled) == (torch.int64, 3, False)
    assert from_tensors(X, Y, X, Y).labelled


@pytest.mark.parametrize(
    ("y", "test_y", "wrong"),
    [
        (Y.float() / 0, Y.float(), "some values of y are not finite"),
        (Y.float(), Y.float()[:, None], r"y is \[\] a training record but \[1\] a test record"),
        (Y - 100, Y, "labels go from -100 to"),  # a record without any label is none
        (-Y[:, None].expand(-1, 4) - 1, Y[:, None].expand(-1, 4), "labels go from -3 to -1, but there are 3 classes"),
    ],
)
def test_targets_that_no_loss_takes_are_refused(y, test_y, wrong) -> None:
    with pytest.raises(ValueError, match=wrong):
        from_tensors(X, y, X, test_y)


def test_an_npz_file_may_hold_validation_records(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4, 4), np.uint8)
    parts = {"x_train": pixels, "y_train": Y.numpy(), "x_test": pixels[:2], "y_test": Y[:2].numpy()}
    np.savez(tmp_path / "a.npz", **parts, x_validation=pixels[:3], y_validation=Y[:3, None].numpy())
    data = from_folder(tmp_path / "a.npz", mean=(0.5,), std=(0.5,))
    assert data.validation_x.shape == (3, 1, 4, 4)
    assert data.validation_x.unique().tolist() == [-1]  # standardised as the others
    assert torch.equal(data.validation_y, Y[:3])
    np.savez(tmp_path / "b.npz", **parts, x_validation=pixels[:3])
    with pytest.raises(ValueError, match="has x_validation alone; give x_validation and y_validation, or neither"):
        from_folder(tmp_path / "b.npz")
