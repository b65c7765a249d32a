"""Text embedding: vectors of texts for retrieval, search and deduplication, from pairs, triplets or scored pairs.

Shapes: B examples, C clients, H features of a vector, P texts of an example (anchor, positive, negative), N pairs, Q
distinct anchors, D distinct positives, R distinct pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns, read_text_columns
from fedspan.data.config import DataConfig
from fedspan.errors import FedspanError
from fedspan.models.pooling import Pooling
from fedspan.tasks.definition import InferredColumns, TaskDefinition
from fedspan.tasks.embedding_losses import (
    EmbeddingLoss,
    compute_contrastive,
    compute_cosent,
    compute_cosine_error,
    compute_multiple_negatives,
)
from fedspan.tasks.encoding import EncodedText, collate_texts, describe_truncation, encode_texts
from fedspan.tasks.losses import compute_guess_bound, upcast
from fedspan.tasks.metrics import Metric, correlate, drop_undefined

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_ROLES = {"text": "anchor", "text_pair": "positive", "negative": "negative"}
"""Roles of an example's texts by column."""
_SCORES = "scores"
_EVALUATION_BLOCK = 64
"""Number of consecutive examples over which losses that compare examples are measured."""
_RETRIEVAL_CHUNK = 1024
"""Number of pairs whose similarities to all documents are in memory at once."""
_ANCHORS = ("anchor", "query", "question", "sentence1", "text1", "sentence_a", "title", "text")
_POSITIVES = ("positive", "document", "passage", "answer", "response", "sentence2", "text2", "sentence_b", "text_pair")
_SCORE_COLUMNS = ("score", "similarity", "similarity_score", "label")


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of text embedding.

    Args:
        loss: The loss; auto: cosent for pairs with a score, multiple-negatives for others.
        scale: Factor of the cosines in multiple-negatives and cosent.
        margin: Distance beyond which a pair of label 0 has no contrastive loss.
    """

    loss: Literal["auto"] | EmbeddingLoss = "auto"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    margin: Annotated[float, Field(gt=0, le=2)] = 0.5


@dataclass(frozen=True)
class EncodedTuples:
    """Tokenized pairs or triplets."""

    texts: Mapping[str, EncodedText]
    """Texts of the examples by role: anchor, positive, negative, as far as there are any."""
    ids: np.ndarray
    """Number of each text, (examples, P), equal for equal texts."""
    scores: np.ndarray | None
    """Score or label of each pair, float32, (examples,); None: there are none."""
    lengths: np.ndarray
    """Number of tokens of each example's texts together, int64, (examples,)."""

    def __len__(self) -> int:
        return len(self.lengths)


