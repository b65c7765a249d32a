"""Keys of secure aggregation: agreement between pairs, derivation from one secret, sealing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")

from fedspan.crypto import keys as sealing
from fedspan.crypto.keys import (
    SessionKeys,
    compute_masking_public,
    compute_share_commitment,
    derive_pair_seed,
    draw_secret,
    open_sealed,
    read_commitments,
    seal,
)


def test_two_clients_agree_on_a_seed_that_is_theirs_and_the_session_s() -> None:
    one, other, third = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(3))
    seed = derive_pair_seed(one.masking, other.masking_public, "run/1")
    assert seed == derive_pair_seed(other.masking, one.masking_public, "run/1")
    assert (
        len({seed, derive_pair_seed(one.masking, third.masking_public, "run/1"), one.own, other.own, one.masking}) == 5
    )
    assert seed != derive_pair_seed(one.masking, other.masking_public, "run/2")
    assert compute_masking_public(one.masking) == one.masking_public
    with pytest.raises(
        ValueError, match="shared key"
    ):  # a point of low order: everybody would agree with it on the same
        derive_pair_seed(one.masking, bytes(32), "run/1")


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
