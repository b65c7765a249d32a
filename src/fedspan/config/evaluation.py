"""Evaluation during a run."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from fedspan.section import Section


class EvaluationConfig(Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per forward pass."""
    clients: int | None = Field(default=None, ge=1)
    """Number of clients that are evaluated on their own validation and test parts (personal models also on the test
    set): the same ones in every round, drawn by the seed; default: all. Of personal models, only those of these clients
    are exported."""
    metric: str | None = None
    """Metric that selects the best round on the clients' validation parts; default: accuracy, pearson or loss, by task.
    Ties are broken by the validation loss, then by the later round. In deployments, rounds are compared by a trimmed
    mean from three nodes on; with two, the last round is the best."""
    by: str | None = Field(default=None, min_length=1)
    """Column of the held-out examples, such as domain or hospital, for each of whose values the report has the final
    scores (by_value); default: none. Not in deployments."""
    best_by: Literal["metric", "loss"] = "metric"
    """Compare rounds, for the best one and for early stopping, by the metric or by the validation loss, which is less
    noisy on small validation parts. By the loss, a round replaces the start only if its gain exceeds the standard error
    of that gain."""
    diagnostics: int | None = Field(default=None, ge=1)
    """Rounds between diagnoses of the clients' updates: the measures of fedspan diagnose for every target layer are
    written to metrics.jsonl and shown by fedspan report; default: never, because it takes time. Not in deployments,
    where no process sees both ends of an update, and not under privacy."""
    generate: bool = False
    """causal-lm: at the end, generate answers to the held-out prompts and count exact matches. seq2seq: generate texts
    for the held-out sources and compute BLEU, chrF and ROUGE (fedspan[seq2seq])."""
    max_new_tokens: int = Field(default=64, ge=1, le=2**17)
    """Maximum number of tokens of a generated answer or text."""
    answer_pattern: str | None = Field(
        default=None,
        min_length=1,
        description="A regular expression for what counts of an answer, such as '####\\s*(\\S+)' for GSM8K: its first "
        "group, or the whole match; left out: the whole text. Numbers are compared as numbers.",
    )

    def get_selection_metric(self, metric: str) -> str:
        """Return the metric by which rounds are compared."""
        return "loss" if self.best_by == "loss" else metric

    @field_validator("answer_pattern")
    @classmethod
    def _validate_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:  # the last two: for a{9999999999}, ((((...
            raise ValueError(f"a valid regular expression ({error})") from None
        return value
