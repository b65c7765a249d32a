"""Masks, the ring that they cancel in, and shares and keys from which they come."""

import itertools
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.crypto.masks import Ring

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from Crypto.Cipher import AES
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedspan.crypto import identity
from fedspan.crypto import keys as sealing
from fedspan.crypto.keys import (
    SessionKeys,
    compute_masking_public,
    compute_share_commitment,
    derive_pair_seed,
    draw_secret,
    open_sealed,
    read_commitments,
    require_public_key,
    seal,
)
from fedspan.crypto.masks import Integers, add_mask
from fedspan.crypto.shares import SHARE, combine, split


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """Distance from a uniform distribution, in standard deviations of what chance makes of it."""
    expected, free = counts.sum() / len(counts), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)


U32, U64 = np.dtype("<u4"), np.dtype("<u8")
SEED = bytes(range(32))
both = pytest.mark.parametrize("dtype", [U32, U64], ids=["32", "64"])


def generate_mask(seed: bytes, length: int, dtype: np.dtype[Any]) -> Integers:
    total: Integers = np.zeros(length, dtype)
    add_mask(total, seed)
    return total


@both
def test_every_bit_of_the_seed_counts_and_every_value_is_drawn(dtype: np.dtype[Any]) -> None:
    """The keystream of AES-256 as another library makes it; no folding of the seed, no value left out."""
    drawn = generate_mask(SEED, 3 << 18, dtype)
    counters = b"".join(number.to_bytes(16, "big") for number in range(drawn.nbytes // 16))
    assert drawn.tobytes() == AES.new(SEED, AES.MODE_ECB).encrypt(counters)
    seen = {drawn[:8].tobytes()}
    for place in range(256):
        flipped = bytearray(SEED)
        flipped[place // 8] ^= 1 << place % 8
        seen.add(generate_mask(bytes(flipped), 8, dtype).tobytes())
    for one, other in itertools.combinations(range(8), 2):  # pairs of words whose changes cancel under xor
        words = bytearray(SEED)
        words[4 * one] ^= 0x5A
        words[4 * other] ^= 0x5A
        seen.add(generate_mask(bytes(words), 8, dtype).tobytes())
    assert len(seen) == 1 + 256 + 28
    halves = np.bincount(drawn.view(np.uint16), minlength=1 << 16)
    assert halves.min() > 0
    assert abs(chi_square(halves)) < 5


def test_flower_s_generator_folds_its_seed_and_leaves_a_value_out() -> None:
    """Why it is not used: 2^32 masks are all there are."""
    utils = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils")
    folded = bytearray(SEED)
    folded[0] ^= 0x5A
    folded[4] ^= 0x5A
    (one,), (other,) = (utils.pseudo_rand_gen(seed, 1 << 22, [(1000,)]) for seed in (SEED, bytes(folded)))
    assert (one == other).all()
    (bits,) = utils.pseudo_rand_gen(SEED, 2, [(1000,)])
    assert set(bits.tolist()) == {0}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 3000), st.sampled_from([U32, U64]), st.integers(0, 2**32))
def test_masks_cancel(clients: int, length: int, dtype: np.dtype[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.integers(0, 2 ** (8 * dtype.itemsize), length, np.uint64).astype(dtype) for _ in range(clients)]
    keys = [SessionKeys.derive(draw_secret(), "run/1") for _ in range(clients)]
    total = np.zeros(length, dtype)
    for i, value in enumerate(values):
        masked = value.copy()
        add_mask(masked, keys[i].own)
        for j, key in enumerate(keys):
            if i != j:
                seed_ij = derive_pair_seed(keys[i].masking, key.masking_public, "run/1", str(i), str(j))
                add_mask(masked, seed_ij, 1 if i < j else -1)
        assert length < 8 or not np.array_equal(masked, value)
        total += masked
    for key in keys:
        add_mask(total, key.own, -1)
    assert np.array_equal(total, sum(values, np.zeros(length, dtype)))


@both
def test_a_vector_longer_than_a_chunk_is_masked_as_a_whole(dtype: np.dtype[Any]) -> None:
    """The mask of a longer vector begins with that of a shorter one, and does not repeat."""
    longer = generate_mask(SEED, (3 << 20) // dtype.itemsize + 5, dtype)
    assert np.array_equal(longer[:1000], generate_mask(SEED, 1000, dtype))
    step = (1 << 20) // dtype.itemsize
    assert not np.array_equal(longer[:step], longer[step : 2 * step])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([32, 64]),
    st.floats(1e-3, 1e6),
    st.integers(2, 300),
    st.integers(0, 2**32),
    st.sampled_from(["any", "greatest", "least"]),
)
def test_a_sum_of_encodings_is_off_by_no_more_than_the_bound(
    bits: int, clip: float, addends: int, seed: int, which: str
) -> None:
    """Also where all addends are as large as they may be: the sum is never taken for its negative."""
    ring, rng = Ring(bits, clip, addends), np.random.default_rng(seed)
    values = {
        "any": rng.uniform(-clip, clip, (addends, 7)),
        "greatest": np.full((addends, 7), clip),
        "least": np.full((addends, 7), -clip),
    }[which]
    total = np.zeros(7, ring.dtype)
    for value in values:
        total += ring.encode(value)
    exact = np.array([float(sum(map(np.longdouble, column))) for column in values.T])
    assert np.abs(ring.decode(total) - exact).max() <= ring.bound_error(addends)


def test_the_bound_is_no_larger_than_it_must_be() -> None:
    ring, rng = Ring(32, 100.0, 20), np.random.default_rng(0)
    values = rng.uniform(-100, 100, (20, 20000))
    off = np.abs(
        ring.decode(sum((ring.encode(value) for value in values), np.zeros(20000, ring.dtype))) - values.sum(0)
    )
    assert ring.bound_error(20) / 6 < off.max() <= ring.bound_error(20)
    assert ring.bound_error(1) == pytest.approx(100 * 20 / 2**31, rel=1e-4)


def test_rounding_is_unbiased_and_depends_on_the_values_alone() -> None:
    ring, rng = Ring(32, 100.0, 20), np.random.default_rng(0)
    values = rng.normal(size=100_000) * 0.1 * ring.clip / ring.levels  # a tenth of a step
    encoded = ring.encode(values)
    assert np.array_equal(encoded, ring.encode(values.copy()))
    assert not np.array_equal(encoded[1:], ring.encode(values[1:]))
    positive = values > 0
    for part in (positive, ~positive):
        assert ring.decode(encoded[part]).mean() == pytest.approx(values[part].mean(), rel=0.1)
    assert not ring.encode(np.zeros(9)).any()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("step", [0.5, 1.5, 2.0, 3.0])
def test_coarse_steps_leave_the_heaviest_addend_hidden(bits: int, step: float) -> None:
    """A server that makes the steps as coarse as one client's changes, of ten of which it weighs four times as much as
    each of the others, learns no more about it than from the exact sum. Rounded to the nearest step, the others would
    be zero."""
    rng, addends = np.random.default_rng(1), 10
    ring = Ring(bits, step * (2 ** (bits - 1) // addends - 1), addends)
    victim, others = rng.normal(size=30_000), rng.normal(size=(9, 30_000)) / 4
    total = ring.encode(victim)
    for other in others:
        total += ring.encode(other)
    exact, decoded = victim + others.sum(0), ring.decode(total)
    assert _cosine(decoded, victim) <= _cosine(exact, victim)
    assert _cosine(decoded - ring.decode(ring.encode(victim)), others.sum(0)) > 0.2


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def test_a_ring_without_room_is_refused() -> None:
    for bits, addends in ((32, 2**31), (32, 1), (16, 4)):
        with pytest.raises(ValueError, match="no ring"):
            _ = Ring(bits, 1.0, addends).levels


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_give_the_secret(secret: bytes, threshold: int, more: int, rng: random.Random) -> None:
    shares = split(secret, threshold, threshold + more)
    assert len(set(shares)) == threshold + more
    assert {len(share) for share in shares} == {SHARE}
    rng.shuffle(shares)
    assert combine(shares[:threshold], threshold) == secret
    assert combine(shares, threshold) == secret
    with pytest.raises(ValueError, match="it takes"):
        combine(shares[: threshold - 1], threshold)
    with pytest.raises(ValueError, match="it takes"):
        combine([shares[0]] * threshold, threshold)
    last = bytearray(shares[threshold - 1])
    last[-1] ^= 1
    assert combine([*shares[: threshold - 1], bytes(last)], threshold) != secret


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 12), st.integers(0, 100), st.randoms(use_true_random=False))
def test_shares_are_combined_as_by_the_library(secret: bytes, threshold: int, more: int, rng: random.Random) -> None:
    used = rng.sample(split(secret, threshold, threshold + more), threshold)
    halves = ([(int.from_bytes(one[:2], "big"), one[at : at + 16]) for one in used] for at in (2, 18))
    assert combine(used, threshold) == b"".join(Shamir.combine(half) for half in halves) == secret


def test_too_few_shares_are_noise_and_what_cannot_be_shared_is_refused() -> None:
    """One of two shares, over many divisions of one secret: every byte of it takes all values alike."""
    drawn = b"".join(split(SEED, 2, 3)[0][2:] for _ in range(2000))
    assert abs(chi_square(np.bincount(np.frombuffer(drawn, np.uint8), minlength=256))) < 5
    for secret, threshold, count in ((SEED[:16], 2, 3), (SEED, 1, 3), (SEED, 4, 3)):
        with pytest.raises(ValueError, match="shares of"):
            split(secret, threshold, count)
    with pytest.raises(ValueError, match="a share has 34 bytes"):
        combine([b"short"] * 2, 2)


def test_two_clients_agree_on_a_seed_that_is_theirs_and_the_session_s() -> None:
    one, other, third = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(3))
    seed = derive_pair_seed(one.masking, other.masking_public, "run/1", "a", "b")
    assert seed == derive_pair_seed(other.masking, one.masking_public, "run/1", "b", "a")
    with_third = derive_pair_seed(one.masking, third.masking_public, "run/1", "a", "b")
    as_third = derive_pair_seed(one.masking, other.masking_public, "run/1", "a", "c")
    assert len({seed, with_third, as_third, one.own, other.own, one.masking}) == 6
    assert seed != derive_pair_seed(one.masking, other.masking_public, "run/2", "a", "b")
    assert compute_masking_public(one.masking) == one.masking_public


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key: key[:31] + bytes([key[31] | 0x80]), "canonical"),
        (lambda key: (2**255 - 19 + 9).to_bytes(32, "little"), "canonical"),
        (lambda key: bytes(32), "the same secret with every private key"),
        (lambda key: (2**255 - 20).to_bytes(32, "little"), "the same secret with every private key"),
    ],
    ids=["highest bit", "not reduced", "zero", "minus one"],
)
def test_keys_in_another_form_and_of_low_order_are_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    one, other = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(2))
    with pytest.raises(ValueError, match=reason):
        require_public_key(change(other.masking_public))
    with pytest.raises(ValueError, match=reason):
        derive_pair_seed(one.masking, change(other.masking_public), "run/1", "a", "b")
    with pytest.raises(ValueError, match=reason):
        seal(one.sealing, change(other.sealing_public), "a", "b", "run/1", bytes(68))


