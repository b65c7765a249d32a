"""Every method between machines: the same states, to the bit, as on one; replies are validated by their structure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedspan.federation.reported_evaluation import RemoteEvaluator
from fedspan.federation.serialization import encode_state
from fedspan.runs.setup import Prepared
from helpers import tiny
from helpers.families import methods_by_family
from helpers.remote_federation import remote
from helpers.watched_rounds import method_config


@pytest.mark.parametrize("key", methods_by_family(quick=["fedgalore"]))
def test_rounds_between_machines_have_the_bits_of_those_on_one(
    key: str, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    training = {"local_steps": None, "batch_size": 12}  # one step to four, by a client's number of texts
    config = method_config(tiny_folder, key, training=training, federation={"rounds": 3})
    here = tiny.variant(prepared, config)
    there = remote(here, tmp_path)
    progress, other = here.federation.begin(), there.begin()
    for _ in range(there.settings.rounds):
        result, got = here.federation.run_round(progress), there.run_round(other)
        progress, other = result.progress, got.progress
        assert not got.failures
        assert encode_state(progress.state) == encode_state(other.state)
        assert progress.last_rounds == other.last_rounds
        assert result.transfers == got.transfers
        assert result.loss == pytest.approx(got.loss, rel=1e-12)
    validation, test = here.evaluator.evaluate_clients(progress)
    theirs = RemoteEvaluator(there, 32).evaluate_clients(other)
    for mine, found in zip((validation, test), theirs, strict=True):
        assert (mine is None) == (found is None)
        if mine is not None and found is not None:
            assert mine.by_client == {id: pytest.approx(row) for id, row in found.by_client.items()}
            assert mine.pooled["accuracy"] == pytest.approx(found.pooled["accuracy"])


@pytest.mark.parametrize("adaptive", [pytest.param(0, marks=pytest.mark.slow), 99])
def test_replies_with_several_projectors_are_accepted(
    adaptive: int, prepared: Prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    """Projectors that are renewed within a round enlarge a reply, which the expected structure allows for."""
    options = {"name": "fedgalore", "r": 2, "steps": 5, "period": 2, "adaptive_refreshes": adaptive}
    config = tiny.config(tiny_folder, method=options, federation={"rounds": 2})
    here = tiny.variant(prepared, config)
    there = remote(here, tmp_path)
    progress, other = here.federation.begin(), there.begin()
    for _ in range(there.settings.rounds):
        progress, got = here.federation.run_round(progress).progress, there.run_round(other)
        other = got.progress
        assert not got.failures
    assert encode_state(progress.state) == encode_state(other.state)


def test_one_node_cannot_hide_or_outweigh_a_metric(tiny_folder: Path, prepared: Prepared, tmp_path: Path) -> None:
    """A row that lacks a metric is excluded and its client named; a stated number of examples is no weight."""
    federation = tiny.variant(prepared, method_config(tiny_folder, "fedit")).federation
    evaluator, ids = RemoteEvaluator(federation, 32), sorted(federation.clients)
    rows = {id: {"accuracy": 0.5, "examples": 4.0} for id in ids}
    liar, silent = ids[0], ids[1]
    rows[liar] = {"accuracy": 1.0, "examples": 1e15}
    rows[silent] = {"loss": 0.1, "examples": 4.0}
    for id in ids:
        client_data = federation.clients[id]
        nothing = np.empty(0, np.int64)
        federation.clients = {**federation.clients, id: replace(client_data, validation=nothing)}
    scores = evaluator._pool("validation", rows)
    assert scores is not None
    assert silent not in scores.by_client
    assert [failure.client for failure in federation.pop_events().failures] == [silent]
    weight = min(float(federation.clients[liar].client.examples), 4 * 4.0)  # federation.max_weight_ratio
    assert scores.by_client[liar]["examples"] == weight
    assert scores.pooled["accuracy"] == pytest.approx((weight + 0.5 * 8) / (weight + 8))
