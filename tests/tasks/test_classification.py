"""Sequence classification and regression: encoding, weights, smoothing, losses, metrics, a run from pairs to PEFT."""

import csv
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.config.rates import get_training_defaults
from fedspan.data import PartitionConfig
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from fedspan.tasks import causal, encoding, registry
from fedspan.tasks.causal import CausalLM
from fedspan.tasks.classification import SEQUENCE_CLASSIFICATION, SequenceClassification
from fedspan.tasks.encoding import EncodedText, Ragged
from fedspan.tasks.losses import CLASS_WEIGHTS, SMOOTHING
from fedspan.tasks.multi_label import MultiLabelClassification
from fedspan.tasks.regression import Regression
from fedspan.tasks.single_label import compute_class_offsets, compute_class_weights
from fedspan.tasks.task import get_labels
from helpers import tiny, tiny_decoders
from helpers.fixed_logits import Fixed
from helpers.refusals import refused

CPU = torch.device("cpu")
TEXTS = ["lab1 word2", "billing3 word1 unheard word5 word6", "symptom2"]


@pytest.fixture
def task(prepared: Prepared) -> SequenceClassification:
    return SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)


@pytest.fixture
def encoded(task: SequenceClassification) -> EncodedText:
    return task.encode(datasets.Dataset.from_dict({"text": TEXTS, "label": [2, 1, 3]}))


@pytest.mark.parametrize("pairs", [False, True])
def test_batches_are_those_of_the_tokenizer_s_own_padding(task: SequenceClassification, pairs: bool) -> None:
    columns = {"text": TEXTS, "label": [2, 1, 3], **({"text_pair": TEXTS[::-1]} if pairs else {})}
    encoded, rows = task.encode(datasets.Dataset.from_dict(columns)), [2, 0, 0, 1]
    made = dict(task.collate(encoded, rows, CPU))
    chosen = {key: [values[row] for row in rows] for key, values in encoded.encodings.items()}
    wanted = task.tokenizer.pad(chosen, padding_side="right", return_attention_mask=True, return_tensors="pt")
    assert torch.equal(made.pop("labels"), torch.tensor([3, 2, 2, 1]))
    assert made.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(made[key], value)
        assert made[key].dtype == value.dtype


def test_texts_are_encoded_once_and_cut(task: SequenceClassification, encoded: EncodedText) -> None:
    """<s>, words, </s>, at most 5 tokens; an unheard word becomes <unk> (1)."""
    vocabulary = task.tokenizer.get_vocab()
    assert list(encoded.encodings["input_ids"]) == [
        [2, vocabulary["lab1"], vocabulary["word2"], 3],
        [2, vocabulary["billing3"], vocabulary["word1"], 1, 3],
        [2, vocabulary["symptom2"], 3],
    ]
    assert "attention_mask" not in encoded.encodings
    assert encoded.lengths.tolist() == [4, 5, 3]
    assert encoded.labels.tolist() == [2, 1, 3]
    assert len(encoded) == 3


def test_pairs_are_encoded_together(task: SequenceClassification) -> None:
    data = {"text": ["lab1", "lab2"], "text_pair": ["word1", "word2 word3"], "label": [0, 1]}
    vocabulary = task.tokenizer.get_vocab()
    ids = task.encode(datasets.Dataset.from_dict(data)).encodings["input_ids"]
    assert ids[0] == [2, vocabulary["lab1"], 3, vocabulary["word1"], 3]
    assert len(ids[1]) == 5


def test_the_loss_is_the_mean_cross_entropy_in_float32(task: SequenceClassification, encoded: EncodedText) -> None:
    logits = torch.tensor([[0.1, 0.2, 3.0, -1.0], [2.0, 0.0, 0.5, 0.25]], dtype=torch.bfloat16)
    model = Fixed(logits)
    loss = task.compute_loss(model, task.collate(encoded, [0, 1], CPU))
    wide = logits.double()
    expected = -(wide.log_softmax(1)[0, 2] + wide.log_softmax(1)[1, 1]) / 2
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert set(model.asked) == {"input_ids", "attention_mask"}  # the model is not shown the labels


