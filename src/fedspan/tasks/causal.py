"""Instruction tuning of causal language models: loss on the answer only; perplexity, exact match of generated text.

Shapes: B examples of a batch, T tokens, V vocabulary, N generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedspan.core.tensors import to_device
from fedspan.data.columns import ColumnReader, ReadColumns, TaskColumns
from fedspan.data.config import DataConfig
from fedspan.data.templates import parse_template
from fedspan.errors import FedspanError
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import CHUNK, Ragged, require_processor
from fedspan.tasks.losses import (
    get_logits,
    select_inputs,
    upcast,
)
from fedspan.tasks.prompts import Prompt, render_chat, tokenize, truncate
from fedspan.tasks.text_scores import is_exact_match
from fedspan.tasks.token_scores import (
    IGNORED,
    SCORES,
    TARGET_COUNTS,
    VocabularyTask,
    compute_token_metrics,
    find_targets,
    mark_ends,
    score_tokens,
)

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings


@dataclass(frozen=True)
class GenerationOptions:
    """Options for generating and comparing answers.

    Args:
        max_new_tokens: Maximal number of tokens of an answer.
        pattern: Regex of the part that is compared: the first group of its first match (the whole match without
            groups); the whole text if None.
    """

    max_new_tokens: int = 64
    pattern: str | None = None


_DEFAULT = GenerationOptions()


@dataclass(frozen=True)
class EncodedPrompts:
    """Tokenized prompts with their answers."""

    ids: Sequence[list[int]]
    """Ids of each example, prompt and answer together."""
    starts: np.ndarray
    """Index where each answer begins, int64, (examples,)."""
    answers: tuple[str, ...]
    lengths: np.ndarray
    """Number of tokens of each example, int64, (examples,)."""
    truncated_prompts: int
    """Number of prompts that lost their beginning."""
    truncated_answers: int
    """Number of answers that lost their end."""

    def __len__(self) -> int:
        return len(self.ids)


class CausalLM(VocabularyTask):
    """Answers to prompts, with any Hugging Face decoder.

    Args:
        max_length: Maximal number of tokens of prompt and answer together; the prompt is cut first.
        refuse_long: Whether an answer that does not fit is refused instead of cut at its end.
        packing: Whether a batch's examples are put end to end into one row, with their own positions and attention: no
            padding, the same loss.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        chat: bool = False,
        system: str | None = None,
        refuse_long: bool = False,
        packing: bool = False,
        generation: GenerationOptions = _DEFAULT,
        metric: str = "loss",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat = chat
        self.system = system
        self.refuse_long = refuse_long
        self.packing = packing
        self.generation = generation
        self.metric = metric

    def encode(self, dataset: datasets.Dataset) -> EncodedPrompts:
        """Tokenize a data set once; its columns are ``text``, ``answer`` and optionally ``history``."""
        require_processor(self.tokenizer, "texts")
        columns = [name for name in ("text", "answer", "history") if name in dataset.column_names]
        selected = dataset.select_columns(columns)
        parts = [
            self._encode_rows(selected.select(range(start, min(start + CHUNK, len(selected)))), start)
            for start in range(0, max(1, len(selected)), CHUNK)
        ]
        ids, starts, answers, truncated_prompts, truncated_answers = zip(*parts, strict=True)
        joined = Ragged.join(ids)
        return EncodedPrompts(
            joined,
            np.concatenate(starts),
            (*chain(*answers),),
            joined.lengths,
            sum(truncated_prompts),
            sum(truncated_answers),
        )

    def _encode_rows(self, rows: datasets.Dataset, first: int) -> tuple[Ragged, np.ndarray, list[str], int, int]:
        """Encode rows; return ids, starts, answers, and the numbers of truncated prompts and answers."""
        prompts = [Prompt.from_row(row) for row in rows]  # pyright: ignore[reportArgumentType]
        texts = [(prompt.text, prompt.answer) for prompt in prompts]
        if self.chat:
            texts = [render_chat(self.tokenizer, prompt, self.system) for prompt in prompts]
        prompt_ids = tokenize(self.tokenizer, [text for text, _ in texts], special=not self.chat)
        answer_ids = tokenize(self.tokenizer, [answer for _, answer in texts], special=False)
        ids: list[list[int]] = []
        starts: list[int] = []
        truncated_prompts = truncated_answers = 0
        for row, (prompt, answer) in enumerate(zip(prompt_ids, answer_ids, strict=True), first):
            prompt, answer = prompt or [self._start_id], self._append_end(answer)
            if self.refuse_long and len(answer) >= self.max_length:
                problem = (
                    f"the answer of example {row + 1} has {len(answer)} tokens, and {self.max_length} is the limit"
                )
                cure = "a larger model.max_length, or data.long_answers: cut"
                raise FedspanError("model.max_length", self.max_length, cure, problem=problem)
            cut_prompt, cut_answer = truncate(
                prompt, answer, self.max_length, prompt[0] in self.tokenizer.all_special_ids
            )
            truncated_prompts, truncated_answers = (
                truncated_prompts + (cut_prompt != prompt),
                truncated_answers + (cut_answer != answer),
            )
            ids.append([*cut_prompt, *cut_answer])
            starts.append(len(cut_prompt))
        answers = [prompt.answer for prompt in prompts]
        return Ragged(ids), np.array(starts, dtype=np.int64), answers, truncated_prompts, truncated_answers

    @property
    def _start_id(self) -> int:
        """Id that begins a prompt without any tokens."""
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        return next(id for id in ids if isinstance(id, int))

    def _append_end(self, answer: list[int]) -> list[int]:
        """Append the end-of-text token to an answer; a chat template writes its own."""
        end = self.tokenizer.eos_token_id
        return [*answer, end] if isinstance(end, int) and end not in answer else answer

    def collate(self, examples: EncodedPrompts, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate ``input_ids`` and ``labels`` (the answers' ids, -100 elsewhere), (B, T), and ``attention_mask``.

        With packing: one row, (1, sum of T), with ``position_ids`` that restart at every example, and no mask.
        """
        rows = [examples.ids[index] for index in indices]
        labels = [
            [IGNORED] * int(examples.starts[index]) + row[int(examples.starts[index]) :]
            for index, row in zip(indices, rows, strict=True)
        ]
        if self.packing:
            batch = {
                "input_ids": torch.tensor([[id for row in rows for id in row]]),
                "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
                "labels": torch.tensor([[id for row in labels for id in row]]),
            }
            return _move_batch(batch, device)
        pad = int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        batch = {
            "input_ids": _pad(rows, pad),
            "attention_mask": _pad([[1] * len(row) for row in rows], 0),
            "labels": _pad(labels, IGNORED),
        }
        return _move_batch(batch, device)

    def compute_logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (S, V) of a batch's S answer tokens, these tokens, and their examples' numbers, (S,)."""
        logits_BTV = get_logits(model(**select_inputs(batch, TARGET_COUNTS), use_cache=False))
        labels_BT = batch["labels"][:, 1:]
        if "position_ids" in batch:
            numbers_BT = (batch["position_ids"] == 0).cumsum(1)[:, 1:] - 1
        else:
            numbers_BT = torch.arange(len(labels_BT), device=labels_BT.device)[:, None].expand_as(labels_BT)
        places = find_targets(labels_BT != IGNORED, batch[TARGET_COUNTS])
        logits_SV = logits_BTV[:, :-1].flatten(0, 1).index_select(0, places)
        return upcast(logits_SV), labels_BT.flatten()[places], numbers_BT.flatten()[places]

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return each example's sum of negative log-likelihood over its answer, answer tokens, and correct tokens.

        With ``generate``, N further columns hold the generated ids, and -1 after their end.
        """
        logits_SV, targets_S, numbers_S = self.compute_logits(model, batch)
        is_packed = "position_ids" in batch
        count = int((batch["position_ids"] == 0).sum()) if is_packed else len(batch["labels"])
        rows = score_tokens(logits_SV, targets_S, numbers_S, count)
        if not generate:
            return rows
        return torch.cat([rows, self._generate(model, batch, self.generation.max_new_tokens)], 1)

    def _generate(self, model: nn.Module, batch: Mapping[str, Tensor], count: int) -> Tensor:
        """Generate greedy answers to the batch's prompts, (B, count), float32, -1 after their end."""
        from transformers import GenerationConfig  # slow to import, and most commands generate nothing

        prompts = self._extract_prompts(batch)
        device, pad = batch["input_ids"].device, int(self.tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        # Padded on the left: generation continues at the right end of every row.
        ids = _pad([row[::-1] for row in prompts], pad).flip(1).to(device)
        mask = _pad([[1] * len(row) for row in prompts], 0).flip(1).to(device)
        # Prompt and answer together have at most as many positions as the model supports.
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", ids.shape[1] + count)
        model_config = getattr(model, "generation_config", None)
        ends = getattr(model_config, "eos_token_id", None) or self.tokenizer.eos_token_id
        room = max(1, min(count, positions - ids.shape[1]))
        config = GenerationConfig(max_new_tokens=room, do_sample=False, pad_token_id=pad, eos_token_id=ends)
        generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :]  # pyright: ignore
        return mark_ends(generated, count, ends)  # pyright: ignore[reportArgumentType]

    def _extract_prompts(self, batch: Mapping[str, Tensor]) -> list[list[int]]:
        ids, is_prompt = batch["input_ids"], batch["labels"] == IGNORED
        if "position_ids" in batch:
            starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
            borders = [*starts[1:], ids.shape[1]]
            return [
                ids[0, start:end][is_prompt[0, start:end]].tolist() for start, end in zip(starts, borders, strict=True)
            ]
        is_prompt = is_prompt & batch["attention_mask"].bool()
        return [row[is_own].tolist() for row, is_own in zip(ids, is_prompt, strict=True)]

    def compute_metrics(
        self, predictions: Tensor, examples: EncodedPrompts, indices: Sequence[int]
    ) -> dict[str, float]:
        """Compute ``loss`` (mean over answer tokens), ``perplexity``, ``token_accuracy``, generated ``exact_match``."""
        scores = compute_token_metrics(predictions)
        if predictions.shape[1] > SCORES:
            pairs = zip(self.decode_predictions(predictions), self.decode_targets(examples, indices), strict=True)
            scores["exact_match"] = float(np.mean([is_exact_match(*pair, self.generation.pattern) for pair in pairs]))
        return scores

    def describe_examples(self, examples: EncodedPrompts) -> tuple[str, ...]:
        """Report how many prompts and answers were truncated."""
        counts = {
            "prompts lost their beginning": examples.truncated_prompts,
            "answers lost their end": examples.truncated_answers,
        }
        limit = f"model.max_length is {self.max_length} tokens"
        return tuple(f"{count} of {len(examples)} {effect}: {limit}" for effect, count in counts.items() if count)

    def decode_targets(self, examples: EncodedPrompts, indices: Sequence[int]) -> list[str]:
        """Return the answers as in the data."""
        return [examples.answers[index].strip() for index in indices]


@torch.no_grad()
def can_attend_across_examples(model: nn.Module, device: torch.device) -> bool:
    """Check whether a packed example's logits depend on the example before it; the model must not be packed then."""
    logits: list[Tensor] = []
    for first in (5, 6):
        ids = torch.tensor([[first, 7, 8, 9, 10, 11]], device=device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
        logits.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 3:])
    return not torch.allclose(logits[0], logits[1], rtol=1e-5)


def _move_batch(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to a device, and add the numbers of answer tokens, which stay on the CPU."""
    counts_B = (batch["labels"][:, 1:] != IGNORED).sum(1)
    return {**{key: to_device(value, device) for key, value in batch.items()}, TARGET_COUNTS: counts_B}


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def _read(reader: ColumnReader, config: DataConfig) -> ReadColumns:
    if config.messages is not None:
        columns = reader.read_conversations(config.messages)
    elif config.prompt is not None:
        columns = {"text": reader.read_prompts(config.prompt), "answer": reader.read_texts(config.answer, "answer")}
    else:
        expected = "a text such as 'Q: {question} A: ', the name of a template, or data.messages in its place"
        raise FedspanError(f"{reader.field}.prompt", None, expected, problem="causal-lm needs a prompt")
    return ReadColumns(columns, set(), None if config.label is None else reader.read_classes(config.label))


def _require(config: DataConfig, field: str) -> list[tuple[str, ...]]:
    if config.messages is not None:
        groups = [(config.messages,)]
    elif config.prompt is not None:
        groups = [parse_template(config.prompt, f"{field}.prompt").columns, (config.answer,)]
    else:
        return []
    return groups if config.label is None else [*groups, (config.label,)]


def build_language_model(
    tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None
) -> CausalLM:
    """Build the task from a run's settings."""
    return CausalLM(
        tokenizer,
        settings.max_length,
        chat=settings.chat,
        system=settings.system,
        refuse_long=data is not None and data.long_answers == "refuse",
        packing=data is not None and data.packing,
        generation=GenerationOptions(settings.max_new_tokens, settings.answer_pattern),
        metric=settings.metric,
    )


CAUSAL_LM = TaskDefinition(
    name="causal-lm",
    title="an answer to a prompt (instruction tuning)",
    head="language-model",
    build=build_language_model,
    target_type="text",
    metrics=("loss", "perplexity", "token_accuracy"),
    columns=TaskColumns(read=_read, get_required_columns=_require, get_label_column=lambda config: config.label),
    is_generative=True,
    peft_task_type="CAUSAL_LM",
    loss_options=CausalLM.loss_options,
    default_model=("Qwen/Qwen2.5-0.5B", "all-linear"),
    lr=2e-4,
    summary_metrics=("perplexity", "exact_match"),
    pipeline_tag="text-generation",
    make_examples=lambda ids, _: EncodedPrompts(ids, ids.lengths // 2, ("",) * len(ids), ids.lengths, 0, 0),
)
