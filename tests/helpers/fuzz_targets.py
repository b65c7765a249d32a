"""What comes from another machine, or from a file, mutated: a target takes bytes, and raises its one documented error.

A target has valid inputs, a mutator that knows their form, and a function that reads them. Input number n of a seed is
always the same bytes, so a finding is a target, a seed and a number.
"""

import asyncio
import base64
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import torch

from fedspan import __version__
from fedspan.config import parse_config, parse_yaml
from fedspan.config.node import NodeConfig
from fedspan.config.validation_errors import convert_validation_errors
from fedspan.core.base import BasePatch, BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.values import Client, Message, ServerState
from fedspan.deployment.approval import JobRequest
from fedspan.deployment.handshake import Introduction, Invitation, build_node_values
from fedspan.errors import FedspanError
from fedspan.federation import serialization
from fedspan.federation.protocol import ClientFacts, Envelope, Masking, Order, Part, Reply, decode_reply, read_header
from fedspan.federation.secagg import messages

from .fuzzing import changed, dumped, mangled
from .hostile_node import make_public_key, make_strange_keys


class Target(ABC):
    """A reader of foreign bytes; its seeds are valid inputs."""

    name: str
    seeds: Sequence[bytes]

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Read an input.

        Raises:
            ValueError: If the input is refused (``FedspanError`` for configs); any other error is a finding.
        """

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """Change an input: its structure in most cases, its bytes in the others."""
        return mangled(data, draws)

    def input(self, seed: int, number: int) -> bytes:
        """Return input ``number`` of a seed."""
        draws = random.Random(f"{self.name} {seed} {number}")
        data = draws.choice(self.seeds)
        for _ in range(draws.choice((1, 1, 1, 2, 4))):
            made = self.mutate(data, draws)
            if len(made) < 2**20:  # a larger one takes long to make, and is refused by its size
                data = made
        return data


class _Json(Target):
    """A target whose inputs are JSON."""

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return mangled(data, draws)
        return mangled(data, draws) if draws.random() < 0.25 else dumped(changed(value, draws))


class Codec(Target):
    """Messages and server states: a safetensors header, the structure in its metadata, and the tensors' bytes."""

    name = "codec"

    def __init__(self) -> None:
        pair = LowRank(torch.ones(4, 2), torch.ones(2, 3), 0.5)
        increment = Increment(1, {"layer": pair, "dense": torch.ones(3, 3)}, 0.9)
        tensors = {"a/A": torch.ones(2, 3), "b": torch.tensor(True), "c": torch.arange(3), "d": torch.zeros(0)}
        patch = BasePatch(2, (increment,), True, 0.9, {"layer": pair})
        state = ServerState(2, tensors, BaseUpdate().add(increment), {"m": torch.ones(2)}, {"s": 1.0, "t": "x"}, 3)
        self.seeds = (
            serialization.encode(Message(tensors, {"x": 1, "y": "z"}, patch)),
            serialization.encode(Message({}, {})),
            serialization.encode_state(state),
        )

    def read(self, data: bytes) -> None:
        """``Target.read``; what was read can be written, and is then read as the same."""
        try:
            message = serialization.decode(data)
        except ValueError:
            serialization.decode_state(data)
            return
        try:
            again = serialization.encode(message)
        except UnicodeEncodeError as error:  # names are any text, and half a character is none
            raise ValueError(str(error)) from error
        if serialization.encode(serialization.decode(again)) != again:
            raise AssertionError("a message that was read is written as another one")

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``."""
        size = int.from_bytes(data[:8], "little")
        if draws.random() < 0.3 or size > len(data):
            return mangled(data, draws)
        try:
            header = json.loads(data[8 : 8 + size])
            text = header["__metadata__"]["fedspan"]
            if draws.random() < 0.6:
                header["__metadata__"]["fedspan"] = dumped(changed(json.loads(text), draws)).decode(errors="replace")
            else:
                header = changed(header, draws)
        except (ValueError, KeyError, TypeError, RecursionError):
            return mangled(data, draws)
        made = dumped(header)
        return len(made).to_bytes(8, "little") + made + data[8 + size :]


_MASKING = Masking(session=1, peers=("a", "b"))
_AGREEMENT = messages.Agreement(
    config="0" * 64,
    task="train",
    round=1,
    lr=0.1,
    model="0" * 64,
    clients=3,
    threshold=3,
    clip=1.0,
    bits=32,
    top=1.0,
    layout="0" * 64,
    facts="0" * 64,
)
_CLIENT = Client("a", 2, 1.0, 5, 1.0, None)
_KEYS = messages.PublicKeys(
    sealing=bytes(32), masking=bytes(32), own=bytes(32), signing=bytes(32), identity="ecdsa", signature=bytes(90)
)
_FACTS: dict[str, Any] = {"run": "run", "serial": 5, "round": 1, "attempt": 0, "to": "a", "session": 1}


class Orders(_Json):
    """Headers of a server's orders, phases of secure aggregation and invitations, as a node reads them."""

    name = "orders"

    def __init__(self) -> None:
        envelopes = (
            Order("train", 0, 0, 0.1, "a", _CLIENT, b"", 0, "run", 7, _MASKING).to_envelope(),
            Order("evaluate", 3, 1, 0.0, "a", None, b"", run="run", serial=8).to_envelope(),
            messages.KeysOrder(**_FACTS).to_envelope(),
            messages.SharesOrder(
                **_FACTS,
                peers={"a": _KEYS, "b": _KEYS},
                agreement=_AGREEMENT,
                facts=(ClientFacts.from_client(_CLIENT),),
            ).to_envelope(),
            messages.ConfirmOrder(**_FACTS, survivors=("a",), dropped=("b",), sealed={"a": bytes(100)}).to_envelope(),
            messages.UnmaskOrder(**_FACTS, signatures={"a": bytes(64)}).to_envelope(),
            Invitation(run="run", version=__version__, config=json.dumps(_CONFIG)).to_envelope(),
        )
        self.seeds = tuple(envelope.header.encode() for envelope in envelopes)

    def read(self, data: bytes) -> None:
        """``Target.read``."""
        envelope = Envelope(data.decode(errors="surrogateescape"))
        try:
            messages.decode_request(envelope)
        except ValueError:
            read_header(Invitation, envelope).read_values()