def test_glue_s_metrics(prepared: Prepared) -> None:
    """Matthews correlation and F1 of the second of two labels, from the counts by hand."""
    task = SequenceClassification(prepared.task.tokenizer, ("no", "yes"), 5)
    truth, guess = [1, 1, 1, 1, 0, 0, 0, 1], [1, 1, 0, 1, 0, 1, 0, 0]
    examples = task.encode(datasets.Dataset.from_dict({"text": ["lab1"] * 8, "label": truth}))
    logits = torch.eye(2)[torch.tensor(guess)]
    metrics = task.compute_metrics(logits, examples, list(range(8)))
    tp, fp, fn, tn = 3, 1, 2, 2
    assert metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    matthews = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert metrics["matthews"] == pytest.approx(matthews)
    assert task.compute_metrics(torch.eye(2)[[1] * 8], examples, list(range(8)))["matthews"] == 0.0
    assert task.decode_predictions(logits)[:3] == ["yes", "yes", "no"]
    assert task.decode_targets(examples, [0, 4]) == ["yes", "no"]


def test_logits_are_adjusted_to_the_classes_of_a_client() -> None:
    offsets = compute_class_offsets(np.array([2, 0, 2, 2]), 4, 0.5)
    assert offsets.tolist() == pytest.approx([0.5 * np.log(0.25), -np.inf, 0.5 * np.log(0.75), -np.inf])
    assert offsets.dtype == torch.float32
    assert compute_class_offsets(np.array([1, 1]), 2, 1.0).tolist() == [-np.inf, 0.0]


NONE: Any = None


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("kind", [SequenceClassification, MultiLabelClassification])
def test_losses_with_weights_are_torchs(kind: Any, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "predict", lambda self, model, batch: batch["logits"])
    rng = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(7, 3, generator=rng), torch.tensor([2, 0, 1, 1, 0, 2, 1])
    weights_CK = torch.tensor([[0.5, 2.0, 1.0], [1.0, 4.0, 0.25]])
    owners = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    targets, losses = labels, [nn.CrossEntropyLoss(weights, label_smoothing=smoothing) for weights in weights_CK]
    if kind is MultiLabelClassification:
        labels = (torch.rand(7, 3, generator=rng) > 0.6).float()
        targets = torch.where(labels > 0, 1 - smoothing / 2, smoothing / 2)
        losses = [nn.BCEWithLogitsLoss(pos_weight=weights) for weights in weights_CK]
    task = kind(NONE, ("a", "b", "c"), 8)
    smoothing_B = torch.full((7,), smoothing, dtype=torch.float64)
    batch = {"logits": logits, "labels": labels, CLASS_WEIGHTS: weights_CK[owners], SMOOTHING: smoothing_B}
    mask_CB = (owners == torch.arange(2)[:, None]).float()
    expected = [loss(logits[owners == at], targets[owners == at]) for at, loss in enumerate(losses)]
    torch.testing.assert_close(task.compute_client_losses(NONE, batch, mask_CB), torch.stack(expected))
    own = {name: value[:3] for name, value in batch.items()}
    torch.testing.assert_close(task.compute_loss(NONE, own), expected[0])


