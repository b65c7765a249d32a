"""A dishonest server with colluding clients against honest clients of secure aggregation, and what it learns.

The server tells two stories: each honest client is sent one of them. It has the secrets of the colluders, which sign
whatever it needs. What it learns is computed from what it has: shares are combined, masks removed, and sums subtracted.
"""

import functools
import hashlib
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedspan.clients.secagg import SecureClient
from fedspan.clients.secagg_store import MemorySessionStore, SessionStore
from fedspan.core.values import Client, Contribution, Message
from fedspan.crypto.identity import Identity, compute_fingerprint, load_identity
from fedspan.crypto.keys import (
    SessionKeys,
    compute_commitment,
    compute_masking_public,
    derive_pair_seed,
    draw_secret,
    open_sealed,
    seal,
)
from fedspan.crypto.masks import Integers, Ring, add_mask
from fedspan.crypto.shares import SHARE, combine, split
from fedspan.errors import FedspanError
from fedspan.federation.config import SecureSettings
from fedspan.federation.protocol import ClientFacts, Masking, Order
from fedspan.federation.secagg import messages
from fedspan.federation.serialization import encode

START = {"layer/A": torch.zeros(2, 3)}
CLIP = 10.0
MODEL = encode(Message(START))


@dataclass(frozen=True)
class Story:
    """What the server tells a client; every part leaves out some of the honest clients.

    Args:
        unknown: Clients that are said to have sent no keys.
        silent: Clients that are said to have sent no shares.
        dropped: Clients that are said to have sent no vector.
        threshold: Number of shares that reconstruct a secret; None: the default.
        top: Largest weight that counts.
        weight: Weight of all clients; None: the number of their examples.
        rank: Rank of the first honest client.
        replaced: Client whose keys the server replaces by its own.
    """

    unknown: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    threshold: int | None = None
    top: float = 16.0
    weight: float | None = None
    rank: int = 2
    replaced: str | None = None


@dataclass(frozen=True)
class Play:
    """What the server does in one session.

    Args:
        story: What it tells the honest clients.
        other: What it tells those of ``misled`` instead.
        misled: Clients that are told the other story.
        unasked: Clients that are not asked to reveal shares.
        task: Kind of the sum.
        lr: Learning rate of the order.
        copied: Whether the colluders sign as their own masking keys those of other clients, in another form.
    """

    story: Story = Story()
    other: Story = Story()
    misled: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    task: str = "train"
    lr: float = 0.1
    copied: bool = False


@dataclass
class _Session:
    """What the server holds of one session, and the secrets of the honest clients, to tell what it can compute."""

    context: str
    keys: dict[str, messages.PublicKeys] = field(default_factory=dict)
    owned: dict[str, SessionKeys] = field(default_factory=dict)
    hidden: dict[str, SessionKeys] = field(default_factory=dict)
    peers: dict[str, Mapping[str, messages.PublicKeys]] = field(default_factory=dict)
    present: dict[str, tuple[str, ...]] = field(default_factory=dict)
    agreements: dict[str, messages.Agreement] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    transcripts: dict[str, str] = field(default_factory=dict)
    sealed: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    vectors: dict[str, Integers] = field(default_factory=dict)
    shares: defaultdict[tuple[str, str], set[bytes]] = field(default_factory=lambda: defaultdict(set))


def compute_bound(clients: int) -> int:
    """Return the number of colluders that a sum withstands: 2 t > n + c, and two honest clients."""
    return min(2 * SecureSettings().compute_threshold(clients) - clients - 1, clients - 2)


