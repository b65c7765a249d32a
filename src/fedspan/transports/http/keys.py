"""Certificates and keys of a deployment: a private authority, the server's keys, the nodes' key pairs, and challenges.

Keys of nodes have the formats of ssh-keygen, so that it can be used instead. The order key's certificate is part of
the file that data owners receive (``ca.crt``), signed by the authority in it. A node's key for sealed orders is derived
from its lasting key, which signs it, so that it is the same after a restart.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedspan.errors import FedspanError
from fedspan.files import fsync_folder, write_atomic, write_file
from fedspan.transports.http.wire import pack

AUTHORITY, CERTIFICATE, KEY, ORDER_KEY = "ca.crt", "server.crt", "server.key", "orders.key"
"""Files that ``make_authority`` writes."""

ORDER_NAME = "fedspan orders"
"""Common name of the certificate of the key that signs orders."""

SOON = 30.0
"""Days before the end of a certificate, or of an admission, from which on commands warn."""

SEALING_BYTES = 32
_JOIN, _SEALING = b"fedspan join 1", b"fedspan sealing key 1"
_DAYS = 730
_NEXT = "next"
"""Folder in the server's folder with the certificates that ``renew_authority`` made and that are not in use yet."""
_FIRST = "first"
"""Folder in the server's folder with the first certificates until all of them have been moved out of it."""


def ensure_authority(folder: Path, hosts: Sequence[str]) -> None:
    """Create an authority and a server certificate, unless the folder contains them.

    Raises:
        FedspanError: If the folder's certificate is not valid for a host.
    """
    if (folder / _FIRST).exists():  # an earlier start was interrupted
        _move_first(folder)
    if not (folder / AUTHORITY).exists():
        _require_no_certificates(folder)
        new = folder / f"{_FIRST}.new"
        shutil.rmtree(new, ignore_errors=True)
        make_authority(new, hosts)
        new.rename(folder / _FIRST)
        _move_first(folder)
    elif missing := [host for host in hosts if host not in list_certified_hosts(folder)]:
        files = ", ".join((AUTHORITY, CERTIFICATE, KEY, ORDER_KEY))
        expected = (
            f"a name in the certificate in {folder} ({', '.join(list_certified_hosts(folder))}). For another, "
            f"use fedspan renew --name, or remove {files} there and give the new {AUTHORITY} to every data owner"
        )
        raise FedspanError("--name", missing[0], expected)


def _move_first(folder: Path) -> None:
    for path in (folder / _FIRST).iterdir():
        path.replace(folder / path.name)
    fsync_folder(folder)
    (folder / _FIRST).rmdir()