def test_all_keys_of_a_session_follow_from_its_secret_and_differ() -> None:
    secret = draw_secret()
    keys, again, later = (
        SessionKeys.derive(secret, "run/1"),
        SessionKeys.derive(secret, "run/1"),
        SessionKeys.derive(secret, "run/2"),
    )
    assert keys == again
    every = [key for one in (keys, later) for key in (one.sealing, one.masking, one.own)]
    assert len({secret, *every}) == 7


def test_only_the_receiver_opens_what_was_sealed_and_only_as_it_was_sealed() -> None:
    one, other, third = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(3))
    sealed = seal(one.sealing, other.sealing_public, "one", "other", "run/1", b"shares")
    assert b"shares" not in sealed
    assert open_sealed(other.sealing, one.sealing_public, "one", "other", "run/1", sealed) == b"shares"
    wrong: list[tuple[Any, ...]] = [
        (third.sealing, one.sealing_public, "one", "other", "run/1", sealed),
        (other.sealing, third.sealing_public, "one", "other", "run/1", sealed),
        (other.sealing, one.sealing_public, "other", "one", "run/1", sealed),
        (other.sealing, one.sealing_public, "one", "other", "run/2", sealed),
        *((other.sealing, one.sealing_public, "one", "other", "run/1", changed) for changed in (
            sealed[:-1], b"", sealed[:20], sealed[:12] + bytes(64) + sealed[76:],
            sealed[:-1] + bytes([sealed[-1] ^ 1]), bytes([sealed[0] ^ 1]) + sealed[1:])),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ValueError, match="not what"):
            open_sealed(*arguments)


