"""Token classification: a tag for each word of a sentence, such as names of diseases (named entity recognition).

The first piece of a word carries its label; further pieces, and special tokens, have none. Shapes: B sentences of a
batch, T pieces, W words, S labeled pieces of a batch, K labels, C clients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import sum_rows, to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns
from fedspan.data.config import DataConfig
from fedspan.data.conll import TAG
from fedspan.data.names import get_arrow_column, is_list
from fedspan.data.source import Source
from fedspan.errors import FedspanError
from fedspan.tasks.definition import InferredColumns, TaskDefinition
from fedspan.tasks.encoding import (
    EncodedText,
    Ragged,
    TextExamples,
    collate_texts,
    join_encodings,
    require_processor,
    split_rows,
)
from fedspan.tasks.entities import convert_to_iob2, find_entities, list_labels, score_entities
from fedspan.tasks.losses import (
    LossOption,
    compute_guess_bound,
    get_logits,
    select_inputs,
)
from fedspan.tasks.metrics import Metric
from fedspan.tasks.token_scores import IGNORED, TARGET_COUNTS, TokenTask, find_targets, select_targets

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_WORDS = "word_numbers"
"""Key of a batch's numbers of the words that its pieces begin, (B, T); -1 for other pieces."""
_SUMS = 2  # columns of a prediction: loss, labeled pieces; the words' labels follow


@dataclass(frozen=True)
class EncodedSentences(TextExamples):
    """Tokenized sentences with the labels of their words."""

    firsts: Ragged
    """Positions of the words' first pieces, ascending."""
    words: Ragged
    """Numbers of these words in their sentence."""
    labels: Ragged
    """Label indices of all words of each sentence, also of those that were cut."""


