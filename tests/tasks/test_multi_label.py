"""Multi-label classification: columns of labels, loss, metrics, predictions, exports and inference of columns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score

import fedspan
from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.config.starter import write_starter_config
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.deployment.node import NodeService
from fedspan.serving.load import load_served
from fedspan.tasks.encoding import EncodedText, Ragged
from fedspan.tasks.multi_label import LabeledTexts, MultiLabelClassification
from fedspan.tasks.registry import get_task
from helpers import refusals, tiny, tiny_topics
from helpers.node_service import introduced, node

TASK = get_task("multi-label-classification").columns
NONE: Any = None


def save(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def read(config: DataConfig) -> tuple[tuple[str, ...], list[list[int]]]:
    data = load(config, task=TASK)
    return data.labels, data.train["labels"][:]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([["b", "a"], ["a"], [], ["b", "b"]], {}),
        (["b|a", "a", "", "b|b|"], {}),
        (["b, a", "a", None, "b"], {}),
        (["b and a", "a", " ", "b"], {"label_separator": " and "}),
    ],
)
def test_lists_and_separated_texts_are_labels(rows: list[Any], options: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [{"text": f"t{at}", "labels": row} for at, row in enumerate(rows)])
    for invalid in ("error", "skip"):
        config = DataConfig.model_validate({"train": path, "test_fraction": 0, "invalid": invalid, **options})
        assert read(config) == (("a", "b"), [[1, 0], [0], [], [1]])


def test_every_part_is_read_with_the_separator_of_the_training_data(tiny_folder: Path, tmp_path: Path) -> None:
    rows = ["news, local;sport", "sport", "news, local", "news;sport;local", "news", "local", "sport;news"] * 6
    train = save(tmp_path / "a.jsonl", [{"text": f"word{at}", "labels": row} for at, row in enumerate(rows)])
    test = save(tmp_path / "b.jsonl", [{"text": "word1", "labels": "news, local"}, {"text": "word2", "labels": "news"}])
    loaded = load(DataConfig(train=train, test=test), task=TASK)
    assert loaded.labels == ("local", "news", "news, local", "sport")
    assert loaded.test["labels"][:] == [[2], [1]]
    values = tiny_topics.settings(tiny_folder, tmp_path, federation={"rounds": 1})
    values["data"] = {"train": train, "test": test, "test_fraction": 0}
    values["partition"] = {"partitioner": "iid", "clients": 3}
    report = fedspan.run(values, tmp_path / "run")
    assert fedspan.read_notes(tmp_path / "run" / "adapter")["columns"]["label_separator"] == ";"
    measured = fedspan.evaluate(tmp_path / "run", data=test)
    assert measured["loss"] == pytest.approx(report.scores["test"]["loss"], rel=1e-5)


def test_a_node_needs_a_named_separator(tiny_folder: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "a.jsonl", [{"text": f"word{at}", "labels": "a;b" if at % 2 else "a"} for at in range(60)])
    values = tiny_topics.settings(tiny_folder, tmp_path)
    own = {"train": data}
    for shared, refused in (({}, True), ({"label_separator": ";"}, False)):
        sent = {**values, "data": {"labels": ["a", "b"], **shared}, "partition": {"clients": 1}}
        service = NodeService(node(tiny_folder, tmp_path / f"node{refused}", data=own))
        introduction = introduced(service, sent)
        assert ("data.label_separator" in (introduction.refused or "")) == refused, introduction
        assert bool(introduction.examples) != refused


def test_columns_of_zeros_and_ones_are_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,late,broken,lost\nt0,1,0,0\nt1,0,0,0\nt2,1,1,0\n")
    config = DataConfig(train=str(path), label_columns=["late", "broken", "lost"], test_fraction=0)
    assert read(config) == (("late", "broken", "lost"), [[0], [], [0, 1]])
    path.write_text("text,late,broken,lost\nt0,1,0,0\nt1,0,2,0\nt2,1,1,\n")
    with refusals.refused("data.label_columns"):
        read(config)
    assert read(config.model_copy(update={"invalid": "skip"}))[1] == [[0]]


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ({"labels": None}, "data.train", "row 3 .*has no list of labels"),
        ({"labels": ["a", None]}, "data.train", "row 3 .*has no list of labels"),
        ({"labels": ["a"], "text": None}, "data.train", "has no text"),
    ],
)
def test_mistakes_in_rows_are_named(row: dict[str, Any], field: str, expected: str, tmp_path: Path) -> None:
    rows = [{"text": "t0", "labels": ["a", "b"]}, {"text": "t1", "labels": ["b"]}, {"text": "t2", **row}]
    config = DataConfig(train=save(tmp_path / "a.jsonl", rows), test_fraction=0)
    with pytest.raises(FedspanError, match=expected) as error:
        load(config, task=TASK)
    assert error.value.field == field
    assert read(config.model_copy(update={"invalid": "skip"}))[1] == [[0, 1], [1]]


def test_options_that_do_not_apply_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with refusals.refused("data.label_columns"):
        parse_config(tiny.settings(tiny_folder, data={"label_columns": ["a", "b"]}))
    with refusals.refused("data.label"):
        parse_config(tiny_topics.settings(tiny_folder, tmp_path, data={"label": "a", "label_columns": ["a", "b"]}))
    values = tiny_topics.settings(tiny_folder, tmp_path)
    with refusals.refused("task_options.threshold"):
        parse_config(values | {"task_options": {"threshold": 1.5}})
    with refusals.refused("model.head_init"):
        parse_config(tiny_topics.settings(tiny_folder, tmp_path, model={"head_init": "lda"}))
    numbers = [{"text": f"t{at}", "labels": at} for at in range(4)]
    with refusals.refused("data.label"):
        load(DataConfig(train=save(tmp_path / "a.jsonl", numbers)), task=TASK)


def test_balanced_weights_are_examples_without_a_label_over_those_with_it() -> None:
    examples = LabeledTexts(EncodedText({}, np.zeros(5), np.zeros(5)), Ragged([[0], [0, 1], [0], [], [1, 0, 2]]))
    task = MultiLabelClassification(NONE, ("a", "b", "c", "d"), 8)
    weights = task.compute_balanced_weights(examples, np.array([0, 1, 2, 3]))
    assert weights.tolist() == pytest.approx([1 / 3, 3.0, 1.0, 1.0])


def test_metrics_are_scikit_learns() -> None:
    rng = np.random.default_rng(2)
    truth = (rng.random((9, 4)) < 0.4).astype(np.uint8)
    truth[:, 2] = 0  # a label without examples, which counts in the mean
    logits = torch.from_numpy(rng.normal(size=(9, 4))).float()
    task = MultiLabelClassification(NONE, ("a", "b", "c", "d"), 8, threshold=0.7)
    text = EncodedText({}, np.arange(9), np.ones(9, np.int64))
    examples = LabeledTexts(text, Ragged([np.flatnonzero(row).tolist() for row in truth]))
    chosen, indices = [0, 3, 4, 7, 8], [8, 3, 0, 4, 7]
    guess = (logits[indices].sigmoid() > 0.7).numpy()
    scores = task.compute_metrics(logits[indices], examples, indices)
    assert scores["micro_f1"] == pytest.approx(f1_score(truth[indices], guess, average="micro"))
    assert scores["macro_f1"] == pytest.approx(f1_score(truth[indices], guess, average="macro", zero_division=0))
    assert scores["subset_accuracy"] == pytest.approx(accuracy_score(truth[indices], guess))
    assert scores == pytest.approx(task.compute_metrics(logits[chosen], examples, chosen))
    assert task.decode_predictions(torch.tensor([[2.0, 0.0, 3.0, -1.0], [0.0] * 4])) == ["a, c", ""]
    assert task.postprocess(torch.tensor([[2.0, 0.0, 3.0, -1.0]]))[0] == [
        ("c", pytest.approx(0.95257, abs=1e-5)),
        ("a", pytest.approx(0.88080, abs=1e-5)),
    ]


def test_the_export_is_a_stock_classifier_with_equal_logits_and_loss(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_topics.settings(
        tiny_folder,
        tmp_path,
        federation={"rounds": 3},
        training={"lr": 0.02, "local_steps": 25, "batch_size": 8},
        evaluation={"every": 3},
        engine={"name": "batched", "clients_per_pass": 3},
    )
    report = fedspan.run({**values, "task_options": {"threshold": 0.4}}, tmp_path / "run")
    assert report.metric == "micro_f1"
    fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    kind = "multi_label_classification"
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        tiny_folder / "bert", num_labels=3, problem_type=kind
    )
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.problem_type == kind
    served = load_served(tmp_path / "run")
    rows = load(DataConfig(train=str(tmp_path / "topics.jsonl"), test_fraction=0), task=TASK).train
    examples = served.task.encode(rows)
    expected = served.compute_predictions(examples)
    batch = served.task.collate(examples, range(len(examples)), torch.device("cpu"))
    for model in (peft.PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")), merged):
        with torch.no_grad():
            output = model.eval()(**batch)
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
        loss = served.task.compute_metrics(expected, examples, range(len(examples)))["loss"]
        assert float(output.loss) == pytest.approx(loss, rel=1e-5)
    answers = fedspan.predict(tmp_path / "run", rows["text"][:5])
    probabilities = expected[:5].sigmoid().tolist()
    for answer, row in zip(answers, probabilities, strict=True):
        pairs = zip(tiny_topics.LABELS, row, strict=True)
        assert dict(answer) == pytest.approx({label: value for label, value in pairs if value > 0.4})
    # The random encoder generalizes little; what it was trained on, it has learnt.
    measured = fedspan.evaluate(tmp_path / "run", data=str(tmp_path / "topics.jsonl"))
    assert measured["examples"] == 84
    assert measured["micro_f1"] > 0.75


def test_init_prefers_a_plain_label_to_lists(tmp_path: Path) -> None:
    rows = [
        {"text": f"word{at} word", "label": "ham" if at % 2 else "spam", "tags": [["a"], ["b"], ["a", "b"]][at % 3]}
        for at in range(40)
    ]
    written = write_starter_config(save(tmp_path / "a.jsonl", rows), tmp_path / "a.yaml")
    config = written.config
    assert (config.task, config.data.label) == ("sequence-classification", "label")
    assert any("--task multi-label-classification --label tags" in finding for finding in written.findings)
    boxes = [
        {"text": row["text"], "group": row["label"], "bbox": [[1], [3], [1, 3]][at % 3]} for at, row in enumerate(rows)
    ]
    written = write_starter_config(save(tmp_path / "b.jsonl", boxes), tmp_path / "b.yaml")
    assert written.config.data.label == "group"


def test_init_infers_lists_of_labels(tmp_path: Path) -> None:
    path = tiny_topics.save_topics(tmp_path / "topics.jsonl")
    written = write_starter_config(path, tmp_path / "a.yaml")
    assert written.config.task == "multi-label-classification"
    assert (written.config.data.text, written.config.data.label) == ("text", "labels")
    assert written.config.partition.column == "site"
    separated = tmp_path / "topics.csv"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [f"{row['text']},{'|'.join(row['labels'])}" for row in rows]
    separated.write_text("\n".join(["message,kinds", *lines]))
    written = write_starter_config(separated, tmp_path / "b.yaml")
    assert written.config.task == "multi-label-classification"
    assert (written.config.data.text, written.config.data.label) == ("message", "kinds")
    # One label for each text, in a list or not, is classification.
    single = [{"text": row["text"], "label": [tiny.LABELS[at % 3]]} for at, row in enumerate(rows)]
    written = write_starter_config(save(tmp_path / "single.jsonl", single), tmp_path / "c.yaml")
    assert written.config.task == "sequence-classification"


def test_columns_of_labels_are_read_in_evaluations_in_either_form(tiny_folder: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in tiny_topics.save_topics(tmp_path / "t.jsonl").read_text().splitlines()]
    flags = [
        {"text": record["text"], **{label: int(label in record["labels"]) for label in tiny_topics.LABELS}}
        for record in records
    ]
    train = save(tmp_path / "flags.jsonl", flags)
    values = tiny_topics.settings(tiny_folder, tmp_path, federation={"rounds": 1})
    values["data"] = {"train": train, "label_columns": [*tiny_topics.LABELS]}
    values["partition"] = {"partitioner": "iid", "clients": 3}
    fedspan.run(values, tmp_path / "run")
    expected = fedspan.evaluate(tmp_path / "run", data=flags)
    assert expected["examples"] == len(records)
    assert fedspan.evaluate(tmp_path / "run", data=records, label="labels") == pytest.approx(expected)
    named = f"data.label_columns=[{', '.join(tiny_topics.LABELS)}]"
    fedspan.export(tmp_path / "run", tmp_path / "out")
    assert fedspan.evaluate(tmp_path / "out", data=flags, overrides=[named]) == pytest.approx(expected)
