"""Masked language modeling: an encoder learns the words of a domain from texts without labels.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", NAACL 2019,
arXiv:1810.04805. A share of a text's tokens, at least one, is predicted. In training, 8 of 10 of them are replaced by
the mask, 1 of 10 by a random token, and 1 of 10 stays; the draw depends on seed, round, client, batch and example only.
In evaluation the mask replaces all of them, and a text always has the same masks.

Deviations: the number of predicted tokens is the rounded share of a text's tokens, as in BERT's own data, and no draw
for each token. Shapes: B texts, T tokens, S predicted tokens of a batch, V tokens of the vocabulary, C clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from fedspan.core.tensors import create_example_generators, create_generator, to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns
from fedspan.data.config import DataConfig
from fedspan.errors import FedspanError
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import TextExamples, TextTask, collate_texts, encode_texts, refuse_pairs, require_processor
from fedspan.tasks.losses import (
    get_logits,
    select_inputs,
)
from fedspan.tasks.metrics import Metric
from fedspan.tasks.token_scores import IGNORED, SCORES, TARGET_COUNTS, VocabularyTask, score_tokens, select_targets

if TYPE_CHECKING:
    from collections.abc import Mapping

    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_MASK, _RANDOM = 0.8, 0.9  # below: replaced by the mask; by a random token; above: unchanged
_LARGEST = 34.0  # the exponential of a larger loss is beyond the bounds of the metric


@dataclass(frozen=True)
class MaskedOptions:
    """Options of masked language modeling.

    Args:
        mask_share: Share of a text's tokens that are predicted, between 0 and 1.
    """

    mask_share: Annotated[float, Field(gt=0, lt=1)] = 0.15


@dataclass(frozen=True)
class MaskedTexts(TextExamples):
    """Tokenized texts."""

    has_masks: bool = False
    """Whether the texts have masks of their own, which are to be filled, instead of drawn ones."""


class MaskedLanguageModel(TextTask, VocabularyTask):
    """Prediction of masked tokens, with any Hugging Face masked language model.

    Args:
        max_length: Maximal number of tokens; further ones are cut.
        mask_share: Share of a text's tokens that are predicted.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, metric: str = "loss", mask_share: float = 0.15
    ) -> None:
        super().__init__(tokenizer, max_length, metric)
        self.mask_share = mask_share

    def encode(self, dataset: datasets.Dataset) -> MaskedTexts:
        """Tokenize a data set once; its column is ``text``; with a column ``has_masks``, texts have their own masks."""
        require_processor(self.tokenizer, "texts")
        if self.tokenizer.mask_token_id is None:
            expected = "a masked language model, whose tokenizer has a mask"
            raise FedspanError("model.name", type(self.tokenizer).__name__, expected)
        text = encode_texts(self.tokenizer, dataset, self.max_length, np.arange(len(dataset)))
        examples = MaskedTexts(text, "has_masks" in dataset.column_names)
        if examples.has_masks:
            for row, ids in enumerate(text.encodings["input_ids"]):
                if self.tokenizer.mask_token_id not in ids:
                    raise FedspanError("texts", dataset["text"][row], f"texts with {self.tokenizer.mask_token}")
        return examples

    def collate(self, examples: MaskedTexts, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate texts with the masks of evaluation, which depend on a text's tokens only.

        ``labels`` are the tokens' own ids where they are predicted, else -100, (B, T).
        """
        return self._collate(examples, indices, device, [None] * len(indices))

    def collate_for_training(
        self, examples: MaskedTexts, indices: Sequence[int], device: torch.device, keys: Sequence[Sequence[int | str]]
    ) -> dict[str, Tensor]:
        """Collate texts with the masks of training.

        Args:
            keys: Key of each text's draw: the seed of the run, followed by round, client, phase and batch.
        """
        generators = create_example_generators("masked tokens", indices, keys)
        return self._collate(examples, indices, device, generators)

    def _collate(
        self,
        examples: MaskedTexts,
        indices: Sequence[int],
        device: torch.device,
        generators: Sequence[Generator | None],
    ) -> dict[str, Tensor]:
        batch = collate_texts(self.tokenizer, examples.text, indices, torch.device("cpu"))
        ids_BT = batch["input_ids"].numpy()
        labels_BT, counts_B = np.full(ids_BT.shape, IGNORED, np.int64), np.zeros(len(indices), np.int64)
        for row, (index, generator) in enumerate(zip(indices, generators, strict=True)):
            ids = np.array(examples.text.encodings["input_ids"][index], np.int64)
            positions, inputs = self._mask(ids, generator, examples.has_masks)
            labels_BT[row, positions], ids_BT[row, positions], counts_B[row] = ids[positions], inputs, len(positions)
        tensors = {**batch, "input_ids": torch.from_numpy(ids_BT), "labels": torch.from_numpy(labels_BT)}
        return {
            **{key: to_device(value, device) for key, value in tensors.items()},
            TARGET_COUNTS: torch.from_numpy(counts_B),
        }

    def _mask(self, ids: np.ndarray, generator: Generator | None, has_masks: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of a text's predicted tokens, ascending, and the ids that the model reads there.

        Args:
            ids: Ids of the text, (tokens,).
            generator: Generator of the draw; None: the masks of evaluation.
            has_masks: Whether the text's own masks are the positions.
        """
        mask: Any = self.tokenizer.mask_token_id
        if has_masks:
            positions = np.flatnonzero(ids == mask)
            return positions, ids[positions]
        candidates = np.flatnonzero(~np.isin(ids, self.tokenizer.all_special_ids))
        if not len(candidates):
            return candidates, candidates
        is_training = generator is not None
        generator = generator or create_generator(0, "masks of evaluation", *ids.tolist())
        count = max(1, round(self.mask_share * len(candidates)))
        positions = np.sort(candidates[torch.randperm(len(candidates), generator=generator)[:count].numpy()])
        if not is_training:
            return positions, np.full(count, mask)
        kinds = torch.rand(count, generator=generator).numpy()
        random_ids = torch.randint(len(self.tokenizer), (count,), generator=generator).numpy()
        return positions, np.where(kinds < _MASK, mask, np.where(kinds < _RANDOM, random_ids, ids[positions]))

    def compute_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (S, V) of the predicted tokens, these tokens, and their texts' numbers, (S,)."""
        logits_BTV = get_logits(model(**select_inputs(batch, TARGET_COUNTS)))
        return select_targets(logits_BTV, batch["labels"], batch[TARGET_COUNTS])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return each text's sum of losses, its predicted tokens, the right ones, and their ids, (B, 3 + max_length).

        The ids are in the order of the text, followed by -1.
        """
        logits_SV, targets_S, rows_S = self.compute_logits(model, batch)
        count = len(batch["labels"])
        counts_B = batch[TARGET_COUNTS].to(rows_S.device)
        numbers_S = torch.arange(len(rows_S), device=rows_S.device) - (counts_B.cumsum(0) - counts_B)[rows_S]
        ids = torch.full((count, self.max_length), -1.0, device=rows_S.device)
        ids[rows_S, numbers_S] = logits_SV.argmax(1).float()
        return torch.cat([score_tokens(logits_SV, targets_S, rows_S, count), ids], 1)

    def compute_metrics(self, predictions: Tensor, examples: MaskedTexts, indices: Sequence[int]) -> dict[str, float]:
        """Compute ``loss`` over all predicted tokens, its exponential, and the share of tokens that are right.

        ``pseudo_perplexity`` is that of these masks. Salazar et al. (ACL 2020, arXiv:1910.14659) mask each token of a
        text in a pass of its own.
        """
        loss, tokens, correct = predictions[:, :SCORES].double().sum(0).tolist()
        mean = loss / max(1, tokens)
        return {
            "loss": mean,
            "pseudo_perplexity": math.exp(min(mean, _LARGEST)),
            "masked_accuracy": correct / max(1, tokens),
        }

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the predicted tokens of each text, joined with spaces."""
        rows = predictions[:, SCORES:].long().tolist()
        return [self._join([id for id in row if id >= 0]) for row in rows]

    def decode_targets(self, examples: MaskedTexts, indices: Sequence[int]) -> list[str]:
        """Return the tokens behind the masks of evaluation of each text, joined with spaces."""
        rows = [np.array(examples.text.encodings["input_ids"][index], np.int64) for index in indices]
        return [self._join(ids[self._mask(ids, None, examples.has_masks)[0]].tolist()) for ids in rows]

    def _join(self, ids: list[int]) -> str:
        return " ".join(self.tokenizer.convert_ids_to_tokens(ids))


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    texts: pa.ChunkedArray = reader.read_texts(config.text, "text")
    return ReadColumns({"text": texts}, {config.text})


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> MaskedLanguageModel:
    options: MaskedOptions = MASKED_LM.parse_options(settings.options)
    return MaskedLanguageModel(tokenizer, settings.max_length, settings.metric, options.mask_share)


def _preprocess(settings: TaskSettings, inputs: Sequence[Any]) -> datasets.Dataset:
    import datasets

    refuse_pairs(inputs, "texts with masks")
    return datasets.Dataset.from_dict({"text": [*inputs], "has_masks": [True] * len(inputs)})


MASKED_LM = TaskDefinition(
    name="masked-lm",
    title="the masked words of a text",
    head="masked-language-model",
    build=_build,
    metrics=("loss", "pseudo_perplexity", "masked_accuracy"),
    custom_metrics={
        "pseudo_perplexity": Metric("pseudo-perplexity", False, minimum=1.0, maximum=1e15, is_exponential_of_loss=True),
        "masked_accuracy": Metric("masked token accuracy", True, is_percentage=True),
    },
    columns=TaskColumns(
        read=_read,
        get_required_columns=lambda config, field: [(config.text,)],
        get_joined_columns=lambda config: (config.text,),
        get_label_column=lambda config: None,
    ),
    options=MaskedOptions,
    loss_options=MaskedLanguageModel.loss_options,
    lr=1e-3,
    summary_metrics=("pseudo_perplexity", "masked_accuracy"),
    pipeline_tag="fill-mask",
    preprocess=_preprocess,
)