class Answers(_Json):
    """Headers of a node's replies, as a server reads them; reasons are text that a terminal can show."""

    name = "answers"

    def __init__(self) -> None:
        scores: Any = {"validation": {"loss": 0.5, "examples": 4.0}}
        envelopes = (
            Reply("train", 1, 0, "a", (Part(loss=0.5, examples=4.0),), scores).to_envelope(),
            Reply("train", 1, 0, "a", failed="no memory", lost=True).to_envelope(),
            messages.KeysReply(id="a", session=1, keys=_KEYS).to_envelope(),
            messages.SharesReply(id="a", session=1, sealed={"b": bytes(100)}).to_envelope(),
            messages.ConfirmReply(id="a", session=1, signature=bytes(64), unopened=("b",)).to_envelope(),
            messages.UnmaskReply(id="a", session=1, shares={"b": bytes(34)}, failed="no").to_envelope(),
            Introduction(id="a", version=__version__, examples=5, base="0" * 64, extras="0" * 64).to_envelope(),
        )
        self.seeds = tuple(envelope.header.encode() for envelope in envelopes)

    def read(self, data: bytes) -> None:
        """``Target.read``."""
        envelope, refusals = Envelope(data.decode(errors="surrogateescape")), 0
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: decode_reply(envelope).failed,
            *(
                (lambda kind=kind: read_header(kind, envelope).failed)
                for kind in (messages.KeysReply, messages.SharesReply, messages.ConfirmReply, messages.UnmaskReply)
            ),
            lambda: read_header(Introduction, envelope).refused,
        )
        if len(data) > 2**17:  # a server reads a reply as the one kind that it waits for
            kinds = (kinds[len(data) % len(kinds)],)
        for kind in kinds:
            try:
                reason = kind()
            except ValueError as error:
                refusals, reason = refusals + 1, str(error)
            if reason is not None and not reason.isprintable():
                raise AssertionError(f"a reason that a terminal obeys: {reason!r}")
        if refusals == len(kinds):
            raise ValueError("no reply")


