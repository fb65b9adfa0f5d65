"""The data of the models: handwritten digits, and text as bytes. Plain arrays, each split in two
parts."""

import gzip
import struct
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8


def split_digits() -> list[np.ndarray]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels: 1,500 images to train on and their labels, then
    those to test on."""
    from sklearn.datasets import (
        load_digits,
    )  # here: it takes two seconds, which the GPT need not wait

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return [
        x[rows] for rows in (order[:1500], order[1500:]) for x in (images.reshape(-1, 8, 8), labels)
    ]


def read_mnist(folder: Path) -> list[np.ndarray]:
    """The same four arrays from MNIST's files, packed (.gz) or not."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    matches = [sorted(folder.glob(f"{name}-ubyte*")) for name in names]
    if not all(matches):
        raise FileNotFoundError(
            f"--data {folder} must hold {', '.join(f'{name}-ubyte' for name in names)}, or .gz."
        )
    return [read_idx(paths[0]) for paths in matches]


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """An array of bytes in MNIST's format: 0, 0, 8 (the dtype), the number of dims, the dims, the
    data."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is no IDX file of bytes: it begins with {content[:3].hex(' ')}, not 00 00 08."
        )
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def read_text(folder: Path | None, context: int) -> list[UInt8[np.ndarray, "rows T+1"]]:
    """A folder's files, else Python's own sources: rows to train on, and those of every tenth file
    to test on."""
    folder, names = (folder, "*.*") if folder else (Path(sysconfig.get_paths()["stdlib"]), "*.py")
    files = [path.read_bytes() for path in sorted(folder.glob(names)) if path.is_file()]
    if len(files) < 2:
        raise FileNotFoundError(
            f"{folder} must hold two files {names}, to train and to test on; it has {len(files)}."
        )
    return [
        windows(part, context) for part in ([x for i, x in enumerate(files) if i % 10], files[::10])
    ]


def windows(files: Sequence[bytes], context: int) -> UInt8[np.ndarray, "rows T+1"]:
    """Rows of a text; each begins with the last byte of the one before, so that every byte is a
    target once."""
    content = np.frombuffer(b"".join(files), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(content, context + 1)[::context]
