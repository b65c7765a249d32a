"""What comes from another machine, or from a file, mutated: a target takes bytes, and raises its one documented error.

A target has valid inputs, a mutator that knows their form, and a function that reads them. Input number n of a seed is
always the same bytes, so a finding is a target, a seed and a number.
"""

import asyncio
import base64
import copy
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
from fedspan.federation.secagg.messages import (
    Agreement,
    ConfirmOrder,
    ConfirmReply,
    KeysOrder,
    KeysReply,
    PublicKeys,
    SharesOrder,
    SharesReply,
    UnmaskOrder,
    UnmaskReply,
    decode_request,
)

from .hostile_node import make_strange_keys, name_of, to_pem, tree_of

__all__ = ["TARGETS", "Codec", "Refusing", "Target"]

_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e308, -1e-320, float("nan"), float("inf")),
    *(
        "",
        "a",
        "x" * 300,
        "\x1b[31m",
        "\ud800",
        "\0",
        "train",
        "invite",
        "fedit",
        "../../etc",
        "1e9",
        [],
        {},
        [[]],
        [0],
    ),
    *({"a": 1}, [None], ["a", "a"], {"": {}}),
)
_BYTES = (b"\0", b"\xff", b"{", b"[" * 2000, b'"', b",", b"\n", b"9" * 400, b"\xed\xa0\x80", b"null", b"&a *a", b"...")


class Target(ABC):
    """A reader of foreign bytes.

    Args:
        name: Name of the target.
        seeds: Valid inputs.
    """

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


def mangled(data: bytes, draws: random.Random) -> bytes:
    """Some bytes changed, dropped, doubled or put in."""
    made = bytearray(data)
    for _ in range(draws.choice((1, 1, 2, 5))):
        at, kind = draws.randrange(len(made) + 1), draws.random()
        if kind < 0.35 and made:
            made[min(at, len(made) - 1)] ^= 1 << draws.randrange(8)
        elif kind < 0.55:
            del made[at : at + draws.choice((1, 1, 8, 100))]
        elif kind < 0.8:
            made[at:at] = draws.choice(_BYTES)
        else:
            start = draws.randrange(len(made) + 1)
            made[at:at] = made[start : start + 40]
    return bytes(made)


def changed(value: Any, draws: random.Random) -> Any:
    """A JSON value with something else at a few places in it."""
    value = json.loads(json.dumps(value))
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        places = _places(value)
        if not places:
            return _junk(draws)
        container, key = draws.choice(places)
        kind = draws.random()
        if kind < 0.2:
            del container[key]
        elif kind < 0.35 and isinstance(container, dict):
            container[draws.choice(("", "extra", "task", "format", "x" * 300))] = _junk(draws)
        elif kind < 0.45 and isinstance(container, list):
            repeated = container[key]
            small = not isinstance(repeated, dict | list) or len(_dumped(repeated)) < 200
            container.extend([repeated] * draws.choice((1, 3, 500 if small else 5)))
        elif kind < 0.5:
            nested = _junk(draws)
            for _ in range(draws.choice((3, 60, 3000))):
                nested = [nested]
            container[key] = nested
        else:
            container[key] = _junk(draws)
    return value


def _junk(draws: random.Random) -> Any:
    return copy.deepcopy(draws.choice(_JUNK))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys, to a depth of 30."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    for _ in range(30):
        below: list[Any] = []
        for one in level:
            items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
            for key, inside in list(items)[:300]:
                found.append((one, key))
                below.append(inside)
        level = below
    return found


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode(errors="surrogatepass")
    except RecursionError:
        return b"[" * 3000


class _Json(Target):
    """A target whose inputs are JSON."""

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return mangled(data, draws)
        return mangled(data, draws) if draws.random() < 0.25 else _dumped(changed(value, draws))


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
                header["__metadata__"]["fedspan"] = _dumped(changed(json.loads(text), draws)).decode(errors="replace")
            else:
                header = changed(header, draws)
        except (ValueError, KeyError, TypeError, RecursionError):
            return mangled(data, draws)
        made = _dumped(header)
        return len(made).to_bytes(8, "little") + made + data[8 + size :]


