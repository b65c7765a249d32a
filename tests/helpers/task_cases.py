"""One case for each task with examples: a run on a tiny model, and its metrics computed by another library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import sacrebleu
import seqeval.metrics
import torch
from rouge_score import rouge_scorer
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_absolute_error, ndcg_score
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from fedspan.tasks.definition import TaskDefinition

from . import (
    tiny,
    tiny_decoders,
    tiny_images,
    tiny_masked,
    tiny_pairs,
    tiny_preferences,
    tiny_seq2seq,
    tiny_tags,
    tiny_topics,
)


class Scored(NamedTuple):
    """What a user of a model has: predictions (``Task.predict``), readable and true answers, and encoded examples."""

    predictions: Tensor
    answers: Sequence[str]
    truths: Sequence[str]
    examples: Any


@dataclass(frozen=True)
class TaskCase:
    """A task's case in the conformance test.

    Args:
        settings: Returns the config of a run of two rounds, given the folders of the tiny models and data.
        reference: Computes the task's metrics (``loss`` is optional).
        trains_alike: Largest difference between what the loop and the batched engine trained.
    """

    settings: Callable[[Mapping[str, Path]], dict[str, Any]]
    reference: Callable[[Scored], Mapping[str, float]]
    trains_alike: float = 2e-5


def measure_labels(scored: Scored) -> Mapping[str, float]:
    """Compute scikit-learn's metrics of single labels, and the mean of the labels' own log-probabilities."""
    labels = torch.from_numpy(scored.examples.labels)
    chosen = scored.predictions.double().log_softmax(1)[torch.arange(len(labels)), labels]
    return {
        "loss": -float(chosen.mean()),
        "accuracy": float(accuracy_score(scored.truths, scored.answers)),
        "macro_f1": float(f1_score(scored.truths, scored.answers, average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(scored.truths, scored.answers)),
    }


def _measure_numbers(scored: Scored) -> Mapping[str, float]:
    values, targets = scored.predictions[:, 0].double().numpy(), scored.examples.labels.astype(np.float64)
    return {
        "loss": float(np.square(values - targets).mean()),
        "pearson": float(pearsonr(values, targets)[0]),
        "spearman": float(spearmanr(values, targets)[0]),
    }


def _measure_texts(scored: Scored) -> Mapping[str, float]:
    matches = [answer == truth for answer, truth in zip(scored.answers, scored.truths, strict=True)]
    return {"exact_match": sum(matches) / len(matches)}


def _measure_pairs(scored: Scored) -> Mapping[str, float]:
    rouge: Any = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [rouge.score(truth, answer) for truth, answer in zip(scored.truths, scored.answers, strict=True)]
    return {
        "bleu": sacrebleu.corpus_bleu(list(scored.answers), [list(scored.truths)]).score,
        "chrf": sacrebleu.CHRF().corpus_score(list(scored.answers), [list(scored.truths)]).score,
        "rouge_1": float(np.mean([score["rouge1"].fmeasure for score in scores])),
        "rouge_2": float(np.mean([score["rouge2"].fmeasure for score in scores])),
        "rouge_l": float(np.mean([score["rougeL"].fmeasure for score in scores])),
    }


def _measure_entities(scored: Scored) -> Mapping[str, float]:
    guessed, true = ([text.split() for text in texts] for texts in (scored.answers, scored.truths))
    return {
        "entity_f1": float(seqeval.metrics.f1_score(true, guessed)),
        "entity_precision": float(seqeval.metrics.precision_score(true, guessed, zero_division=0)),
        "entity_recall": float(seqeval.metrics.recall_score(true, guessed, zero_division=0)),
        "token_accuracy": float(seqeval.metrics.accuracy_score(true, guessed)),
    }


def _measure_label_lists(scored: Scored) -> Mapping[str, float]:
    true, guessed = (
        [[label in text.split(", ") for label in tiny_topics.LABELS] for text in texts]
        for texts in (scored.truths, scored.answers)
    )
    return {
        "loss": float(torch.nn.BCEWithLogitsLoss()(scored.predictions, torch.tensor(true).float())),
        "micro_f1": float(f1_score(true, guessed, average="micro", zero_division=0)),
        "macro_f1": float(f1_score(true, guessed, average="macro", zero_division=0)),
        "subset_accuracy": float(accuracy_score(true, guessed)),
    }


def _measure_masked(scored: Scored) -> Mapping[str, float]:
    pairs = [
        (guess, word)
        for answer, truth in zip(scored.answers, scored.truths, strict=True)
        for guess, word in zip(answer.split(), truth.split(), strict=True)
    ]
    return {"masked_accuracy": float(accuracy_score([word for _, word in pairs], [guess for guess, _ in pairs]))}


def _measure_retrieval(scored: Scored) -> Mapping[str, float]:
    """Compute nDCG by scikit-learn, and the share of the relevant documents among each anchor's first ten."""
    anchors, positives, _ = (part.numpy() for part in scored.predictions[:, 1:].double().chunk(3, 1))
    (queries, first_query), (documents, first_document) = (
        np.unique(scored.examples.ids[:, column], return_index=True) for column in (0, 1)
    )
    similarities = cosine_similarity(anchors[first_query], positives[first_document])
    relevant = np.zeros(similarities.shape)
    for query, document in scored.examples.ids[:, :2]:
        relevant[np.searchsorted(queries, query), np.searchsorted(documents, document)] = 1
    hits = np.take_along_axis(relevant, np.argsort(-similarities, axis=1)[:, :10], axis=1)
    return {
        "recall_at_10": float((hits.sum(1) / relevant.sum(1)).mean()),
        "ndcg_at_10": float(ndcg_score(relevant, similarities, k=10)),
    }


