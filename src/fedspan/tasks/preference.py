"""Preference tuning: a causal language model learns from pairs of a better and a worse answer to a prompt.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
arXiv:2305.18290. With the policy p and the reference q, the reward of an answer y to a prompt x is

    r(x, y) = beta * (log p(y | x) - log q(y | x)),    loss = -log sigmoid(r(x, chosen) - r(x, rejected)).

The reference is the pretrained model: the base before the first round, without adapters. It is constant, so engines
compute its log-probabilities once an example (``fedspan.training.references``). Other losses as in TRL: hinge
(SLiC-HF, arXiv:2305.10425), ipo (arXiv:2310.12036, with log-probabilities per token as its authors use them), and
robust DPO (arXiv:2403.00409) for pairs of which a known share is in the wrong order.

Shapes: B examples of a batch, S answer tokens of a batch, V vocabulary, C clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import to_device
from fedspan.data.columns import TaskColumns
from fedspan.data.config import DataConfig
from fedspan.errors import FedspanError
from fedspan.tasks.causal import CausalLM, EncodedPrompts, build_language_model
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.encoding import Ragged
from fedspan.tasks.losses import average_by_client
from fedspan.tasks.metrics import Metric, drop_undefined
from fedspan.tasks.preference_columns import ANSWERS, find_valid_rows, get_required_columns, infer_columns, read_columns

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from fedspan.tasks.settings import TaskSettings

_REFERENCE = "reference"
_BOUND = 1e15  # of metrics without a bound


@dataclass(frozen=True)
class PreferenceOptions:
    """Options of preference tuning.

    Args:
        loss: The loss, by TRL's name: sigmoid is DPO.
        beta: Strength of the tie to the reference: the factor of rewards, and ipo's tau.
        label_smoothing: Share of pairs that are in the wrong order, below one half, for the robust loss.
    """

    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss != "robust":
            expected = f"loss: robust, whose option it is, and not {self.loss}"
            raise FedspanError("task_options.label_smoothing", self.label_smoothing, expected)


@dataclass(frozen=True)
class EncodedPreferences:
    """Tokenized prompts with their better and worse answers."""

    answers: Mapping[str, EncodedPrompts]
    """Prompts with the chosen and with the rejected answers, by role; prompts to answer have "chosen" alone."""
    lengths: np.ndarray
    """Number of tokens of an example's texts together, int64, (examples,)."""
    reference: np.ndarray
    """Log-probabilities of the chosen and the rejected answers under the reference, float64, (examples, 2); NaN until
    an engine has computed them. Of prompts to answer, (examples, 0)."""

    def __len__(self) -> int:
        return len(self.lengths)


