"""Entities in sequences of tags: IOB1, IOB2, IOBES and BILOU read in one way, written as IOB2, and counted.

An entity is found as by ``conlleval`` of CoNLL-2000 and by seqeval's default mode, which ignore the scheme: it begins
at B, S or U, at any other tag after O, after an entity's last tag (E, L, S, U), and where the type changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BEGINS = frozenset("BSU")
_ENDS = frozenset("ELSU")


def find_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return the type, the first position and the position after the last one of each entity, in order.

    Args:
        tags: Tags of a sentence: ``O``, or a prefix, a hyphen and a type.
    """
    entities: list[tuple[str, int, int]] = []
    kind, start, ended = "", 0, True
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, current = tag.partition("-")
        is_outside = prefix == "O"
        if kind and (is_outside or prefix in _BEGINS or ended or current != kind):
            entities.append((kind, start, position))
            kind = ""
        if not is_outside and not kind:
            kind, start = current, position
        ended = prefix in _ENDS
    return entities


def convert_to_iob2(tags: Sequence[str]) -> list[str]:
    """Write the entities of a sentence as IOB2: B at each first word, I at its others, O elsewhere."""
    converted = ["O"] * len(tags)
    for kind, start, end in find_entities(tags):
        converted[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    return converted


def list_labels(tags: Iterable[str]) -> list[str]:
    """Return IOB2's labels for all types that occur in tags: O, then B and I of each type in order."""
    kinds = sorted({tag.partition("-")[2] for tag in tags} - {""})
    return ["O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI")]


@dataclass(frozen=True)
class EntityScores:
    """Micro-averaged scores of entities: an entity counts as found if type, first and last word are right."""

    precision: float
    """Share of the predicted entities that are true; 0 if none is predicted."""
    recall: float
    """Share of the true entities that are predicted; 0 if there are none."""
    f1: float
    """Harmonic mean of both; 0 if both are 0."""


def score_entities(references: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> EntityScores:
    """Compare the entities of predicted tags with those of true ones."""
    true = {(number, *entity) for number, tags in enumerate(references) for entity in find_entities(tags)}
    predicted = {(number, *entity) for number, tags in enumerate(predictions) for entity in find_entities(tags)}
    correct = len(true & predicted)
    precision, recall = correct / max(1, len(predicted)), correct / max(1, len(true))
    return EntityScores(precision, recall, 2 * correct / max(1, len(true) + len(predicted)))
