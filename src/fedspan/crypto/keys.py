"""A client's keys of one session, all from one random secret, and what two clients derive from each other's.

    secret: 32 random bytes;   every other secret is HKDF-SHA256(secret, purpose, context)
    pair of clients: X25519 of their keys, through HKDF-SHA256 with what it is for

One pair of keys is for sealing shares (AES-256-GCM), one for the pairwise masks: the private key of the second is what
shares are made of, and may become known, which must not open what the first sealed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

__all__ = ["SECRET", "Keys", "mask_key_of", "new_secret", "open_sealed", "pair_seed", "seal"]

SECRET = 32
"""Bytes of every secret and key."""

_NONCE = 12


def new_secret() -> bytes:
    """A fresh secret from the operating system."""
    return secrets.token_bytes(SECRET)


def _derived(secret: bytes, purpose: str, *context: str) -> bytes:
    parts = [part.encode() for part in ("fedspan secure aggregation 1", purpose, *context)]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)  # no two lists of parts are one info
    return HKDF(SHA256(), SECRET, None, info).derive(secret)


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agreed(private: bytes, public: bytes) -> bytes:
    """What two clients' keys give both of them.

    Raises:
        ValueError: for a public key that gives everybody the same.
    """
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


@dataclass(frozen=True)
class Keys:
    """What follows from a session's secret.

    Args:
        sealing: private key for sealing shares.
        masking: private key for pairwise masks; shared, so that a client's masks can be removed when it drops out.
        own: seed of the client's own mask; shared, so that it can be removed where the client stays.
    """

    sealing: bytes
    masking: bytes
    own: bytes

    @classmethod
    def of(cls, secret: bytes, context: str) -> Keys:
        """The keys of a secret.

        Args:
            secret: from ``new_secret``.
            context: the run and the session.
        """
        return cls(*(_derived(secret, purpose, context) for purpose in ("sealing", "masking", "own mask")))

    @property
    def sealing_public(self) -> bytes:
        """For others to seal shares for this client."""
        return _public(self.sealing)

    @property
    def masking_public(self) -> bytes:
        """For others' pairwise masks."""
        return _public(self.masking)


def mask_key_of(private: bytes) -> bytes:
    """The public key of a private masking key that was put together from shares."""
    return _public(private)


def pair_seed(masking: bytes, public: bytes, context: str) -> bytes:
    """The seed of two clients' mask, the same from either side.

    Args:
        masking: private key of one.
        public: masking key of the other.
        context: the run and the session.

    Raises:
        ValueError: for a public key that gives everybody the same.
    """
    return _derived(_agreed(masking, public), "pair", context)


def _lock(sealing: bytes, public: bytes, sender: str, receiver: str, context: str) -> AESGCM:
    return AESGCM(_derived(_agreed(sealing, public), "seal", context, sender, receiver))


def seal(sealing: bytes, public: bytes, sender: str, receiver: str, context: str, content: bytes) -> bytes:
    """Content that only the receiver can open.

    Args:
        sealing: private key of the sender.
        public: sealing key of the receiver.
        sender: id.
        receiver: id.
        context: the run and the session.
        content: what is sealed.

    Raises:
        ValueError: for a public key that gives everybody the same.
    """
    nonce = secrets.token_bytes(_NONCE)
    return nonce + _lock(sealing, public, sender, receiver, context).encrypt(nonce, content, None)


def open_sealed(sealing: bytes, public: bytes, sender: str, receiver: str, context: str, sealed: bytes) -> bytes:
    """The content that ``seal`` sealed.

    Raises:
        ValueError: if it was sealed by or for somebody else, in another session, or changed.
    """
    lock = _lock(sealing, public, sender, receiver, context)
    try:
        if len(sealed) < _NONCE:
            raise InvalidTag
        return lock.decrypt(sealed[:_NONCE], sealed[_NONCE:], None)
    except InvalidTag as error:
        raise ValueError(f"not what {sender!r} sealed for {receiver!r}") from error
