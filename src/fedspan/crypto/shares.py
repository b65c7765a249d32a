"""Shamir's shares of a 32-byte secret: any ``threshold`` of them reveal it, fewer reveal nothing.

PyCryptodome shares 16 bytes at a time (over GF(2^128)), so a secret is shared as two halves. A share is transmitted as
two bytes of its number and the two halves' shares. Shares are combined here and not by PyCryptodome, which takes tens
of milliseconds for each secret: the coefficients of the interpolation depend on the shares' numbers alone, and a server
opens many secrets with the shares of the same clients. It learns the secrets anyway, so this code need not hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from Crypto.Protocol.SecretSharing import Shamir

_HALF = 16
_NUMBER = 2
SHARE = _NUMBER + 2 * _HALF

_TOP = 1 << 128
_POLYNOMIAL = _TOP | 0x87
"""x^128 + x^7 + x^2 + x + 1, PyCryptodome's field."""


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into shares.

    Args:
        secret: Secret of 32 bytes.
        threshold: Number of shares that reveal it, at least 2.

    Raises:
        ValueError: If the secret has another length, or the threshold is out of range.
    """
    if len(secret) != 2 * _HALF or not 2 <= threshold <= count < 2 ** (8 * _NUMBER):
        raise ValueError(f"{count} shares of {len(secret)} bytes, of which {threshold} suffice")
    first = Shamir.split(threshold, count, secret[:_HALF], ssss=False)
    second = Shamir.split(threshold, count, secret[_HALF:], ssss=False)
    return [
        number.to_bytes(_NUMBER, "big") + first_part + second_part
        for (number, first_part), (_, second_part) in zip(first, second, strict=True)
    ]


def combine(shares: Sequence[bytes], threshold: int) -> bytes:
    """Combine shares to their secret; a wrong share gives a different result.

    Raises:
        ValueError: If there are too few distinct shares, or one is not a share.
    """
    if any(len(share) != SHARE for share in shares):
        raise ValueError(f"a share has {SHARE} bytes")
    numbered = {int.from_bytes(share[:_NUMBER], "big"): share[_NUMBER:] for share in shares}
    if len(numbered) < threshold or 0 in numbered:
        raise ValueError(f"{len(numbered)} shares; it takes {threshold}")
    numbers = tuple(sorted(numbered)[:threshold])
    halves = [0, 0]
    for number, coefficient in zip(numbers, _compute_coefficients(numbers), strict=True):
        for half_index in range(2):
            share = int.from_bytes(numbered[number][_HALF * half_index : _HALF * (half_index + 1)], "big")
            halves[half_index] ^= _multiply(coefficient, share)
    return b"".join(half.to_bytes(_HALF, "big") for half in halves)


@lru_cache(maxsize=256)
def _compute_coefficients(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Compute Lagrange's coefficients at 0: prod_{m != j} x_m / (x_j + x_m) for every share's number x_j."""
    product_of_all, denominators = 1, list[int]()
    for number in numbers:
        product_of_all = _multiply(product_of_all, number)
        product = number
        for other in numbers:
            if other != number:
                product = _multiply(product, number ^ other)
        denominators.append(product)
    return tuple(_multiply(product_of_all, inverse) for inverse in _invert(denominators))


def _invert(values: Sequence[int]) -> list[int]:
    """Compute the inverses of nonzero elements, by one inversion."""
    products = [1]
    for value in values:
        products.append(_multiply(products[-1], value))
    inverse, base = 1, products[-1]
    for _ in range(127):  # to the power of 2^128 - 2
        base = _multiply(base, base)
        inverse = _multiply(inverse, base)
    coefficients: list[int] = []
    for value, product in zip(reversed(values), reversed(products[:-1]), strict=True):
        coefficients.append(_multiply(inverse, product))
        inverse = _multiply(inverse, value)
    return coefficients[::-1]


def _multiply(left: int, right: int) -> int:
    if right > left:
        left, right = right, left
    product = 0
    while right:
        if right & 1:
            product ^= left
        right >>= 1
        left <<= 1
        if left & _TOP:
            left ^= _POLYNOMIAL
    return product
