"""Metrics that clients report: what no client can have, what one alone could decide, and who is named for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.federation.evaluation import ClientScores
from fedspan.federation.federation import Federation
from fedspan.federation.protocol import Envelope, Reply, decode_order
from fedspan.federation.reported_evaluation import RemoteEvaluator, ReportedEvaluator
from fedspan.federation.settings import BufferedSettings
from fedspan.federation.validation import ReplyRules
from fedspan.runs.selection import Selection
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny
from helpers.reply_transport import Replies, ReplyingTransport

HONEST = {"accuracy": 0.5, "loss": 0.7, "examples": 4.0}


class Reporting(ReplyingTransport):
    """Reports given metrics of the validation parts."""

    def __init__(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        self.rows = rows

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            scores = {"validation": dict(self.rows[id])}
            yield id, Reply("evaluate", order.round, 0, id, scores=scores).to_envelope()  # pyright: ignore


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    return prepare(tiny.config(tiny_folder))


def reported(prepared: Prepared, rows: Sequence[Mapping[str, float]]) -> tuple[ClientScores, dict[str, str]]:
    """The pooled scores of clients of 20 training examples each, whose parts the server does not know."""
    old, nobody = prepared.federation, np.zeros(0, np.int64)
    client_data = next(iter(old.clients.values()))
    clients = {
        id: replace(client_data, client=replace(client_data.client, id=id, examples=20), validation=nobody, test=nobody)
        for id in (f"c{number}" for number in range(len(rows)))
    }
    transport = Reporting(dict(zip(clients, rows, strict=True)))
    federation = Federation(old.method, old.engine, clients, old.examples, old.settings, transport)
    scores, _ = RemoteEvaluator(federation, 32).evaluate_clients(federation.begin())
    assert scores is not None
    return scores, {failure.client: failure.reason for failure in federation.pop_events().failures}


@pytest.mark.parametrize(
    ("name", "value"),
    [("accuracy", 1e308), ("accuracy", -0.1), ("loss", 1e308), ("loss", 1e9), ("loss", -1.0), ("perplexity", 1e12)],
)
def test_an_impossible_metric_does_not_count_and_its_client_is_named(
    prepared: Prepared, name: str, value: float
) -> None:
    rows = [{**HONEST, "perplexity": 2.0}] * 2 + [{**HONEST, "perplexity": 2.0, name: value}]
    scores, failures = reported(prepared, rows)
    assert {key: scores.pooled[key] for key in ("accuracy", "loss", "perplexity")} == pytest.approx(
        {"accuracy": 0.5, "loss": 0.7, "perplexity": 2.0}
    )
    assert set(failures) == {"c2"}
    assert ("c2" in scores.by_client) == (name == "perplexity")  # the loss and the accuracy are required


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_a_client_without_a_metric_removes_it_for_nobody_else(prepared: Prepared, count: int, name: str) -> None:
    silent = {key: value for key, value in HONEST.items() if key != name}
    scores, failures = reported(prepared, [HONEST] * (count - 1) + [silent])
    assert scores.pooled == pytest.approx({"accuracy": 0.5, "loss": 0.7, "examples": 4.0 * (count - 1)})
    assert failures == {f"c{count - 1}": f"not measured: no {name} of its validation part"}


def test_an_honest_client_is_not_excluded_for_a_metric_that_another_invents(prepared: Prepared) -> None:
    scores, failures = reported(prepared, [HONEST, {**HONEST, "f1": 1.0, "unheard": 7.0}])
    assert set(scores.by_client) == {"c0", "c1"}
    assert not failures
    assert "unheard" not in scores.pooled


def test_stated_examples_weigh_what_is_plausible(prepared: Prepared) -> None:
    scores, _ = reported(prepared, [HONEST, HONEST, {"accuracy": 1.0, "loss": 0.1, "examples": 2.0**53}])
    assert [row["examples"] for row in scores.by_client.values()] == [4.0, 4.0, 16.0]


@pytest.mark.parametrize("honest", [2, 3, 4])
def test_one_client_does_not_choose_the_best_round(prepared: Prepared, honest: int) -> None:
    """It reports a perfect first round; the honest clients become better in the second."""
    liar = {"accuracy": 1.0, "loss": 0.0, "examples": 20.0}
    first, _ = reported(prepared, [{**HONEST, "accuracy": 0.4 + number / 100} for number in range(honest)] + [liar])
    second, _ = reported(
        prepared,
        [{**HONEST, "accuracy": 0.44 + number / 100} for number in range(honest)]
        + [{**liar, "accuracy": 0.0, "loss": 1.0}],
    )
    assert first.pooled["accuracy"] > second.pooled["accuracy"]
    selected = Selection().add("accuracy", 1, first).add("accuracy", 2, second).best
    assert selected.round == 2


def test_a_single_client_and_one_whose_examples_are_known_here_are_not_trimmed(prepared: Prepared) -> None:
    single, pair = (reported(prepared, [HONEST] * count)[0] for count in (1, 2))
    assert single.trimmed is None
    assert pair.trimmed is not None
    assert single.rounded
    assert pair.rounded
    old = prepared.federation
    rows = dict.fromkeys(old.clients, HONEST)
    federation = Federation(old.method, old.engine, old.clients, old.examples, old.settings, Reporting(rows))
    scores, _ = RemoteEvaluator(federation, 32).evaluate_clients(federation.begin())
    assert len(scores.by_client) >= 3
    assert scores.trimmed is None
    assert not scores.rounded


def test_a_client_that_was_admitted_with_a_number_counts_up_to_it(tiny_folder: Path) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    none, ids = np.zeros(0, np.int64), list(federation.clients)
    clients = {
        id: replace(data, client=replace(data.client, examples=1000), validation=none)
        for id, data in federation.clients.items()
    }
    federation.clients = clients
    evaluator = ReportedEvaluator(federation, 8)
    reported = {**dict.fromkeys(ids, 10.0), ids[0]: 500.0}
    ratio = federation.settings.max_weight_ratio
    assert ratio is not None
    assert evaluator._compute_weights("validation", reported)[ids[0]] == 10 * ratio  # pyright: ignore[reportPrivateUsage]
    clients[ids[0]] = replace(clients[ids[0]], client=replace(clients[ids[0]].client, examples=50_000))
    clients[ids[0]] = replace(clients[ids[0]], max_weight=50_000.0)
    assert evaluator._compute_weights("validation", reported)[ids[0]] == 500  # pyright: ignore[reportPrivateUsage]
    # admitted with its training examples, it claims to evaluate on all of them: it weighs what the others' share gives
    lied = {**reported, ids[0]: 50_000.0}
    assert evaluator._compute_weights("validation", lied)[ids[0]] == 500  # pyright: ignore[reportPrivateUsage]
    clients[ids[0]] = replace(clients[ids[0]], max_weight=400.0)
    assert evaluator._compute_weights("validation", lied)[ids[0]] == 4  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("most", [None, 400.0])
def test_a_client_that_reports_a_fraction_of_an_example_stops_no_run(tiny_folder: Path, most: float | None) -> None:
    """The weights of the clients that were measured never sum to 0, also where it was measured alone."""
    federation = prepare(tiny.config(tiny_folder)).federation
    none, ids = np.zeros(0, np.int64), list(federation.clients)
    federation.clients = {
        id: replace(data, validation=none, max_weight=most) for id, data in federation.clients.items()
    }
    scores = ReportedEvaluator(federation, 8)._pool(  # pyright: ignore[reportPrivateUsage]
        "validation", {ids[0]: {"accuracy": 0.5, "loss": 0.7, "examples": 5e-324}}
    )
    assert scores.pooled == {"accuracy": 0.5, "loss": 0.7, "examples": 1.0}


def test_asynchronous_evaluations_do_not_wait_for_nodes_that_missed_the_last_ones(prepared: Prepared) -> None:
    """A node that trains but does not answer evaluations would otherwise hold each of them until the deadline."""
    old, waited = prepared.federation, list[bool]()
    silent = sorted(old.clients)[0]

    class Silent(Reporting):
        def replies(self, envelopes: Mapping[str, Envelope], *args: Any, **options: Any) -> Replies:
            assert silent in envelopes
            waited.append(False)
            yield from super().replies({id: envelopes[id] for id in envelopes if id != silent}, 1.0)
            waited[-1] = True
            yield silent, "no reply within 3600 s"

    settings = replace(old.settings, buffered=BufferedSettings(concurrency=2))
    transport = Silent(dict.fromkeys(old.clients, HONEST))
    rules = ReplyRules(max_missed_rounds=2)
    federation = Federation(
        old.method, old.engine, list(old.clients.values()), old.examples, settings, transport, rules
    )
    evaluator = RemoteEvaluator(federation, 32)
    for _ in range(6):
        scores, _ = evaluator.evaluate_clients(federation.begin())
        assert scores is not None
    assert waited == [True, True, False, False, True, False]