class Messages(Target):
    """Messages as they are transmitted: an order at a node and a reply at a server, whole or with their open heads.

    The first byte of an input is the reader: ``O`` and ``R`` read a message as it arrives, ``o`` and ``r`` one whose
    head is sealed after the mutations, so that they reach what is in it, and ``u`` reads one without keys. Signed and
    sealed bytes are others each time, so what follows are seeds of mutations, except without keys.
    """

    name = "messages"

    def __init__(self) -> None:
        from fedspan.transports.http import keys, signing, wire

        self._signing = signing
        self._folder = TemporaryDirectory()
        folder = Path(self._folder.name)
        keys.make_authority(folder, [])
        public = keys.make_node_key(folder / "node.key").read_bytes()
        self._server = signing.ServerSigner(folder, lambda: {7: public})
        self._node = signing.NodeSigner(keys.load_node_key(folder / "node.key"), folder / "ca.crt")
        body, sealing = self._server.encrypt(b"weights"), self._node.sign_sealing_key()
        head, self._nonce = self._server.seal('{"task": "train"}', body, 7, sealing)
        order = self._node.open_order(head + body.data, 7)
        reply = self._node.seal_reply(Envelope('{"task": "train"}', b"weights"), 7, order)
        self._messages = {b"o": head + body.data, b"r": reply}
        self._keys = {b"o": self._node._sealing_key, b"r": self._server._reply_key}
        unsigned = signing.join_message(wire.pack([bytes(16), b'{"task": "train"}'])) + b"weights"
        self.seeds = (b"O", b"R", b"o", b"r", b"u" + unsigned)

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``; the reader stays."""
        return data[:1] + mangled(data[1:], draws) if data[:1] == b"u" else data + draws.randbytes(8)

    def read(self, data: bytes) -> None:
        """``Target.read``; what was changed is not opened, except without keys."""
        kind, suite = data[:1].lower(), self._signing._SUITE
        if kind == b"u":
            self._signing.UnsignedSigner().open_order(data[1:], 7)
            return
        message, key, is_opened = self._messages[kind], self._keys[kind], data[:1] == kind
        if is_opened:
            head, body = self._signing.split_message(message)
            message = self._signing.join_message(suite.decrypt(head, key)) + bytes(body)
        made = message
        for start in range(1, len(data), 8):
            made = mangled(made, random.Random(data[start : start + 8]))
        if is_opened:
            head, body = self._signing.split_message(made)
            sealed = self._signing.join_message(suite.encrypt(head, key.public_key())) + bytes(body)
        else:
            sealed = made
        if kind == b"o":
            self._node.open_order(sealed, 7)
        else:
            self._server.open(sealed, 7, self._nonce)
        if made != message:
            raise AssertionError("a message that was changed is opened")


class Requests(Target):
    """Requests of nodes and of the operator to a server with keys: a method, a path, headers and a body, as in HTTP.

    Of the headers that only a node or the operator knows, an input has one that is valid: the session, or the secret.
    """

    name = "requests"

    def __init__(self) -> None:
        from fedspan.transports.http import app
        from fedspan.transports.http.admissions import compute_node_id
        from fedspan.transports.http.requests import RequestLimits
        from fedspan.transports.http.store import Order

        self._app, self._folder = app, TemporaryDirectory()
        self._path = Path(self._folder.name)
        self._key = make_public_key(11)
        self._node, self._order = compute_node_id(self._key), Order
        self._limits = RequestLimits(poll=0.0, gather=0.0, body_seconds=2.0)
        file = hashlib.sha256(b"base").hexdigest()
        (self._path / "weights").write_bytes(bytes(70_000))
        (self._path / f"{file}.run.json").write_text(json.dumps({file: str(self._path / "weights")}))
        session, reply = f"authorization: Bearer {_SESSION}", f"/v1/order/{_ORDER}/reply"
        self.seeds = (
            _request("GET /v1/health"),
            _request("POST /v1/join", b"", "fedspan-protocols: 1", f"fedspan-key: {self._key}"),
            _request("POST /v1/order", b"", session),
            _request(f"GET /v1/order/{_ORDER}", b"", session, "range: bytes=5-"),
            _request(f"PUT {reply}?upload={'a' * 32}&start=0&total=10", b"0123456789", session),
            _request(f"PUT {reply}?upload={'a' * 32}&start=0&total=99", b"0123456789", session),
            _request(f"GET {reply}?upload={'a' * 32}", b"", session),
            _request(f"POST /v1/order/{_ORDER}/failure", b"no memory", session),
            _request(f"GET /v1/base/{file}/{file}", b"", session, "range: bytes=5-"),
            _request("POST /v1/heartbeat", b"training/37", session),
            _request("POST /v1/leave", b"", session),
        )
        self._strange = [
            _request("POST /v1/join", b"", "fedspan-protocols: 1", f"fedspan-key: {one}") for one in make_strange_keys()
        ]

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``; some requests become those to join with a strange key or a wrong signature."""
        kind = draws.random()
        if kind < 0.05:
            return draws.choice(self._strange)
        if kind < 0.2:
            signed = base64.b64encode(draws.randbytes(draws.choice((0, 32, 130)))).decode()
            head, _, body = data.partition(b"\n\n")
            moment = draws.choice(("1.0", "nan", "inf", "-1", "1e999", "", "\u0661"))
            values = f"\nfedspan-challenge: {moment}:{signed}\nfedspan-signature: {signed}\nfedspan-sealing: {signed}"
            return head + values.encode() + b"\n\n" + body
        return mangled(data, draws)

    def read(self, data: bytes) -> None:
        """``Target.read``."""
        head, _, body = data.partition(b"\n\n")
        first, *lines = head.split(b"\n")
        method, _, target = first.partition(b" ")
        path, _, query = target.partition(b"?")
        pairs = (line.partition(b": ") for line in lines)
        headers = [(name.lower(), value) for name, _, value in pairs]
        status = asyncio.run(self._serve(method, path, query, headers, body))
        is_known = any(value == f"Bearer {_SESSION}".encode() for name, value in headers if name == b"authorization")
        if status < 400 and not is_known and path not in (b"/v1/health", b"/v1/join"):
            raise AssertionError("a request without a session was answered")
        if status >= 400:
            raise ValueError(f"refused with {status}")

    async def _serve(
        self, method: bytes, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> int:
        from fedspan.transports.http.node_requests import Session
        from fedspan.transports.http.requests import Bucket, Sender
        from fedspan.transports.http.store import Store

        with TemporaryDirectory() as folder, closing(Store(Path(folder))) as store:
            store.add_run("run")
            store.add_orders([self._order(_ORDER, "run", self._node, b"head", "", 100)])
            server = self._app.Server(
                store, "secret", lambda: {self._node: self._key}, bytes(32), self._limits, self._path
            )
            sender = Sender(asyncio.Semaphore(2), Bucket(1e9, 1e9))
            session, nodes = Session(self._node, _SESSION, b"", "", sender), server._nodes
            nodes.sessions[self._node] = nodes._by_token[_SESSION] = session
            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": method.decode("latin-1"),
                "path": unquote(path.decode("latin-1")),
                "raw_path": path,
                "query_string": query,
                "client": ("192.0.2.1", 7),
                "server": ("127.0.0.1", 1),
                "headers": headers,
            }
            events, sent = [{"type": "http.request", "body": body, "more_body": False}], list[Any]()

            async def receive() -> Any:
                return events.pop() if events else {"type": "http.disconnect"}

            async def send(event: Any) -> None:
                sent.append(event)

            await server(scope, receive, send)
            answer = b"".join(event.get("body", b"") for event in sent)
            if b"PRIVATE" in answer or b"secret" in answer:
                raise AssertionError("an answer with a file of the server's")
            return int(sent[0]["status"])


