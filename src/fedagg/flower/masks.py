"""Masks for secure aggregation: a cipher's key stream, keyed with the whole secret that two nodes share.

Flower folds that secret into 32 bits and seeds a Mersenne Twister with them. Anyone who sees a masked vector can try all seeds in
minutes and remove the mask. Here Flower's protocol is unchanged, but runs with another generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import _collect_masked_vectors
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.supercore.version import package_version
from numpy.typing import NDArray

from fedagg.errors import SettingError

PURPOSE = b"fedagg: a mask for secure aggregation"


def mask(secret: bytes, modulus: int, shapes: list[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Numbers uniform over the modulus, a power of two up to 2^32, which look random without the secret: AES-256 in counter mode. A
    secret masks one round's vector, so no part of the stream is used twice."""
    assert modulus.bit_count() == 1
    assert modulus <= 2**32
    key = HKDF(hashes.SHA256(), length=32, salt=None, info=PURPOSE).derive(secret)
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def numbers(shape: tuple[int, ...]) -> NDArray[np.int64]:
        words = np.frombuffer(stream.update(bytes(4 * int(np.prod(shape)))), "<u4")
        return (words & np.uint32(modulus - 1)).astype(np.int64).reshape(shape)

    return [numbers(shape) for shape in shapes]


def pack(numbers: NDArray[np.int64]) -> bytes:
    """Masked numbers in 32 bits each: they are below 2^32, so half of the bytes that Flower sends are zeros."""
    return ndarray_to_bytes(numbers.astype(np.uint32))


def unpack(data: bytes) -> NDArray[np.int64]:
    return bytes_to_ndarray(data).astype(np.int64)


def with_names(function: Callable[..., Any], **others: Any) -> FunctionType:
    """A copy of one of Flower's functions in which some global names refer to other objects. Flower's own function, which other
    apps in the process may use, is not changed."""
    assert isinstance(function, FunctionType)
    if not set(others) <= set(names(function.__code__)):
        fix = f"fedagg does not know how Flower {package_version} makes its masks; install flwr 1.41"
        raise SettingError("secure", True, fix)
    copy = FunctionType(function.__code__, {**function.__globals__, **others}, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names(inner)


_collect = with_names(_collect_masked_vectors, pseudo_rand_gen=mask, ndarray_to_bytes=pack)
_protocol = with_names(secaggplus_mod, _collect_masked_vectors=_collect)


def secagg_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Flower's SecAgg+ on the node, with masks from `mask`."""
    reply = _protocol(message, context, call_next)
    assert isinstance(reply, Message)
    return reply
