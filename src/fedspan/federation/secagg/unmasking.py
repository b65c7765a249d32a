"""The server's last step of a secure sum: clients' own masks, and those that were for clients who dropped out, go."""

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
    """Who masked with whom.

    Args:
        context: the run and the session.
        present: of everybody who was asked to train, itself and those whom it masks with.
        needed: shares that open a client's secret.
        keys: of all clients.
        survivors: whose vectors are in the sum.
    """

    context: str
    present: Mapping[str, tuple[str, ...]]
    needed: Mapping[str, int]
    keys: Mapping[str, PublicKeys]
    survivors: Collection[str]


def unmask(total: Integers, masked: Masked, given: Mapping[str, Mapping[str, bytes]]) -> None:
    """Remove all masks from a sum, in place.

    Args:
        total: of the survivors' vectors.
        masked: who masked with whom.
        given: shares of each client's secret, by the client that held them and the client whose they are: of a
            survivor's own mask, of another's masking key.

    Raises:
        ValueError: if the shares of a client are too few, or do not fit; the sum is of no use then.
    """
    for id, members in sorted(masked.present.items()):
        partners = [peer for peer in members if peer in masked.survivors and peer != id]
        if id not in masked.survivors and not partners:
            continue  # nobody's mask was for it
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
