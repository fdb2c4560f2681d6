"""IDX, the format of MNIST and EMNIST: a magic number, big-endian sizes, then the bytes themselves.

A file may come from anywhere, so nothing is allocated from the sizes it declares: they are checked against the bytes that are
actually there.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fedagg import files
from fedagg.errors import DataError

_UBYTE = 0x08
_KINDS: dict[str, tuple[int, np.dtype[Any]]] = {"ubyte": (_UBYTE, np.dtype(np.uint8)), "int": (0x0C, np.dtype(">i4"))}
_CHUNK = 1 << 20
_LIMIT = 1 << 32
"""More bytes than any IDX file in use has: a small gz file can declare, and contain, far more than fits into memory."""


def read_idx(path: str | os.PathLike[str], most: int = _LIMIT, kind: str = "ubyte") -> npt.NDArray[Any]:
    """Read an IDX file of unsigned bytes (or of `int`, four bytes each) with 1 to 4 dimensions, gz or plain. Any damage is a
    DataError.

    `most` is the number of bytes that the file may unpack to, if known.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _read(raw, path, most, kind)
            with gzip.GzipFile(fileobj=raw, mode="rb") as stream:
                return _read(stream, path, most, kind)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({_one_line(error)})") from error


def write_idx(path: str | os.PathLike[str], array: npt.NDArray[np.uint8]) -> None:
    """Write unsigned bytes as IDX, gz if the name ends so; the same array always gives the same bytes."""
    path = Path(path)
    if array.dtype != np.uint8 or not 1 <= array.ndim <= 4 or array.size == 0:
        raise DataError(f"{path}: an IDX file here holds uint8 in 1 to 4 dimensions, not {array.dtype} {array.shape}")
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    content = bytes([0, 0, _UBYTE, array.ndim]) + sizes + array.tobytes()
    if path.suffix == ".gz":
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=9, mtime=0) as stream:
            stream.write(content)
        content = packed.getvalue()
    files.write(path, content)


def _read(stream: BinaryIO | gzip.GzipFile, path: Path, most: int, kind: str) -> npt.NDArray[Any]:
    code, dtype = _KINDS[kind]
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(f"{path}: not an IDX file (it begins with {magic.hex() or 'nothing'})")
    if magic[2] != code or not 1 <= magic[3] <= 4:
        raise DataError(f"{path}: IDX of type {magic[2]:#04x} with {magic[3]} dimensions, not {kind} with 1 to 4")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise DataError(f"{path}: truncated within its header")
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(0, len(header), 4))
    size = dtype.itemsize * math.prod(shape)
    if not 0 < size <= most:
        raise DataError(f"{path}: declares the sizes {shape}, which cannot be right")
    content = bytearray()
    while len(content) <= size:
        # One byte more than declared is requested: it reveals trailing bytes, and makes gz verify its checksum.
        chunk = stream.read(min(_CHUNK, size + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    if len(content) != size:
        held = f"only {len(content)}" if len(content) < size else "more"
        raise DataError(f"{path}: declares {size} bytes of {shape} and holds {held}")
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