class TextEmbedding:
    """Vectors of texts, by any encoder and a pooling of its last hidden states.

    Each of an example's texts goes through the model in a pass of its own, so that rows are examples in every pass.

    Args:
        max_length: Maximum number of tokens of a text; further ones are cut.
    """

    has_several_passes = True
    """Whether a batch takes several passes of the model, for which states that belong to one pass are not cached."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        pooling: Pooling,
        options: EmbeddingOptions | None = None,
        metric: str = "loss",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.pooling = pooling
        self.options = options or EmbeddingOptions()
        self.metric = metric

    @property
    def has_batch_dependent_loss(self) -> bool:
        """Whether the loss of an example depends on others in its batch, as far as the options tell."""
        return self.options.loss not in ("cosine-similarity", "contrastive")

    def encode(self, dataset: datasets.Dataset) -> EncodedTuples:
        """Tokenize a data set once.

        Its columns are ``text`` and, for all but predictions, ``text_pair``; also ``negative`` or ``target`` (numbers).
        """
        texts: dict[str, EncodedText] = {}
        numbers: dict[str, int] = {}
        ids: list[list[int]] = []
        for column, role in _ROLES.items():
            if column in dataset.column_names:
                column_texts = dataset.select_columns([column])
                column_texts = column_texts if column == "text" else column_texts.rename_column(column, "text")
                texts[role] = encode_texts(
                    self.tokenizer, column_texts, self.max_length, np.zeros(len(column_texts), np.int64)
                )
                ids.append([numbers.setdefault(text, len(numbers)) for text in column_texts["text"]])
        scores = None
        if "target" in dataset.column_names:
            scores = np.array(dataset["target"], dtype=np.float32)
            self._require_scores(scores)
        lengths = np.sum([text.lengths for text in texts.values()], axis=0)
        return EncodedTuples(texts, np.array(ids).T, scores, lengths)

    def _require_scores(self, scores: np.ndarray) -> None:
        loss = self.options.loss
        if loss == "contrastive" and not np.isin(scores, (0, 1)).all():
            invalid = float(scores[~np.isin(scores, (0, 1))][0])
            raise FedspanError("data.label", invalid, "1 for similar texts and 0 for others, with the contrastive loss")
        if loss == "cosine-similarity" and len(scores) and abs(scores).max() > 1:
            invalid = float(scores[abs(scores).argmax()])
            expected = "scores from -1 to 1, which the cosines are compared with (cosent takes any scale)"
            raise FedspanError("data.label", invalid, expected)

    def collate(self, examples: EncodedTuples, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples: the tokenizer's outputs for the texts of each role, and ``scores`` if there are any.

        Texts are padded to the longest of their role. The name of a role comes before that of an output:
        ``anchor.input_ids``.
        """
        batch: dict[str, Tensor] = {}
        for role, text in examples.texts.items():
            role_batch = collate_texts(self.tokenizer, text, indices, device)
            batch |= {f"{role}.{key}": value for key, value in role_batch.items() if key != "labels"}
        if examples.scores is not None:
            batch[_SCORES] = to_device(torch.from_numpy(examples.scores[list(indices)]), device)
        return batch

    def embed(self, model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the vectors of the texts of a batch, (B, H) for each role."""
        vectors: list[Tensor] = []
        for role in _ROLES.values():
            prefix = f"{role}."
            inputs = {key.removeprefix(prefix): value for key, value in batch.items() if key.startswith(prefix)}
            if inputs:
                hidden_BTH = model(**inputs)[0]
                vectors.append(self.pooling(hidden_BTH, inputs["attention_mask"]))
        return vectors

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of a batch, in float32 or better."""
        vectors = [upcast(vectors_BH) for vectors_BH in self.embed(model, batch)]
        return self._compute_losses(vectors, batch.get(_SCORES), vectors[0].new_ones(1, len(vectors[0])))[0]

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the loss of each client over its own examples alone, (C,)."""
        vectors = [upcast(vectors_BH) for vectors_BH in self.embed(model, batch)]
        return self._compute_losses(vectors, batch.get(_SCORES), mask_CB.to(vectors[0]))

    def _compute_losses(self, vectors: Sequence[Tensor], scores_B: Tensor | None, mask_CB: Tensor) -> Tensor:
        """Compute the losses from vectors, (B, H) for each role."""
        options, loss = self.options, self._choose_loss(scores_B is not None)
        if loss == "multiple-negatives":
            return compute_multiple_negatives(vectors[0], vectors[1:], mask_CB, options.scale)
        if scores_B is None:
            raise FedspanError("task_options.loss", loss, problem=f"{loss} needs pairs with a score (data.label)")
        cosines_B, scores_B = F.cosine_similarity(vectors[0], vectors[1]), scores_B.to(vectors[0])
        if loss == "cosent":
            return compute_cosent(cosines_B, scores_B, mask_CB, options.scale)
        if loss == "contrastive":
            return compute_contrastive(cosines_B, scores_B, mask_CB, options.margin)
        return compute_cosine_error(cosines_B, scores_B, mask_CB)

    def _choose_loss(self, has_scores: bool) -> EmbeddingLoss:
        if self.options.loss != "auto":
            return self.options.loss
        return "cosent" if has_scores else "multiple-negatives"

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return the number P of an example's texts and their vectors, (B, 1 + P * H)."""
        vectors = self.embed(model, batch)
        return torch.cat([vectors[0].new_full((len(vectors[0]), 1), len(vectors)), *vectors], 1)

    def compute_metrics(self, predictions: Tensor, examples: EncodedTuples, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss``, and ``spearman`` of scored pairs, or ``recall_at_10`` and ``ndcg_at_10`` of others.

        Losses that compare examples are means over blocks of 64 examples in the order of ``indices``. Recall and nDCG
        rank the positives of all given examples. Spearman is left out where it is undefined.
        """
        vectors = [vectors_BH.float() for vectors_BH in split_vectors(predictions)]
        rows = np.asarray(indices, dtype=np.int64)
        scores_B = None if examples.scores is None else torch.from_numpy(examples.scores[rows])
        total = 0.0
        for start in range(0, len(rows), _EVALUATION_BLOCK):
            block = slice(start, start + _EVALUATION_BLOCK)
            block_vectors = [vectors_BH[block] for vectors_BH in vectors]
            scores = None if scores_B is None else scores_B[block]
            total += len(block_vectors[0]) * float(
                self._compute_losses(block_vectors, scores, block_vectors[0].new_ones(1, len(block_vectors[0])))
            )
        loss = total / max(1, len(rows))
        if scores_B is None:
            recall, ndcg = measure_retrieval(vectors[0], vectors[1], examples.ids[rows, 0], examples.ids[rows, 1])
            return {"loss": loss, "recall_at_10": recall, "ndcg_at_10": ndcg}
        cosines = F.cosine_similarity(vectors[0].double(), vectors[1].double()).numpy()
        return drop_undefined({"loss": loss, "spearman": correlate("spearman", cosines, scores_B.numpy())})

    @property
    def loss_bound(self) -> float:
        """Largest mean loss that an owner reports to others, about twice that of equal vectors in a full block."""
        pairs = 2 if self.options.loss in ("auto", "cosent") else 1  # CoSENT compares pairs of examples
        return compute_guess_bound(_EVALUATION_BLOCK**pairs)

    def describe_examples(self, examples: EncodedTuples) -> tuple[str, ...]:
        """Report how many texts of each role fill the maximum length, and so may have been cut."""
        return tuple(
            f"{role}: {note}"
            for role, text in examples.texts.items()
            for note in describe_truncation(text, self.max_length)
        )

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the cosine similarity of each anchor and its positive, with three decimal places."""
        anchors_BH, positives_BH, *_ = split_vectors(predictions)
        return [f"{cosine:.3f}" for cosine in F.cosine_similarity(anchors_BH, positives_BH).tolist()]

    def decode_targets(self, examples: EncodedTuples, indices: Sequence[int]) -> list[str]:
        """Return the score of each pair, or "positive" for pairs without one."""
        if examples.scores is None:
            return ["positive"] * len(indices)
        return [f"{score:.3f}" for score in examples.scores[list(indices)].tolist()]


def measure_retrieval(
    anchors_NH: Tensor, positives_NH: Tensor, anchor_ids: np.ndarray, positive_ids: np.ndarray, k: int = 10
) -> tuple[float, float]:
    """Compute recall and nDCG of the first ``k`` documents, as means over distinct anchors.

    The documents are the distinct positives; every positive of an anchor is relevant. Of documents with equal
    similarities, the relevant ones count as the last, so that a model with one vector for all texts finds nothing.

    Args:
        anchors_NH: Vectors of the anchors.
        positives_NH: Vectors of the positives.
        anchor_ids: Number of each anchor's text, (N,); equal texts have equal numbers.
        positive_ids: Number of each positive's text, (N,).
    """
    _, first_Q, queries_N = np.unique(anchor_ids, return_index=True, return_inverse=True)
    _, first_D, documents_N = np.unique(positive_ids, return_index=True, return_inverse=True)
    anchors_QH = F.normalize(anchors_NH[torch.from_numpy(first_Q)].float(), dim=1)
    documents_DH = F.normalize(positives_NH[torch.from_numpy(first_D)].float(), dim=1)
    pairs_R2 = np.unique(np.stack([queries_N, documents_N], 1), axis=0)
    ranks: list[Tensor] = []
    for start in range(0, len(pairs_R2), _RETRIEVAL_CHUNK):
        queries_R, documents_R = torch.from_numpy(pairs_R2[start : start + _RETRIEVAL_CHUNK]).T
        similarities_RD = anchors_QH[queries_R] @ documents_DH.T
        own_R = similarities_RD.gather(1, documents_R[:, None])
        ranks.append((similarities_RD >= own_R).sum(1))
    ranks_R = torch.cat(ranks).numpy()
    is_hit_R = (ranks_R >= 1) & (ranks_R <= k)  # a similarity that is not a number has rank 0
    queries_R = pairs_R2[:, 0]
    relevant_Q = np.bincount(queries_R)
    hits_Q = np.bincount(queries_R, is_hit_R)
    gains_Q = np.bincount(queries_R, is_hit_R / np.log2(np.maximum(ranks_R, 1) + 1))
    ideal = np.cumsum(1 / np.log2(np.arange(k) + 2))
    return float((hits_Q / relevant_Q).mean()), float((gains_Q / ideal[np.minimum(relevant_Q, k) - 1]).mean())


def split_vectors(predictions: Tensor) -> tuple[Tensor, ...]:
    """Return the vectors of the texts of each role, (B, H), from the rows of ``TextEmbedding.predict``."""
    return predictions[:, 1:].chunk(int(predictions[0, 0]), 1)


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    if config.text_pair is None:
        expected = "the column of positives, beside data.text, the column of anchors"
        raise FedspanError(f"{reader.field}.text_pair", None, expected)
    columns, used = read_text_columns(reader, config)
    negative = config.roles.get("negative")
    if negative is not None:
        if config.label is not None:
            problem = "triplets have no score. Leave out one of data.label and data.roles.negative"
            raise FedspanError(f"{reader.field}.label", config.label, problem=problem)
        columns["negative"] = reader.read_texts(negative, "roles.negative")
        used.add(negative)
    numbers: dict[str, pa.ChunkedArray] = {}
    if config.label is not None:
        numbers["target"] = reader.read_numbers(config.label)
    return ReadColumns({**columns, **numbers}, used)


def _require(config: DataConfig, field: str) -> list[tuple[str, ...]]:
    columns = (config.text, config.text_pair, config.roles.get("negative"), config.label)
    return [(column,) for column in columns if column is not None]


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> TextEmbedding:
    options: EmbeddingOptions = TEXT_EMBEDDING.parse_options(settings.options)
    if data is not None and data.label is None and options.loss not in ("auto", "multiple-negatives"):
        raise FedspanError("data.label", None, f"the column of scores, which task_options.loss: {options.loss} needs")
    if data is not None and data.label is not None and options.loss == "multiple-negatives":
        problem = "multiple-negatives takes pairs without a score, all of which are similar. Leave data.label out"
        raise FedspanError("task_options.loss", options.loss, problem=problem)
    return TextEmbedding(tokenizer, settings.max_length, settings.pooling or Pooling("mean"), options, settings.metric)


def _infer_columns(sample: datasets.Dataset, options: Mapping[str, str | None]) -> InferredColumns | None:
    """Find two columns of texts by their names or order, and columns of negatives and scores by their names."""
    names = [name for name in sample.column_names if name != options["by"]]
    negative = "negative" if "negative" in names else None
    label = options["label"] or next((name for name in _SCORE_COLUMNS if name in names and negative is None), None)
    texts = [name for name in names if name not in (negative, label) and isinstance(sample[0][name], str)]
    anchor = options["text"] or next((name for name in (*_ANCHORS, *texts) if name in texts), None)
    others = [name for name in texts if name != anchor]
    positive = options["answer"] or next((name for name in (*_POSITIVES, *others) if name in others), None)
    if anchor is None or positive is None:
        return None
    fields: dict[str, Any] = {"text": anchor, "text_pair": positive}
    finding = f"anchors {anchor!r}, positives {positive!r}"
    if negative is not None:
        fields["roles"], finding = {"negative": negative}, f"{finding}, negatives {negative!r}"
    if label is not None:
        fields["label"], finding = label, f"{finding}, scores {label!r}"
    return InferredColumns(fields, finding)


def _preprocess(settings: TaskSettings, inputs: Sequence[Any]) -> datasets.Dataset:
    import datasets

    pairs = [text for text in inputs if isinstance(text, tuple)]
    if pairs and len(pairs) != len(inputs):
        single = next(text for text in inputs if not isinstance(text, tuple))
        raise FedspanError("texts", single, "texts alone, for their vectors, or pairs alone, for their similarities")
    if pairs:
        return datasets.Dataset.from_dict(
            {"text": [pair[0] for pair in pairs], "text_pair": [pair[1] for pair in pairs]}
        )
    return datasets.Dataset.from_dict({"text": [*map(str, inputs)]})


def _postprocess(task: TextEmbedding, inputs: Sequence[Any], predictions: Tensor) -> list[Any]:
    """Return the vector of each text, or the cosine similarity of each pair."""
    vectors = split_vectors(predictions)
    return (vectors[0] if len(vectors) == 1 else F.cosine_similarity(vectors[0], vectors[1])).tolist()


TEXT_EMBEDDING = TaskDefinition(
    name="text-embedding",
    title="a vector for a text (retrieval, search, deduplication)",
    head="encoder",
    build=_build,
    metrics=("loss", "spearman", "recall_at_10", "ndcg_at_10"),
    custom_metrics={
        "recall_at_10": Metric("recall@10", True, is_percentage=True),
        "ndcg_at_10": Metric("nDCG@10", True),
    },
    columns=TaskColumns(
        read=_read,
        get_required_columns=_require,
        get_joined_columns=lambda config: (config.text, config.text_pair, config.roles.get("negative")),
        get_label_column=lambda config: config.label,
        roles=("negative",),
        has_numeric_labels=True,
    ),
    can_pool=True,
    peft_task_type="FEATURE_EXTRACTION",
    options=EmbeddingOptions,
    default_model=("builtin:all-minilm-l6-v2", "[query, value]"),
    lr=1e-3,
    summary_metrics=("spearman", "recall_at_10", "ndcg_at_10"),
    pipeline_tag="sentence-similarity",
    is_inferred=False,
    infer_columns=_infer_columns,
    preprocess=_preprocess,
    postprocess=_postprocess,
    count_passes=lambda data: 3 if "negative" in data.roles else 2,
)