def test_balanced_weights_are_scikit_learns() -> None:
    labels = np.array([0, 2, 2, 2, 3, 0, 2])
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels)
    weights = compute_class_weights(labels, 5)
    assert weights[[0, 2, 3]].tolist() == pytest.approx(expected.tolist())
    assert weights[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("engine", [{"name": "loop"}, {"name": "batched", "clients_per_pass": 2, "workers": 1}])
def test_balanced_weights_are_not_computed_again_for_each_batch(
    engine: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(labels: np.ndarray, classes: int) -> torch.Tensor:
        calls.append(len(labels))
        return compute_class_weights(labels, classes)

    monkeypatch.setattr("fedspan.training.services.compute_class_weights", count)
    counts: list[int] = []
    for epochs in (1, 3):
        calls.clear()
        training = {"class_weights": "balanced", "local_epochs": epochs}
        values = tiny.settings(tiny_folder, federation={"rounds": 1}, training=training)
        tiny.final_tensors(prepare(parse_config({**values, "engine": engine})))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_what_does_not_apply_is_refused(tiny_folder: Path) -> None:
    with refused("training.class_weights.labs"):
        prepare(parse_config(tiny.settings(tiny_folder, training={"class_weights": {"labs": 2.0}})))
    for task, more, reason in (
        ("regression", {}, "regression has no classes"),
        ("text-embedding", {}, "text-embedding has no classes"),
        ("sequence-classification", {"logit_adjustment": 1.0}, r"training\.logit_adjustment corrects for shares"),
    ):
        training = {"label_smoothing": 0.1, **more}
        with pytest.raises(FedspanError, match=rf"`training\.label_smoothing`: {reason}"):
            parse_config(tiny.settings(tiny_folder, training=training) | {"task": task})
    privacy = {"mechanism": "dp-sgd", "noise": 1.0, "clip": 0.5}
    for training in ({"label_smoothing": 0.1}, {"class_weights": "balanced"}):
        with pytest.raises(FedspanError, match="dp-sgd computes each example's loss without it"):
            parse_config(tiny.settings(tiny_folder, training=training, privacy=privacy))


class Squared(SequenceClassification):
    """A task of a user's own that computes another loss, and says so."""

    loss_options = ()

    def compute_loss(self, model: Any, batch: Any) -> torch.Tensor:
        probabilities = self.predict(model, batch).softmax(1)
        return (probabilities - nn.functional.one_hot(batch["labels"], len(self.labels))).square().mean()


OPTIONS = [("logit_adjustment", 1.0), ("class_weights", "balanced"), ("label_smoothing", 0.9)]


@pytest.mark.parametrize(("option", "value"), OPTIONS)
@pytest.mark.parametrize("declared", [(), SEQUENCE_CLASSIFICATION.loss_options])
def test_a_task_whose_loss_does_not_take_an_option_refuses_it_before_training(
    declared: tuple[Any, ...], option: str, value: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its definition was copied from one that takes them."""
    definition = replace(
        SEQUENCE_CLASSIFICATION,
        name="squared",
        loss_options=declared,
        build=lambda tokenizer, settings, data: Squared(tokenizer, settings.labels, settings.max_length),
    )
    monkeypatch.setitem(registry._tasks, "squared", definition)
    values = tiny.settings(tiny_folder, training={option: value}) | {"task": "squared"}
    with refused(f"training.{option}", "does not take it"):
        prepare(parse_config(values))
    prepare(parse_config(tiny.settings(tiny_folder) | {"task": "squared"}))
    assert get_training_defaults("squared", "fedit").logit_adjustment == (1.0 if declared else 0.0)


@dataclass(frozen=True)
class Unlabeled:
    """Examples of a user's own that name their labels otherwise."""

    text: Any

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> np.ndarray:
        return self.text.lengths


class Renamed(SequenceClassification):
    """A task of a user's own whose examples have no ``labels``."""

    def encode(self, dataset: Any) -> Any:
        return Unlabeled(super().encode(dataset))

    def collate(self, examples: Any, indices: Any, device: torch.device) -> dict[str, torch.Tensor]:
        return super().collate(examples.text, indices, device)


def test_examples_without_labels_are_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = replace(
        SEQUENCE_CLASSIFICATION,
        name="renamed",
        build=lambda tokenizer, settings, data: Renamed(tokenizer, settings.labels, settings.max_length),
    )
    monkeypatch.setitem(registry._tasks, "renamed", definition)
    values = tiny.settings(tiny_folder, training={"class_weights": "balanced"}) | {"task": "renamed"}
    with refused("task", "Unlabeled, the encoded examples of this task, has no array `labels`"):
        tiny.final_tensors(prepare(parse_config(values)))
    flipped = {
        **tiny.settings(tiny_folder),
        "task": "renamed",
        "simulation": {"faults": {"kind": "label-flip", "share": 0.5}},
    }
    with refused("task", "has no array `labels`"):
        prepare(parse_config(flipped))


ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6)


@given(st.lists(ROWS, max_size=4))
def test_rows_come_back(parts: list[list[list[int]]]) -> None:
    made, rows = Ragged.join([Ragged(part) for part in parts]), [row for part in parts for row in part]
    assert list(made) == rows
    assert made.lengths.tolist() == [len(row) for row in rows]
    assert made[1:-1] == rows[1:-1]
    with pytest.raises(IndexError):
        made[len(rows)]


def test_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        Ragged([[2**31]])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, prepared: Prepared) -> None:
    task = SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)
    texts = [f"lab{number % 8} " * (number % 4) + "word1" for number in range(9)]
    data = datasets.Dataset.from_dict({"text": texts, "text_pair": texts[::-1], "label": [0] * 9})
    whole = task.encode(data)
    monkeypatch.setattr(encoding, "CHUNK", 4)
    parts = task.encode(data)
    assert {key: list(rows) for key, rows in parts.encodings.items()} == {
        key: list(rows) for key, rows in whole.encodings.items()
    }
    assert parts.lengths.tolist() == whole.lengths.tolist()


