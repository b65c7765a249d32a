"""Data owners under secure aggregation: what their limits are worth, and that any process can go on for another."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan import __version__
from fedspan.config.node import NodeConfig
from fedspan.deployment.handshake import Introduction, Invitation
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Order, decode_reply, read_header
from fedspan.federation.secagg.messages import KeysReply, UnmaskReply, decode_request
from helpers.secure_nodes import CLINICS, node, served, values


def test_nodes_continue_after_a_restart_between_any_two_phases(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, restarts=True, secure_only=True)
    first = run.federation.run_round(run.federation.begin())
    assert not first.failures
    transport.make = functools.cache(transport.make)  # one more restart, before the second round
    second = run.federation.run_round(first.progress)
    assert not second.failures
    assert second.progress.last_rounds == dict.fromkeys(CLINICS, 1)
    assert len(transport.sent) == 2 * 4 * 3
    sessions = sorted(tmp_path.rglob("session.json"))
    assert len(sessions) == 3
    assert {path.stat().st_mode & 0o777 for path in sessions} == {0o600}
    validation, test = run.evaluator.evaluate_clients(second.progress)
    assert validation is not None
    assert set(test.by_client) == set(CLINICS)


@pytest.mark.parametrize("limit", [1, 10])
def test_no_training_loss_leaves_the_nodes_of_a_secure_sum(limit: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Masks hide the reply, of which a loss would tell; with the limit 1 an owner chooses metrics as measured."""
    run, transport = served(tiny_folder, tmp_path, evaluation_examples=limit)
    result = run.federation.run_round(run.federation.begin())
    assert not result.failures
    replies = [
        decode_reply(back)
        for sent, back in zip(transport.sent, transport.came, strict=True)
        if decode_request(sent).task == "train"
    ]
    assert [len(reply.parts) for reply in replies] == [int(limit == 1)] * 3
    assert math.isnan(result.loss) is (limit > 1)


def test_every_envelope_that_comes_again_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path)
    run.federation.run_round(run.federation.begin())
    transport.make.cache_clear()  # what a node has answered outlives its process
    for envelope in transport.sent:
        asked = decode_request(envelope)
        back = transport.make(asked.to).answer(envelope)
        kind = KeysReply if asked.task == "keys" else UnmaskReply if asked.task == "unmask" else None
        if isinstance(asked, Order):
            assert "arrived before" in (decode_reply(back).failed or "")
        elif kind is not None:
            assert "arrived before" in (read_header(kind, back).failed or "")
        newer = asked.serial + 10**9 + len(transport.came)
        if not isinstance(asked, Order):  # newer by its serial: the session still knows
            again = transport.make(asked.to).answer(asked.model_copy(update={"serial": newer}).to_envelope())
            assert '"failed":"`message.session`: ' in again.header


def test_a_node_that_sends_nothing_in_plaintext_does_not_participate_in_plaintext_runs(
    tiny_folder: Path, tmp_path: Path
) -> None:
    service = NodeService(node("clinic-a", tiny_folder, tmp_path, secure_only=True))
    invitation = Invitation(run="run", version=__version__, config=json.dumps(values(tiny_folder)))
    told = read_header(Introduction, service.answer(invitation.to_envelope()))
    assert "`limits.secure_only`: this node only joins runs with federation.secure" in (told.refused or "")
    assert not list(tmp_path.rglob("invitation.json"))


def test_a_server_cannot_leave_the_masks_out_later(tiny_folder: Path, tmp_path: Path) -> None:
    run, transport = served(tiny_folder, tmp_path, secure_only=True)
    run.federation.run_round(run.federation.begin())
    order = next(asked for asked in map(decode_request, transport.sent) if isinstance(asked, Order))
    answer = decode_reply(transport.make(order.to).answer(replace(order, secure=None, serial=2**52).to_envelope()))
    assert "this run sends replies only under masks" in (answer.failed or "")
    assert not answer.body


@pytest.mark.parametrize(("least", "stands"), [pytest.param(3, False, marks=pytest.mark.slow), (2, True)])
def test_a_node_says_in_how_small_a_sum_it_is(least: int, stands: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """One of three is gone before its vector came: the other two give what removes the masks only if they agree."""
    run, transport = served(
        tiny_folder, tmp_path, lambda asked: asked.to == "clinic-c" and asked.task == "train", secure_clients=least
    )
    begin = run.federation.begin()
    if stands:
        result = run.federation.run_round(begin)
        assert set(result.progress.last_rounds) == set(CLINICS[:2])
        return
    too_small = r"`limits\.secure_clients`: a sum of 2 clients is too small\. Expected at least 3 clients"
    with pytest.raises(FedspanError, match=too_small):
        run.federation.run_round(begin)
    answers = [one for one in transport.came if '"task":"unmask"' in one.header]
    assert len(answers) == 2
    assert all(not read_header(UnmaskReply, one).shares for one in answers)


def test_the_default_is_three() -> None:
    assert NodeConfig.model_validate({"id": "a", "server": "h:1", "data": {}}).limits.secure_clients == 3
