"""The shipped data: what is in it, that it is checked, and that the two sides share nothing."""

import hashlib
import importlib.util
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from course_utils import datasets
from course_utils.datasets import DataError, mnist, photo_patches, photographs


@pytest.fixture
def copied_data(tmp_path, monkeypatch):
    """The data folder, copied to where a test may damage it."""
    folder = tmp_path / "data"
    shutil.copytree(datasets.DATA, folder)
    monkeypatch.setattr(datasets, "DATA", folder)
    return folder


def test_mnist_subset_is_balanced_and_its_two_parts_share_no_image():
    (x_train, y_train), (x_test, y_test) = mnist()
    assert x_train.shape == (5000, 28, 28) and x_test.shape == (1000, 28, 28)
    assert {a.dtype for a in (x_train, y_train, x_test, y_test)} == {np.dtype("uint8")}
    assert np.bincount(y_train).tolist() == [500] * 10
    assert np.bincount(y_test).tolist() == [100] * 10
    images = {image.tobytes() for image in np.concatenate([x_train, x_test])}
    assert len(images) == 6000
    assert x_train.min() == 0 and x_train.max() == 255
    assert len(set(y_train[:50])) == 10, "not mixed: a first batch must hold every digit"


def test_mnist_is_the_real_thing():
    # A line through centroids of the training images already reads most test digits.
    (x_train, y_train), (x_test, y_test) = mnist()
    means = np.stack([x_train[y_train == digit].mean(0).ravel() for digit in range(10)])
    distance = ((x_test.reshape(-1, 1, 784) - means) ** 2).sum(-1)
    assert (distance.argmin(1) == y_test).mean() > 0.75
    # Mean and spread of MNIST's pixels as widely published: 0.1307 and 0.3081.
    assert abs(x_train.mean() / 255 - 0.1307) < 0.005
    assert abs(x_train.std() / 255 - 0.3081) < 0.005


def test_results_on_the_subset_have_a_label():
    assert "not comparable" in datasets.MNIST_NOTE


def test_full_mnist_says_how_to_fill_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"keras\.datasets\.mnist\.load_data") as raised:
        mnist(full=True)
    assert str(tmp_path) in str(raised.value)


def test_full_mnist_reads_keras_cache_and_refuses_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    path = tmp_path / "datasets" / "mnist.npz"
    path.parent.mkdir()
    part = {"x": np.zeros((3, 28, 28), np.uint8), "y": np.arange(3, dtype=np.uint8)}
    np.savez(path, x_train=part["x"], y_train=part["y"], x_test=part["x"], y_test=part["y"])
    with pytest.raises(DataError, match="damaged or another file"):
        mnist(full=True)
    monkeypatch.setattr(datasets, "_FULL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    (x_train, _), (_, y_test) = mnist(full=True)
    assert x_train.shape == (3, 28, 28) and y_test.tolist() == [0, 1, 2]


def test_the_sum_of_full_mnist_is_the_one_keras_checks():
    keras = importlib.util.find_spec("keras")  # importing it would load TensorFlow
    if keras is None:
        pytest.skip("Keras is not installed")
    source = Path(keras.origin).parent / "src" / "datasets" / "mnist.py"
    assert datasets._FULL_SHA256 in source.read_text("utf-8")


@pytest.mark.parametrize("size", [32, 80, 150])
def test_patches_have_the_asked_size_and_there_are_enough(size):
    train, validation = photo_patches(size)
    for patches, least in ((train, 300), (validation, 80)):
        assert patches.shape[1:] == (size, size, 3) and patches.dtype == np.uint8
        assert len(patches) >= least
    assert train.std() > 20, "an empty picture teaches nothing"


def test_training_and_validation_share_no_photograph():
    names = {part: set(photographs(part)) for part in ("train", "validation")}
    assert names["train"] and names["validation"]
    assert not names["train"] & names["validation"]
    # Every patch is found in a photograph of its own side, and in none of the other's.
    for patches, own in zip(photo_patches(80, limit=24), ("train", "validation"), strict=True):
        other = {"train": "validation", "validation": "train"}[own]
        for patch in patches:
            assert any(contains(picture, patch) for picture in photographs(own).values())
            assert not any(contains(picture, patch) for picture in photographs(other).values())


def contains(picture, patch) -> bool:
    stride = 80 // 3
    return any(
        np.array_equal(picture[top : top + 80, left : left + 80], patch)
        for top in range(0, picture.shape[0] - 79, stride)
        for left in range(0, picture.shape[1] - 79, stride)
    )


def test_patches_are_deterministic_and_the_seed_orders_them():
    first, again = photo_patches(64, limit=40), photo_patches(64, limit=40)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    other, _ = photo_patches(64, limit=40, seed=1)
    assert not np.array_equal(first[0], other)
    everything, _ = photo_patches(64)
    assert np.array_equal(everything[:40], first[0]), "limit keeps the first ones"


def test_limit_and_stride():
    train, validation = photo_patches(80, limit=40)
    assert (len(train), len(validation)) == (40, 10)
    assert len(photo_patches(80, limit=1)[1]) == 1
    apart, _ = photo_patches(80, stride=80)
    assert 0 < len(apart) < len(photo_patches(80, stride=40)[0])


def test_impossible_patches_are_refused():
    with pytest.raises(ValueError, match="smallest photograph"):
        photo_patches(301)
    for bad in ({"size": 0}, {"stride": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            photo_patches(**bad)
    with pytest.raises(ValueError, match="validation"):
        photographs("test")


@pytest.mark.parametrize("name", ["mnist.npz", "china.jpg"])
def test_a_damaged_file_is_named_with_its_cure(copied_data, name):
    load = mnist if name == "mnist.npz" else photo_patches
    path = copied_data / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is damaged.*git checkout"):
        load()
    path.unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read.*Install"):
        load()


def test_every_shipped_file_is_small_and_its_licence_named():
    licences = (datasets.DATA / "LICENSES.md").read_text("utf-8")
    files = [path for path in datasets.DATA.iterdir() if path.suffix in (".npz", ".jpg")]
    photos = [name for part in datasets.PHOTOGRAPHS.values() for name in part]
    assert {path.name for path in files} == {"mnist.npz", *(f"{name}.jpg" for name in photos)}
    for path in files:
        assert path.name in licences
        assert path.stat().st_size < 1_500_000


def test_loading_is_quick():
    """Measured: 0.04 s and 0.15 s. The bound only tells these from a download or a loop."""
    start = time.perf_counter()
    mnist()
    photo_patches()
    assert time.perf_counter() - start < 5
