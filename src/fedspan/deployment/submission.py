"""A submitted run on its server: inviting nodes, and the transport to those that have joined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from fedspan.assembly.model import list_unnamed_modules
from fedspan.assembly.run import Prepared
from fedspan.assembly.server import ServerRun, build_server_clients, connect
from fedspan.deployment.audit import AuditedTransport
from fedspan.deployment.handshake import (
    BASE_PARTS,
    Introduction,
    Invitation,
    compute_base_digest,
    compute_extras_digest,
    explain_version,
)
from fedspan.deployment.participants import NodeCallbacks, Participant, ParticipantRecord, Participants, load_record
from fedspan.deployment.status import read_status, store_named_run
from fedspan.errors import FedspanError
from fedspan.federation.config import FederationConfig
from fedspan.federation.progress import ClientData
from fedspan.federation.protocol import Envelope, read_header
from fedspan.federation.tags import explain_missing_tags
from fedspan.federation.transport import AsynchronousTransport
from fedspan.files import convert_disk_errors
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder

if TYPE_CHECKING:
    from fedspan.transports.http.admissions import Admission
    from fedspan.transports.http.server import RunLink, ServerLink
    from fedspan.transports.http.signing import OrderSigner


class Submission:
    """A submitted run and its nodes.

    Args:
        signer: Seals orders and opens replies; None: neither.
        wait: Seconds to wait for all nodes.
    """

    def __init__(
        self,
        link: ServerLink,
        run_folder: RunFolder,
        prepared: ServerRun,
        invitation: Invitation,
        signer: OrderSigner | None,
        listener: Listener,
        wait: float,
    ) -> None:
        from fedspan.transports.http.admissions import open_audit_log

        self._link, self._folder, self._prepared, self._run = link, run_folder.path, prepared, invitation.run
        self._signer, self._listener, self._wait = signer, listener, wait
        self._invitation = invitation
        self._audit = open_audit_log(link)
        self._audit.write(
            "run submitted",
            run=invitation.run,
            folder=str(self._folder.resolve()),
            config_sha256=invitation.config_digest,
        )
        self._handshakes = Handshakes(prepared, listener, link)
        self._nodes: dict[str, Participant] = {}
        """All nodes that ever joined, by client id."""
        self._announced: dict[str, Participant] = {}
        """Those whose introduction was accepted in this process."""

    def gather(self, server: RunLink) -> None:
        """Wait for the nodes with which the run begins or goes on.

        Raises:
            FedspanError: If too few nodes join in time; it names the nodes that refused.
        """
        record = None
        if self._prepared.config.federation.late_joiners:
            record = load_record(self._folder, read_status(self._folder).round)
        if record is not None:
            self._nodes = {**record.clients}
            self._handshakes.owners.update({id: one.node for id, one in record.clients.items()})
        expected = () if record is None else self._list_expected(record, server)
        self._store_nodes({})  # the run is shown while nodes are waited for
        with self._prepared.engine.stages.stage("nodes", self._handshakes.clients, "nodes"):
            gather_nodes(self._handshakes, server, self._invitation, self._wait, self._signer, expected)
        self._collect_joined()

    def _list_expected(self, record: ParticipantRecord, server: RunLink) -> Collection[str]:
        """Return the clients that a resumed run waits for: those of an interrupted round, or those that are online."""
        finished = read_status(self._folder).round
        if len(record.present) > finished:
            return record.present[finished]
        online = set(server.list_online())
        recorded = record.present[-1] if record.present else ()
        return [id for id, one in record.clients.items() if one.node in online] or recorded

    def connect(self, server: RunLink) -> Prepared:
        """Return the run with its clients."""
        from fedspan.transports.http.transport import ServerTransport

        if self._prepared.config.federation.late_joiners:
            return self._connect_late(server)
        nodes = {id: one.node for id, one in self._nodes.items()}
        self._store_nodes(nodes)
        transport = ServerTransport(server, nodes, self._reconnect_timeout, self._signer, self._list_revoked)
        clients = self._build_clients({id: one.examples for id, one in self._nodes.items()})
        return self._connect(transport, nodes, clients)

    def _connect_late(self, server: RunLink) -> Prepared:
        """Return the run with clients that join and leave between its rounds."""
        from fedspan.transports.http.invitations import Invitations
        from fedspan.transports.http.transport import ServerTransport

        handshakes, config = self._handshakes, self._prepared.config
        invitations = Invitations(
            *(server, self._invitation.to_envelope(), self._signer),
            handshakes.undecided,
            handshakes.known_nodes,
        )

        def invite_new() -> dict[str, Participant]:
            for node, reply in invitations.receive(0):
                handshakes.process(node, reply, server)
            invitations.send()
            for id in self._collect_joined():
                self._listener.on_note(f"{id} has joined and participates from the next round on")
            return handshakes.nodes

        def list_online() -> Collection[int]:
            return set(server.list_online()) - set(self._list_revoked())

        callbacks = NodeCallbacks(
            list_online, invite_new, lambda: invitations.pending_nodes, self._build_clients, self._store_nodes
        )
        cohort = config.federation.clients_per_round or config.partition.clients
        least = self._prepared.settings.compute_quorum(min(cohort, config.partition.clients))
        participants = Participants(self._folder, handshakes.nodes, callbacks, least, self._reconnect_timeout)
        self._nodes = {**participants.clients}
        self._store_nodes(participants.nodes)
        transport = ServerTransport(
            *(server, participants.nodes, self._reconnect_timeout, self._signer),
            self._list_revoked,
            participants.admit_now_and_then,
        )
        return self._connect(transport, participants.nodes, participants.build_clients(), participants, least)

    def _connect(
        self,
        transport: AsynchronousTransport,
        nodes: Mapping[str, int],
        clients: Mapping[str, ClientData],
        participants: Participants | None = None,
        least: int = 1,
    ) -> Prepared:
        return connect(
            self._prepared,
            AuditedTransport(transport, self._audit, self._run, nodes),
            clients=clients,
            run=self._run,
            agreed=self._invitation.digest,
            least=least,
            presence=None if participants is None else participants.build_presence(),
            begin_round=None if participants is None else participants.begin_round,
        )

    @property
    def _reconnect_timeout(self) -> float:
        return self._prepared.config.federation.reconnect_timeout

    def _collect_joined(self) -> dict[str, Participant]:
        """Record the nodes whose introduction was accepted since the last call, and return those that are new."""
        accepted, announced = self._handshakes.nodes, self._announced
        joined = {id: one for id, one in accepted.items() if announced.get(id) != one}
        for id, one in joined.items():
            facts = {"run": self._run, "client": id, "node": str(one.node), "examples": one.examples}
            if id in self._nodes and (before := self._nodes[id].node) != one.node:
                self._audit.write("replaced", **facts, replaced=str(before))
                self._listener.on_note(f"{id} has come back as node {one.node}; it was node {before}")
            else:
                self._audit.write("joined", **facts)
        new = {id: one for id, one in joined.items() if id not in announced}
        self._nodes.update(joined)
        announced.update(joined)
        return new

    def _build_clients(self, examples: Mapping[str, int]) -> dict[str, ClientData]:
        from fedspan.transports.http.admissions import read_admissions

        admitted = read_admissions(self._link)
        admissions = {id: admitted[one.node] for id, one in self._nodes.items() if one.node in admitted}
        return build_server_clients(
            *(self._prepared.config, self._prepared.engine.adapted.spec, examples),
            {id: one.max_examples for id, one in admissions.items() if one.max_examples is not None},
            {id: one.key for id, one in admissions.items()},
        )

    def _list_revoked(self) -> Collection[int]:
        from fedspan.transports.http.admissions import read_revocations

        return () if self._link.authority is None else read_revocations(self._link)

    def _store_nodes(self, nodes: Mapping[str, int]) -> None:
        with convert_disk_errors(self._link.folder):
            store_named_run(self._link.folder, self._folder, nodes)


class Handshakes:
    """The nodes that were invited to a run: which have joined, and why others have not."""

    def __init__(self, prepared: ServerRun, listener: Listener, link: ServerLink) -> None:
        self._prepared, self._listener, self._link = prepared, listener, link
        self._federation = prepared.config.federation
        self._base = compute_base_digest(prepared.model)
        self.clients = prepared.config.partition.clients
        self.nodes: dict[str, Participant] = {}
        """The nodes whose last introduction was accepted, by client id."""
        self.owners: dict[str, int] = {}
        """Ids of all nodes that ever joined, by client id. A caller adds those of a resumed run."""
        self.refused: dict[str, str] = {}
        """Why other nodes have not, by client id."""
        self._refused_ids: dict[int, str] = {}  # the id of each node's entry
        self.undecided: set[int] = set()
        """Nodes whose operators have not decided, which are to be invited again."""
        self.known_nodes: set[int] = set()
        """Nodes that have replied."""

    def process(self, node: int, reply: Envelope | str, server: RunLink) -> None:
        """Process a node's reply to the invitation."""
        from fedspan.transports.http.admissions import read_admissions, read_revocations

        admissions = read_admissions(self._link)  # a node may be admitted while others are waited for
        admitted = admissions.get(node)
        has_keys = self._link.authority is not None
        owned = (admissions | read_revocations(self._link)).values() if has_keys else ()
        names = {admission.name for admission in owned}
        introduction, reason = read_introduction(
            reply, partial(explain_base, self._prepared, self._base), admitted, names, self._federation
        )
        is_taken = False
        if introduction is not None and reason is None:
            reason = self._explain_second_id(introduction.id, node)
        if introduction is not None and reason is None and self.owners.get(introduction.id, node) != node:
            # It may take over the id of one that is gone if it has its name, or if there are no names.
            has_name = self._link.authority is None if admitted is None else admitted.name == introduction.id
            is_taken = self._federation.late_joiners and has_name
            reason = self._explain_taken(introduction.id, is_taken, server)
        if introduction is not None and reason is None:
            self.nodes[introduction.id] = Participant(node=node, examples=introduction.examples)
            self.owners[introduction.id] = node
            self.refused.pop(introduction.id, None)
            self.known_nodes.add(node)
            return
        for id in [id for id, participant in self.nodes.items() if participant.node == node]:
            del self.nodes[id]  # it came back, and its new introduction was not accepted
        id = f"node {node}" if introduction is None else introduction.id
        if is_taken or (introduction is not None and introduction.waiting):
            self.undecided.add(node)
        else:
            self.known_nodes.add(node)
        earlier = self._refused_ids.get(node)
        self._refused_ids[node] = id
        if earlier is not None and earlier not in self._refused_ids.values():  # one entry a node, whatever ids it takes
            self.refused.pop(earlier, None)
        if self.refused.get(id) != reason:
            self.refused[id] = reason or ""
            self._listener.on_note(f"{id} does not participate{' yet' if node in self.undecided else ''}: {reason}")

    def _explain_second_id(self, id: str, node: int) -> str | None:
        """Return why a node cannot have an id beside the one under which it joined; None: it has no other.

        With several ids one data owner would count as several clients, wherever clients are counted.
        """
        other = next((known for known, owner in self.owners.items() if owner == node and known != id), None)
        return None if other is None else f"this node has joined this run as {other}. Set id: {other} in its file"

    def _explain_taken(self, id: str, may_replace: bool, server: RunLink) -> str | None:
        """Return why a node cannot have the id of another one; None: it may take it over."""
        from fedspan.transports.http.admissions import read_revocations

        owner = self.owners[id]
        if not may_replace:
            return "another node has this id"
        if owner not in set(server.list_online()) or (
            self._link.authority is not None and owner in read_revocations(self._link)
        ):
            return None
        return f"another node has this id, and is online (node {owner})"


