"""The service of a data owner's node: it processes envelopes from servers within its operator's limits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from fedspan import __version__
from fedspan.assembly.run import load_run
from fedspan.clients.refusals import describe_error, refuse_any
from fedspan.config import parse_config
from fedspan.config.node import NodeConfig
from fedspan.deployment.approval import Approvals, NotApprovedError, compute_job_digest
from fedspan.deployment.audit import AUDIT, describe_envelope
from fedspan.deployment.base_files import BaseMissingError, refuses_offer, require_base
from fedspan.deployment.handshake import Introduction, Invitation, parse_run_config
from fedspan.deployment.health import Heartbeat
from fedspan.deployment.joined_run import JoinedRun, JoinedRunBuilder, Load
from fedspan.deployment.last_order import LastOrderFile
from fedspan.deployment.limits import require_config
from fedspan.deployment.node_folder import LAST_ORDER, get_run_folder, remove_old_states
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError, escape_controls
from fedspan.federation.protocol import Envelope, Order, read_header
from fedspan.federation.secagg.messages import Phase, decode_request
from fedspan.federation.tags import explain_missing_tags
from fedspan.files import convert_disk_errors, read_bytes, write_atomic
from fedspan.logs import AuditLog
from fedspan.training.stages import StageName, Stages

_INVITATION = "invitation.json"

_STAGES: Mapping[str, StageName] = {"statistics": "statistics", "evaluate": "evaluation", "export": "export"}
"""The stage of each kind of order; training and the exchanges of secure aggregation are one."""

_load = partial(load_run, ignores_labels=True)  # else a refusal would tell the server which labels occur

log = logging.getLogger("fedspan.node")


class NodeService:
    """Replies to servers on behalf of one client.

    The state that a run needs after a restart is in a separate folder: the invitation, the client's stored state, and
    what has become of the last order. So an order that has been answered is not executed again, and one whose execution
    was interrupted is when it is delivered again. The reply to an answered order is sent again only while the node's
    file and its data are those with which it was made.
    """

    def __init__(self, node: NodeConfig, load: Load = _load) -> None:
        self.node = node
        self.folder = Path(node.folder)
        self._usage = UsageBook(node)
        self._usage.begin()
        self._loaded: tuple[str, JoinedRun] | None = None
        self._audit = AuditLog(self.folder / AUDIT)
        self._heartbeat = Heartbeat(self.folder)
        self._stages = Stages(self._heartbeat.observe)
        self._builder = JoinedRunBuilder(node, load, self._stages, self._usage.compute_content)
        self._approvals = Approvals(self.folder, self._audit)
        self._announced = ""  # the last job that the log named as waiting: invitations are repeated

    def load(self, envelope: Envelope) -> None:
        """Load the model of the run that an envelope belongs to, if possible; if not, ``answer`` reports the reason."""
        with suppress(Exception):
            self._run(decode_request(envelope).run)

    def answer(self, envelope: Envelope) -> Envelope:
        """Execute the order in an envelope, or report why not.

        Raises:
            ValueError: If the envelope is not a fedspan order or invitation.
        """
        request = None
        with suppress(ValueError):
            request = decode_request(envelope)
        if request is None:
            return self._introduce(read_header(Invitation, envelope)).to_envelope()
        name, last = escape_controls(request.run), LastOrderFile(self._run_folder(request.run) / LAST_ORDER)
        try:
            self._audit.write("asked", run=name, **describe_envelope(envelope))
            if len(envelope.body) > self.node.limits.message_bytes:
                self._require_small("message", envelope.body)
            repeated = last.begin(envelope, request.serial)  # a reply, which obeys the present limits, too
            if self.node.limits.approve == "ask" and (stored := self._run_folder(request.run) / _INVITATION).is_file():
                self._approvals.require(load_invitation(stored))
            run = self._run(request.run)
            if repeated is not None:
                last.require_context(run.context)
                self._audit.write("answered", run=name, **describe_envelope(repeated))
                log.info("%s was done before; its reply is sent again", _describe_request(request))
                return repeated
            if isinstance(request, Order):
                run.terms.require(request)
                if request.task == "statistics":
                    run.host.require_statistics(request)  # refused ones are not what leaves once
                if not last.is_recorded:
                    self._usage.record_order(request, run.host.compute_charges(request), run.context)
                    last.mark_recorded()
            elif request.task in ("keys", "shares"):
                self._usage.record_exchange(request.run)
            is_noisy = request.task == "evaluate" and run.host.metric_limits.epsilon is not None
            self._heartbeat.hides_shares = run.host.hides_failures or is_noisy
            units = run.host.count_examples(request.to) if request.task == "train" else None
            with self._stages.stage(_STAGES.get(request.task, "training"), units):
                reply = run.host.reply(request)
            self._require_small("reply", reply.body)
            # phases of secure aggregation may reveal shares
            last.close(reply if isinstance(request, Order) else None, run.context)
            self._audit.write("answered", run=name, **describe_envelope(reply))
            log.info("%s done", _describe_request(request))
        except Exception as error:
            log.exception("%s failed", _describe_request(request))
            reply = refuse_any(request, error)
            with suppress(FedspanError):  # a full disk is the reason already
                last.close()
                self._audit.write(
                    "refused", run=name, task=request.task, round=request.round, reason=describe_error(error)
                )
        return reply

    def _introduce(self, invitation: Invitation) -> Introduction:
        introduction = Introduction(id=self.node.id, version=__version__, tags=self.node.tags)
        try:
            self._usage.record_invitation(compute_job_digest(invitation))
            self._require_same_run(invitation)
            self._require_allowed(invitation)
            if self.node.limits.approve == "ask":
                self._approvals.require(invitation)
            model = parse_config(self._builder.build_values(invitation)).model
            require_base(self.node, model.name, model.revision, invitation.base_files)
            try:
                joined = self._build(invitation)
            except FedspanError as error:
                if error.field == "model.name" and refuses_offer(
                    self.node, model.name, model.revision, invitation.base_files
                ):
                    problem = (
                        f"this node has no copy of {model.name}, could not load it from the hub, and does not receive "
                        "it from the server. Its operator can set limits.accept_base: true, or name a copy under models"
                    )
                    raise FedspanError("limits.accept_base", False, problem=problem) from error
                raise
            # A node that a round may leave out does not know how often it will train.
            if joined.terms.config.federation.clients_per_round is None:
                host = joined.host
                self._usage.require_privacy(invitation.run, lambda: host.compute_planned_charges(self.node.id))
            self._record_run(invitation.run)
            self._audit.write("joined", **self._describe_job(invitation), examples=joined.terms.client.examples)
        except NotApprovedError as error:
            if error.job != self._announced:
                self._announced = error.job
                log.warning("job %s waits for approval: fedspan approve shows it and approves it", error.job)
            return introduction.model_copy(update={"refused": describe_error(error), "waiting": True})
        except BaseMissingError as error:
            log.info("%s", error)
            return introduction.model_copy(update={"refused": describe_error(error), "waiting": True})
        except Exception as error:  # on any error the server learns that this node does not participate
            is_reason = isinstance(error, FedspanError)
            reason = f": {error}" if is_reason else ""
            log.warning("the invitation to %s is refused%s", invitation.run, reason, exc_info=not is_reason)
            with suppress(FedspanError):
                self._audit.write(
                    "invitation refused", **self._describe_job(invitation), reason=describe_error(error)[:4096]
                )
            return introduction.model_copy(update={"refused": describe_error(error)[:4096]})
        folder = self._run_folder(invitation.run)
        with convert_disk_errors(self.folder, "free some space on the node"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(folder / _INVITATION, invitation.model_dump_json().encode())
        if removed := remove_old_states(self.folder):
            log.info("removed the state of %d runs that had no order for a month", removed)
        self._loaded = (invitation.run, joined)
        examples = joined.terms.client.examples
        log.info("joined %s with %d examples", invitation.run, examples)
        return introduction.model_copy(update={"examples": examples, "base": joined.base, "extras": joined.extras})

    def _require_same_run(self, invitation: Invitation) -> None:
        """Check that an invitation to a known run has the config that this node agreed to.

        Otherwise one order could be answered under several configs: differences of such replies tell more than any of
        them, and the other clients of a secure sum could be made to send nothing.
        """
        path = self._run_folder(invitation.run) / _INVITATION
        if not path.is_file():
            return
        known = load_invitation(path)
        if invitation.config != known.config or (known.base_files and invitation.base_files != known.base_files):
            problem = "this node knows this run with another config or base model. Start a new run"
            raise FedspanError("run", invitation.run, problem=problem)

    def _describe_job(self, invitation: Invitation) -> dict[str, str]:
        run = escape_controls(invitation.run)
        return {"run": run, "job": compute_job_digest(invitation), "config_sha256": invitation.config_digest}

    def _require_small(self, subject: str, body: bytes) -> None:
        limit = self.node.limits.message_bytes
        if len(body) > limit:
            raise FedspanError(
                subject, len(body), problem=f"{len(body)} bytes are more than this node's limit of {limit}"
            )

    def _require_allowed(self, invitation: Invitation) -> None:
        parse_run_config(invitation.read_values())  # an approval shows it whole
        config = parse_config(self._builder.build_values(invitation))
        if (missing := explain_missing_tags(self.node.tags, config.federation.require_tags)) is not None:
            raise FedspanError("federation.require_tags", config.federation.require_tags, problem=missing)
        require_config(self.node, invitation, config)
        self._usage.require_run(invitation.run, config.federation.rounds)

    def _build(self, invitation: Invitation) -> JoinedRun:
        if self._loaded is not None and self._loaded[0] == invitation.run:
            stored = self._run_folder(invitation.run) / _INVITATION
            if stored.is_file() and stored.read_bytes() == invitation.model_dump_json().encode():
                return self._loaded[1]
        self._loaded = None  # two models may not fit into memory
        return self._builder.build(invitation)

    def _run(self, run: str) -> JoinedRun:
        if self._loaded is None or self._loaded[0] != run:
            path = self._run_folder(run) / _INVITATION
            if not path.is_file():
                raise FedspanError("run", run, "a run to which this node was invited")
            invitation = load_invitation(path)
            self._require_allowed(invitation)
            joined = self._build(invitation)
            self._record_run(run)  # the data may have changed since the node joined
            self._loaded = (run, joined)
        return self._loaded[1]

    def _record_run(self, run: str) -> None:
        use = self._usage.record_run(run)
        details = {"run": escape_controls(run), "data": self.node.data_id, "sha256": use.content}
        if use.is_changed:
            self._audit.write("data changed", **details)
        if use.other_servers:
            self._audit.write("data used by another server", **details, servers=list(use.other_servers))

    def _run_folder(self, run: str) -> Path:
        return get_run_folder(self.folder, run)


def load_invitation(path: Path) -> Invitation:
    """Load the invitation to a run from its file."""
    try:
        return Invitation.model_validate_json(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise FedspanError(str(path), None, problem="the file is damaged. Remove its folder") from error


def _describe_request(request: Order | Phase) -> str:
    """Describe an order for the log; models are evaluated and exported as they are between rounds."""
    if request.task not in ("evaluate", "export"):
        return f"round {request.round + 1}: {request.task}"
    return f"{f'after round {request.round}' if request.round else 'before round 1'}: {request.task}"
