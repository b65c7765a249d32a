"""A node's metrics leave it with noise and of many examples, and its training losses do not leave it."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedspan.assembly.run import Prepared
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import Reply, decode_order, decode_reply
from helpers.node_service import node, served

FREE = {"approve": "auto", "min_batch": 1, "train_examples": 1}


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Prepared, Any]:
    service = NodeService(node(tiny_folder, tmp_path, limits={**FREE, **request.param}))
    return served(tiny_folder, service)


def measure(run: Prepared) -> list[float]:
    begin = run.federation.begin()
    scores = [run.evaluator.evaluate_clients(begin)[0] for _ in range(8)]
    return [one.pooled["accuracy"] for one in scores if one is not None]


@pytest.mark.parametrize("run", [{"evaluation_examples": 10, "evaluation_epsilon": 0.2}], indirect=True)
def test_the_same_model_has_other_metrics_each_time_and_no_training_loss(run: tuple[Prepared, Any]) -> None:
    assert len(set(measure(run[0]))) > 1
    result = run[0].federation.run_round(run[0].federation.begin())
    assert not result.failures
    assert math.isnan(result.loss)


@pytest.mark.parametrize("run", [{"evaluation_examples": 10, "evaluation_epsilon": None}], indirect=True)
def test_an_owner_can_send_metrics_as_measured(run: tuple[Prepared, Any]) -> None:
    assert len(set(measure(run[0]))) == 1
    assert math.isfinite(run[0].federation.run_round(run[0].federation.begin()).loss)


@pytest.mark.parametrize("run", [{"evaluation_examples": 100}], indirect=True)
def test_few_examples_send_no_metrics_and_the_last_round_is_the_best(run: tuple[Prepared, Any]) -> None:
    assert measure(run[0]) == []
    sent = run[1].service.answer(run[1].sent[-1])
    assert decode_order(run[1].sent[-1]).task == "evaluate"
    assert isinstance(reply := decode_reply(sent), Reply)
    assert not reply.scores
