"""Entities are those of seqeval, in every scheme, and so are their scores."""

from __future__ import annotations

import numpy as np
import pytest
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities

from fedspan.tasks.entities import convert_to_iob2, find_entities, list_labels, score_entities

KINDS = ("Drug", "Gene")


def random_tags(rng: np.random.Generator, prefixes: str, count: int) -> list[str]:
    """Return tags in no order that a scheme allows."""
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in KINDS)]
    return [tags[at] for at in rng.integers(0, len(tags), count)]


@pytest.mark.parametrize("prefixes", ["BI", "I", "BIES"])
def test_entities_of_any_tags_are_seqevals(prefixes: str) -> None:
    rng = np.random.default_rng(5)
    for length in (1, 2, 3, 5, 9) * 40:
        tags = random_tags(rng, prefixes, length)
        expected = [(kind, start, end + 1) for kind, start, end in get_entities(tags)]
        assert find_entities(tags) == expected, tags


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [
        (IOB1, "I-Drug I-Drug B-Drug O I-Gene I-Drug I-Gene B-Gene I-Gene"),
        (IOB2, "B-Drug I-Drug B-Drug O B-Gene B-Drug B-Gene B-Gene I-Gene"),
        (IOBES, "B-Drug E-Drug S-Drug O S-Gene S-Drug S-Gene B-Gene E-Gene"),
        (BILOU, "B-Drug L-Drug U-Drug O U-Gene U-Drug U-Gene B-Gene L-Gene"),
    ],
)
def test_all_schemes_are_read_alike(scheme: type, tags: str) -> None:
    words = tags.split()
    strict = [(entity.tag, entity.start, entity.end) for entity in Entities([words], scheme).entities[0]]
    assert find_entities(words) == strict
    assert convert_to_iob2(words) == [
        "B-Drug",
        "I-Drug",
        "B-Drug",
        "O",
        "B-Gene",
        "B-Drug",
        "B-Gene",
        "B-Gene",
        "I-Gene",
    ]


def test_scores_are_seqevals() -> None:
    rng = np.random.default_rng(8)
    truths = [convert_to_iob2(random_tags(rng, "BI", length)) for length in (4, 9, 1, 6, 12)]
    guesses: list[list[str]] = []
    for truth in truths:
        others = random_tags(rng, "BI", len(truth))
        guesses.append([tag if rng.random() < 0.7 else other for tag, other in zip(truth, others, strict=True)])
    scores = score_entities(truths, guesses)
    assert scores.f1 == pytest.approx(f1_score(truths, guesses))
    assert scores.precision == pytest.approx(precision_score(truths, guesses))
    assert scores.recall == pytest.approx(recall_score(truths, guesses))
    assert 0 < scores.recall < 1


def test_without_entities_scores_are_zero() -> None:
    scores = score_entities([["O", "O"]], [["O", "O"]])
    assert (scores.precision, scores.recall, scores.f1) == (0, 0, 0)


def test_labels_are_complete_and_ordered() -> None:
    assert list_labels(["I-Gene", "O", "B-Drug"]) == ["O", "B-Drug", "I-Drug", "B-Gene", "I-Gene"]