_SESSION, _ORDER = "5" * 64, "6" * 32


def _request(first: str, body: bytes = b"", *headers: str) -> bytes:
    """An input of the requests."""
    return "\n".join([first, *headers, f"content-length: {len(body)}", "", ""]).encode() + body


_CONFIG: dict[str, Any] = {
    "task": "sequence-classification",
    "model": {"name": "bert", "target_modules": ["query", "value"], "max_length": 32},
    "data": {"labels": ["a", "b"], "train": "t.csv"},
    "partition": {"partitioner": "dirichlet", "clients": 3, "alpha": 0.3, "validation": 0.1},
    "method": {"name": "fedit", "r": 4, "wrappers": [{"name": "fedprox", "mu": 0.1}]},
    "federation": {"rounds": 3, "secure": {"clip": 10.0}, "ranks": None, "deadline": 5.0},
    "training": {"lr": 0.1, "betas": [0.9, 0.99], "local_steps": 2},
    "privacy": None,
    "evaluation": {"every": 1, "metric": "accuracy"},
}
_OWN: dict[str, Any] = {"validation": 0.1, "test": 0.1, "split_seed": 0}
_NODE: dict[str, Any] = {
    "id": "clinic-a",
    "server": "fl.example.org:9092",
    "data": {"train": "messages.csv", "text": "message"},
    "limits": {"methods": ["fedit"], "rounds": 50, "round_seconds": 60.0, "approve": "ask"},
}