class Game:
    """Honest clients, each with its pinned peers, and a server with some colluders.

    Args:
        clients: Number of all clients.
        colluders: Number of those that collude with the server.
        stated: Number of colluders that the owners state; None: as many as there are, and at least one.
        min_clients: Smallest sum that the owners allow.
        stores: Session stores by client; others are in memory.
    """

    def __init__(
        self,
        clients: int,
        colluders: int,
        stated: int | None = None,
        min_clients: int = 3,
        stores: Mapping[str, SessionStore] | None = None,
    ) -> None:
        self.honest = tuple(f"honest-{number:02}" for number in range(clients - colluders))
        self.colluders = tuple(f"colluder-{number:02}" for number in range(colluders))
        known = {id: compute_fingerprint(make_identity(id).public) for id in (*self.honest, *self.colluders)}
        self.clients = {
            id: SecureClient(
                id,
                (stores or {}).get(id) or MemorySessionStore(),
                min_clients,
                max(1, colluders) if stated is None else stated,
                identity=make_identity(id),
                known=known,
            )
            for id in self.honest
        }
        self.weights = {id: float(2 + number) for number, id in enumerate(self.honest)}
        rng = np.random.default_rng(clients)
        self.values = {id: {"layer/A": torch.from_numpy(rng.uniform(-2, 2, (2, 3))).float()} for id in self.honest}
        self.reasons = list[str]()
        """Why clients refused, in their order."""
        self._opened = list[tuple[dict[tuple[str, int], float], np.ndarray[Any, Any]]]()
        self._number = 0

    def play(self, play: Play, body: bytes = MODEL) -> None:
        """Run a session, and keep what the server opens of it."""
        self._number += 1
        session = _Session(messages.build_session_context("run", self._number))
        stories = {id: play.other if id in play.misled else play.story for id in self.honest}
        self._exchange_keys(session, play.copied)
        for id, story in stories.items():
            self._exchange_shares(session, id, story, play, body)
        for id in session.sealed:
            self._train(session, id, stories[id], play, body)
        self._confirm_and_unmask(session, stories, play.unasked)
        self._open(session)

    def compute_score(self) -> set[str]:
        """Return the honest clients on whose vectors alone a combination of opened sums depends."""
        columns = sorted({column for shares, _ in self._opened for column in shares})
        rows = np.array([[shares.get(column, 0.0) for column in columns] for shares, _ in self._opened])
        totals = np.array([total for _, total in self._opened])
        isolated = set[str]()
        for id in self.honest if self._opened else ():
            is_own = np.array([column[0] == id for column in columns])
            others = np.vstack([np.zeros(len(rows)), rows[:, ~is_own].T])
            _, sizes, directions = np.linalg.svd(others)
            for factors in directions[np.sum(sizes > 1e-9) :]:
                own = factors @ rows[:, is_own]
                if np.abs(own).max(initial=0) > 1e-6:
                    values = torch.stack([self._compute_values(*column) for column in columns if column[0] == id])
                    exact = own @ values.double().flatten(1).numpy()
                    assert np.abs(factors @ totals - exact).max() < 1e-3, "the server's own arithmetic is wrong"
                    isolated.add(id)
        return isolated

    def list_sums(self) -> list[set[str]]:
        """Return the honest clients of the opened sums."""
        return [{id for id, _ in shares} for shares, _ in self._opened]

    def _compute_values(self, id: str, rank: int) -> torch.Tensor:
        """Return the change of a client; with a smaller rank, its rows of zeros beyond it are sent, too."""
        return self.values[id]["layer/A"] * (torch.arange(2)[:, None] < rank)

    def _describe(self, id: str, story: Story) -> Client:
        """Return the facts about a client in a story."""
        weight = self.weights.get(id, 1.0) if story.weight is None else story.weight
        return Client(id, story.rank if id == self.honest[0] else 2, 1.0, 1, weight, None)

    def _common(self, id: str) -> dict[str, Any]:
        return {"run": "run", "serial": 1, "round": 0, "attempt": 0, "to": id, "session": self._number}

    def _answer(self, id: str, kind: Any, **parts: Any) -> Any:
        """Send a client an order, and return its reply; None: it refused."""
        try:
            return self.clients[id].answer(kind(**self._common(id), **parts))
        except FedspanError as error:
            self.reasons.append(str(error))
            return None

    def _exchange_keys(self, session: _Session, is_copied: bool) -> None:
        for id in self.honest:
            reply = self._answer(id, messages.KeysOrder)
            assert isinstance(reply, messages.KeysReply)
            assert reply.keys is not None
            stored = self.clients[id].sessions.load(id)
            assert stored is not None
            session.keys[id], session.hidden[id] = reply.keys, SessionKeys.derive(stored.secret, session.context)
        for number, id in enumerate(self.colluders):
            keys = session.owned[id] = SessionKeys.derive(draw_secret(), id)
            victim = session.keys[self.honest[(1 + number) % len(self.honest)]].masking
            masking = victim[:31] + bytes([victim[31] | 0x80]) if is_copied else keys.masking_public
            session.keys[id] = _sign_keys(keys, session.context, id, make_identity(id), masking)

    def _exchange_shares(self, session: _Session, id: str, story: Story, play: Play, body: bytes) -> None:
        ids = sorted(set(session.keys) - set(story.unknown))
        if len(ids) < 2 or id not in ids:
            return  # no order says so
        peers = {peer: session.keys[peer] for peer in ids}
        if story.replaced in peers:
            keys = SessionKeys.derive(draw_secret(), "replaced")
            peers[story.replaced] = _sign_keys(
                keys, session.context, story.replaced, make_identity("server"), keys.masking_public
            )
        threshold = SecureSettings().compute_threshold(len(ids)) if story.threshold is None else story.threshold
        facts = tuple(ClientFacts.from_client(self._describe(peer, story)) for peer in ids)
        agreement = messages.Agreement(
            config="",
            task=play.task,  # pyright: ignore[reportArgumentType]
            round=0,
            lr=play.lr,
            model=hashlib.sha256(body).hexdigest(),
            clients=len(ids),
            threshold=threshold,
            clip=CLIP,
            bits=64,
            top=story.top,
            layout=messages.compute_layout_digest(messages.create_initial_values(START, START)),
            facts=messages.compute_facts_digest(facts),
        )
        reply = self._answer(id, messages.SharesOrder, peers=peers, agreement=agreement, facts=facts)
        if isinstance(reply, messages.SharesReply):
            session.agreements[id], session.sealed[id] = agreement, reply.sealed
            session.peers[id] = peers
            session.transcripts[id] = agreement.build_transcript(session.context, peers)
            session.present[id] = tuple(peer for peer in ids if peer not in story.silent)

    def _train(self, session: _Session, id: str, story: Story, play: Play, body: bytes) -> None:
        masking = Masking(session=self._number, peers=session.present[id])
        client = session.clients[id] = self._describe(id, story)
        order = Order(play.task, 0, 0, play.lr, id, client, body, run="run", secure=masking)  # type: ignore[arg-type]
        contribution = Contribution(sum={"layer/A": self._compute_values(id, client.rank)})
        try:
            message, _ = self.clients[id].mask(order, masking, contribution, START)
        except FedspanError as error:
            self.reasons.append(str(error))
            return
        session.vectors[id] = message.tensors[messages.MASKED].numpy().view(np.uint64)

    def _confirm_and_unmask(self, session: _Session, stories: Mapping[str, Story], unasked: Collection[str]) -> None:
        statements, signatures = dict[str, bytes](), defaultdict[bytes, dict[str, bytes]](dict)
        for id in session.vectors:
            dropped = tuple(peer for peer in session.present[id] if peer in stories[id].dropped)
            survivors = tuple(peer for peer in session.present[id] if peer not in dropped)
            sealed = {peer: self._seal_for(session, peer, id) for peer in session.present[id]}
            reply = self._answer(id, messages.ConfirmOrder, survivors=survivors, dropped=dropped, sealed=sealed)
            if isinstance(reply, messages.ConfirmReply):
                statements[id] = messages.build_confirmation(session.transcripts[id], survivors, dropped)
                signatures[statements[id]][id] = reply.signature
        for id, statement in statements.items():
            if id in unasked:
                continue
            signed = {peer: session.owned[peer].sign(statement) for peer in session.owned}
            reply = self._answer(id, messages.UnmaskOrder, signatures={**signed, **signatures[statement]})
            for owner, share in reply.shares.items() if isinstance(reply, messages.UnmaskReply) else ():
                is_own = owner not in stories[id].dropped
                session.shares[owner, "own" if is_own else "masking"].add(share)

    def _seal_for(self, session: _Session, owner: str, receiver: str) -> bytes:
        """Return what a client sealed for another one; a colluder seals what the receiver can open."""
        if owner in session.sealed:
            return session.sealed[owner].get(receiver, bytes(92))
        if owner not in session.owned:
            return bytes(92)
        keys, agreement = session.owned[owner], session.agreements[receiver]
        pair = [split(secret, agreement.threshold, agreement.clients)[0] for secret in (keys.own, keys.masking)]
        public = session.keys[receiver].sealing
        return seal(keys.sealing, public, owner, receiver, session.transcripts[receiver], b"".join(pair))

    def _open(self, session: _Session) -> None:
        """Combine the shares that the server holds, and remove the masks that it knows."""
        for owner, sealed in session.sealed.items():
            for colluder in session.owned.keys() & sealed.keys():
                keys, public = session.owned[colluder], session.keys[owner].sealing
                pair = open_sealed(keys.sealing, public, owner, colluder, session.transcripts[owner], sealed[colluder])
                session.shares[owner, "own"].add(pair[:SHARE])
                session.shares[owner, "masking"].add(pair[SHARE:])
        known, private = set[bytes](), {id: keys.masking for id, keys in session.owned.items()}
        for id in session.sealed:
            threshold, public = session.agreements[id].threshold, session.keys[id]
            seed = _combine(session.shares[id, "own"], threshold)
            if seed is not None and compute_commitment(seed) == public.own:
                known.add(seed)
            key = _combine(session.shares[id, "masking"], threshold)
            if key is not None and compute_masking_public(key) == public.masking:
                private[id] = key
        for id in session.vectors:
            for owner in private.keys() & set(session.present[id]):
                for peer in session.present[id] if owner == id else (id,):
                    if peer != owner:
                        public = session.peers[id][peer].masking
                        known.add(derive_pair_seed(private[owner], public, session.transcripts[id], owner, peer))
        self._cancel_masks(session, known)

    def _cancel_masks(self, session: _Session, known: Collection[bytes]) -> None:
        """Keep all combinations of the vectors in which no mask remains that the server does not know."""
        vectors, masks = dict[str, Integers](), {id: self._count_masks(session, id) for id in session.vectors}
        for id, vector in session.vectors.items():
            vectors[id] = vector.copy()
            for seed in masks[id].keys() & known:
                vectors[id] -= _compute_mask(seed, 6) * np.uint64(masks[id][seed] % 2**64)
        unknown = sorted(set().union(*masks.values()) - set(known))
        rows = [[0] * len(masks), *([counts[seed] for counts in masks.values()] for seed in unknown)]
        for solution in sympy.Matrix(rows).nullspace() if masks else ():
            whole = [int(factor * sympy.ilcm(1, *(part.q for part in solution))) for factor in solution]
            factors = {id: factor for id, factor in zip(masks, whole, strict=True) if factor}
            total = np.zeros(6, np.uint64)
            for id, factor in factors.items():
                total += vectors[id] * np.uint64(factor % 2**64)
            shares = {
                (id, session.clients[id].rank): factor
                * messages.compute_share(session.clients[id].weight, session.agreements[id].top)
                for id, factor in factors.items()
            }
            self._opened.append((shares, Ring(64, CLIP, session.agreements[min(factors)].clients).decode(total)))

    def _count_masks(self, session: _Session, id: str) -> Counter[bytes]:
        """Return how often each seed's mask was added to a client's vector."""
        keys, counts = session.hidden[id], Counter({session.hidden[id].own: 1})
        for peer in set(session.present[id]) - {id}:
            public, transcript = session.peers[id][peer].masking, session.transcripts[id]
            counts[derive_pair_seed(keys.masking, public, transcript, id, peer)] += 1 if id < peer else -1
        return counts


