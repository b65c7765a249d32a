"""A run's head: which start is chosen, that it is measured and saved, and that an interrupted run has the same bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedspan
from fedspan import FedspanError
from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared, prepare
from fedspan.cli.run_summary import show_report
from fedspan.config import parse_config
from fedspan.config.node import NodeLimits
from fedspan.core.heads import solve_head, summarize_features
from fedspan.deployment.handshake import build_server_config
from fedspan.deployment.limits import refuse_statistics
from fedspan.deployment.node import NodeService
from fedspan.runs import start
from helpers import node_service, tiny, tiny_images, tiny_seq2seq, tiny_tags, tiny_topics
from helpers.head_starts import HEAD, start_of
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.trainer_clients import save_without_head


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
    assert float((discriminants.argmax(1) == truth).float().mean()) > 0.5  # of four labels, on the examples themselves


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
    with pytest.raises(FedspanError, match=r"no statistics of examples leave this node"):
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
    with pytest.raises(FedspanError, match=r"has 2 .*Fix the cause and resume, or start a run with model.head_init: a"):
        fedspan.run(half_lost(tiny_folder, "lda"), tmp_path / "run")


def test_nodes_that_refuse_statistics_do_not_stop_a_deployment(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node_service.node(tiny_folder, tmp_path / "node", limits={"head_statistics": False}))

    def build(config: Any, partition: Any, key: bytes | None, callbacks: Any) -> Prepared:
        return node_service.served(tiny_folder, service, model={"head_init": "lda"})[0]

    config = build_server_config(node_service.values(tiny_folder, model={"head_init": "lda"}))
    report = start.run(config, tmp_path / "run", build=build)
    assert (report.rounds, report.start["head_init"]) == (3, "random")
    assert "no statistics of examples leave this node" in report.start["reason"]
