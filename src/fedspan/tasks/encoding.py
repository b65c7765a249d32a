"""Token ids of a text task, encoded once and stored in one array."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.core.tensors import to_device
from fedspan.errors import FedspanError
from fedspan.models.pooling import PAIR
from fedspan.tasks.losses import get_logits, select_inputs
from fedspan.tasks.task import Examples

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


class Ragged(Sequence[list[int]]):
    """Rows of ids of different lengths; every access to a row returns a new list.

    Args:
        rows: The rows; each id fits within 32 bits.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        lengths, ids = np.array([len(row) for row in rows], np.int64), np.array([*chain.from_iterable(rows)], np.int32)
        minimum, maximum = ids.min(initial=0), ids.max(initial=0)
        self._set(lengths, ids.astype(np.promote_types(np.min_scalar_type(minimum), np.min_scalar_type(maximum))))

    def _set(self, lengths: np.ndarray, ids: np.ndarray) -> None:
        self.lengths = lengths
        """Length of each row, int64, (rows,)."""
        self._ids = ids
        self._ends = np.cumsum(lengths)

    @classmethod
    def join(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts in order."""
        joined = cls([])
        if parts:
            joined._set(np.concatenate([part.lengths for part in parts]), np.concatenate([part._ids for part in parts]))
        return joined

    def pad(self, indices: Sequence[int], value: int) -> np.ndarray:
        """Return some rows, padded on the right to the longest of them, int64, (rows, longest)."""
        lengths, ends = self.lengths[list(indices)], self._ends[list(indices)]
        columns = np.arange(lengths.max(initial=0))
        is_value = columns < lengths[:, None]
        positions = np.where(is_value, (ends - lengths)[:, None] + columns, 0)
        # Unsigned ids would wrap a negative value.
        return np.where(is_value, self._ids[positions].astype(np.int64), value)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        end = self._ends[index]
        return self._ids[end - self.lengths[index] : end].tolist()


CHUNK = 4096
"""Number of texts tokenized at once: the tokenizer's own objects are many times as large as the ids."""


@dataclass(frozen=True)
class EncodedText:
    """Tokenized texts with the target of each."""

    encodings: Mapping[str, Ragged]
    """Ids of each example, by tokenizer output (``input_ids``, ``token_type_ids``); of second texts that are encoded
    alone, ``PAIR`` comes before its name."""
    labels: np.ndarray
    """Index into the label list, int64, or the value, float32; (examples,)."""
    lengths: np.ndarray
    """Number of tokens of each example, or of its longer text, int64, (examples,)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class TextExamples:
    """Tokenized texts, for a base of examples with other targets than one for each text."""

    text: EncodedText
    """Tokens of each text; its labels are positions and are not used."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64, (texts,)."""
        return self.text.lengths


class TextTask:
    """Base of tasks that predict from a text or a pair of texts, with any Hugging Face sequence classifier.

    Args:
        max_length: Maximal number of tokens; further ones are cut.
        pairs: Whether each text of a pair has a pass of its own through an encoder (``Pooling.pairs``).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, metric: str = "loss", *, pairs: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.metric = metric
        self.has_several_passes = pairs

    def encode_texts(self, dataset: datasets.Dataset, labels: np.ndarray) -> EncodedText:
        """Tokenize the column ``text`` and, if present, ``text_pair``, once."""
        return encode_texts(self.tokenizer, dataset, self.max_length, labels, apart=self.has_several_passes)

    def collate(self, examples: Any, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate examples, padded to the longest of them, with ``attention_mask`` and ``labels``."""
        return collate_texts(self.tokenizer, examples, indices, device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Compute the logits, (examples, outputs)."""
        return get_logits(model(**select_inputs(batch)))

    def describe_examples(self, examples: Examples) -> tuple[str, ...]:
        """Report how many texts fill the maximal length, and so may have been cut."""
        return describe_truncation(examples, self.max_length)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    dataset: datasets.Dataset,
    max_length: int,
    labels: np.ndarray,
    *,
    apart: bool = False,
) -> EncodedText:
    """Tokenize the column ``text`` and, if present, ``text_pair``, once.

    Args:
        apart: Whether both texts of a pair are encoded alone; else, as one sequence.
    """
    require_processor(tokenizer, "texts")
    encodings: dict[str, Ragged] = {}
    for prefix, first, second in (("", "text", ""), (PAIR, "text_pair", "")) if apart else (("", "text", "text_pair"),):
        selected = dataset.select_columns([name for name in (first, second) if name in dataset.column_names])
        joined = join_encodings(
            tokenizer(rows[first], rows.get(second), truncation=True, max_length=max_length)
            for rows in split_rows(selected)
        )
        encodings |= {f"{prefix}{key}": values for key, values in joined.items()}
    lengths = [values.lengths for key, values in encodings.items() if key.endswith("input_ids")]
    return EncodedText(encodings, labels, np.maximum.reduce(lengths))


def split_rows(dataset: datasets.Dataset) -> Generator[dict[str, list[Any]]]:
    """Split a data set into the columns of some rows each, which a tokenizer takes at once."""
    for start in range(0, max(1, len(dataset)), CHUNK):
        yield dataset[start : start + CHUNK]


def join_encodings(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Ragged]:
    """Join a tokenizer's outputs by name; collation makes ``attention_mask``."""
    pieces: dict[str, list[Ragged]] = {}
    for encoded in chunks:
        for key, value in encoded.items():
            if key != "attention_mask":
                pieces.setdefault(key, []).append(Ragged(value))
    return {key: Ragged.join(parts) for key, parts in pieces.items()}


def require_processor(processor: object, inputs: str) -> None:
    """Require a tokenizer or image processor, which a model that is no Transformers model does not have.

    Args:
        processor: The tokenizer or image processor; None: there is none.
        inputs: The inputs that it converts to tensors, in the plural.
    """
    if processor is None:
        problem = f"the task needs a tokenizer or image processor for its {inputs}, and the model has none. "
        advice = "Pass one as tokenizer=, or a task of your own, which makes the tensors itself, as task=."
        raise FedspanError("task", None, problem=problem + advice)


def collate_texts(
    tokenizer: PreTrainedTokenizerBase, examples: EncodedText, indices: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Collate examples, padded on the right to the longest of them, with ``attention_mask`` and ``labels``."""
    # As ``tokenizer.pad``, which takes milliseconds for a batch of many clients.
    padding = {"input_ids": int(tokenizer.pad_token_id), "token_type_ids": tokenizer.pad_token_type_id}  # pyright: ignore
    batch = {
        key: torch.from_numpy(values.pad(indices, padding.get(key.removeprefix(PAIR), 0)))
        for key, values in examples.encodings.items()
    }
    for key in [key for key in batch if key.endswith("input_ids")]:
        lengths = torch.from_numpy(examples.encodings[key].lengths[list(indices)])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        batch[key.replace("input_ids", "attention_mask")] = mask
    batch["labels"] = torch.from_numpy(examples.labels[list(indices)])
    return {key: to_device(value, device) for key, value in batch.items()}


def describe_truncation(examples: Examples, max_length: int) -> tuple[str, ...]:
    """Return a note for the user if texts fill the maximum length; most of these were longer."""
    count = int((examples.lengths >= max_length).sum())
    if not count:
        return ()
    return (f"{count} of {len(examples)} texts reach model.max_length, {max_length} tokens: their end may be cut",)


def refuse_pairs(inputs: Sequence[Any], expected: str) -> None:
    """Refuse inputs of ``fedspan.predict`` that are not single texts."""
    pair = next((text for text in inputs if not isinstance(text, str)), None)
    if pair is not None:
        raise FedspanError("texts", pair, f"{expected}, because this model takes no pairs")