def make_authority(folder: Path, hosts: Sequence[str]) -> None:
    """Create an authority, a server certificate and an order key; the authority's private key is discarded.

    Args:
        folder: Folder for ``ca.crt`` (for all nodes that join: certificates of the authority and of the order key),
            ``server.crt``, ``server.key`` and ``orders.key`` (0600).
        hosts: Host names and addresses of the server; the loopback names of this machine are added.

    Raises:
        FedspanError: If the folder already contains such files, or a host is empty.
    """
    _require_no_certificates(folder)
    if any(not host for host in hosts):
        raise FedspanError("host", "", "a name or an address")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, server_key, order_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedspan federation")])
    public = authority_key.public_key()
    authority = _build_certificate(issuer, issuer, public, public, x509.BasicConstraints(ca=True, path_length=0))
    authority = authority.add_extension(_SIGNS_CERTIFICATES, critical=True)
    order_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ORDER_NAME)])
    order_certificate = _build_certificate(order_name, issuer, order_key.public_key(), public)
    certificates = [
        builder.sign(authority_key, hashes.SHA384()).public_bytes(Encoding.PEM)
        for builder in (authority, order_certificate)
    ]
    write_atomic(folder / AUTHORITY, b"".join(certificates), 0o644)
    write_atomic(folder / ORDER_KEY, _encode_private_key(order_key), 0o600)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0] if hosts else "localhost")])
    names = [_build_name(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1"))]
    server = _build_certificate(subject, issuer, server_key.public_key(), public)
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    server = server.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    write_atomic(folder / KEY, _encode_private_key(server_key), 0o600)
    write_atomic(folder / CERTIFICATE, server.sign(authority_key, hashes.SHA384()).public_bytes(Encoding.PEM), 0o644)


def _require_no_certificates(folder: Path) -> None:
    for name in (AUTHORITY, CERTIFICATE, KEY, ORDER_KEY):
        if (folder / name).exists():
            raise FedspanError(
                "certificates",
                str(folder / name),
                "a folder without certificates",
                problem="the folder already has certificates",
            )


def list_certified_hosts(folder: Path) -> list[str]:
    """Return the host names and addresses for which a server's certificate is valid."""
    path = folder / CERTIFICATE
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise FedspanError("certificates", str(path), f"the server's certificate ({error})") from error
    return [str(name.value) for name in names]


def renew_authority(folder: Path, hosts: Sequence[str]) -> Path:
    """Make new certificates beside those in use: authority, server certificate and order key, all with new keys.

    Nodes that have the new ``ca.crt`` accept both the certificates in use and the new ones. ``activate_authority``
    puts the new ones in use, and the next renewal leaves the old ones out.

    Args:
        hosts: Further host names and addresses of the server; those of the certificate in use stay.

    Returns:
        The new ``ca.crt``, for every data owner.

    Raises:
        FedspanError: If the folder has no certificates, or renewed ones that are not in use yet.
    """
    if (folder / _NEXT).exists():
        problem = f"{folder / _NEXT} has certificates that are not in use yet. Use --activate, or remove the folder"
        raise FedspanError("certificates", str(folder / _NEXT), problem=problem)
    names = list(dict.fromkeys((*list_certified_hosts(folder), *hosts)))
    new = folder / f"{_NEXT}.new"
    shutil.rmtree(new, ignore_errors=True)
    make_authority(new, names)
    write_atomic(new / AUTHORITY, (new / AUTHORITY).read_bytes() + _read_used_authority(folder))
    new.rename(folder / _NEXT)
    return folder / _NEXT / AUTHORITY


def get_newest_authority(folder: Path) -> Path:
    """Return the ``ca.crt`` for a new data owner: the one of renewed certificates also accepts those in use."""
    renewed = folder / _NEXT / AUTHORITY
    return renewed if renewed.is_file() else folder / AUTHORITY


def activate_authority(folder: Path) -> None:
    """Put the certificates of ``renew_authority`` in the place of those in use; a running server restarts with them."""
    renewed = folder / _NEXT
    if not (renewed / AUTHORITY).is_file():
        raise FedspanError("certificates", str(renewed), problem="there are no renewed certificates. Run fedspan renew")
    # Both authorities are trusted before the rest changes; a running server restarts when the certificate changes.
    for name in (AUTHORITY, ORDER_KEY, KEY, CERTIFICATE):
        write_atomic(folder / name, (renewed / name).read_bytes(), 0o600 if name in (ORDER_KEY, KEY) else 0o644)
    shutil.rmtree(renewed)


def _read_used_authority(folder: Path) -> bytes:
    """Return the certificates of the authority in use and of its order key, without those of earlier ones."""
    server = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    certificates = x509.load_pem_x509_certificates((folder / AUTHORITY).read_bytes())
    authority = find_issuer(server, certificates)
    if authority is None:
        problem = f"{AUTHORITY} does not have the authority of {CERTIFICATE}. Restore both"
        raise FedspanError("certificates", str(folder), problem=problem)
    orders = (
        certificate
        for certificate in certificates
        if certificate is not authority and _is_issued(certificate, authority)
    )
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in (authority, *orders))


def find_issuer(certificate: x509.Certificate, candidates: Iterable[x509.Certificate]) -> x509.Certificate | None:
    """Return the authority among some certificates that signed another one; None: none of them did."""
    return next((one for one in candidates if _is_authority(one) and _is_issued(certificate, one)), None)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _is_issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def compute_days_left(*files: Path) -> float:
    """Return the days until the first of the certificates in some files expires."""
    expirations: list[datetime] = []
    for path in files:
        try:
            expirations += [
                certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(path.read_bytes())
            ]
        except (OSError, ValueError) as error:
            raise FedspanError("certificates", str(path), f"a file with certificates ({error})") from error
    return (min(expirations) - datetime.now(UTC)).total_seconds() / 86400


def make_node_key(path: Path) -> Path:
    """Create a node's key pair, like ``ssh-keygen -t ecdsa -b 384``, and return the public key's file.

    Args:
        path: File for the private key (0600); the public key, for the server's operator, is written to ``path.pub``.
    """
    public = path.with_name(f"{path.name}.pub")
    if existing := next((str(file) for file in (path, public) if file.exists()), None):
        raise FedspanError("key", existing, "the path of a new file", problem=f"{existing!r} already exists")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP384R1())
    write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    write_file(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", 0o644)
    return public


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Load a node's private key.

    Raises:
        FedspanError: If the file is not such a key, or users other than its owner may read it.
    """
    try:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise FedspanError("key", str(path), problem=f"others can read the key. Run: chmod 600 {path}")
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise FedspanError("key", str(path), f"a private key as fedspan join --new-key makes it ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedspanError("key", str(path), "an elliptic-curve key (ssh-keygen -t ecdsa -b 384)")
    return key


_CERTIFIES_NOTHING = x509.BasicConstraints(ca=False, path_length=None)
_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    **dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ),
    encipher_only=False,
    decipher_only=False,
)


def _build_certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    constraints: x509.BasicConstraints = _CERTIFIES_NOTHING,
) -> x509.CertificateBuilder:
    """Build a certificate with the identifiers of both keys, which Python demands from 3.13 on (RFC 5280)."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # tolerates clock differences
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(constraints, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _build_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def sign_join(
    key: ec.EllipticCurvePrivateKey,
    order_keys: Iterable[ec.EllipticCurvePublicKey],
    challenge: bytes,
    server: bytes,
    sealing: bytes,
) -> bytes:
    """Sign a server's challenge, the fingerprint of the order key that it names, and the node's signed sealing key.

    Raises:
        ValueError: If the fingerprint is of no key in the node's file of the authority, so that the server passes on
            the challenge of another one.
    """
    if server not in map(fingerprint_order_key, order_keys):
        raise ValueError("the server names an order key that is not in this node's ca.crt")
    return key.sign(pack([_JOIN, challenge, server, sealing]), ec.ECDSA(hashes.SHA384()))


def verify_join(key: bytes, signature: bytes, challenge: bytes, server: bytes, sealing: bytes) -> None:
    """Verify what ``sign_join`` signed; raise ``ValueError`` if it is not signed by a key in OpenSSH's format."""
    read_sealing_key(key, sealing)
    try:
        load_node_public_key(key).verify(
            signature, pack([_JOIN, challenge, server, sealing]), ec.ECDSA(hashes.SHA384())
        )
    except InvalidSignature:
        raise ValueError("its signature is not valid") from None


def fingerprint_order_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the SHA-256 of an order key."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def load_order_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key that signs a server's orders."""
    path = folder / ORDER_KEY
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise FedspanError("server", str(path), f"the server's order key ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedspanError("server", str(path), "an elliptic-curve key, as fedspan server writes it")
    return key


def load_order_keys(path: Path) -> list[ec.EllipticCurvePublicKey]:
    """Load the public keys that sign a server's orders, and check that an authority in the file certified each.

    Args:
        path: File with the certificates of authorities and of their order keys: one of each, or two while the server's
            certificates are renewed.
    """
    expected = f"the {AUTHORITY} that fedspan server wrote"
    keys: list[ec.EllipticCurvePublicKey] = []
    is_expired, now = False, datetime.now(UTC)
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
        for certificate in certificates:
            (name,) = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            key = certificate.public_key()
            if name.value != ORDER_NAME or not isinstance(key, ec.EllipticCurvePublicKey):
                continue
            issuer = find_issuer(certificate, certificates)
            if issuer is None:
                raise ValueError("no authority in the file certified the order key")
            if all(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in (certificate, issuer)):
                keys.append(key)
            else:
                is_expired = True
    except (OSError, ValueError, TypeError) as error:
        raise FedspanError("authority", str(path), f"{expected} ({error})") from error
    if not keys and is_expired:
        problem = "the certificates in it have expired. Ask the server's operator for a new one (fedspan renew)"
        raise FedspanError("authority", str(path), problem=problem)
    if not keys:
        raise FedspanError("authority", str(path), expected, problem="the file has no certificate of an order key")
    return keys


@lru_cache(4096)
def load_node_public_key(key: bytes) -> ec.EllipticCurvePublicKey:
    """Parse a node's public key in OpenSSH's format."""
    public = load_ssh_public_key(key)
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ValueError("its node's key is not an elliptic-curve key")
    return public


@lru_cache(4096)
def read_sealing_key(key: bytes, sealing: bytes) -> X25519PublicKey:
    """Return the sealing key that a node's lasting key has signed."""
    public, signature = sealing[:SEALING_BYTES], sealing[SEALING_BYTES:]
    try:
        load_node_public_key(key).verify(signature, pack([_SEALING, public]), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ValueError("its node's sealing key is not signed by its key") from None
    sealing_key = X25519PublicKey.from_public_bytes(public)
    X25519PrivateKey.generate().exchange(sealing_key)  # which refuses points of small order, such as zeros
    return sealing_key


def sign_sealing_key(key: ec.EllipticCurvePrivateKey, sealing: X25519PrivateKey) -> bytes:
    """Return a node's public sealing key with the signature of its lasting key."""
    public = sealing.public_key().public_bytes_raw()
    return public + key.sign(pack([_SEALING, public]), ec.ECDSA(hashes.SHA384()))


def derive_sealing_key(key: ec.EllipticCurvePrivateKey) -> X25519PrivateKey:
    """Return a node's key for sealed orders, which is the same after a restart."""
    secret = key.private_numbers().private_value.to_bytes(key.key_size // 8 + 1, "big")
    derived = HKDF(hashes.SHA256(), SEALING_BYTES, salt=None, info=_SEALING).derive(secret)
    return X25519PrivateKey.from_private_bytes(derived)