class PreferenceTuning:
    """Preferences among answers to prompts, with any Hugging Face decoder.

    Each of an example's two texts goes through the model in a pass of its own, so that rows are examples in every pass.

    Args:
        language: Encodes the prompts with each answer, and generates answers.
    """

    has_several_passes = True
    """Whether a batch takes several passes of the model, for which states that belong to one pass are not cached."""

    def __init__(self, language: CausalLM, options: PreferenceOptions | None = None, metric: str = "loss") -> None:
        self.language = language
        self.options = options or PreferenceOptions()
        self.metric = metric

    def encode(self, dataset: datasets.Dataset) -> EncodedPreferences:
        """Tokenize a data set once.

        Its columns are ``text``, ``chosen``, ``rejected`` and optionally ``history``; without ``chosen``, its texts are
        prompts to answer.
        """
        has_pairs = ANSWERS[0] in dataset.column_names
        prompts = dataset.select_columns([name for name in ("text", "history") if name in dataset.column_names])
        answers: dict[str, EncodedPrompts] = {}
        for role in ANSWERS if has_pairs else ANSWERS[:1]:
            texts = dataset[role] if has_pairs else [""] * len(dataset)
            answers[role] = self.language.encode(prompts.add_column("answer", list(texts)))  # pyright: ignore
        if has_pairs:
            answers = dict(zip(ANSWERS, _share_prompts(*answers.values()), strict=True))
        lengths = np.sum([encoded.lengths for encoded in answers.values()], axis=0)
        return EncodedPreferences(answers, lengths, np.full((len(lengths), len(ANSWERS) if has_pairs else 0), np.nan))

    def collate(self, examples: EncodedPreferences, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Collate ``input_ids``, ``labels`` and ``attention_mask`` for each role, such as ``chosen.labels``.

        ``reference`` holds the log-probabilities of the reference, (B, 2), if they are computed for all examples.
        """
        batch: dict[str, Tensor] = {}
        for role, encoded in examples.answers.items():
            batch |= {f"{role}.{key}": value for key, value in self.language.collate(encoded, indices, device).items()}
        reference = torch.from_numpy(examples.reference[list(indices)])
        if not reference.isnan().any():
            dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
            batch[_REFERENCE] = to_device(reference.to(dtype), device)
        return batch

    def _score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities of a batch's answers and their numbers of tokens, both (B, 2)."""
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        for role in ANSWERS:
            logits_SV, targets_S, numbers_S = self.language.compute_logits(model, _select(batch, role))
            losses_S = F.cross_entropy(logits_SV, targets_S, reduction="none")
            # A product with zeros and ones: an indexed sum adds in no fixed order on a GPU.
            rows_B = torch.arange(len(batch[f"{role}.labels"]), device=numbers_S.device)
            owners_BS = (numbers_S == rows_B[:, None]).to(losses_S)
            sums.append(-(owners_BS @ losses_S))
            counts.append(owners_BS.sum(1))
        return torch.stack(sums, 1), torch.stack(counts, 1)

    @torch.no_grad()
    def compute_reference(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute what ``EncodedPreferences.reference`` holds for a batch with the reference model, (B, 2)."""
        return self._score(model, batch)[0]

    def _compare(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities, their differences from the reference's, and numbers of tokens, (B, 2) each."""
        if _REFERENCE not in batch:
            raise ValueError("the reference of some examples is not computed: call Engine.prepare before")
        scores_B2, counts_B2 = self._score(model, batch)
        return scores_B2, scores_B2 - batch[_REFERENCE].to(scores_B2.dtype), counts_B2

    def _compute_losses(self, ratios_B2: Tensor, counts_B2: Tensor) -> Tensor:
        """Compute the loss of each example, (B,), from log-ratios to the reference and numbers of tokens."""
        options = self.options
        if options.loss == "ipo":
            averages_B2 = ratios_B2 / counts_B2.clamp(min=1)
            return (averages_B2[:, 0] - averages_B2[:, 1] - 1 / (2 * options.beta)).square()
        margins_B = options.beta * (ratios_B2[:, 0] - ratios_B2[:, 1])
        if options.loss == "hinge":
            return F.relu(1 - margins_B)
        losses_B, share = -F.logsigmoid(margins_B), options.label_smoothing
        if options.loss == "robust":
            return ((1 - share) * losses_B + share * F.logsigmoid(-margins_B)) / (1 - 2 * share)
        return losses_B

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss of a batch, in float32 or better."""
        _, ratios_B2, counts_B2 = self._compare(model, batch)
        return self._compute_losses(ratios_B2, counts_B2).mean()

    def compute_client_losses(self, model: nn.Module, batch: Mapping[str, Tensor], mask_CB: Tensor) -> Tensor:
        """Compute the mean loss of each client's examples, (C,)."""
        _, ratios_B2, counts_B2 = self._compare(model, batch)
        return average_by_client(self._compute_losses(ratios_B2, counts_B2), mask_CB)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        """Return log-probabilities, log-ratios to the reference and numbers of tokens of both answers, (B, 6).

        Of prompts without answers, return what ``CausalLM.predict`` does.
        """
        if not _select(batch, ANSWERS[1]):
            return self.language.predict(model, _select(batch, ANSWERS[0]), generate=generate)
        return torch.cat(self._compare(model, batch), 1)

    def compute_metrics(
        self, predictions: Tensor, examples: EncodedPreferences, indices: Sequence[int]
    ) -> dict[str, float]:
        """Compute ``loss``, ``reward_accuracy`` and ``reward_margin``, TRL's rewards/accuracies and rewards/margins."""
        _, ratios_B2, counts_B2 = predictions.double().split(len(ANSWERS), 1)
        rewards_B2 = self.options.beta * ratios_B2
        values = {
            "loss": float(self._compute_losses(ratios_B2, counts_B2).mean()),
            "reward_accuracy": float((rewards_B2[:, 0] > rewards_B2[:, 1]).double().mean()),
            "reward_margin": float((rewards_B2[:, 0] - rewards_B2[:, 1]).mean()),
        }
        return drop_undefined(values)

    @property
    def loss_bound(self) -> float:
        """Largest loss of an example that an owner reports to others: twice that of the reference."""
        return 2 * float(self._compute_losses(torch.zeros(1, 2), torch.ones(1, 2)))

    def compute_example_losses(
        self, predictions: Tensor, examples: EncodedPreferences, indices: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """``BoundsExamples.compute_example_losses``: the pairs' losses, with equal weights."""
        _, ratios_B2, counts_B2 = predictions.double().split(len(ANSWERS), 1)
        losses_B = self._compute_losses(ratios_B2, counts_B2)
        return losses_B, torch.ones_like(losses_B)

    def describe_examples(self, examples: EncodedPreferences) -> tuple[str, ...]:
        """Report how many prompts and answers were cut, by role, and how many pairs of answers became equal."""
        remarks = [
            f"{role}: {remark}"
            for role, encoded in examples.answers.items()
            for remark in self.language.describe_examples(encoded)
        ]
        if equal := _count_equal_answers(examples):
            limit = f"model.max_length is {self.language.max_length} tokens"
            remarks.append(
                f"{equal} of {len(examples)} pairs have two answers of the same tokens, which teach nothing: {limit}"
            )
        return tuple(remarks)

    def decode_predictions(self, predictions: Tensor) -> list[str]:
        """Return the answer that has the higher reward, chosen or rejected; equal rewards count as rejected."""
        return [ANSWERS[0] if chosen > rejected else ANSWERS[1] for chosen, rejected in predictions[:, 2:4].tolist()]

    def decode_targets(self, examples: EncodedPreferences, indices: Sequence[int]) -> list[str]:
        """Return the right answers: chosen."""
        return [ANSWERS[0]] * len(indices)


def _share_prompts(first: EncodedPrompts, second: EncodedPrompts) -> tuple[EncodedPrompts, EncodedPrompts]:
    """Truncate the prompt of each pair to what the longer answer leaves of it: both answers follow equal prompts.

    Args:
        first: One answer to each prompt.
        second: Another answer to the same prompts. Truncated prompts have lost their beginning.
    """
    changed = (first.starts != second.starts).nonzero()[0].tolist()
    if not changed:
        return first, second
    starts = np.minimum(first.starts, second.starts)
    shared: list[EncodedPrompts] = []
    for own, other in ((first, second), (second, first)):
        rows = [list(ids) for ids in own.ids]
        for row in changed:
            if own.starts[row] > starts[row]:
                rows[row] = [*other.ids[row][: starts[row]], *rows[row][own.starts[row] :]]
        ids = Ragged(rows)
        truncated = max(first.truncated_prompts, second.truncated_prompts)
        shared.append(replace(own, ids=ids, starts=starts, lengths=ids.lengths, truncated_prompts=truncated))
    return shared[0], shared[1]


def _count_equal_answers(examples: EncodedPreferences) -> int:
    """Return the number of pairs whose answers have the same tokens, as two long ones that were cut can have."""
    if len(examples.answers) < len(ANSWERS):
        return 0
    chosen, rejected = (examples.answers[role] for role in ANSWERS)
    same_length = np.flatnonzero(chosen.lengths == rejected.lengths).tolist()
    return sum(chosen.ids[index] == rejected.ids[index] for index in same_length)


def _select(batch: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    prefix = f"{role}."
    return {key.removeprefix(prefix): value for key, value in batch.items() if key.startswith(prefix)}


def _build(tokenizer: PreTrainedTokenizerBase, settings: TaskSettings, data: DataConfig | None) -> PreferenceTuning:
    options: PreferenceOptions = PREFERENCE.parse_options(settings.options)
    return PreferenceTuning(build_language_model(tokenizer, settings, data), options, settings.metric)


PREFERENCE = TaskDefinition(
    name="preference",
    title="the better of two answers to a prompt (DPO)",
    head="language-model",
    build=_build,
    metrics=("loss", "reward_accuracy", "reward_margin"),
    custom_metrics={
        "reward_accuracy": Metric("reward accuracy", True, is_percentage=True, is_mean=True),
        "reward_margin": Metric("reward margin", True, minimum=-_BOUND, maximum=_BOUND),
    },
    columns=TaskColumns(
        read=read_columns,
        get_required_columns=get_required_columns,
        find_valid_rows=find_valid_rows,
        get_example_column=lambda config: config.roles.get("prompt", "prompt"),
        get_joined_columns=lambda config: (),
        get_label_column=lambda config: config.label,
        roles=("prompt", *ANSWERS),
    ),
    is_generative=True,
    has_reference=True,
    peft_task_type="CAUSAL_LM",
    options=PreferenceOptions,
    default_model=("Qwen/Qwen2.5-0.5B-Instruct", "all-linear"),
    lr=2e-4,
    summary_metrics=("reward_accuracy", "reward_margin"),
    pipeline_tag="text-generation",
    infer_columns=infer_columns,
    postprocess=lambda task, inputs, predictions: task.language.decode_predictions(predictions),
    count_passes=lambda data: len(ANSWERS),
)