def _measure_preferences(scored: Scored) -> Mapping[str, float]:
    """Compute the loss by the formula of DPO's paper, and the accuracy by scikit-learn."""
    policy, rewards = scored.predictions[:, :2].double().numpy(), scored.predictions[:, 2:4].double().numpy() * 0.5
    np.testing.assert_allclose(policy - scored.examples.reference, rewards / 0.5, rtol=1e-4, atol=1e-4)
    return {
        "loss": float(np.log1p(np.exp(rewards[:, 1] - rewards[:, 0])).mean()),
        "reward_accuracy": float(accuracy_score(scored.truths, scored.answers)),
    }


def _labeled(folders: Mapping[str, Path]) -> dict[str, Any]:
    return tiny.settings(folders["texts"])


def _numbers(folders: Mapping[str, Path]) -> dict[str, Any]:
    rows = (folders["texts"] / "corpus.csv").read_text(encoding="utf-8").splitlines()
    path = folders["own"] / "numbers.csv"
    header, *body = rows
    lines = [f"{header},target", *(f"{line},{len(line) / 40:.3f}" for line in body)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tiny.settings(folders["texts"], data={"train": str(path), "label": "target"}) | {"task": "regression"}


def _load_own_task() -> TaskDefinition:
    """Return the definition of examples/own_task.py."""
    path = Path(__file__).parents[2] / "examples" / "own_task.py"
    spec = spec_from_file_location("own_task", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MEDIAN_REGRESSION


def _measure_medians(scored: Scored) -> Mapping[str, float]:
    error = float(mean_absolute_error(scored.examples.labels, scored.predictions[:, 0].numpy()))
    return {**_measure_numbers(scored), "loss": error, "absolute_error": error}


OWN = _load_own_task()
"""A task of a user's own, which the conformance test registers."""
CASES: Mapping[str, TaskCase] = {
    "sequence-classification": TaskCase(_labeled, measure_labels),
    "regression": TaskCase(_numbers, _measure_numbers),
    "median-regression": TaskCase(lambda folders: _numbers(folders) | {"task": OWN.name}, _measure_medians),
    "token-classification": TaskCase(
        lambda folders: tiny_tags.settings(folders["texts"], folders["own"]), _measure_entities
    ),
    "multi-label-classification": TaskCase(
        lambda folders: tiny_topics.settings(folders["texts"], folders["own"]), _measure_label_lists
    ),
    "masked-lm": TaskCase(lambda folders: tiny_masked.settings(folders["own"]), _measure_masked),
    "text-embedding": TaskCase(
        lambda folders: tiny_pairs.settings(folders["texts"], folders["own"]), _measure_retrieval
    ),
    "preference": TaskCase(
        lambda folders: tiny_preferences.settings(folders["decoders"], folders["own"]), _measure_preferences
    ),
    "seq2seq": TaskCase(lambda folders: tiny_seq2seq.settings(folders["own"]), _measure_pairs),
    "causal-lm": TaskCase(lambda folders: tiny_decoders.settings(folders["decoders"]), _measure_texts),
    "image-classification": TaskCase(lambda folders: tiny_images.settings(folders["images"]), measure_labels),
}
"""Cases by name of the task. A task without one fails the conformance test."""
REFUSED: Mapping[str, str] = {"trainer": "fedspan reads no examples of it, and every call of the task is refused"}
"""Tasks without a case, and the reason."""


def folders_of(request: pytest.FixtureRequest, name: str, own: Path) -> dict[str, Path]:
    """Return the folders of tiny models and data that the case of a task needs."""
    fixtures = {"causal-lm": ("decoders",), "preference": ("decoders",), "image-classification": ("images",)}.get(
        name, ("tiny_folder",)
    )
    places = {"tiny_folder": "texts", "decoders": "decoders", "images": "images"}
    return {"own": own, **{places[fixture]: request.getfixturevalue(fixture) for fixture in fixtures}}
