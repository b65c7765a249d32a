"""Federations in this process and behind a transport: labels, presence, weights, and what is counted and resumed."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.assembly.federation import compute_client_ranks, compute_client_scaling
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.server import connect
from fedspan.config import RunConfig, parse_config
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client, LayerSpec, Spec
from fedspan.deployment.flower_simulation import get_nodes_folder, reply_as
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Reply, decode_order
from fedspan.federation.serialization import encode_state
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.checkpoint import load_latest
from fedspan.runs.ledger import read_totals
from fedspan.runs.report import RunReport
from helpers import tiny
from helpers.listeners import Notes
from helpers.reply_transport import Replies, ReplyingTransport

IDS = tuple(sorted(tiny.SITES))
PRESENT = {"north": [2, None], "south": [1, 2], "west": [2, 3]}
"""East is there all the time."""


def build(folder: Path, **changes: Mapping[str, Any]) -> Prepared:
    changes["federation"] = {"clients_per_round": None, "rounds": 4, **changes.get("federation", {})}
    return prepare(tiny.config(folder, **{"training": {"local_steps": 1}, **changes}))


def test_labels_are_flipped_for_training_alone(tiny_folder: Path) -> None:
    plain = build(tiny_folder)
    prepared = build(tiny_folder, simulation={"faults": {"share": 0.5, "kind": "label-flip"}})
    bad = prepared.config.simulation.build_conditions(prepared.config.seed).draw_faulty(IDS)
    flipped: Any = prepared.federation.examples
    honest: Any = plain.train
    last = len(prepared.labels) - 1
    for id, client_data in prepared.federation.clients.items():
        own = client_data.train
        wanted = last - honest.labels[own] if id in bad else honest.labels[own]
        assert (flipped.labels[own] == wanted).all()
        for part in (client_data.validation, client_data.test):
            assert (flipped.labels[part] == honest.labels[part]).all()
    one, other = (run.federation.run_round(run.federation.begin()).progress.state.tensors for run in (prepared, plain))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"simulation": {"present": {"nort": [1, 2]}}}, r"simulation\.present\.nort.*Did you mean 'north'"),
        ({"simulation": {"present": {id: [1, 3] for id in IDS}}}, "0 of 4 clients are present in round 4"),
        ({"federation": {"min_replies": 3}}, r"2 of 4 clients are present in round 1.*at least 3 \(federation"),
        (
            {"federation": {"secure": {"bits": 64}, "weights": "uniform"}},
            r"2 of 4 clients are present in round 1.*at least 3 \(federation\.secure",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=why):
        build(tiny_folder, **{"simulation": {"present": PRESENT}, **changes})


def test_a_cohort_of_more_clients_than_there_are_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=r"federation\.clients_per_round.*at most 4, the number of clients"):
        build(tiny_folder, federation={"clients_per_round": 5})


def test_clients_have_their_examples_and_the_ranks_weights_and_scaling_of_the_config(tiny_folder: Path) -> None:
    ranks = {"east": 1, "north": 2, "south": 3, "west": 4}
    changes: dict[str, Any] = {"method": {"name": "flexlora", "r": 4, "lora_alpha": 8}}
    for weights in ("examples", "uniform"):
        prepared = build(tiny_folder, **changes, federation={"ranks": ranks, "weights": weights})
        for part in prepared.partition.clients:
            client_data = prepared.federation.clients[part.id]
            assert client_data.train.tolist() == part.train.tolist()
            assert (client_data.validation.tolist(), client_data.test.tolist()) == (
                part.validation.tolist(),
                part.test.tolist(),
            )
            assert client_data.client.rank == ranks[part.id]
            assert client_data.client.scaling == 8 / ranks[part.id]
            assert client_data.client.examples == len(part.train)
            assert client_data.client.weight == (len(part.train) if weights == "examples" else 1.0)
        assert prepared.federation.examples is prepared.train


SPEC = Spec((LayerSpec("wide", 32, 64), LayerSpec("tall", 64, 32)))


def made(ranks: Any, method: str = "flora", **changes: Any) -> tuple[RunConfig, RegisteredMethod]:
    federation = {"ranks": ranks, **changes.pop("federation", {})}
    values = {"data": {"train": "x.csv"}, "method": {"name": method}, "federation": federation, **changes}
    config = parse_config(values)
    return config, config.build_method(SPEC)


def ids(count: int) -> list[str]:
    return [f"client-{number:02}" for number in range(count)]


def test_by_client_and_in_turn() -> None:
    by_client = compute_client_ranks(*made({"client-01": 4}), ids(3))
    assert by_client == {"client-00": 8, "client-01": 4, "client-02": 8}
    assert list(compute_client_ranks(*made([4, 16]), ids(5)).values()) == [4, 16, 4, 16, 4]
    assert set(compute_client_ranks(*made(None), ids(3)).values()) == {8}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 9))
def test_shares_come_out_to_within_one_client(parts: list[int], count: int, seed: int) -> None:
    shares = {2 + rank: part / sum(parts) for rank, part in enumerate(parts)}
    ranks = compute_client_ranks(*made({"assign": "fractions", "of": shares, "seed": seed}), ids(count))
    assert list(ranks) == ids(count)
    counts = Counter(ranks.values())
    for rank, share in shares.items():
        assert abs(counts[rank] - share * count) < 1
    assert set(counts) <= set(shares)


def test_whole_shares_are_exact_and_who_gets_them_is_drawn() -> None:
    shares = {"assign": "fractions", "of": {4: 0.5, 8: 0.3, 16: 0.2}}
    ranks = compute_client_ranks(*made({**shares, "seed": 1}), ids(20))
    assert Counter(ranks.values()) == {4: 10, 8: 6, 16: 4}
    assert list(ranks.values()) != sorted(ranks.values())
    assert ranks == compute_client_ranks(*made({**shares, "seed": 1}), ids(20))
    assert ranks != compute_client_ranks(*made({**shares, "seed": 2}), ids(20))


def test_a_drawn_rank_is_the_client_s_own() -> None:
    """Whoever else there is; every rank of the list occurs about as often as any other."""
    drawn = {"assign": "draw", "of": [4, 8, 16], "seed": 3}
    many, few = compute_client_ranks(*made(drawn), ids(99)), compute_client_ranks(*made(drawn), ids(9)[3:])
    assert all(many[id] == rank for id, rank in few.items())
    counts = Counter(many.values())
    assert set(counts) == {4, 8, 16}
    assert min(counts.values()) > 18  # 33 expected, standard deviation 4.7


@pytest.mark.parametrize("way", [{"assign": "draw", "of": [4, 8]}, {"assign": "fractions", "of": {4: 0.5, 8: 0.5}}])
def test_without_a_seed_it_is_that_of_the_division(way: dict[str, Any]) -> None:
    """So that clients keep their ranks where several seeds are compared on one division."""
    config, method = made(way, seed=5, partition={"seed": 2})
    assert compute_client_ranks(config, method, ids(20)) == compute_client_ranks(*made({**way, "seed": 2}), ids(20))
    config, method = made(way, seed=5)
    assert compute_client_ranks(config, method, ids(20)) == compute_client_ranks(*made({**way, "seed": 5}), ids(20))


def test_ranks_that_do_not_fit_are_refused_for_every_client() -> None:
    with pytest.raises(FedspanError, match="from 1 to 32") as caught:
        compute_client_ranks(*made({"assign": "draw", "of": [33]}), ids(2))
    assert (caught.value.field, caught.value.value) == ("federation.ranks.client-00", 33)
    with pytest.raises(FedspanError, match=r"Expected 8, because fedit needs one rank for all clients"):
        compute_client_ranks(*made([8, 4], "fedit"), ids(2))
    with pytest.raises(FedspanError, match="no client is named"):
        compute_client_ranks(*made({"client-09": 4}), ids(2))


def test_where_the_whole_weight_is_factorized_every_layer_has_a_full_rank_of_its_own() -> None:
    """Of a convolution that of the (O k1) x (C k2) rectangle, which may be far above min(O, C k1 k2)."""
    spec = Spec((LayerSpec("conv", 4, 12 * 9, (3, 3)), LayerSpec("linear", 6, 5)))
    values = {"data": {"train": "x.csv"}, "method": {"name": "fedhm"}, "federation": {"ranks": [1, 12]}}
    config = parse_config(values)
    method = config.build_method(spec)
    assert set(compute_client_ranks(config, method, ids(4)).values()) == {1, 12}
    client = Client("client-01", 12, 1.0, 1, 1.0)
    job = method.start(method.sync(method.init(_Ones(spec)), client), client, {}, 0)
    assert {name: tuple(value.shape) for name, value in job.tensors.items()} == {
        **{"conv/U": (12, 12), "conv/V": (12, 36), "linear/U": (6, 5), "linear/V": (5, 5)}
    }
    with pytest.raises(FedspanError, match="from 1 to 12, the full rank of the largest layer"):
        compute_client_ranks(parse_config({**values, "federation": {"ranks": [13]}}), method, ids(1))
    adapters = parse_config({**values, "method": {"name": "flora", "r": 2}})
    with pytest.raises(FedspanError, match="from 1 to 4, the smallest layer's side"):
        compute_client_ranks(adapters, adapters.build_method(spec), ids(2))


class _Ones:
    def __init__(self, spec: Spec) -> None:
        self.shapes = {layer.name: layer.shape for layer in spec.layers}

    def get_weight(self, layer: str) -> Tensor:
        return torch.ones(self.shapes[layer])

    def get_extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)


def test_scalings_follow_from_ranks_unless_they_are_to_be_equal() -> None:
    config, method = made([4, 16])
    assert [compute_client_scaling(config, method, rank) for rank in (4, 8, 16)] == [4.0, 2.0, 1.0]
    config, method = made([4, 16], federation={"scaling": "equal"})
    assert [compute_client_scaling(config, method, rank) for rank in (4, 16)] == [2.0, 2.0]


BAD = "south"


class Here(ReplyingTransport):
    """A transport to clients in this process, one of whom is asked in vain."""

    def __init__(self, run: Path, tasks: tuple[str, ...]) -> None:
        self.run, self.tasks = str(run), tasks

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        for id, envelope in envelopes.items():
            if id == BAD and decode_order(envelope).task in self.tasks:
                yield id, "no reply within 5 s"
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), envelope)


def host(*tasks: str, kind: type[Here] = Here, reads_nodes: bool = True) -> start.HostRun:
    """A host of runs whose clients are behind a transport."""

    def simulated(place: RunFolder, prepared: Prepared, played: Any) -> RunReport:
        transport = kind(place.path.resolve(), tasks)
        rules = prepared.config.federation.build_reply_rules()
        return played(connect(prepared, transport, rules, nodes=get_nodes_folder(place.path) if reads_nodes else None))

    return simulated


def test_failures_are_counted_over_the_whole_run_though_it_was_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    whole = start.run(config, tmp_path / "whole", host=host("train"))
    assert whole.failures == {BAD: {"count": 2, "round": 2, "reason": "no reply within 5 s"}}
    with pytest.raises(KeyboardInterrupt):
        start.run(config, tmp_path / "resumed", host=host("train"), listener=Notes(1))
    again = start.run(None, tmp_path / "resumed", resume=True, host=host("train"))
    assert again.failures == whole.failures
    assert again.bytes == whole.bytes
    assert again.other_bytes == whole.other_bytes
    told = json.loads((tmp_path / "resumed" / "report.json").read_text())
    assert told["failures"] == again.failures


def test_who_is_not_measured_is_counted_too(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    report = start.run(config, tmp_path / "run", host=host("evaluate"))
    assert report.failures[BAD]["count"] == 4  # of the start, after each round, and of the best one at the end
    assert report.failures[BAD]["reason"] == "not measured: no reply within 5 s"
    failures = next(read_lines(tmp_path / "run" / "metrics.jsonl"))["failures"]
    assert [failure["purpose"] for failure in failures] == ["evaluate"] * 2  # the start has no line of its own


def test_what_evaluation_sends_is_in_the_ledger_and_apart_from_the_training(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny.config(tiny_folder, federation={"clients_per_round": None, "rounds": 2})
    here = start.run(config, tmp_path / "here")
    report = start.run(config, tmp_path / "run", host=host())
    assert report.failures == {}
    assert report.bytes == here.bytes
    assert here.other_bytes == {}
    totals = read_totals(tmp_path / "run" / "ledger.jsonl")
    assert totals.run("down").bytes == report.bytes["down"]
    rows = list(read_lines(tmp_path / "run" / "ledger.jsonl"))
    asked = [row for row in rows if row["purpose"] == "evaluate"]
    assert len(asked) == 4 * len(tiny.SITES)  # of the start, after each round, and of the best one at the end
    sent = sum(row["bytes"] for row in asked)
    assert report.other_bytes == {"evaluate": {"down": sent, "up": 0}}


def test_a_run_of_personal_models_ends_without_an_adapter_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    federation = {"clients_per_round": None, "rounds": 1}
    config = tiny.config(tiny_folder, method={"name": "local-only"}, federation=federation)
    report = start.run(config, tmp_path / "run", host=host(reads_nodes=False))
    assert report.adapters == {}
    assert not (tmp_path / "run" / "adapter").exists()


class Forgetful(Here):
    """One client replies last, and in the third round it reports that it lost what it stored."""

    def replies(self, envelopes: Mapping[str, Envelope], seconds: float, *, wait_for_offline: bool = False) -> Replies:
        yield from super().replies(
            {id: envelope for id, envelope in envelopes.items() if id != BAD},
            seconds,
            wait_for_offline=wait_for_offline,
        )
        for id in envelopes.keys() & {BAD}:
            order = decode_order(envelopes[id])
            if (order.task, order.round) == ("train", 2):
                yield id, Reply("train", 2, order.attempt, id, failed="its disk was replaced", lost=True).to_envelope()
            else:
                yield id, reply_as(self.run, torch.get_num_threads(), envelopes[id])


@pytest.mark.slow
def test_a_client_that_lost_its_state_misses_the_round_of_the_loss_only(tiny_folder: Path, tmp_path: Path) -> None:
    forgetful = host(kind=Forgetful)
    config = tiny.config(
        tiny_folder, method={"name": "fedsa-lora"}, federation={"clients_per_round": None, "rounds": 5}
    )
    start.run(config, tmp_path / "whole", host=forgetful)
    with pytest.raises(KeyboardInterrupt):
        start.run(config, tmp_path / "resumed", host=forgetful, listener=Notes(3))
    halfway = load_latest(RunFolder(tmp_path / "resumed"))
    assert BAD not in halfway.last_rounds
    assert halfway.last_replies == {BAD: 1}
    start.run(None, tmp_path / "resumed", resume=True, host=forgetful)
    ends: list[bytes] = []
    for name in ("whole", "resumed"):
        rows: list[Any] = list(read_lines(tmp_path / name / "metrics.jsonl"))
        assert [row.get("late") for row in rows] == [None] * 5, "every round waited for it"
        assert [[one["client"] for one in row.get("failures", [])] for row in rows] == [[], [], [BAD], [], []]
        last = load_latest(RunFolder(tmp_path / name))
        assert last.last_rounds[BAD] == 4
        assert last.last_replies == {}
        ends.append(encode_state(last.state))
    assert ends[0] == ends[1]
