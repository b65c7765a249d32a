"""Corpora that ship with fedspan, so that the first run needs neither a file nor the network."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

from fedspan.errors import FedspanError, suggest_nearest

PREFIX = "builtin:"


CORPORA = {"review-sentences": "review_sentences", "patient-messages": "patient_messages"}
"""The built-in corpora: their folders under ``fedspan/data/corpus``, with a csv file for each split."""
_SPLITS = ("train", "test")


def find_corpus_file(user_path: str, split: str, field: str) -> Traversable:
    """Return the csv file (columns text, label) of one split of a built-in corpus.

    Args:
        user_path: The corpus as the user wrote it, such as ``builtin:patient-messages``.
        field: The option that contains `user_path`; that of the split is ``<field>_split``.
    """
    name = user_path.removeprefix(PREFIX)
    if name not in CORPORA:
        available = [PREFIX + corpus for corpus in CORPORA]
        raise FedspanError(
            field,
            user_path,
            problem=f"no built-in corpus is named {user_path!r}. {suggest_nearest(user_path, available)}",
        )
    if split not in _SPLITS:
        problem = f"{user_path} has no split {split!r}. {suggest_nearest(split, _SPLITS)}"
        raise FedspanError(f"{field}_split", split, problem=problem)
    return files("fedspan.data").joinpath("corpus", CORPORA[name], f"{split}.csv")