def explain_base(prepared: ServerRun, base: str, introduction: Introduction) -> str | None:
    """Return why a node's base model is not this run's, whose digest is ``base``; None: it is."""
    extras = compute_extras_digest(prepared.model)
    if introduction.extras[:32] == extras[:32]:  # the same modules
        if others := [name for name, part in BASE_PARTS.items() if introduction.base[part] != base[part]]:
            return f"its base model differs in: {', '.join(others)}"
        return None if introduction.extras == extras else "its head is for another number of labels"
    unnamed = list_unnamed_modules(prepared.config, prepared.model)
    if not unnamed:
        return "its model trains other modules in full than this run's"
    return (
        f"its model does not train {', '.join(unnamed)} in full, which have new weights in this run: nodes with "
        f"trainers need `model.modules_to_save: [{', '.join(unnamed)}]` in the run's config"
    )


def gather_nodes(
    handshakes: Handshakes,
    server: RunLink,
    invitation: Invitation,
    wait: float,
    signer: OrderSigner | None,
    expected: Collection[str] = (),
) -> None:
    """Invite nodes until as many have joined as there are clients, or all expected ones have.

    Args:
        signer: Seals the invitation and opens replies; None: neither.
        expected: Clients of a resumed run, where nodes may join and leave; after the wait the run goes on without those
            that have not joined if others have, and its next round waits for enough.

    Raises:
        FedspanError: If too few nodes join in time; it names the nodes that refused.
    """
    from fedspan.transports.http.invitations import invite

    for node, reply in invite(server, invitation.to_envelope(), wait, signer, handshakes.undecided):
        handshakes.process(node, reply, server)
        joined = handshakes.nodes.keys()
        if joined >= set(expected) if expected else len(joined) == handshakes.clients:
            return
    if expected and handshakes.nodes:
        return
    refused, clients = handshakes.refused, handshakes.clients
    reasons = "; ".join(f"{id}: {text}" for id, text in sorted(refused.items())) or "no more nodes are online"
    problem = f"{len(handshakes.nodes)} of {clients} nodes participate ({reasons}). Fix the cause, then use --resume"
    raise FedspanError("nodes", len(handshakes.nodes), problem=problem)