_MASKING = Masking(session=1, peers=("a", "b"))
_AGREEMENT = Agreement(
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
_KEYS = PublicKeys(
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
            KeysOrder(**_FACTS).to_envelope(),
            SharesOrder(
                **_FACTS,
                peers={"a": _KEYS, "b": _KEYS},
                agreement=_AGREEMENT,
                facts=(ClientFacts.from_client(_CLIENT),),
            ).to_envelope(),
            ConfirmOrder(**_FACTS, survivors=("a",), dropped=("b",), sealed={"a": bytes(100)}).to_envelope(),
            UnmaskOrder(**_FACTS, signatures={"a": bytes(64)}).to_envelope(),
            Invitation(run="run", version=__version__, config=json.dumps(_CONFIG)).to_envelope(),
        )
        self.seeds = tuple(envelope.header.encode() for envelope in envelopes)

    def read(self, data: bytes) -> None:
        """``Target.read``."""
        envelope = Envelope(data.decode(errors="surrogateescape"))
        try:
            decode_request(envelope)
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
            KeysReply(id="a", session=1, keys=_KEYS).to_envelope(),
            SharesReply(id="a", session=1, sealed={"b": bytes(100)}).to_envelope(),
            ConfirmReply(id="a", session=1, signature=bytes(64), unopened=("b",)).to_envelope(),
            UnmaskReply(id="a", session=1, shares={"b": bytes(34)}, failed="no").to_envelope(),
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
                for kind in (KeysReply, SharesReply, ConfirmReply, UnmaskReply)
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


class Door(Target):
    """Requests at the door: whether nodes need keys, the path, headers, and a body, as in HTTP.

    Of the headers with which a node signs, an input decides the values; the others it holds.
    """

    name = "door"

    def __init__(self) -> None:
        from fedspan.transports.flower import adapter, wire

        self._request = name_of("flwr.proto.fleet_pb2", "PushMessagesRequest")
        request = self._request()
        request.node.node_id = 7
        message = request.messages_list.add()
        message.metadata.src_node_id, message.metadata.dst_node_id = 7, 1
        message.metadata.message_id, message.metadata.reply_to_message_id = "m", "o"
        request.message_object_trees.append(tree_of("m", [tree_of(name) for name in "abc"]))
        reply, digest, content = request.SerializeToString(), hashlib.sha256(b"base").hexdigest(), bytes(70_000)
        self._folder = TemporaryDirectory()
        base = Path(self._folder.name, "weights")
        base.write_bytes(content)
        Path(self._folder.name, f"{digest}.run.json").write_text(json.dumps({digest: str(base)}))
        part = wire.UploadPart(hashlib.sha256(content).hexdigest(), 0, len(content), 9, len(content))
        sent = wire.pack((reply, b"a", b"b"))
        sent_part = wire.UploadPart(hashlib.sha256(sent).hexdigest(), 0, len(sent))
        flower, own = adapter.NODE_API, wire.NODE_PATH
        file = wire.pack((digest.encode(), digest.encode(), b"0"))
        rest = {"range": "bytes=5-", "if-range": wire.compute_tag(file, len(content))}
        self.seeds = (
            _request(flower + "push-messages", reply),
            _request(flower + "push-object", content, {wire.UPLOAD_HEADER: part.to_header()}),
            _request(flower + "pull-object", b"object", {wire.PROGRESS_HEADER: wire.format_progress(5, 900), **rest}),
            _request(flower + "pull-messages", b""),
            _request(flower + "send-node-heartbeat", b"heartbeat"),
            _request(own + wire.TAKE_ORDER, wire.pack((b"7", b"o")), rest),
            _request(own + wire.SEND_REPLY, sent),
            _request(own + wire.SEND_REPLY, sent, {wire.UPLOAD_HEADER: sent_part.to_header()}),
            _request(own + wire.UPLOAD_OFFSET, part.digest.encode()),
            _request(own + wire.FETCH_BASE, file, rest),
        )
        self._keys = [key for key in make_strange_keys() if key.startswith(b"-----BEGIN")]

    def mutate(self, data: bytes, draws: random.Random) -> bytes:
        """``Target.mutate``: the body, whose length is declared again in most cases, or a header, or any bytes."""
        kind, path, headers, body = _read_request(data)
        if (which := draws.random()) < 0.1:
            return mangled(data, draws)
        if which < 0.4 and headers:
            at = draws.randrange(len(headers))
            name, value = headers[at]
            junk = (mangled(value, draws), mangled(value, draws), b"-1", b"9" * 40, b"", b"1e3", "٣".encode(), b"\xff")
            headers[at] = name, draws.choice(junk).replace(b"\n", b"")
        elif which < 0.5:
            kind, path = draws.choice((kind, b"keyed")), draws.choice((path + b"x", mangled(path, draws), path))
        else:
            body = self._mutate_body(body, draws)
            if draws.random() < 0.8:
                headers = [(name, value) for name, value in headers if name != b"content-length"]
                headers.append((b"content-length", b"%d" % len(body)))
        lines = b"\n".join((kind + b" " + path, *(name + b": " + value for name, value in headers)))
        return lines + b"\n\n" + body

    def _mutate_body(self, body: bytes, draws: random.Random) -> bytes:
        from fedspan.transports.flower import wire

        try:
            parts = wire.unpack(body, 100)
        except ValueError:
            parts = []
        if not parts:
            return self._mutate_reply(body, draws)
        at = draws.randrange(len(parts))
        match draws.randrange(4):
            case 0:
                parts[at] = self._mutate_reply(parts[at], draws)
            case 1:
                parts[at] = draws.choice((b"", b"7", b"9" * 20, b"9" * 21, b"-1", bytes(64), b"a" * 64, b"\xff" * 64))
            case 2:
                parts[at:at] = [parts[at]] * draws.choice((1, 3, 300))
            case _:
                del parts[at]
        return wire.pack(parts)

    def _mutate_reply(self, data: bytes, draws: random.Random) -> bytes:
        request = self._request()
        try:
            request.ParseFromString(data)
        except Exception:  # protobuf's own error class depends on its implementation
            return mangled(data, draws)
        if draws.random() < 0.4 or not request.messages_list or not request.message_object_trees:
            return mangled(data, draws)
        head, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        match draws.randrange(6):
            case 0:
                head.src_node_id = draws.choice((0, 1, 7, 8, 2**64 - 1))
            case 1:
                head.dst_node_id = draws.choice((0, 1, 7, 2**64 - 1))
            case 2:
                request.messages_list.add().CopyFrom(request.messages_list[0])
            case 3:
                for _ in range(draws.choice((3, 60, 90))):
                    tree = tree.children.add()
                    tree.object_id = "d"
            case 4:
                for number in range(draws.choice((3, 300, 20_000))):
                    tree.children.add().object_id = str(number)
            case _:
                head.reply_to_message_id = draws.choice(("", "o", "x" * 1000))
        return request.SerializeToString()

    def read(self, data: bytes) -> None:
        """``Target.read``; the door answers every request with one status, and passes on what a role allows.

        A request whose body can be resumed is sent twice, as by a node that lost the answer.
        """
        from fedspan.transports.flower import adapter, door, wire

        kind, path, headers, body = _read_request(data)
        self._require_unsigned(data, headers)
        passed, exchange = list[bytes](), _Exchange()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            passed.append((await receive())["body"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"answer"})

        scope = {
            "type": "http",
            "path": path.decode("latin-1"),
            "method": "POST",
            "client": ("192.0.2.1", 7),
            "server": ("127.0.0.1", 1),
            "headers": headers,
            "app": SimpleNamespace(state=SimpleNamespace(enable_supernode_auth=kind == b"keyed")),
        }

        async def request() -> list[int]:
            made = door.Door(app, exchange=exchange, offers=Path(self._folder.name))
            statuses = list[int]()
            for _ in range(2 if wire.UPLOAD_HEADER.encode() in dict(headers) else 1):
                events, sent = [{"type": "http.request", "body": body, "more_body": False}], list[Any]()

                async def receive(events: list[Any] = events) -> Any:
                    return events.pop() if events else {"type": "http.disconnect"}

                async def send(event: Any, sent: list[Any] = sent) -> None:
                    sent.append(event)

                await made(dict(scope), receive, send)
                statuses += [event["status"] for event in sent if event["type"] == "http.response.start"]
            return statuses

        with patch.object(door, "find_reply_limit", lambda *_: None):  # there is no database behind this door
            statuses = asyncio.run(request())
        if kind == b"keyed" and (passed or exchange.heads):
            raise AssertionError("a request without a valid signature passed the door")
        heads = passed if path == adapter.NODE_API.encode() + b"push-messages" else exchange.heads
        for head in heads:
            reply = adapter.read_pushed_reply(head, door.DoorLimits().objects)
            if reply is None or reply.sender != reply.node or not reply.is_to_server or reply.depth > 8:
                raise AssertionError("a message that is no reply of the node passed the door")
        if statuses[0] not in (200, 206):
            raise ValueError(f"refused with {statuses[0]}")

    def _require_unsigned(self, data: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Add the headers with which a node signs, and check that their values are valid for nobody."""
        from fedspan.transports.flower import adapter

        draws = random.Random(data)
        names = [adapter.FLEET_HTTP_PUBLIC_KEY_HEADER, adapter.FLEET_HTTP_SIGNATURE_HEADER, adapter.TIMESTAMP_HEADER]
        key = to_pem(mangled(base64.b64decode(b"".join(draws.choice(self._keys).splitlines()[1:-1])), draws))
        values = (data[:80], base64.b64encode(data[:80]), b"2026-01-01T00:00:00+00:00", b"", b"\xff")
        signed = [(name.lower().encode(), draws.choice(values)) for name in names]
        likely = (base64.b64encode(key), base64.b64encode(data[:80]), values[2])  # the key is read before the signature
        headers += draws.choice((signed, [(name, value) for (name, _), value in zip(signed, likely, strict=True)]))
        with patch.object(adapter.superlink, "now", lambda: datetime(2026, 1, 1, tzinfo=UTC)):
            if adapter.verify_node_headers(dict(headers)) is not None:
                raise AssertionError("headers that nobody signed are valid")


class _Exchange:
    """The door's own requests without a database; ``heads`` has the announcements of the replies that passed."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    async def take_order(self, node: int, received: str, disconnect: Any, slot: Any = None) -> bytes:
        disconnect.close()
        node.to_bytes(8, "big")  # numbers of nodes have 64 bits in the database
        return (70_000).to_bytes(4, "big") + bytes(70_000)

    async def send_reply(self, node: int, request: Any, contents: Sequence[bytes]) -> bytes:
        self.heads.append(request.SerializeToString())
        return b"stored"

    async def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
        if body != b"heartbeat":
            raise ValueError("not a heartbeat")
        return b"acknowledged"

    async def note_object(self, body: bytes) -> None:
        pass

    def wake_runs(self) -> None:
        pass


def _request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """An input of the door."""
    lines = [f"keyless {path}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return "\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def _read_request(data: bytes) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
    """Whether nodes need keys, path, headers and body of an input of the door."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    kind, _, path = first.partition(b" ")
    pairs = (line.partition(b": ") for line in lines)
    return kind, path, [(name.lower(), value) for name, _, value in pairs], body


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
    """A target whose errors are all of one documented kind.

    Args:
        inner: The target.
        error: The documented error.
    """

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
    "door": lambda: Refusing(Door(), ValueError),
    "configs": lambda: Refusing(Configs(), FedspanError),
}
"""The targets by name. A read of theirs that raises anything is a finding."""
