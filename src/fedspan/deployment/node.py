"""The service of a data owner's node: it processes envelopes from servers within its operator's limits."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedspan import __version__
from fedspan.clients.host import Host, describe_error, refuse_any
from fedspan.clients.statistics import StatisticsLimits
from fedspan.clients.store import DiskClientStore
from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeConfig
from fedspan.core.base import BaseUpdate
from fedspan.core.values import Job
from fedspan.deployment.handshake import Introduction, Invitation, base_digest, node_values
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, read_header
from fedspan.federation.secagg.messages import Phase, decode_request
from fedspan.files import disk_errors, read_bytes, write_atomic
from fedspan.runs.privacy_budget import Book, has_key, load_noise_key, new_key, store_noise_key
from fedspan.runs.remote import method_for, secure_client
from fedspan.runs.setup import prepare
from fedspan.runs.trained_models import write_model

__all__ = ["NodeService", "last_serial", "load_invitation"]

_INVITATION, _SERIAL = "invitation.json", "serial"

log = logging.getLogger("fedspan.node")


class NodeService:
    """Replies to servers on behalf of one client.

    The state that a run needs after a restart is in a separate folder: the invitation, the client's stored state, and
    the serial of the last order, so that a repeated order is not executed twice.

    Args:
        node: Config of the node, from the operator's file.
    """

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        self.folder = Path(node.folder)
        self._book = Book(self.folder, node.limits.delta)
        self._loaded: tuple[str, Host, str] | None = None

    def load(self, envelope: Envelope) -> None:
        """Load the model of the run that an envelope belongs to, if possible; if not, ``answer`` reports the reason."""
        with suppress(Exception):
            self._host(decode_request(envelope).run)

    def answer(self, envelope: Envelope) -> Envelope:
        """Execute the order in an envelope, or report why not.

        Raises:
            ValueError: If the envelope is not a fedspan order or invitation.
        """
        try:
            asked = decode_request(envelope)
        except ValueError:
            return self._introduced(read_header(Invitation, envelope)).envelope()
        try:
            if len(envelope.body) > self.node.limits.message_bytes:
                self._require_small("message", envelope.body)
            self._require_new(asked)
            host = self._host(asked.run)
            self._book.pay(host.charges(asked), self.node.limits.epsilon)
            answer = host.reply(asked)
            self._require_small("reply", answer.body)
            log.info("round %d: %s done", asked.round + 1, asked.task)
        except Exception as error:
            log.exception("round %d: %s failed", asked.round + 1, asked.task)
            answer = refuse_any(asked, error)
        return answer

    def _introduced(self, invitation: Invitation) -> Introduction:
        own = Introduction(id=self.node.id, version=__version__)
        try:
            self._require_allowed(invitation)
            host, base = self._build(invitation)
        except Exception as error:  # on any error the server learns that this node does not participate
            log.exception("the invitation to %s is refused", invitation.run)
            return own.model_copy(update={"refused": describe_error(error)[:4096]})
        place = self._of(invitation.run)
        with disk_errors(self.folder, "free some space on the node"):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(place / _INVITATION, invitation.model_dump_json().encode())
        self._loaded = (invitation.run, host, base)
        log.info("joined %s with %d examples", invitation.run, host.clients[self.node.id].client.examples)
        return own.model_copy(update={"examples": host.clients[self.node.id].client.examples, "base": base})

    def _require_small(self, what: str, body: bytes) -> None:
        most = self.node.limits.message_bytes
        if len(body) > most:
            raise FedspanError(what, len(body), problem=f"{len(body)} bytes are more than this node's limit of {most}")

    def _require_allowed(self, invitation: Invitation) -> None:
        if invitation.version != __version__:
            raise FedspanError("version", invitation.version, f"fedspan {__version__}, the version of this node")
        limits, config = self.node.limits, parse_config(self._values(invitation))
        for field, value, allowed in (
            ("limits.methods", config.method.name, limits.methods),
            ("limits.models", invitation.values().get("model", {}).get("name", config.model.name), limits.models),
        ):
            if allowed is not None and value not in allowed:
                problem = f"this node does not allow {value!r}. It allows {', '.join(allowed) or 'none'}"
                raise FedspanError(field, value, problem=problem)
        privacy = config.privacy
        if privacy is not None and privacy.randomness != "secret":
            raise FedspanError(
                "federation", privacy.randomness, problem="this node requires privacy.randomness: secret"
            )
        if limits.epsilon is not None and (privacy is None or privacy.mechanism == "central"):
            found = "no privacy" if privacy is None else privacy.mechanism
            problem = f"this node requires privacy.mechanism local or dp-sgd, and the run has {found}"
            raise FedspanError("limits.epsilon", found, problem=problem)
        if limits.rounds is not None and config.federation.rounds > limits.rounds:
            raise FedspanError(
                "limits.rounds",
                config.federation.rounds,
                problem=f"the run has {config.federation.rounds} rounds, and this node allows at most {limits.rounds}",
            )
        if limits.secure_only and config.federation.secure is None:
            raise FedspanError("limits.secure_only", None, problem="this node only joins runs with federation.secure")

    def _values(self, invitation: Invitation) -> dict[str, object]:
        own = self.node.model_dump(include={"data", "validation", "test", "device", "threads"})
        values = node_values(invitation.values(), own)
        model = dict(values.get("model") or {})
        if model.get("name") in self.node.models:
            model["name"] = self.node.models[model["name"]]
        return {**values, "model": model}

    def _build(self, invitation: Invitation) -> tuple[Host, str]:
        if self._loaded is not None and self._loaded[0] == invitation.run:
            kept = self._of(invitation.run) / _INVITATION
            if kept.is_file() and kept.read_bytes() == invitation.model_dump_json().encode():
                return self._loaded[1], self._loaded[2]
        self._loaded = None  # two models may not fit into memory
        config = parse_config(self._values(invitation))
        place = self._of(invitation.run)
        prepared = prepare(config, key=self._key(place, config))
        (member,) = prepared.federation.clients.values()
        member = replace(member, client=replace(member.client, id=self.node.id))
        keeper = DiskClientStore(place / "kept")
        theirs = parse_config({**invitation.values(), "data": config.data.model_dump(mode="json")})
        method = config.wrapped(method_for(theirs, prepared.engine.adapted.spec))

        def export(job: Job, base: BaseUpdate, round: int) -> None:
            write_model(prepared, job, base, place / "adapter", round, self.node.id)
            log.info("round %d: own adapter written to %s", round, place / "adapter")

        secure = secure_client(config, self.node.id, place / "kept", self.node.limits.secure_clients)
        announced = () if config.head_kind[0] is None else (config.head_kind[0],)
        host = Host(
            method,
            prepared.engine,
            {self.node.id: member},
            prepared.train,
            keeper,
            config.evaluation.batch_size,
            export,
            None if secure is None else {self.node.id: secure},
            limits=StatisticsLimits(self.node.limits.head_statistics, self.node.limits.class_examples, announced),
        )
        return host, base_digest(prepared.model)

    def _key(self, place: Path, config: RunConfig) -> bytes | None:
        """Return the secret key of this node's noise in a run; it is created at the start of the run."""
        key = new_key(config)
        if key is None:
            return None
        with disk_errors(self.folder, "free some space on the node"):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not has_key(place):
            store_noise_key(place, key)
        return load_noise_key(place, config)

    def _host(self, run: str) -> Host:
        if self._loaded is None or self._loaded[0] != run:
            place = self._of(run) / _INVITATION
            if not place.is_file():
                raise FedspanError("run", run, "a run to which this node was invited")
            invitation = load_invitation(place)
            self._require_allowed(invitation)
            host, base = self._build(invitation)
            self._loaded = (run, host, base)
        return self._loaded[1]

    def _require_new(self, order: Order | Phase) -> None:
        """Refuse an order that was sent before.

        Raises:
            FedspanError: If the order is not newer than the last one of its run, or the disk cannot be written.
        """
        place = self._of(order.run) / _SERIAL
        last = last_serial(place)
        if order.serial <= last:
            raise FedspanError(
                "serial", order.serial, problem=f"order {order.serial} arrived before, or is older than order {last}"
            )
        if place.parent.is_dir():
            with disk_errors(self.folder, "free some space on the node"):
                write_atomic(place, str(order.serial).encode())

    def _of(self, run: str) -> Path:
        return self.folder / hashlib.sha256(run.encode()).hexdigest()[:32]


def last_serial(place: Path) -> int:
    """Read the serial of the last order from its file; 0: there was none.

    Raises:
        FedspanError: If the file does not contain a number.
    """
    if not place.is_file():
        return 0
    try:
        found = json.loads(read_bytes(place))
    except (ValueError, RecursionError):
        found = None
    if type(found) is not int or found < 0:
        raise FedspanError(str(place), found, problem="the file is damaged. Remove its folder")
    return found


def load_invitation(place: Path) -> Invitation:
    """Load the invitation to a run from its file.

    Raises:
        FedspanError: If the file is missing or not an invitation.
    """
    try:
        return Invitation.model_validate_json(read_bytes(place))
    except (ValueError, RecursionError) as error:
        raise FedspanError(str(place), None, problem="the file is damaged. Remove its folder") from error
