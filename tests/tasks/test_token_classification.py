"""Token classification: labels at first pieces, columns of lists, truncation, predictions, and inference of columns."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Split, Whitespace
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

import fedspan
from fedspan.config.starter import write_starter_config
from fedspan.data.config import DataConfig
from fedspan.data.loading import load
from fedspan.tasks.losses import CLASS_WEIGHTS, SMOOTHING
from fedspan.tasks.registry import get_task
from fedspan.tasks.settings import TaskSettings
from fedspan.tasks.token_classification import TokenClassification
from helpers import tiny, tiny_tags
from helpers.refusals import refused

LABELS = ("O", "B-Drug", "I-Drug")
TASK = get_task("token-classification").columns


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "as", "##pir", "##in", "helps", "a", "lot"]
    made = Tokenizer(WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def rows(*sentences: tuple[str, list[int]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"tokens": [text.split() for text, _ in sentences], "labels": [labels for _, labels in sentences]}
    )


def test_first_pieces_carry_the_labels(tokenizer: Any) -> None:
    task = TokenClassification(tokenizer, LABELS, 16)
    examples = task.encode(rows(("aspirin helps", [1, 0]), ("a lot aspirin", [0, 0, 1])))
    batch = task.collate(examples, [1, 0], torch.device("cpu"))
    ignored = -100  # special tokens and further pieces, and the padding of the shorter sentence
    assert batch["labels"].tolist() == [
        [ignored, 0, 0, 1, ignored, ignored, ignored],
        [ignored, 1, ignored, ignored, 0, ignored, ignored],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [7, 6]
    assert examples.lengths.tolist() == [6, 7]


@pytest.mark.parametrize("kind", ["roberta", "fast"])
def test_byte_level_tokenizers_keep_the_spaces_between_words(kind: str, tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet()), "ab", "Ġa", "Ġab"]
    vocabulary, merges = {piece: at for at, piece in enumerate(pieces)}, [("a", "b"), ("Ġ", "a"), ("Ġ", "ab")]
    if kind == "roberta":
        own: Any = transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)
    else:
        backend = Tokenizer(BPE(vocabulary, merges))
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        own = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    prepared = get_task("token-classification").get_processor(own)
    words, text = ["ab", "a", "ab"], "ab a ab"
    assert prepared.tokenize(words, is_split_into_words=True) == prepared.tokenize(text) == ["Ġab", "Ġa", "Ġab"]
    assert own.tokenize(text) == ["ab", "Ġa", "Ġab"]  # the caller's stays as it was
    prepared.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).tokenize(text) == ["Ġab", "Ġa", "Ġab"]


def test_a_tokenizer_that_glues_words_is_refused() -> None:
    backend = Tokenizer(BPE({piece: at for at, piece in enumerate(["<unk>", *sorted(ByteLevel.alphabet())])}, []))
    backend.pre_tokenizer = PreTokenizers([Split(" ", "isolated"), ByteLevel(add_prefix_space=False)])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with refused("model.name", "as if there were no spaces between them"):
        get_task("token-classification").get_processor(own)


def test_the_loss_is_transformers_own(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    model = transformers.BertForTokenClassification(config).eval()
    task = TokenClassification(tokenizer, LABELS, 16)
    examples = task.encode(rows(("aspirin helps", [1, 2]), ("a lot aspirin", [0, 0, 1])))
    batch = task.collate(examples, [0, 1], torch.device("cpu"))
    known = ("input_ids", "token_type_ids", "attention_mask", "labels")
    output = model(**{key: batch[key] for key in known if key in batch})
    expected = output.loss
    torch.testing.assert_close(task.compute_loss(model, batch), expected)
    smoothing = {SMOOTHING: torch.full((2,), 0.2, dtype=torch.float64)}
    smoothed = task.compute_loss(model, {**batch, **smoothing})
    torch.testing.assert_close(smoothed, LabelSmoother(0.2)(output, batch["labels"]))
    weights_CK = torch.tensor([[0.5, 2.0, 1.0], [3.0, 1.0, 0.25]])  # a client for each sentence
    weighted = {**batch, CLASS_WEIGHTS: weights_CK, **smoothing}
    losses = [
        nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)(logits, labels)
        for weights, logits, labels in zip(weights_CK, output.logits, batch["labels"], strict=True)
    ]
    torch.testing.assert_close(task.compute_client_losses(model, weighted, torch.eye(2)), torch.stack(losses))
    predictions = task.predict(model, batch)
    assert predictions.shape == (2, 2 + 16)
    assert float((predictions[:, 0].sum() / predictions[:, 1].sum()).detach()) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_words_that_were_cut_count_as_outside(tokenizer: Any) -> None:
    task = TokenClassification(tokenizer, LABELS, 5)
    examples = task.encode(rows(("a lot helps aspirin", [0, 0, 0, 1]), ("a lot", [0, 1])))
    assert task.describe_examples(examples) == ("1 of 2 sentences lost words: model.max_length is 5 pieces",)
    predictions = torch.tensor([[1.0, 3, 0, 0, 0, -1, -1], [1.0, 2, 0, 1, -1, -1, -1]])
    scores = task.compute_metrics(predictions, examples, [0, 1])
    assert scores["entity_recall"] == 0.5  # the drug that was cut is missed
    assert scores["entity_precision"] == 1.0
    assert scores["token_accuracy"] == pytest.approx(5 / 6)
    assert scores["loss"] == pytest.approx(2 / 5)
    assert task.decode_predictions(predictions) == ["O O O", "O B-Drug"]
    assert task.decode_targets(examples, [0, 1]) == ["O O O B-Drug", "O B-Drug"]


def test_lists_of_named_classes_are_tags(tmp_path: Path) -> None:
    feature = datasets.List(datasets.ClassLabel(names=["O", "I-Gene", "B-Gene"]))
    made = datasets.Dataset.from_dict({"words": [["a", "b", "c"], ["d"]], "ner": [[1, 1, 0], [2]]}).cast_column(
        "ner", feature
    )
    made.to_parquet(tmp_path / "a.parquet")
    config = DataConfig(train=str(tmp_path / "a.parquet"), label="ner", roles={"tokens": "words"}, test_fraction=0)
    data = load(config, task=TASK)
    assert data.labels == ("O", "B-Gene", "I-Gene")
    assert data.train["labels"][:] == [[1, 2, 0], [1]]


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "data.label", "2 words and 1 tags"),
        ({"tokens": ["a"], "tags": ["Drug"]}, "data.label", "has the tag 'Drug'"),
        ({"tokens": "a", "tags": "O"}, "data.roles.tokens", "holds string, not lists of texts"),
        ({"tokens": [], "tags": []}, "data.train", "has no texts"),
        ({"tokens": ["a"], "labels": ["O"]}, "data.label", "no column named 'tags'"),
    ],
)
def test_mistakes_in_rows_are_named(row: dict[str, Any], field: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = {"tokens": ["a", "b"], "tags": ["B-Drug", "O"]}
    content = [row] if "labels" in row or isinstance(row["tokens"], str) else [good, row]
    path.write_text("\n".join(map(json.dumps, content)))
    with refused(field, expected):
        load(DataConfig(train=str(path), test_fraction=0), task=TASK)


def test_init_infers_words_and_tags(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    sentences = [{"words": ["take", "aspirin"], "ner": ["O", "B-Drug"], "clinic": f"c{at % 3}"} for at in range(30)]
    path.write_text("\n".join(map(json.dumps, sentences)))
    written = write_starter_config(path, tmp_path / "a.yaml")
    assert written.config.task == "token-classification"
    assert (written.config.data.roles, written.config.data.label) == ({"tokens": "words"}, "ner")
    assert written.config.partition.column == "clinic"
    conll = tmp_path / "reports.tsv"
    conll.write_text("take\tO\naspirin\tB-Drug\n\n" * 30)
    assert write_starter_config(conll, tmp_path / "b.yaml").config.task == "token-classification"


def test_entities_are_predicted_for_texts(tiny_folder: Path, tmp_path: Path) -> None:
    training = {"lr": 0.03, "local_steps": 15, "batch_size": 8}
    values = tiny_tags.settings(
        tiny_folder,
        tmp_path,
        federation={"rounds": 6},
        training=training,
        partition={"validation": 0.0},
        evaluation={"every": 6},
        engine={"name": "batched", "clients_per_pass": 3},
    )
    report = fedspan.run(values, tmp_path / "run")
    assert report.metric == "entity_f1"
    # The random encoder generalizes little; what it was trained on, it has learnt.
    measured = fedspan.evaluate(tmp_path / "run", data=str(tmp_path / "sentences.jsonl"))
    assert measured["examples"] == 84
    assert measured["entity_f1"] > 0.3
    words = ["word1", "admin3", "word2"]
    (from_text, from_words) = fedspan.predict(tmp_path / "run", [" ".join(words), tuple(words)])
    assert from_text == from_words
    assert all(isinstance(text, str) and kind in tiny.LABELS for text, kind in from_text)


def test_columns_of_the_run_are_read_in_evaluations(tiny_folder: Path, tmp_path: Path, call: Any) -> None:
    tiny_tags.save_sentences(tmp_path / "sentences.jsonl")
    records = [json.loads(line) for line in (tmp_path / "sentences.jsonl").read_text().splitlines()]
    renamed = [{"words": record["tokens"], "ner": record["tags"], "site": record["site"]} for record in records]
    for name, rows in (("renamed", renamed), ("default", records)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny_tags.settings(tiny_folder, tmp_path, federation={"rounds": 1})
    values["data"] = {"train": str(tmp_path / "renamed.jsonl"), "roles": {"tokens": "words"}, "label": "ner"}
    fedspan.run(values, tmp_path / "run")
    expected = fedspan.evaluate(tmp_path / "run", data=renamed)
    assert expected["examples"] == len(records)
    options = ("--role", "tokens=tokens", "--set", "data.label=tags", "--json")
    result = call("evaluate", tmp_path / "run", "--data", tmp_path / "default.jsonl", *options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == pytest.approx(expected)
    result = call("evaluate", tmp_path / "run", "--role", "tokens")
    assert "`--role`" in result.output


@pytest.mark.slow
def test_it_is_planned_and_timed(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_tags.settings(tiny_folder, tmp_path, data={"labels": ["O", "B-admin", "I-admin", "B-lab", "I-lab"]})
    plan = fedspan.plan(values, clients=3, examples=60, length=6, device="here")
    assert plan.client.base > 0
    assert plan.compute.length == 6


def test_partitions_are_shown_without_labels(tiny_folder: Path, tmp_path: Path, call: Any) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(yaml.safe_dump(tiny_tags.settings(tiny_folder, tmp_path)))
    result = call("partition", config, "--json", "--png", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    content = json.loads(result.output)
    assert content["labels"] == []
    assert [client["id"] for client in content["clients"]] == ["east", "north", "west"]


def test_columns_of_broken_images_are_no_words() -> None:
    broken = {"bytes": b"no picture", "path": None}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    made = datasets.Dataset.from_dict({"image": [broken] * 3, "label": ["cat", "dog", "cat"]}, features=kinds)
    definition = get_task("token-classification")
    assert definition.infer_columns(made, {"text": None, "label": None, "answer": None, "by": None}) is None


@pytest.mark.parametrize("text", [None, 5, Path("a"), b"ab", {"a": 1}, ["a", 5]])
def test_inputs_that_are_neither_texts_nor_words_are_refused(text: Any) -> None:
    definition = get_task("token-classification")
    with refused("texts", "Expected texts, or lists of words"):
        definition.preprocess(TaskSettings(definition.name, LABELS, 8, "entity_f1"), ["a b", text])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["O", "S-Drug", "B-Drug", "I-Drug"], "no example has the label 'S-Drug'"),
        (["B-Drug", "I-Drug"], "the label 'O' is missing"),
    ],
)
def test_labels_of_other_schemes_are_refused(labels: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"tokens": ["a"], "tags": ["B-Drug"]}))
    with refused("data.labels", expected):
        load(DataConfig(train=str(tmp_path / "a.jsonl"), test_fraction=0, labels=labels), task=TASK)


def test_partitions_by_label_are_refused_without_other_tasks_advice(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_tags.settings(tiny_folder, tmp_path)
    values["partition"] = {"partitioner": "dirichlet", "clients": 3}
    with refused("partition.partitioner", "these examples have several labels each"):
        fedspan.run(values, tmp_path / "run")


def test_a_last_word_without_pieces_was_not_cut(tokenizer: Any) -> None:
    task = TokenClassification(tokenizer, LABELS, 16)
    assert task.describe_examples(task.encode(rows(("a lot", [0, 0])))) == ()
    blank = datasets.Dataset.from_dict({"tokens": [["a", " "]], "labels": [[0, 0]]})
    assert task.describe_examples(task.encode(blank)) == ()


def test_classes_are_those_of_the_words_that_the_loss_counts(tokenizer: Any) -> None:
    task = TokenClassification(tokenizer, LABELS, 4)
    examples = task.encode(rows(("aspirin helps", [1, 2]), ("a lot aspirin", [0, 0, 1]), ("aspirin", [1])))
    batch = task.collate(examples, [2, 1, 0], torch.device("cpu"))
    counted = batch["labels"][batch["labels"] != -100].tolist()
    assert len(counted) < 6  # a word is cut
    assert task.list_classes(examples, np.array([2, 1, 0])).tolist() == counted
