"""Real data that needs no network: MNIST digits, and patches of photographs.

    >>> (x_train, y_train), (x_test, y_test) = mnist()
    >>> x_train.shape, x_test.shape
    ((5000, 28, 28), (1000, 28, 28))
    >>> train, validation = photo_patches(size=80)
    >>> train.shape[1:], train.dtype
    ((80, 80, 3), dtype('uint8'))

The files ship in `course_utils/data`; licences and authors: `course_utils/data/LICENSES.md`.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Arrays = tuple[np.ndarray, np.ndarray]

DATA = Path(__file__).parent / "data"

# To print beside any accuracy measured on the subset.
MNIST_NOTE = (
    "MNIST subset (5,000 + 1,000 of 70,000 images, split by the course): "
    "not comparable with results on the full data set"
)
_MNIST_SHA256 = "195d5fb6b8c0f204ede6310b141bd8daf4a0307301467ebd2c1c1ad98e294018"
# The sum that Keras itself checks in keras.datasets.mnist.load_data.
_FULL_SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"

# Which photograph is on which side. Whole photographs are held back: two patches of one
# photograph overlap, so a split by patch would test on pixels that were trained on.
PHOTOGRAPHS = {
    "train": {
        "astronaut": "7df9e4b494e3d18ee98c0e7a51eb506ca377ccf67668ca7e8500a6704e12518d",
        "china": "8c89ef16f75af261539301f903e9ce5b419c0e1471788a5282cd461917092106",
        "flower": "7d31016452a3a7b8c6abf85cddc801a4e4a4e22df02e47d005969a6908c74a71",
        "raccoon": "21020ee8967ad3d2bba7ca46ee602a2dfbd7364b9a1c5426441983a62132bddf",
        "rocket": "e6be25026753dff0d102a6b39322794cc44fd90568d9702cfb0f5cbec1aa4aa0",
    },
    "validation": {
        "chelsea": "fc898c685c70f36d349c985193d1121103966bad43aa69cb3d7114cb0430150f",
        "coffee": "952901529a5cdf33c3d31cc5058809e8e304216a206565eca8c4261fea2afd8a",
    },
}


class DataError(RuntimeError):
    """A data file is missing or is not the one it should be. The message says what to do."""


def mnist(full: bool = False) -> "tuple[Arrays, Arrays]":
    """Handwritten digits: `(x_train, y_train), (x_test, y_test)`.

    x is uint8 [n, 28, 28] with 0 = background and 255 = ink, y is uint8 [n]. The subset has
    5,000 + 1,000 images, each digit equally often; print MNIST_NOTE beside what you measure
    on it. `full=True` gives all 60,000 + 10,000 from the cache that Keras keeps, and asks
    no network: raises DataError, saying how to fill the cache, when they are not there.
    """
    import numpy as np

    if full:
        path, sha256, cure = _keras_cache(), _FULL_SHA256, _FILL_KERAS_CACHE
    else:
        path, sha256, cure = DATA / "mnist.npz", _MNIST_SHA256, _REINSTALL
    with np.load(io.BytesIO(_read(path, sha256, cure)), allow_pickle=False) as arrays:
        train = arrays["x_train"], arrays["y_train"]
        test = arrays["x_test"], arrays["y_test"]
    return train, test


def photographs(part: str) -> "dict[str, np.ndarray]":
    """The photographs of "train" or "validation": name -> uint8 [height, width, 3]."""
    import numpy as np
    from PIL import Image

    if part not in PHOTOGRAPHS:
        raise ValueError(f"part={part!r}: there are {list(PHOTOGRAPHS)}")
    pictures = {}
    for name, sha256 in PHOTOGRAPHS[part].items():
        data = _read(DATA / f"{name}.jpg", sha256, _REINSTALL)
        pictures[name] = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return pictures


def photo_patches(
    size: int = 80, stride: int | None = None, limit: int | None = None, seed: int = 0
) -> "tuple[np.ndarray, np.ndarray]":
    """Square pieces of photographs: `(train, validation)`, each uint8 [n, size, size, 3].

    Patches lie on a grid of `stride` pixels (default: a third of `size`, so neighbours
    overlap), and training and validation never share a photograph. `seed` sets the order, in
    which the photographs are mixed. `limit` keeps at most so many training patches, and at
    most a quarter as many for validation. Same arguments, same patches.
    Raises ValueError when no photograph is as large as `size` or a number is below 1.
    """
    stride = max(1, size // 3) if stride is None else stride
    for name, value in (("size", size), ("stride", stride), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    train = _patches("train", size, stride, limit, seed)
    validation = _patches("validation", size, stride, limit and max(1, limit // 4), seed)
    return train, validation


def _patches(part: str, size: int, stride: int, limit: int | None, seed: int) -> "np.ndarray":
    import numpy as np

    pictures = photographs(part)
    largest = min(min(picture.shape[:2]) for picture in pictures.values())
    if size > largest:
        raise ValueError(f"size={size}: the smallest photograph allows {largest} at most")
    places = [
        (name, top, left)
        for name, picture in pictures.items()
        for top in range(0, picture.shape[0] - size + 1, stride)
        for left in range(0, picture.shape[1] - size + 1, stride)
    ]
    chosen = np.random.default_rng(seed).permutation(len(places))[:limit]
    patches = np.empty((len(chosen), size, size, 3), dtype=np.uint8)
    for patch, place in zip(patches, chosen, strict=True):
        name, top, left = places[place]
        patch[:] = pictures[name][top : top + size, left : left + size]
    return patches


_REINSTALL = (
    "Install the course's package again (pip install --force-reinstall --no-deps, with the "
    "source you took it from), or in a git clone: git checkout -- course_utils/data"
)
_FILL_KERAS_CACHE = (
    "Where there is a network, this downloads it once (11 MiB): "
    'python -c "import keras; keras.datasets.mnist.load_data()". '
    "Without one, copy mnist.npz to that place, or use mnist(), the subset that ships"
)


def _read(path: Path, sha256: str, cure: str) -> bytes:
    """The file's bytes, once their checksum is right; else DataError with the cure."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path} cannot be read ({reason}). {cure}.") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(
            f"{path} is damaged or another file: its sha256 starts with {found[:12]}, "
            f"not with {sha256[:12]}. Delete it. {cure}."
        )
    return data


def _keras_cache() -> Path:
    home = os.environ.get("KERAS_HOME")  # Keras looks there first
    return (Path(home) if home else Path.home() / ".keras") / "datasets" / "mnist.npz"