def _values(text: str) -> Any:
    """The values of a config as a server sends it."""
    try:
        return Invitation(run="run", version=__version__, config=text).read_values()
    except (ValueError, RecursionError) as error:
        raise FedspanError("config", None, problem="no JSON object") from error


class Configs(_Json):
    """Configs of runs, as text and as a server sends them to a node, and nodes' files."""

    name = "configs"
    seeds = (
        json.dumps(_CONFIG).encode(),
        json.dumps({**_CONFIG, "federation": {}}).encode(),
        json.dumps(_NODE).encode(),
    )

    def read(self, data: bytes) -> None:
        """``Target.read``."""
        text = data.decode(errors="replace")
        # YAML takes a hundred times as long as JSON.
        values = parse_yaml(text, "config.yaml") if random.Random(data).random() < 0.1 else _values(text)
        if isinstance(values, dict) and "server" in values:
            with convert_validation_errors(root=NodeConfig):
                NodeConfig.model_validate(values)
            return
        config = parse_config(values)
        given = config.model_dump(mode="json")
        summary = JobRequest("0" * 64, "run", given, "now").summarize(NodeConfig.model_validate(_NODE))
        if not all(value.isprintable() for value in summary.values()):
            raise AssertionError("a summary that a terminal obeys")
        parse_config(build_node_values(given, {**_OWN, "data": {"train": "t.csv"}}))


class Refusing(Target):
    """A target whose errors are all of one documented kind."""

    def __init__(self, inner: Target, error: type[Exception]) -> None:
        self.inner, self.error, self.name, self.seeds = inner, error, inner.name, inner.seeds

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``."""
        return self.inner.mutate(data, draws)

    def read(self, data: bytes) -> None:
        """``Target.read``; the documented error is no finding."""
        try:
            self.inner.read(data)
        except self.error as refusal:
            if isinstance(refusal, FedspanError) and str(refusal).splitlines() != [str(refusal)]:
                raise AssertionError("a refusal of several lines") from refusal


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": lambda: Refusing(Codec(), ValueError),
    "orders": lambda: Refusing(Orders(), ValueError),
    "answers": lambda: Refusing(Answers(), ValueError),
    "messages": lambda: Refusing(Messages(), ValueError),
    "requests": lambda: Refusing(Requests(), ValueError),
    "configs": lambda: Refusing(Configs(), FedspanError),
}
"""The targets by name. A read of theirs that raises anything is a finding."""
