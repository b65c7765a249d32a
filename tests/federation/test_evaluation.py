"""Metrics measured here or reported by clients: what no client can have or decide alone, and who is named for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.assembly.run import Prepared, prepare
from fedspan.federation.config import BufferedSettings
from fedspan.federation.evaluation import ClientScores, Evaluator, RemoteEvaluator, ReportedEvaluator, summarize
from fedspan.federation.federation import Federation
from fedspan.federation.plausibility import (
    compute_trimmed_means,
    count_trimmed_clients,
    describe_few_nodes,
    describe_few_reports,
    drop_impossible_losses,
    drop_impossible_metrics,
)
from fedspan.federation.progress import ClientData, Transfer
from fedspan.federation.protocol import Envelope, Part, Reply, decode_order
from fedspan.federation.round import exchange_model
from fedspan.runs.selection import Selection
from fedspan.transports.in_process import simulate
from helpers import tiny
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.round_settings import with_rules


def test_client_scores_pool_average_and_find_the_worst(prepared: Prepared) -> None:
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


HONEST = {"accuracy": 0.5, "loss": 0.7, "examples": 4.0}


class Reporting(ReplyingTransport):
    """Reports given metrics of the validation parts."""

    def __init__(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        self.rows = rows

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            order = decode_order(envelope)
            scores = {"validation": dict(self.rows[id])}
            yield id, Reply("evaluate", order.round, 0, id, scores=scores).to_envelope()


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
    assert single.noisy
    assert pair.noisy
    old = prepared.federation
    rows = dict.fromkeys(old.clients, HONEST)
    federation = Federation(old.method, old.engine, old.clients, old.examples, old.settings, Reporting(rows))
    scores, _ = RemoteEvaluator(federation, 32).evaluate_clients(federation.begin())
    assert len(scores.by_client) >= 3
    assert scores.trimmed is None
    assert not scores.noisy


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
    assert evaluator._compute_weights("validation", reported)[ids[0]] == 10 * ratio
    clients[ids[0]] = replace(clients[ids[0]], client=replace(clients[ids[0]].client, examples=50_000))
    clients[ids[0]] = replace(clients[ids[0]], max_weight=50_000.0)
    assert evaluator._compute_weights("validation", reported)[ids[0]] == 500
    # admitted with its training examples, it claims to evaluate on all of them: it weighs what the others' share gives
    lied = {**reported, ids[0]: 50_000.0}
    assert evaluator._compute_weights("validation", lied)[ids[0]] == 500
    clients[ids[0]] = replace(clients[ids[0]], max_weight=400.0)
    assert evaluator._compute_weights("validation", lied)[ids[0]] == 4


@pytest.mark.parametrize("most", [None, 400.0])
def test_a_client_that_reports_a_fraction_of_an_example_stops_no_run(tiny_folder: Path, most: float | None) -> None:
    """The weights of the clients that were measured never sum to 0, also where it was measured alone."""
    federation = prepare(tiny.config(tiny_folder)).federation
    none, ids = np.zeros(0, np.int64), list(federation.clients)
    federation.clients = {
        id: replace(data, validation=none, max_weight=most) for id, data in federation.clients.items()
    }
    scores = ReportedEvaluator(federation, 8)._pool(
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

    settings = with_rules(old.settings, buffered=BufferedSettings(concurrency=2), max_missed_rounds=2)
    transport = Silent(dict.fromkeys(old.clients, HONEST))
    federation = Federation(old.method, old.engine, list(old.clients.values()), old.examples, settings, transport)
    evaluator = RemoteEvaluator(federation, 32)
    for _ in range(6):
        scores, _ = evaluator.evaluate_clients(federation.begin())
        assert scores is not None
    assert waited == [True, True, False, False, True, False]


def test_a_client_that_has_no_scores_to_send_is_not_asked_again(prepared: Prepared) -> None:
    """A model for each client and round would be more traffic than training, for nothing."""
    old, asked = prepared.federation, list[set[str]]()
    few, *others = sorted(old.clients)

    class Few(Reporting):
        def replies(self, envelopes: Mapping[str, Envelope], *args: Any, **options: Any) -> Replies:
            asked.append(set(envelopes))
            for id, envelope in super().replies(envelopes, *args, **options):
                yield id, Reply("evaluate", 0, 0, id).to_envelope() if id in unscored else envelope

    transport = Few(dict.fromkeys(old.clients, HONEST))
    federation = Federation(old.method, old.engine, old.clients, old.examples, old.settings, transport)
    evaluator, unscored = RemoteEvaluator(federation, 32), {few}
    for _ in range(2):
        scores, _ = evaluator.evaluate_clients(federation.begin())
        assert set(scores.by_client) == set(others)
    unscored.update(others)
    assert [evaluator.evaluate_clients(federation.begin()) for _ in range(2)] == [(None, None)] * 2
    assert [ids for ids in asked if ids] == [{few, *others}, set(others), set(others)]


def reply(*losses: float) -> Reply:
    return Reply("train", 0, 0, "a", tuple(Part(loss=loss, examples=4.0) for loss in losses))


@pytest.mark.parametrize("losses", [(1e308,), (-1.0,), (0.5, 1e308), (1e308, -1.0)])
def test_an_impossible_loss_removes_its_reply_and_names_its_client(losses: tuple[float, ...]) -> None:
    others = {"a": reply(0.5), "b": reply(0.7, 3.0), "silent": reply()}
    kept, ((client, reason),) = drop_impossible_losses({**others, "liar": reply(*losses)})
    assert kept == others
    assert client == "liar"
    assert reason.startswith("of its training, loss ")


def test_a_client_that_reports_a_loss_of_1e308_hides_no_other_client_s(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(lies: bool) -> tuple[float, list[tuple[str, str]]]:
        values = tiny.config(tiny_folder, federation={"clients_per_round": None}, simulation={})
        federation = prepare(values).federation
        host = tiny.host_of(federation)
        honest = host.train

        def lying(orders: Any, on_reply: Callable[[Reply], None]) -> None:
            lie = (Part(loss=1e308, examples=1e6),)
            honest(orders, lambda one: on_reply(replace(one, parts=lie) if lies and one.id == "west" else one))

        monkeypatch.setattr(host, "train", lying)
        result = federation.run_round(federation.begin())
        return result.loss, [(failure.client, failure.reason) for failure in result.failures]

    loss, failures = train(lies=True)
    honest_loss, silent = train(lies=False)
    assert math.isfinite(loss)
    assert loss == pytest.approx(honest_loss, rel=0.3)  # the mean of three clients in place of four
    assert [client for client, _ in failures] == ["west"]
    assert silent == []


def test_a_loss_is_compared_with_the_median_from_three_clients_on() -> None:
    rows, impossible = drop_impossible_metrics({"a": {"loss": 0.2}, "b": {"loss": 5000.0}})
    assert rows == {"a": {"loss": 0.2}, "b": {"loss": 5000.0}}
    assert not impossible
    rows, impossible = drop_impossible_metrics({"a": {"loss": 20.0}, "b": {"loss": 5000.0}, "c": {"loss": 0.1}})
    assert [id for id, _ in impossible] == []
    rows, impossible = drop_impossible_metrics({"a": {"loss": 0.2}, "b": {"loss": 5000.0}, "c": {"loss": 0.1}})
    assert impossible == [("b", "loss 5e+03 is not from 0 to 1e+03")]
    assert rows["b"] == {}


def test_a_trimmed_mean_is_within_the_range_of_the_other_clients() -> None:
    """Whichever client lies, whatever it reports and whatever it weighs."""
    rng = np.random.default_rng(0)
    for count in (3, 4, 5, 10, 11):
        for lie in (-1e9, 0.0, 1.0, 1e9):
            values, weights = rng.random(count), rng.integers(1, 9, count).astype(float)
            rows = {f"c{number}": {"loss": values[number], "examples": weights[number]} for number in range(count)}
            liar = f"c{rng.integers(count)}"
            others = [row["loss"] for id, row in rows.items() if id != liar]
            rows[liar] = {"loss": lie, "examples": 1e6}
            mean = compute_trimmed_means(rows, ["loss", "accuracy"])
            assert mean.keys() == {"loss"}
            assert min(others) <= mean["loss"] <= max(others)
    three = {id: {"loss": loss, "examples": 5.0} for id, loss in (("a", 0.1), ("b", 0.4), ("c", 9.0))}
    assert compute_trimmed_means(three, ["loss"]) == {"loss": 0.4}


def test_a_note_says_when_the_metrics_of_the_nodes_select_no_round() -> None:
    assert [count_trimmed_clients(count) for count in (1, 2, 3, 4, 5, 10, 11)] == [0, 0, 1, 1, 1, 1, 2]
    few = {(evaluated, sent): describe_few_reports(evaluated, sent) for evaluated in range(1, 6) for sent in range(6)}
    assert {pair for pair, note in few.items() if note} == {(n, sent) for n in (3, 4, 5) for sent in (0, 1, 2)}
    assert [describe_few_nodes(count) is None for count in (1, 2, 3, 4, 5, 50)] == [True, False, True, True, True, True]


class Confused(ReplyingTransport):
    """Its clients answer as asked, another task, another round, and in another client's name."""

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for number, (id, envelope) in enumerate(envelopes.items()):
            order = decode_order(envelope)
            reply = Reply(order.task, order.round, 0, order.to)
            changed = {"task": "train"}, {"round": order.round + 1}, {"id": "nobody"}
            yield id, (replace(reply, **changed[number - 1]) if number else reply).to_envelope()


def test_an_answer_to_another_order_does_not_count(tiny_folder: Path) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    ids, transfers, replies = sorted(federation.clients), list[Transfer](), dict[str, Reply | str]()

    def take(id: str, reply: Reply | str) -> bool:
        replies[id] = reply
        return False

    exchange_model(
        "export",
        federation.method,
        federation.begin().state,
        ids,
        lambda _: None,
        Confused(),
        run="",
        seconds=1.0,
        on_order=transfers.append,
        on_reply=take,
    )
    assert [(transfer.client, transfer.purpose) for transfer in transfers] == [(id, "export") for id in ids]
    assert replies == {
        ids[0]: Reply("export", 0, 0, ids[0], scores={}),
        ids[1]: f"an answer of {ids[1]!r} (train) to round 1",
        ids[2]: f"an answer of {ids[2]!r} (export) to round 2",
        ids[3]: "an answer of 'nobody' (export) to round 1",
    }
