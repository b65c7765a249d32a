"""The config section ``training``: local training of one client in one round."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from fedspan.section import Section


class TrainingConfig(Section):
    """Local training of one client in one round."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD uses training.momentum."""
    lr: float | Literal["auto"] = 2e-3
    """Peak learning rate. auto: selected before the first round by a range test, which trains a few steps with each of
    several rates and selects the lowest loss on the clients' validation parts. Only for clients in this process,
    without privacy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate across rounds."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds of linear warm-up."""
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Final learning rate of a schedule; at most lr."""
    cycle_rounds: int | None = Field(default=None, ge=1)
    """Rounds after which a schedule restarts."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Epsilon of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay: decoupled for AdamW, L2 for SGD."""
    batch_size: int = Field(default=16, ge=1)
    """Examples per forward and backward pass."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Passes per optimizer step."""
    local_epochs: int = Field(default=1, ge=1)
    """Epochs over a client's examples per round."""
    local_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps per round, instead of local_epochs."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Norm to which gradients are clipped; 0: no clipping."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """reset: re-initialize a client's moments every round. keep: store them on the client."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    logit_adjustment: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """For clients with different classes: add this multiple of the logarithm of a class's share of the client's
    examples to its logit in local training, so that a client does not unlearn classes that it lacks (logit calibration;
    usually 1). 0: off."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target that is spread over all classes (language models: over the vocabulary) in training, as in
    torch.nn.CrossEntropyLoss. With several labels each is spread over its two answers. For tasks whose targets are
    labels, tags or tokens."""
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = "none"
    """Classification and tags: weights of classes in the loss, as in torch.nn.CrossEntropyLoss. balanced: by the counts
    of the client's own examples (tags: words), as in scikit-learn, so that no client learns those of others. Or weights
    by label, the same for all clients; other labels have weight 1. With several labels: of the examples that have the
    label (pos_weight of torch.nn.BCEWithLogitsLoss); balanced: examples without it over those with it."""
    checkpoint_steps: int | None = Field(default=None, ge=1)
    """Nodes of a deployment: optimizer steps after which a node stores the progress of its training. A node that is
    killed within a round, and is back before the server has given up its order, then continues after the last
    checkpoint with the same bits. Not with privacy.mechanism: dp-sgd, and not on nodes with trainers of their own. A
    simulation continues after its last round."""
    checkpoint_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """As checkpoint_steps, after a number of minutes; with both, whichever comes first."""
    group_by_length: bool = True
    """Put texts of similar length into a batch, which reduces padding."""

    @field_validator("betas")
    @classmethod
    def _validate_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("two numbers from 0 to below 1")
        return value

    @field_validator("lr", mode="before")
    @classmethod
    def _parse_lr(cls, value: object) -> object:
        try:
            positive = value == "auto" or (not isinstance(value, bool) and 0 < float(value) < math.inf)  # pyright: ignore
        except (TypeError, ValueError):
            positive = False
        if not positive:
            raise ValueError("a number above 0, or auto")
        return value if value == "auto" else float(value)  # pyright: ignore

    @field_validator("min_lr")
    @classmethod
    def _validate_min_lr(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("lr") != "auto" and value > info.data.get("lr", value):
            raise ValueError(f"at most training.lr, {info.data['lr']:g}")
        return value