def test_chunks_of_prompts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    task = CausalLM(tiny_decoders.tokenizer(pads=True), 6)
    texts = ["Q: " + "b0 " * number for number in range(1, 8)]
    data = datasets.Dataset.from_dict({"text": texts, "answer": [text[::-1] for text in texts]})
    whole = task.encode(data)
    monkeypatch.setattr(causal, "CHUNK", 3)
    parts = task.encode(data)
    assert list(parts.ids) == list(whole.ids)
    assert parts.starts.tolist() == whole.starts.tolist()
    assert (parts.answers, parts.truncated_prompts, parts.truncated_answers) == (
        whole.answers, whole.truncated_prompts, whole.truncated_answers,
    )  # fmt: skip
    assert parts.truncated_prompts > 0
    strict = CausalLM(tiny_decoders.tokenizer(pads=True), 6, refuse_long=True)
    with refused("model.max_length"):
        strict.encode(datasets.Dataset.from_dict({"text": texts, "answer": ["c0 " * at for at in range(1, 8)]}))


def test_ids_take_no_more_bytes_than_they_need() -> None:
    rows = [[0] * 1000, [255], [70_000], [-100, 3]]
    made = Ragged.join([Ragged([row]) for row in rows])
    assert [made[at] for at in range(4)] == rows
    assert made.pad([1, 3], -1).tolist() == [[255, -1], [-100, 3]]
    assert Ragged([[0] * 1000])._ids.nbytes == 1000


@pytest.mark.parametrize("labels", [np.array([2, 0, 1]), np.array([0.5, -1.0, 3.0])], ids=["labels", "numbers"])
def test_labels_are_those_of_the_given_examples_in_their_order(labels: np.ndarray) -> None:
    found = get_labels(SimpleNamespace(labels=labels), np.array([2, 0]))
    assert found.dtype == labels.dtype
    assert found.tolist() == [labels[2], labels[0]]


@pytest.mark.parametrize("examples", [SimpleNamespace(), SimpleNamespace(labels=[2, 0, 1])], ids=["none", "a list"])
def test_examples_of_a_users_own_task_without_an_array_of_labels_are_refused(examples: SimpleNamespace) -> None:
    with refused("task", "SimpleNamespace, the encoded examples of this task, has no array `labels`"):
        get_labels(examples, np.array([0]))


@pytest.fixture
def regression(prepared: Prepared) -> Regression:
    return Regression(prepared.task.tokenizer, 8)


