"""Evaluation during a run."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from fedspan.config.section import Section

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1, description="Rounds between evaluations; the last round is always evaluated.")
    batch_size: int = Field(default=64, ge=1, description="Texts of one forward pass.")
    clients: int | None = Field(
        default=None,
        ge=1,
        description="How many clients are measured on their own validation and test parts (and, where every client has "
        "a model of its own, on the held-out set): the same ones in every round, drawn by the seed; left out: all. "
        "Where every client has a model of its own, those of these clients are written at the end.",
    )
    metric: str | None = Field(
        default=None,
        description="By which the best round is chosen, on the clients' validation parts; left out: accuracy, pearson "
        "or loss, by task. The validation loss decides between equal values, then the later round.",
    )
    best_by: Literal["metric", "loss"] = Field(
        default="metric",
        description="Whether rounds are compared, for the best one and for early stopping, by that metric or by the "
        "validation loss, which is steadier where the validation parts are small. By the loss, a round "
        "replaces the start if it gains more on it than the standard error of that gain.",
    )
    diagnostics: int | None = Field(
        default=None,
        ge=1,
        description="Rounds between two diagnoses of the clients' updates: what fedspan diagnose measures in every "
        "target layer is written to metrics.jsonl and shown by fedspan report; left out: never, as it takes time. "
        "Not between machines, where no process sees both ends of an update, and not under privacy.",
    )
    generate: bool = Field(
        default=False,
        description="causal-lm: at the end let the model answer the held-out prompts and count exact matches.",
    )
    max_new_tokens: int = Field(
        default=64, ge=1, le=2**17, description="Tokens at which a generated answer ends at the latest."
    )
    answer_pattern: str | None = Field(
        default=None,
        min_length=1,
        description="A regular expression for what counts of an answer, such as '####\\s*(\\S+)' for GSM8K: its first "
        "group, or the whole match; left out: all of the text. Numbers are compared as numbers.",
    )

    def get_selection_metric(self, metric: str) -> str:
        """Return the metric by which rounds are compared.

        Args:
            metric: The run's metric.
        """
        return "loss" if self.best_by == "loss" else metric

    @field_validator("answer_pattern")
    @classmethod
    def _validate_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:  # the last two: for a{9999999999}, ((((...
            raise ValueError(f"a regular expression, which this is not: {error}") from None
        return value