class TokenClassification(TokenTask):
    """Prediction of a tag for each word, with any Hugging Face token classifier.

    Args:
        labels: Tags by index, in IOB2.
        max_length: Maximum number of pieces of a sentence; words beyond it are cut, and predicted as outside.
    """

    loss_options: tuple[LossOption, ...] = ("label_smoothing", "class_weights")
    """Options of ``training`` that the loss takes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int, metric: str = "entity_f1"
    ) -> None:
        self.tokenizer = tokenizer
        self.labels = tuple(labels)
        self.max_length = max_length
        self.metric = metric

    def encode(self, dataset: datasets.Dataset) -> EncodedSentences:
        """Tokenize a data set once; its columns are ``tokens`` (words) and ``labels`` (indices, one for each word)."""
        require_processor(self.tokenizer, "texts")
        if not self.tokenizer.is_fast:
            expected = "a model with a fast tokenizer, which reports the words of its pieces"
            raise FedspanError("model.name", type(self.tokenizer).__name__, expected)
        firsts: list[list[int]] = []
        words: list[list[int]] = []
        encodings = join_encodings(self._tokenize(rows["tokens"], firsts, words) for rows in split_rows(dataset))
        lengths = encodings["input_ids"].lengths
        labels = Ragged(cast("list[list[int]]", dataset["labels"][:]))
        text = EncodedText(encodings, np.arange(len(lengths)), lengths)
        return EncodedSentences(text, Ragged(firsts), Ragged(words), labels)

    def _tokenize(self, sentences: list[list[str]], firsts: list[list[int]], words: list[list[int]]) -> Any:
        """Tokenize sentences, and append the positions of words' first pieces, and the words' numbers."""
        encoded = self.tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=self.max_length)
        for row in range(len(sentences)):
            numbers = encoded.word_ids(row)
            first_pieces = [
                (position, number)
                for position, number in enumerate(numbers)
                if number is not None and (position == 0 or numbers[position - 1] != number)
            ]
            firsts.append([position for position, _ in first_pieces])
            words.append([number for _, number in first_pieces])
        return encoded

    def collate(self, examples: EncodedSentences, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate sentences, padded to the longest of them: pieces, ``attention_mask``, and ``labels``, (B, T)."""
        rows = list(indices)
        batch = collate_texts(self.tokenizer, examples.text, rows, device)
        shape = tuple(batch["input_ids"].shape)
        labels_BT, numbers_BT = np.full(shape, IGNORED, np.int64), np.full(shape, -1, np.int64)
        for position, row in enumerate(rows):
            first_pieces, word_numbers = examples.firsts[row], examples.words[row]
            labels_BT[position, first_pieces] = np.asarray(examples.labels[row], np.int64)[word_numbers]
            numbers_BT[position, first_pieces] = word_numbers
        word_tensors = {"labels": torch.from_numpy(labels_BT), _WORDS: torch.from_numpy(numbers_BT)}
        counts_B = torch.from_numpy(examples.firsts.lengths[rows])
        return {
            **batch,
            **{key: to_device(value, device) for key, value in word_tensors.items()},
            TARGET_COUNTS: counts_B,
        }

    def list_classes(self, examples: EncodedSentences, indices: np.ndarray) -> np.ndarray:
        """Return the labels of the words of sentences that the loss counts, int64, (words,)."""
        words = examples.words.pad(indices.tolist(), -1)
        labels = examples.labels.pad(indices.tolist(), -1)
        return np.take_along_axis(labels, np.maximum(words, 0), axis=1)[words >= 0]

    def select_words(self, values_BTD: Tensor, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of the first pieces of each sentence's words, (words, D)."""
        return [values[words >= 0] for values, words in zip(values_BTD, batch[_WORDS], strict=True)]

    def compute_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (S, K) of the labeled pieces, their labels, and their sentences' numbers, (S,)."""
        logits_BTK = get_logits(model(**select_inputs(batch, _WORDS, TARGET_COUNTS)))
        return select_targets(logits_BTK, batch["labels"], batch[TARGET_COUNTS])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return each sentence's sum of losses, its labeled words, and the labels of its words, (B, 2 + max_length).

        Words without a piece of their own, and columns beyond the sentence, are -1.
        """
        logits_SK, targets_S, rows_S = self.compute_logits(model, batch)
        losses_S = F.cross_entropy(logits_SK, targets_S, reduction="none")
        count = len(batch["input_ids"])
        values = torch.stack([losses_S.float(), torch.ones_like(losses_S, dtype=torch.float32)], 1)
        sums = sum_rows(values, rows_S, count)
        labels = torch.full((count, self.max_length), -1.0, device=losses_S.device)
        numbers_S = batch[_WORDS].flatten()[find_targets(batch[_WORDS] >= 0, batch[TARGET_COUNTS])]
        fits = numbers_S < self.max_length  # words without pieces may push later words beyond the width
        labels[rows_S[fits], numbers_S[fits]] = logits_SK.argmax(1).float()[fits]
        return torch.cat([sums, labels], 1)

    def compute_metrics(
        self, predictions: Tensor, examples: EncodedSentences, indices: Sequence[int]
    ) -> dict[str, float]:
        """Compute ``loss`` over labeled words, and scores of entities and words over all words.

        A word that was cut counts as predicted to be outside of entities.
        """
        loss, words = predictions[:, :_SUMS].double().sum(0).tolist()
        references = [self._get_tags(examples.labels[index]) for index in indices]
        rows = predictions[:, _SUMS:].long().tolist()
        predicted = [self._pad(row, len(reference)) for row, reference in zip(rows, references, strict=True)]
        scores = score_entities(references, predicted)
        pairs = zip(chain.from_iterable(references), chain.from_iterable(predicted), strict=True)
        correct = sum(reference == prediction for reference, prediction in pairs)
        return {
            "loss": loss / max(1, words),
            "entity_f1": scores.f1,
            "entity_precision": scores.precision,
            "entity_recall": scores.recall,
            "token_accuracy": correct / max(1, sum(map(len, references))),
        }

    @property
    def loss_bound(self) -> float:
        """Largest loss of an example that an owner reports to others."""
        return compute_guess_bound(len(self.labels))

    def _get_tags(self, indices: Sequence[int]) -> list[str]:
        return [self.labels[index] for index in indices]

    def _pad(self, row: Sequence[int], count: int) -> list[str]:
        """Return the tags of ``count`` words, from label indices with -1 for words without a prediction."""
        tags = [self.labels[index] if index >= 0 else "O" for index in row[:count]]
        return [*tags, *["O"] * (count - len(tags))]

    def describe_examples(self, examples: EncodedSentences) -> tuple[str, ...]:
        """Report how many sentences lost words at their end."""
        encoded_words = np.array([max(examples.words[row], default=-1) + 1 for row in range(len(examples))])
        # A last word may also have no pieces at all, such as one of control characters only.
        count = int(((encoded_words < examples.labels.lengths) & (examples.lengths >= self.max_length)).sum())
        if not count:
            return ()
        return (f"{count} of {len(examples)} sentences lost words: model.max_length is {self.max_length} pieces",)

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the predicted tags of each sentence, joined with spaces."""
        texts: list[str] = []
        for row in predictions[:, _SUMS:].long().tolist():
            last = max((position for position, index in enumerate(row) if index >= 0), default=-1)
            texts.append(" ".join(self._pad(row, last + 1)))
        return texts

    def decode_targets(self, examples: EncodedSentences, indices: Sequence[int]) -> list[str]:
        """Return the true tags of each sentence, joined with spaces."""
        return [" ".join(self._get_tags(examples.labels[index])) for index in indices]


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    words, tags = reader.get_role_column(config, "tokens"), _get_tag_column(config)
    tokens = reader.read_text_lists(words, "roles.tokens")
    lists: list[list[str]] = []
    for row, (sentence, sentence_tags) in enumerate(
        zip(tokens.to_pylist(), reader.read_tag_lists(tags, "label"), strict=True)
    ):
        place = reader.source.row(row)
        if len(sentence) != len(sentence_tags):
            problem = f"{place} has {len(sentence)} words and {len(sentence_tags)} tags. {reader.skip_advice}"
            raise FedspanError(f"{reader.field}.label", tags, problem=problem)
        invalid = next((tag for tag in sentence_tags if not TAG.fullmatch(tag)), None)
        if invalid is not None:
            expected = "tags such as O, B-TYPE and I-TYPE (IOB1, IOB2, IOBES or BILOU)"
            problem = f"{place} has the tag {invalid!r}. {reader.skip_advice}"
            raise FedspanError(f"{reader.field}.label", tags, expected, problem=problem)
        lists.append(convert_to_iob2(sentence_tags))
    texts = pa.chunked_array([pa.array([" ".join(sentence) for sentence in tokens.to_pylist()], pa.string())])
    return ReadColumns({"text": texts, "tokens": tokens}, {words, tags}, label_lists=lists)


def _find_valid_rows(source: Source, config: DataConfig, limit: int | None) -> list[bool]:
    dataset = source.dataset
    words, tags = config.roles.get("tokens", "tokens"), _get_tag_column(config)
    if words not in dataset.column_names or tags not in dataset.column_names:
        return [True] * len(dataset)  # the check of the columns reports it better
    pairs = zip(*(get_arrow_column(dataset, column).to_pylist() for column in (words, tags)), strict=True)
    return [_has_matching_tags(sentence, sentence_tags) for sentence, sentence_tags in pairs]


def _has_matching_tags(sentence: object, tags: object) -> bool:
    if not isinstance(sentence, list) or not isinstance(tags, list):
        return True  # a column of another type is refused, however few rows there are
    tag_list = cast("list[object]", tags)
    has_tags = all(TAG.fullmatch(tag) for tag in tag_list if isinstance(tag, str))
    return len(cast("list[object]", sentence)) == len(tag_list) and has_tags


def _get_tag_column(config: DataConfig) -> str:
    return config.label or config.roles.get("tags", "tags")


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> TokenClassification:
    return TokenClassification(tokenizer, settings.labels, settings.max_length, settings.metric)


def _prepare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that splits the words of a sentence as it splits a text.

    RoBERTa's and GPT-2's tokenizers encode the space before a word with the word; without ``add_prefix_space`` they
    encode a sentence's words as if there were no spaces between them.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    if not getattr(tokenizer, "is_fast", False) or _has_word_separation(tokenizer):
        return tokenizer  # `TokenClassification.encode` refuses those that are not fast
    prepared: Any = copy.deepcopy(tokenizer)
    spaces = prepared.backend_tokenizer.pre_tokenizer
    if isinstance(spaces, ByteLevel):
        spaces.add_prefix_space = True
        prepared.backend_tokenizer.pre_tokenizer = spaces
        # Some tokenizers are built from this option again when they are loaded.
        prepared.add_prefix_space = prepared.init_kwargs["add_prefix_space"] = True
    if not _has_word_separation(prepared):
        problem = "it encodes the words of a sentence as if there were no spaces between them"
        expected = "a model of another family, such as BERT or RoBERTa"
        raise FedspanError("model.name", type(tokenizer).__name__, expected, problem=problem)
    return prepared


def _has_word_separation(tokenizer: Any) -> bool:
    """Check whether words have the same ids as a text of the same words."""
    words = tokenizer(["a", "a"], is_split_into_words=True, add_special_tokens=False)
    return words["input_ids"] == tokenizer("a a", add_special_tokens=False)["input_ids"]


def _infer_columns(sample: datasets.Dataset, options: Mapping[str, str | None]) -> InferredColumns | None:
    """Find a column of lists of words and one of lists of tags."""
    lists: dict[str, list[list[Any]]] = {}
    for name in sample.column_names:
        column = get_arrow_column(sample, name)  # as Arrow stores it: images are not decoded
        if is_list(column.type) and (values := [value for value in column.to_pylist() if value]):
            lists[name] = values
    tags = options["label"] or next((name for name in lists if _has_tags(sample, name, lists[name])), None)
    if tags not in lists:
        return None
    texts = [
        name for name in lists if name != tags and all(isinstance(word, str) for row in lists[name] for word in row)
    ]
    words = options["text"] or next(iter(texts), None)
    if words not in lists:
        return None
    roles = {} if words == "tokens" else {"roles": {"tokens": words}}
    label = {} if tags == "tags" else {"label": tags}
    return InferredColumns({**roles, **label}, f"words {words!r}, tags {tags!r}")


def _has_tags(sample: datasets.Dataset, name: str, rows: list[list[Any]]) -> bool:
    classes: list[str] | None = getattr(getattr(sample.features[name], "feature", None), "names", None)
    tags = [tag for row in rows for tag in row] if classes is None else classes
    return all(isinstance(tag, str) and TAG.fullmatch(tag) for tag in tags) and len(set(tags)) > 1


def _preprocess(settings: TaskSettings, inputs: Sequence[Any]) -> datasets.Dataset:
    """Convert texts, whose words are separated by spaces, or sequences of words, to rows."""
    import datasets

    tokens = [_list_words(text) for text in inputs]
    empty = next((number for number, words in enumerate(tokens) if not words), None)
    if empty is not None:
        raise FedspanError("texts", inputs[empty], "texts with words")
    return datasets.Dataset.from_dict({"tokens": tokens, "labels": [[0] * len(words) for words in tokens]})


def _list_words(text: Any) -> list[str]:
    if isinstance(text, str):
        return text.split()
    if not isinstance(text, list | tuple) or not all(isinstance(word, str) for word in cast("list[Any]", text)):
        raise FedspanError("texts", repr(text), "texts, or lists of words")
    return [*cast("list[str]", text)]


def _postprocess(task: TokenClassification, inputs: Sequence[Any], predictions: Tensor) -> list[list[tuple[str, str]]]:
    """Return the entities of each input, as text and type."""
    entities: list[list[tuple[str, str]]] = []
    for text, tags in zip(inputs, task.decode_predictions(predictions), strict=True):
        words = _list_words(text)
        entities.append([(" ".join(words[start:end]), kind) for kind, start, end in find_entities(tags.split())])
    return entities


def _make_examples(ids: Ragged, classes: np.ndarray) -> EncodedSentences:
    """Make sentences each of whose words is one piece, with one label for all words of a sentence."""
    positions = Ragged([range(length) for length in ids.lengths])
    labels = Ragged([[int(label)] * int(length) for label, length in zip(classes, ids.lengths, strict=True)])
    text = EncodedText({"input_ids": ids}, np.arange(len(ids)), ids.lengths)
    return EncodedSentences(text, positions, positions, labels)


TOKEN_CLASSIFICATION = TaskDefinition(
    name="token-classification",
    title="a tag for each word of a sentence (named entities)",
    head="token-classification",
    build=_build,
    prepare_processor=_prepare_tokenizer,
    target_type="labels",
    metrics=("entity_f1", "entity_precision", "entity_recall", "token_accuracy", "loss"),
    custom_metrics={
        "entity_f1": Metric("entity F1", True, is_percentage=True),
        "entity_precision": Metric("entity precision", True, is_percentage=True),
        "entity_recall": Metric("entity recall", True, is_percentage=True),
    },
    columns=TaskColumns(
        read=_read,
        get_required_columns=lambda config, field: [
            (config.roles.get("tokens", "tokens"),),
            (_get_tag_column(config),),
        ],
        find_valid_rows=_find_valid_rows,
        get_example_column=lambda config: config.roles.get("tokens", "tokens"),
        get_joined_columns=lambda config: (),
        get_label_column=lambda config: None,
        roles=("tokens", "tags"),
        complete_labels=list_labels,
    ),
    peft_task_type="TOKEN_CLS",
    loss_options=TokenClassification.loss_options,
    label_starts=("class-means", "lda"),
    default_model=("builtin:all-minilm-l6-v2", "[query, key, value, dense]"),
    lr=1e-3,
    summary_metrics=("entity_precision", "entity_recall"),
    pipeline_tag="token-classification",
    infer_columns=_infer_columns,
    preprocess=_preprocess,
    postprocess=_postprocess,
    make_examples=_make_examples,
)
