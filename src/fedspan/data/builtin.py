"""Corpora that ship with fedspan, so that the first run needs neither a file nor the network."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fedspan.errors import FedspanError, suggest_nearest

PREFIX = "builtin:"


@dataclass(frozen=True)
class Corpus:
    """A built-in corpus: its folder under ``fedspan/data/corpus``, with one csv per split, and its description."""

    folder: str
    summary: str
    splits: tuple[str, ...] = ("train", "test")


CORPORA = {
    "review-sentences": Corpus(
        "review_sentences", "sentences from reviews of phones, films and restaurants, positive or negative"
    ),
    "patient-messages": Corpus(
        "patient_messages", "short messages of patients to a clinic, labeled by what they ask for"
    ),
}


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
    corpus = CORPORA[name]
    if split not in corpus.splits:
        problem = f"{user_path} has no split {split!r}. {suggest_nearest(split, corpus.splits)}"
        raise FedspanError(f"{field}_split", split, problem=problem)
    return files("fedspan.data").joinpath("corpus", corpus.folder, f"{split}.csv")
