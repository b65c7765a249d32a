"""What one server may have of a data set is counted in tens, for each run and for all runs, invitations included."""

from pathlib import Path

from fedspan.config.node import NodeLimits
from fedspan.deployment.node import NodeService
from helpers.node_service import introduced, node, served, values

AUTO = {"approve": "auto"}


def test_the_defaults_are_tens() -> None:
    limits = NodeLimits()
    assert limits.approve == "ask"
    assert limits.head_statistics == "off"
    assert max(limits.run_rounds, limits.run_evaluations, limits.runs) < 100
    assert max(limits.rounds, limits.evaluations, limits.invitations) <= 200


def test_a_run_s_evaluations_end_before_those_of_the_server(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={**AUTO, "run_evaluations": 1, "evaluations": 3}))
    run, _ = served(tiny_folder, service)
    begin = run.federation.begin()
    assert run.evaluator.evaluate_clients(begin)[0] is not None
    assert run.evaluator.evaluate_clients(begin)[0] is None
    (failure,) = run.federation.pop_events().failures
    assert "`limits.run_evaluations`: this run has used 1 evaluations of this node's data" in failure.reason


def test_refusals_cost_invitations(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={**AUTO, "invitations": 3, "rank": 2}))
    for lr in (0.1, 0.2):
        refused = introduced(service, values(tiny_folder, method={"name": "fedit", "r": 64}, training={"lr": lr}))
        assert "limits.rank" in (refused.refused or "")
    for _ in range(2):  # a repeated one has the same answer
        assert introduced(service, values(tiny_folder, method={"name": "fedit", "r": 2})).refused is None
    over = introduced(service, values(tiny_folder, method={"name": "fedit", "r": 2}, training={"lr": 0.5}), run="next")
    assert "`limits.invitations`: this server has used 3 invitations" in (over.refused or "")


def test_a_waiting_job_costs_one_invitation(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path, limits={"approve": "ask", "invitations": 1}))
    for _ in range(3):
        assert introduced(service, values(tiny_folder)).waiting
    assert not introduced(service, values(tiny_folder), run="another").waiting
