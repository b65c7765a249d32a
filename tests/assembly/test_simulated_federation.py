"""Federations in this process: labels, presence, weights, a head's start, and what is counted, saved and resumed."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import fedspan
from fedspan.assembly.federation import compute_client_ranks, compute_client_scaling
from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.server import connect
from fedspan.cli.run_summary import show_report
from fedspan.config import RunConfig, parse_config
from fedspan.config.node import NodeLimits
from fedspan.core.heads import solve_head, summarize_features
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import Client, LayerSpec, Spec
from fedspan.deployment.flower_simulation import get_nodes_folder, reply_as
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.limits import refuse_statistics
from fedspan.deployment.node import NodeService
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Reply, decode_order
from fedspan.federation.serialization import encode_state
from fedspan.logs import read_lines
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.checkpoint import load_latest
from fedspan.runs.ledger import read_totals
from fedspan.runs.report import RunReport
from helpers import node_service, tiny, tiny_images, tiny_seq2seq, tiny_tags, tiny_topics
from helpers.head_starts import HEAD, start_of
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.reply_transport import Replies, ReplyingTransport
from helpers.trainer_clients import save_without_head

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
    with refused("federation.clients_per_round"):
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
    with refused("federation.ranks.client-00") as caught:
        compute_client_ranks(*made({"assign": "draw", "of": [33]}), ids(2))
    assert (caught.value.field, caught.value.value) == ("federation.ranks.client-00", 33)
    with refused("federation.ranks.client-01"):
        compute_client_ranks(*made([8, 4], "fedit"), ids(2))
    with refused("federation.ranks.client-09"):
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
    with refused("federation.ranks.client-00"):
        compute_client_ranks(parse_config({**values, "federation": {"ranks": [13]}}), method, ids(1))
    adapters = parse_config({**values, "method": {"name": "flora", "r": 2}})
    with refused("federation.ranks.client-01"):
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
        return played(connect(prepared, transport, nodes=get_nodes_folder(place.path) if reads_nodes else None))

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
    assert len(asked) == 3 * len(tiny.SITES)  # of the start and after each round, of which the last is the best
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


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_classifiers_start_from_lda(kind: str, tiny_folder: Path) -> None:
    targets = {"distilbert": ["q_lin", "v_lin"], "gpt2": tiny.GPT2}.get(kind, tiny.BERT)
    run = prepare(tiny.config(tiny_folder, kind, model={"head_init": "auto", "target_modules": targets}))
    assert run.head.kind == "lda"
    expected = {"roberta": "classifier.out_proj", "gpt2": "score"}.get(kind, "classifier")
    assert (run.head.layer.path, run.head.layer.bias) == (expected, kind != "gpt2")
    progress = begin(run.federation, run.head)
    predictions = run.engine.predict(
        run.evaluator.build_job(progress, None), run.train, run.federation.clients["west"].train, 8
    )
    truth = torch.from_numpy(run.train.labels[run.federation.clients["west"].train])
    labels = torch.from_numpy(np.concatenate([run.train.labels[one.train] for one in run.federation.clients.values()]))
    # A model with random weights separates little, so that the classes' shares outweigh the discriminants.
    discriminants = predictions - (labels.bincount() / len(labels)).log()
    ahead = discriminants.gather(1, truth[:, None])[:, 0] - discriminants.mean(1)
    assert float(ahead.mean()) > 2 * float(ahead.std()) / len(ahead) ** 0.5  # on the examples themselves


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(("corpus", "kind"), [(tiny_topics, "by-label"), (tiny_tags, "lda")])
def test_several_labels_and_words_start_from_statistics_of_all_clients(
    corpus: Any, kind: str, engine: str, tiny_folder: Path, tmp_path: Path
) -> None:
    values = corpus.settings(tiny_folder, tmp_path, model={"head_init": "auto"}, engine={"name": engine})
    values["model"]["name"] = str(tiny_folder / "deep-bert")
    run = prepare(parse_config(values))
    assert run.head.kind == kind
    found, model = start_of(run), run.engine.adapted.model
    run.engine.adapted.install({}, {}, frozenset())
    features, answers = list[torch.Tensor](), list[torch.Tensor]()
    rows = np.concatenate([one.train for one in run.federation.clients.values()])
    for row in rows.tolist():
        batch = run.task.collate(run.train, [row], torch.device("cpu"))
        with torch.no_grad():
            hidden = model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        if kind == "lda":
            is_word = batch["labels"][0] >= 0
            features.append(hidden.last_hidden_state[0, is_word])
            answers.append(batch["labels"][0, is_word])
        else:
            features.append(hidden.pooler_output)
            answers.append(batch["labels"].to(torch.uint8))
    together = torch.cat(features), torch.cat(answers)
    assert len(together[0]) > len(rows) or kind == "by-label"
    whole = solve_head(kind, summarize_features(*together, run.head.layer.outputs, kind), len(together[0]))
    torch.testing.assert_close(found[HEAD[0]], whole.weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[HEAD[1]], whole.bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("corpus", [tiny_topics, tiny_tags])
def test_statistics_of_several_labels_and_words_are_for_plain_simulations(
    corpus: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    values = corpus.settings(tiny_folder, tmp_path, model={"head_init": "auto"})
    report = fedspan.run({**values, "baselines": ["local-only", "centralized"]}, tmp_path / "run")
    assert report.start["head_init"] in ("by-label", "lda")
    assert set(report.baselines) == {"local-only", "centralized"}
    kind = report.start["head_init"]
    secure = {**values, "federation": {**values["federation"], "secure": {}}}
    for config, parse in (
        (secure, parse_config),
        (values | {"data": {}, "partition": {"clients": 3}}, build_server_config),
    ):
        assert parse(config | {"data": {**config["data"], "labels": report_labels(tmp_path)}}).head_kind[0] is None
        with refused("model.head_init", "simulations without secure aggregation"):
            parse({**config, "model": {**config["model"], "head_init": kind}})
    limits = NodeLimits(approve="auto", head_statistics="exact", statistics_max_length=2)
    named = parse_config({**values, "model": {**values["model"], "head_init": kind}})
    assert "are for simulations" in str(refuse_statistics(limits, named))


def report_labels(folder: Path) -> list[str]:
    return fedspan.read_notes(folder / "run" / "adapter")["labels"]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_classifiers_that_read_the_last_token_start_from_lda(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    checkpoint = save_without_head(kind, tiny_folder, tmp_path / kind)
    model = {"name": str(checkpoint), "head_init": "auto", "target_modules": tiny_seq2seq.TARGETS[kind]}
    run = prepare(tiny.config(tiny_folder, model=model))
    assert run.head.layer.path == "classification_head.out_proj"
    report = fedspan.run(tiny.settings(tiny_folder, model=model, federation={"rounds": 1}), tmp_path / "run")
    assert (report.start["head_init"], report.rounds) == ("lda", 1)


@pytest.mark.parametrize("kind", ["vit", pytest.param("resnet", marks=pytest.mark.slow)])
def test_image_classifiers_start_from_lda(kind: str, images: Path, tmp_path: Path) -> None:
    values = tiny_images.settings(images, kind)
    values["model"] = {**values["model"], "head_init": "auto"}
    report = fedspan.run(values, tmp_path / "run")
    assert report.start["head_init"] == "lda"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"privacy": {"mechanism": "dp-sgd", "noise": 1.0}}, "not privatized"),
        ({"federation": {"reduction": "median"}}, "median does not apply"),
    ],
)
def test_where_statistics_do_not_apply_a_name_is_refused(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    run = prepare(tiny.config(tiny_folder, model={"head_init": "auto"}, **changes))
    assert run.head is None
    assert any(why in note for note in run.notes)
    with pytest.raises(FedspanError, match=why):
        tiny.config(tiny_folder, model={"head_init": "lda"}, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"task": "regression", "model": {"head_init": "lda"}}, "model.head_init"),
        ({"model": {"head_init": "least-squares"}}, "model.head_init"),
        ({"model": {"head_init": "lda", "pretrained": False}}, "model.head_init"),
        ({"task": "image-classification", "model": {"pooling": "mean"}}, "model.pooling"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], field: str, tiny_folder: Path) -> None:
    values = tiny.settings(tiny_folder)
    values["model"] = {**values["model"], **changes["model"]}
    with refused(field):
        parse_config({**values, **{key: value for key, value in changes.items() if key != "model"}})


def test_models_from_scratch_and_trained_heads_stay_as_they_are(tiny_folder: Path, tmp_path: Path) -> None:
    scratch = prepare(tiny.config(tiny_folder, model={"head_init": "auto", "pretrained": False}))
    assert scratch.head is None
    model = tiny.fresh_classifier(tiny_folder / "bert")
    model.save_pretrained(tmp_path / "fitted")
    tiny.save_tokenizer(tmp_path / "fitted")
    fitted = tiny.config(tiny_folder, model={"head_init": "auto", "name": str(tmp_path / "fitted")})
    assert prepare(fitted).head is None
    named = tiny.config(tiny_folder, model={"head_init": "lda", "name": str(tmp_path / "fitted")})
    assert prepare(named).head is not None


@pytest.mark.parametrize("stop", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupted_run_has_the_bits_of_an_uninterrupted_one(stop: int, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(
        tiny_folder, model={"head_init": "lda"}, method={"name": "fedsa-lora"}, federation={"rounds": 2}
    )
    whole = fedspan.run(values, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(values, tmp_path / "stopped", listener=Notes(stop))
    resumed = fedspan.resume(tmp_path / "stopped")
    assert resumed.scores == whole.scores
    assert resumed.start == whole.start
    for name in whole.adapters.values():
        file = Path(name) / "adapter_model.safetensors"
        assert (tmp_path / "stopped" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    ledgers = [(tmp_path / name / "ledger.jsonl").read_text() for name in ("whole", "stopped")]
    assert ledgers[0] == ledgers[1]


def test_the_start_is_a_row_of_metrics_and_can_be_the_best(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(
        tiny_folder,
        model={"head_init": "lda"},
        partition={"partitioner": "natural", "column": "site", "validation": 0.3},
        training={"lr": 1e-12},
        federation={"rounds": 2},
    )
    report = fedspan.run({**values, "baselines": ["local-only", "centralized"]}, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert "loss" not in rows[0]
    assert rows[0]["bytes"] == {"down": 0, "up": 0}
    assert report.start["test"] == rows[0]["test"]
    assert report.other_bytes["statistics"]["up"] > 0
    # with so small a rate every round has the start's scores, and so have both baselines their own
    assert rows[2]["test"]["accuracy"] == rows[0]["test"]["accuracy"]
    central = report.baselines["centralized"]["scores"]["test"]["accuracy"]
    assert central == pytest.approx(rows[0]["test"]["accuracy"], abs=0.1)


@pytest.mark.parametrize("extras", ["average", "frozen"])
def test_a_node_participates_in_the_start(extras: str, tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node_service.node(tiny_folder, tmp_path))
    model = {"head_init": "lda", "extras": extras}
    run, transport = node_service.served(tiny_folder, service, model=model)
    progress = begin(run.federation, run.head)
    assert not run.federation.pop_events().failures
    assert len(transport.sent) == 1
    head = "extras/classifier.weight"
    assert not torch.equal(progress.state.tensors[head], run.federation.begin().state.tensors[head])
    after = run.federation.run_round(progress)
    assert not after.failures
    validation, _ = run.evaluator.evaluate_clients(after.progress)
    assert validation is not None
    assert torch.equal(after.progress.state.tensors[head], progress.state.tensors[head]) == (extras == "frozen")


def test_a_node_may_refuse_statistics(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node_service.node(tiny_folder, tmp_path, limits={"head_statistics": False}))
    run, _ = node_service.served(tiny_folder, service, model={"head_init": "lda"})
    with refused("good replies", r"no statistics of examples leave this node"):
        begin(run.federation, run.head)
    assert not run.federation.run_round(run.federation.begin()).failures


def half_lost(folder: Path, kind: str) -> dict[str, Any]:
    """A run in which two of four clients never reply, and only the others train."""
    values = tiny.settings(
        folder,
        model={"head_init": kind},
        federation={"rounds": 2, "clients_per_round": 1},
        simulation={"dropout": {"north": 1.0, "west": 1.0}},
    )
    return {**values, "seed": 9}


def test_without_enough_statistics_auto_starts_at_random_and_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    values, notes = half_lost(tiny_folder, "auto"), Notes()
    report = fedspan.run({**values, "baselines": ["centralized"]}, tmp_path / "run", listener=notes)
    assert report.rounds == 2
    assert report.start["head_init"] == "random"
    assert set(report.start) == {"head_init", "reason", "validation", "clients", "test"}
    words = "the exchange of statistics needs good replies of at least 3 of 4 clients, and has 2"
    assert words in report.start["reason"]
    assert any(note.startswith(f"the head starts at random: {words}") for note in notes.notes)
    assert fedspan.read_report(tmp_path / "run").start == report.start
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {failure["client"] for failure in rows[0]["failures"]} == {"north", "west"}
    screen = Console(record=True, width=200)
    show_report(screen, report, tmp_path / "run")
    assert "The head was initialized at random, because too few clients sent statistics" in screen.export_text()
    measured = {"head_init": "lda", "test": report.scores["test"]}
    show_report(screen, replace(report, start=measured), tmp_path / "run")
    assert "Held-out accuracy is not measurably different from the start" in screen.export_text()
    plain = fedspan.run({**half_lost(tiny_folder, "random"), "baselines": ["centralized"]}, tmp_path / "plain")
    assert report.scores == plain.scores
    assert report.baselines == plain.baselines


def test_without_enough_statistics_a_named_start_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    with refused("model.head_init"):
        fedspan.run(half_lost(tiny_folder, "lda"), tmp_path / "run")


def test_nodes_that_refuse_statistics_do_not_stop_a_deployment(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node_service.node(tiny_folder, tmp_path / "node", limits={"head_statistics": False}))
    run, _ = node_service.served(tiny_folder, service, model={"head_init": "lda"})
    config = build_server_config(node_service.values(tiny_folder, model={"head_init": "lda"}))
    report = start.run(config, tmp_path / "run", build=lambda *_: run)
    assert (report.rounds, report.start["head_init"]) == (3, "random")
    assert "no statistics of examples leave this node" in report.start["reason"]
