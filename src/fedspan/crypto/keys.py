"""A client's keys of one session, all from one random secret, and the secrets that two clients share.

    secret: 32 random bytes;   every other secret is HKDF-SHA256(secret, purpose, context)
    pair of clients: X25519 of their keys, through HKDF-SHA256 with the purpose

One pair of keys is for sealing shares (AES-256-GCM), one for the pairwise masks, one for signatures (Ed25519). The
private key of the masks is shared out and may become known, which must not open content sealed with the first.

    sealed: nonce (12 bytes), SHA-256 of either share (2 x 32), AES-256-GCM of both shares with the hashes as its header

The server, which forwards sealed shares, reads the hashes, and so can tell a share that its receiver reveals from any
other. The receiver checks them when it opens the shares. A share is as random as its secret, so its hash does not
reveal it.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET = 32
"""Bytes of every secret and key."""

_NONCE = 12
_PRIME = 2**255 - 19


def draw_secret() -> bytes:
    """Draw a fresh secret from the operating system."""
    return secrets.token_bytes(SECRET)


def _derive(secret: bytes, purpose: str, *context: str) -> bytes:
    parts = [part.encode() for part in ("fedspan secure aggregation 1", purpose, *context)]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)  # distinct parts have distinct infos
    return HKDF(SHA256(), SECRET, None, info).derive(secret)


def _compute_public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agree(private: bytes, public: bytes) -> bytes:
    """Compute the common secret of two clients.

    Raises:
        ValueError: If the public key gives the same secret with every private key, or is another form of a key: X25519
            ignores the highest bit and reduces modulo the prime.
    """
    if int.from_bytes(public, "little") >= _PRIME:
        raise ValueError("a public key is not in its canonical form")
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ValueError("a public key gives the same secret with every private key") from error


@dataclass(frozen=True)
class SessionKeys:
    """The keys that follow from a session's secret.

    Args:
        masking: Private key for pairwise masks; shared, so that a client's masks can be removed when it drops out.
        own: Seed of the client's own mask; shared, so that it can be removed if the client stays.
    """

    sealing: bytes
    masking: bytes
    own: bytes
    signing: bytes

    @classmethod
    def derive(cls, secret: bytes, context: str) -> SessionKeys:
        """Derive the keys of a secret.

        Args:
            context: Identifier of the run and the session.
        """
        return cls(*(_derive(secret, purpose, context) for purpose in ("sealing", "masking", "own mask", "signing")))

    @property
    def sealing_public(self) -> bytes:
        """Public key with which other clients seal shares for this one."""
        return _compute_public_key(self.sealing)

    @property
    def masking_public(self) -> bytes:
        """Public key for pairwise masks with other clients."""
        return _compute_public_key(self.masking)

    @property
    def signing_public(self) -> bytes:
        """Public key with which other clients check signatures."""
        return Ed25519PrivateKey.from_private_bytes(self.signing).public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Sign bytes."""
        return Ed25519PrivateKey.from_private_bytes(self.signing).sign(data)


def verify_session_signature(public: bytes, signature: bytes, data: bytes) -> None:
    """Check a signature of ``SessionKeys.sign``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except InvalidSignature as error:
        raise ValueError("the signature is not valid") from error


def compute_commitment(own: bytes) -> bytes:
    """Compute what a client commits itself to as the seed of its own mask: the SHA-256, which does not reveal it."""
    return hashlib.sha256(b"fedspan own mask" + own).digest()


def compute_masking_public(private: bytes) -> bytes:
    """Compute the public key of a private masking key that was reconstructed from shares."""
    return _compute_public_key(private)


def require_public_key(public: bytes) -> None:
    """Check that clients can agree on secrets with the owner of a public key.

    Raises:
        ValueError: If the public key is not canonical, or gives the same secret with every private key.
    """
    _agree(draw_secret(), public)


def derive_pair_seed(masking: bytes, public: bytes, context: str, id: str, peer: str) -> bytes:
    """Derive the seed of two clients' mask, the same on either side and another one for every other pair.

    Args:
        masking: Private masking key of one client.
        public: Public masking key of the other client.
        context: Identifier of the run and the session.

    Raises:
        ValueError: If the public key is not canonical, or gives the same secret with every private key.
    """
    pair = sorted([(id, _compute_public_key(masking).hex()), (peer, public.hex())])
    return _derive(_agree(masking, public), "pair", context, *pair[0], *pair[1])


def _make_cipher(sealing: bytes, public: bytes, sender: str, receiver: str, context: str) -> AESGCM:
    return AESGCM(_derive(_agree(sealing, public), "seal", context, sender, receiver))


def compute_share_commitment(share: bytes) -> bytes:
    """Compute what a client commits itself to as a share: the SHA-256, which does not reveal it."""
    return hashlib.sha256(b"fedspan share" + share).digest()


def _commit(shares: bytes) -> bytes:
    half = len(shares) // 2
    return compute_share_commitment(shares[:half]) + compute_share_commitment(shares[half:])


def read_commitments(sealed: bytes) -> tuple[bytes, bytes]:
    """Read the commitments to both shares from sealed ones."""
    return sealed[_NONCE : _NONCE + SECRET], sealed[_NONCE + SECRET : _NONCE + 2 * SECRET]


def seal(sealing: bytes, public: bytes, sender: str, receiver: str, context: str, shares: bytes) -> bytes:
    """Seal two shares so that only the receiver can open them, with commitments to either in plaintext.

    Args:
        sealing: Private sealing key of the sender.
        public: Public sealing key of the receiver.
        context: Identifier of the run and the session.
        shares: The shares, of equal length.

    Raises:
        ValueError: If the public key gives the same secret with every private key.
    """
    nonce, commitments = secrets.token_bytes(_NONCE), _commit(shares)
    cipher = _make_cipher(sealing, public, sender, receiver, context)
    return nonce + commitments + cipher.encrypt(nonce, shares, commitments)


def open_sealed(sealing: bytes, public: bytes, sender: str, receiver: str, context: str, sealed: bytes) -> bytes:
    """Open the two shares that ``seal`` sealed.

    Raises:
        ValueError: If they were sealed by or for another client, in another session, were changed, or are not those
            that the sender committed itself to.
    """
    cipher = _make_cipher(sealing, public, sender, receiver, context)
    nonce, commitments, encrypted = (
        sealed[:_NONCE],
        sealed[_NONCE : _NONCE + 2 * SECRET],
        sealed[_NONCE + 2 * SECRET :],
    )
    try:
        if len(nonce) < _NONCE:
            raise InvalidTag
        shares = cipher.decrypt(nonce, encrypted, commitments)
        if _commit(shares) != commitments:
            raise InvalidTag
    except InvalidTag as error:
        raise ValueError(f"not what {sender!r} sealed for {receiver!r}") from error
    return shares