def test_shares_are_those_that_their_sender_committed_itself_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads the commitments; a sender that seals other shares seals nothing that opens."""
    one, other = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(2))
    arguments = one.sealing, other.sealing_public, "one", "other", "run/1"
    sealed = seal(*arguments, b"own" + b"key")
    assert read_commitments(sealed) == (compute_share_commitment(b"own"), compute_share_commitment(b"key"))
    assert b"own" not in sealed
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "_commit", lambda _: compute_share_commitment(b"own") + compute_share_commitment(b"no"))
        wrong = seal(*arguments, b"own" + b"key")
    with pytest.raises(ValueError, match="not what 'one' sealed for 'other'"):
        open_sealed(other.sealing, one.sealing_public, "one", "other", "run/1", wrong)


def written(path: Path, key: object) -> Path:
    encoding, format = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(encoding, format, serialization.NoEncryption()))
    return path


def test_what_an_identity_signed_is_valid_for_these_bytes_and_this_key_alone(tmp_path: Path) -> None:
    mine = identity.load_identity(written(tmp_path / "mine", ec.generate_private_key(ec.SECP384R1())))
    other = identity.load_identity(written(tmp_path / "other", ec.generate_private_key(ec.SECP384R1())))
    signature = mine.sign(b"keys")
    identity.verify_signature(mine.public, signature, b"keys")
    for public, forged, data in (
        (mine.public, signature, b"other keys"),
        (mine.public, signature[:-1] + bytes([signature[-1] ^ 1]), b"keys"),
        (mine.public, b"", b"keys"),
        (other.public, signature, b"keys"),
    ):
        with pytest.raises(ValueError, match="the signature is not valid"):
            identity.verify_signature(public, forged, data)


def test_files_without_an_elliptic_curve_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        identity.load_identity(tmp_path / "missing")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(ValueError, match=r"OpenSSH|delimiter|format"):
        identity.load_identity(tmp_path / "text")
    with pytest.raises(ValueError, match="not an elliptic-curve key"):
        identity.load_identity(written(tmp_path / "edwards", ed25519.Ed25519PrivateKey.generate()))


def test_keys_that_are_none_verify_nothing() -> None:
    edwards = ed25519.Ed25519PrivateKey.generate().public_key()
    public = edwards.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    with pytest.raises(ValueError, match="not an elliptic-curve key"):
        identity.verify_signature(public, b"", b"keys")
    for broken in ("", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 AAAA", "\ud800"):
        with pytest.raises(ValueError, match=r"not valid|[Kk]ey|Invalid"):
            identity.verify_signature(broken, b"", b"keys")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_key_behind_a_passphrase_is_refused(tmp_path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(tmp_path / "locked")]
    subprocess.run(command, check=True)
    with pytest.raises(ValueError, match=r"[Pp]assword"):
        identity.load_identity(tmp_path / "locked")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_fingerprint_is_ssh_keygen_s(tmp_path: Path) -> None:
    public = identity.load_identity(written(tmp_path / "key", ec.generate_private_key(ec.SECP384R1()))).public
    (tmp_path / "key.pub").write_text(f"{public} somebody\n")
    command = ["ssh-keygen", "-l", "-f", str(tmp_path / "key.pub")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = identity.compute_fingerprint(public)
    assert found == identity.compute_fingerprint(f"{public} a comment") == printed.split()[1]
    assert len(found) == len("SHA256:") + 43


@pytest.mark.parametrize("public", ["", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 A*BC"])
def test_what_is_no_public_key_has_no_fingerprint(public: str) -> None:
    with pytest.raises(ValueError, match=r"OpenSSH|base64|padding|Non-base64|alphabet"):
        identity.compute_fingerprint(public)