def test_the_loss_is_the_mean_squared_error_and_correlations_are_the_textbook_s(regression: Regression) -> None:
    truth, guess = [1.0, 2.0, 4.0, 3.5], [0.5, 2.5, 3.0, 9.0]
    examples = regression.encode(datasets.Dataset.from_dict({"text": ["lab1"] * 4, "target": truth}))
    loss = regression.compute_loss(Fixed(torch.tensor(guess)[:, None]), regression.collate(examples, [0, 1, 2, 3], CPU))
    x, y = np.array(guess), np.array(truth)
    assert float(loss) == pytest.approx(np.mean((x - y) ** 2))
    metrics = regression.compute_metrics(torch.tensor(guess)[:, None], examples, [0, 1, 2, 3])
    assert metrics["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = np.corrcoef([0, 1, 2, 3], [0, 1, 3, 2])[0, 1]
    assert metrics["spearman"] == pytest.approx(ranks)
    assert metrics["loss"] == pytest.approx(np.mean((x - y) ** 2))
    assert regression.decode_predictions(torch.tensor(guess)[:, None]) == ["0.500", "2.500", "3.000", "9.000"]
    assert regression.decode_targets(examples, [2, 0]) == ["4.000", "1.000"]


@pytest.mark.parametrize(("guess", "truth"), [([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0]), ([1.0, 2.0], [3.0, 3.0])])
def test_a_correlation_without_a_value_is_left_out(
    guess: list[float], truth: list[float], regression: Regression
) -> None:
    examples = regression.encode(datasets.Dataset.from_dict({"text": ["lab1"] * len(truth), "target": truth}))
    assert set(regression.compute_metrics(torch.tensor(guess)[:, None], examples, list(range(len(truth))))) == {"loss"}


def pairs(folder: Path) -> Path:
    """120 pairs; the score, 0 to 5, is how many of five words they share."""
    rng, path = random.Random(1), folder / "pairs.tsv"
    words = [f"word{number}" for number in range(12)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["one", "other", "score", "site"])
        for number in range(120):
            one, shared = rng.sample(words, 5), rng.randint(0, 5)
            other = rng.sample(one, shared) + rng.sample([w for w in words if w not in one], 5 - shared)
            writer.writerow([" ".join(one), " ".join(other), shared / 1.0, f"site{number % 3}"])
    return path


def settings(tiny_folder: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    values = tiny.settings(tiny_folder, **changes)
    data = {"train": str(pairs(folder)), "text": "one", "text_pair": "other", "label": "score", "test_fraction": 0.2}
    return {**values, "task": "regression", "data": data}


def test_a_run_of_regression_on_pairs(tiny_folder: Path, tmp_path: Path) -> None:
    training = {"lr": 0.01, "local_steps": None, "batch_size": 8, "local_epochs": 4}
    engine = {"name": "batched", "clients_per_pass": 4}
    federation = {"rounds": 2, "clients_per_round": None}
    values = settings(tiny_folder, tmp_path, federation=federation, training=training, engine=engine)
    report = fedspan.run(values, tmp_path / "run")
    assert (report.task, report.metric) == ("regression", "pearson")
    assert set(report.scores["test"]) == {"loss", "pearson", "spearman"}
    assert report.scores["clients"]["worst"].keys() == {"client", "pearson"}
    assert report.scores["test"]["loss"] < np.var([0, 1, 2, 3, 4, 5]) + 6.25  # that of answering 0 always
    measured = fedspan.evaluate(tmp_path / "run")
    for name, value in report.scores["test"].items():
        assert measured[name] == pytest.approx(value, rel=1e-4)
    numbers = fedspan.predict(tmp_path / "run", [("word1 word2", "word1 word2"), ("word1", "word5")])
    assert all(isinstance(number, float) for number in numbers)


def test_the_best_round_may_be_chosen_by_another_metric(tiny_folder: Path, tmp_path: Path) -> None:
    values = settings(tiny_folder, tmp_path, evaluation={"metric": "loss"})
    made = prepare(parse_config(values))
    assert made.task.metric == "loss"


@pytest.mark.parametrize("partitioner", ["dirichlet", "pathological"])
def test_numbers_are_divided_by_ranges(partitioner: str) -> None:
    """The ranges, of as many examples each, are what labels are to a division of classes."""
    numbers = np.random.default_rng(0).normal(size=400)
    ranks = np.argsort(np.argsort(numbers))
    config = PartitionConfig.model_validate({"partitioner": partitioner, "clients": 8, "alpha": 0.3, "bins": 5})
    found = partition(datasets.Dataset.from_dict({"target": numbers}), config, 7)
    classes = partition(datasets.Dataset.from_dict({"label": ranks // 80}), config.model_copy(update={"bins": None}), 7)
    assert found.fingerprint == classes.fingerprint
    tied = datasets.Dataset.from_dict({"target": [1.0] * 300 + [2.0] * 100})
    with refused("partition.bins"):
        partition(tied, config, 7)


def test_what_is_no_regression_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    values = settings(tiny_folder, tmp_path)
    dirichlet = {"partitioner": "dirichlet", "clients": 3}
    with refused("partition.partitioner") as caught:
        prepare(parse_config({**values, "partition": dirichlet}))
    assert (caught.value.field, caught.value.value) == ("partition.partitioner", "dirichlet")
    labeled = tiny.settings(tiny_folder, partition={**dirichlet, "column": None, "bins": 4})
    with refused("partition.bins"):
        prepare(parse_config(labeled))
    (tmp_path / "pairs.tsv").write_text("one\tother\tscore\tsite\na\tb\t3,500\tx\n")
    with refused("data.label"):
        prepare(parse_config({**values, "data": {**values["data"], "train": str(tmp_path / "pairs.tsv")}}))
