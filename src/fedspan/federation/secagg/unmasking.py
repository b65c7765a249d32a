"""The server's last step of a secure sum: removal of the clients' own masks and of masks shared with dropouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedspan.crypto.keys import mask_key_of, pair_seed
from fedspan.crypto.masks import add_mask
from fedspan.crypto.ring import Integers
from fedspan.crypto.shares import combine
from fedspan.federation.secagg.messages import PublicKeys

__all__ = ["Masked", "unmask"]


@dataclass(frozen=True)
class Masked:
    """The masking partners of a session.

    Args:
        context: Text that identifies the run and the session.
        present: The masking partners of every client that was ordered to train, including itself.
        needed: Number of shares that reconstruct a client's secret, by client.
        keys: Public keys of all clients.
        survivors: Clients whose vectors are in the sum.
    """

    context: str
    present: Mapping[str, tuple[str, ...]]
    needed: Mapping[str, int]
    keys: Mapping[str, PublicKeys]
    survivors: Collection[str]


def unmask(total: Integers, masked: Masked, given: Mapping[str, Mapping[str, bytes]]) -> None:
    """Remove all masks from a sum, in place.

    Args:
        total: Sum of the survivors' vectors.
        masked: The masking partners of the session.
        given: Shares by the client that stored them and the client whose secret they share: a survivor's own mask, a
            dropout's masking key.

    Raises:
        ValueError: If the shares of a client are too few or inconsistent; the sum is then unusable.
    """
    for id, members in sorted(masked.present.items()):
        partners = [peer for peer in members if peer in masked.survivors and peer != id]
        if id not in masked.survivors and not partners:
            continue  # no mask in the sum is shared with this client
        shares = [given[holder][id] for holder in members if holder in given and id in given[holder]]
        try:
            secret = combine(shares, masked.needed[id])
        except ValueError as error:
            raise ValueError(f"of {id!r}: {error}") from error
        if id in masked.survivors:
            add_mask(total, secret, -1)
            continue
        if mask_key_of(secret) != masked.keys[id].masking:
            raise ValueError(f"of {id!r}: shares that are not of its key")
        for peer in partners:
            seed = pair_seed(secret, masked.keys[peer].masking, masked.context)
            add_mask(total, seed, -1 if peer < id else 1)
