"""Evaluation of a federation's models in this process, against predictions one client at a time."""

from __future__ import annotations

import numpy as np
import pytest

from fedspan.federation.evaluation import ClientScores, Evaluator, summarize
from fedspan.federation.progress import ClientData
from fedspan.runs.setup import Prepared
from fedspan.transports.in_process import simulate


def test_client_scores_pool_average_and_find_the_worst(prepared: Prepared) -> None:
    """Pooled over examples, the mean over clients, and a client without a test part is left out."""
    old = prepared.federation
    bare = [
        ClientData(one.client, one.train, np.array([], dtype=np.int64), one.test[: 0 if id == "east" else None])
        for id, one in old.clients.items()
    ]
    federation = simulate(old.method, old.engine, bare, old.examples, old.settings)
    evaluator = type(prepared.evaluator)(federation, 3)
    progress = federation.run_round(federation.begin()).progress
    validation, own = evaluator.evaluate_clients(progress)
    assert validation is None
    sizes = {id: len(client_data.test) for id, client_data in federation.clients.items() if id != "east"}
    assert own.by_client.keys() == sizes.keys()
    pooled = sum(sizes[id] * scores["accuracy"] for id, scores in own.by_client.items()) / sum(sizes.values())
    assert own.pooled["accuracy"] == pytest.approx(pooled)
    job = evaluator.build_job(progress, None)
    for id, scores in own.by_client.items():
        indices = federation.clients[id].test
        predictions = prepared.engine.predict(job, old.examples, indices, 1)
        expected = prepared.task.compute_metrics(predictions, old.examples, indices.tolist())
        assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert scores["accuracy"] == expected["accuracy"]
    assert prepared.test is not None
    assert evaluator.evaluate_heldout(progress, prepared.test).keys() == {"global"}
    scores = ClientScores({}, {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.1}, "c": {"accuracy": 0.9}})
    assert scores.summarize("accuracy") == {"accuracy": pytest.approx(0.5), "worst": {"client": "b", "accuracy": 0.1}}


def test_a_summary_knows_which_way_is_better_and_passes_over_what_has_no_value() -> None:
    """A client with one example has a loss, and no correlation."""
    by_client = {"a": {"loss": 0.5, "pearson": 0.2, "examples": 9.0}, "b": {"loss": 0.7, "examples": 1.0}}
    means = {"loss": pytest.approx(0.6), "pearson": pytest.approx(0.2)}
    assert summarize(by_client, "loss") == {**means, "worst": {"client": "b", "loss": 0.7}}
    assert summarize(by_client, "pearson") == {**means, "worst": {"client": "a", "pearson": 0.2}}
    assert summarize({"b": by_client["b"]}, "pearson") == {"loss": 0.7}


def test_a_sample_of_all_is_all(prepared: Prepared) -> None:
    ids = tuple(prepared.federation.clients)
    assert Evaluator(prepared.federation, 8).ids == Evaluator(prepared.federation, 8, 99).ids == ids
