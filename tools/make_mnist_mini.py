"""Make the embedded mnist-mini: 6,000 training and 1,000 test images of MNIST, equally many of every digit.

    python tools/make_mnist_mini.py DATA_DIR

DATA_DIR holds mnist/ with the publishers' four files. Prints the row of each file for the table in
fedagg/data/sources.py.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np

from fedagg.data.idx import read_idx, write_idx

SEED = 2024
TARGET = Path(__file__).resolve().parent.parent / "src" / "fedagg" / "data" / "mnist-mini"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path, help="the folder that holds mnist/")
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    for part, per_digit in (("train", 600), ("t10k", 100)):
        names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        images, labels = (read_idx(args.data_dir / "mnist" / name) for name in names)
        chosen = [rng.choice(np.flatnonzero(labels == digit), per_digit, replace=False) for digit in range(10)]
        keep = np.sort(np.concatenate(chosen))
        for name, array in zip(names, (images[keep], labels[keep]), strict=True):
            write_idx(args.out / name, array)
            content = (args.out / name).read_bytes()
            print(name, array.shape, len(content), hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