def _compute_mask(seed: bytes, length: int) -> Integers:
    mask = np.zeros(length, np.uint64)
    add_mask(mask, seed)
    return mask


def _combine(shares: Collection[bytes], threshold: int) -> bytes | None:
    try:
        return combine(sorted(shares), threshold)
    except ValueError:
        return None


def _sign_keys(keys: SessionKeys, context: str, id: str, identity: Identity, masking: bytes) -> messages.PublicKeys:
    public = messages.PublicKeys(
        sealing=keys.sealing_public,
        masking=masking,
        own=compute_commitment(keys.own),
        signing=keys.signing_public,
        identity=identity.public,
    )
    return public.model_copy(update={"signature": identity.sign(public.build_statement(context, id))})


@functools.cache
def make_identity(name: str) -> Identity:
    """Create a lasting key."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return load_identity(path)


def list_attacks(honest: Sequence[str], colluders: int) -> dict[str, tuple[Play, ...]]:
    """Return the attacks on the first honest client, each the sessions that it takes."""
    victim, others = honest[0], honest[1:]
    misled, majority = others[: (len(others) + 1) // 2], (len(honest) + colluders) // 2 + 1
    return {
        "none": (Play(),),
        "two stories of who survived": (Play(other=Story(dropped=(victim,)), misled=misled),),
        "a threshold as small as can be": (Play(Story(threshold=2)),),
        "a threshold of a bare majority": (
            Play(Story(threshold=majority), Story(threshold=majority, dropped=(victim,)), misled=misled),
        ),
        "colluders all around": (Play(Story(unknown=others[1:], silent=others[:1])),),
        "the same model without the victim": (Play(), Play(Story(unknown=(victim,)))),
        "the victim is said to have dropped out in a retry": (Play(), Play(Story(dropped=(victim,)), lr=0.2)),
        "another largest weight": (Play(), Play(Story(top=len(honest) + 0.5))),
        "equal weights instead of the examples": (Play(), Play(Story(weight=1.0))),
        "another rank of the victim": (Play(), Play(Story(rank=1))),
        "unasked clients are summed again": (
            Play(unasked=others[-2:]),
            Play(Story(unknown=(victim,)), unasked=others[:2]),
        ),
        "keys of the server's own": (Play(Story(replaced=honest[-1])),),
        "masking keys of other clients in another form": (Play(copied=True),),
    }


def list_lies(honest: Sequence[str], colluders: int) -> tuple[Callable[[Play], Play], ...]:
    """Return changes of a session that the server may combine."""
    victim, others = tuple(honest[:1]), tuple(honest[1:])
    half = others[: (len(others) + 1) // 2]

    def tell(**changes: Any) -> Callable[[Play], Play]:
        return lambda play: replace(play, story=replace(play.story, **changes), other=replace(play.other, **changes))

    def tell_half(**changes: Any) -> Callable[[Play], Play]:
        return lambda play: replace(play, other=replace(play.other, **changes), misled=half)

    def play_so(**changes: Any) -> Callable[[Play], Play]:
        return lambda play: replace(play, **changes)

    return (
        *(tell(**{part: group}) for part in ("unknown", "dropped") for group in (victim, honest[-1:], half)),
        *(tell_half(**{part: victim}) for part in ("unknown", "silent", "dropped", "dropped")),
        tell(silent=others[:1]),
        *(tell(threshold=threshold) for threshold in (2, (len(honest) + colluders) // 2 + 1)),
        tell(top=len(honest) + 0.5),
        tell_half(top=len(honest) + 0.5),
        tell(weight=1.0),
        tell(rank=1),
        tell_half(rank=1),
        tell(replaced=honest[-1]),
        *(play_so(unasked=group) for group in (honest, half, others[-2:])),
        play_so(task="statistics"),
        play_so(lr=0.2),
        play_so(copied=True),
    )