def read_introduction(
    reply: Envelope | str,
    explain_base: Callable[[Introduction], str | None],
    admitted: Admission | None,
    names: Collection[str],
    federation: FederationConfig,
) -> tuple[Introduction | None, str | None]:
    """Decode a node's reply to an invitation, and return it with the reason if the node cannot participate.

    A reply under an id that is not the node's own is not returned, so that nothing of it counts for that id.

    Args:
        explain_base: Returns why the node's base model is another; None: it is the same.
        admitted: What the operator decided about the node; None without keys.
        names: All names under which nodes were ever admitted.
    """
    if isinstance(reply, str):
        return None, reply
    try:
        introduction = read_header(Introduction, reply)
    except ValueError as error:
        return None, str(error)
    # else one data owner's node could replace another, or refuse in its name
    own = "" if admitted is None else admitted.name
    if own and introduction.id != own:
        return None, f"it calls itself {introduction.id}; this node was admitted as {own}"
    if not own and introduction.id in names:
        return None, f"it calls itself {introduction.id}, a name under which another key was admitted (--as)"
    if introduction.refused is not None:
        return introduction, introduction.refused
    if (version := explain_version(introduction.version)) is not None:
        return introduction, version
    if (reason := explain_base(introduction)) is not None:
        return introduction, reason
    if introduction.examples < 1:  # a round in which it alone replies would have no weight, and stop the run
        return introduction, "it declares no training examples"
    if introduction.examples < federation.min_examples:
        required = federation.min_examples
        return introduction, f"it has {introduction.examples} training examples, and this run requires {required}"
    if (missing := explain_missing_tags(introduction.tags, federation.require_tags)) is not None:
        return introduction, missing
    masked = federation.secure is not None  # the node weighs its reply itself: the server cannot lower the weight
    most = None if admitted is None else admitted.max_examples
    if masked and most is not None and introduction.examples > most:
        return (
            introduction,
            f"it declares {introduction.examples} examples and was admitted with at most {most} (--max-examples)",
        )
    return introduction, None
