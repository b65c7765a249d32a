"""The built-in corpora: figures of a datasheet, and the files of the published set.

    python -m evidence.pages.corpus --figures patient-messages
    python -m evidence.pages.corpus --sentences FOLDER

The figures are sizes, the closest pair of texts, and two classifiers without any fine-tuning, trained on train.csv and
scored on test.csv. With ``--sentences``, the script writes ``builtin:review-sentences`` into the source instead, from
the files of Sentiment Labelled Sentences, without repetitions and without sentences that have a word of ``CRUDE``.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import statistics
from pathlib import Path

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoTokenizer

from fedspan.data.builtin import find_corpus_file
from fedspan.models.names import resolve_model

SITES = {"amazon_cells": "phones", "imdb": "films", "yelp": "restaurants"}
"""Sites of the review sentences by the beginning of their file's name."""
CRUDE = re.compile(
    r"\b(ass\b|asses|bitch|bullshit|crap|damn|freaking|fuck|hell\b|idiot|jerks?\b|moron|nude|piss|poop|retard|screwed|sex"
    r"|shit|stupid|suck|vomit)",
    re.IGNORECASE,
)
"""Beginnings of words, or whole ones, whose sentences are left out."""


def read(corpus: str, split: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a split."""
    path = find_corpus_file(f"builtin:{corpus}", split, "data.train")
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    return [row["text"] for row in rows], [row["label"] for row in rows]


@torch.no_grad()
def compute_sentence_vectors(texts: list[str]) -> np.ndarray:
    """Mean-pooled vectors of the frozen model, normalized: (texts, hidden)."""
    folder = resolve_model("builtin:all-minilm-l6-v2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    vectors: list[np.ndarray] = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
    return np.concatenate(vectors)


def write_review_sentences(folder: Path) -> None:
    """Write the sentences of the three sites in ``folder``; a fifth of them is the test part."""
    rows: dict[str, tuple[str, str, str]] = {}
    for stem, site in SITES.items():
        # Not as lines of Python: a sentence may have a separator of Unicode in it.
        for line in (folder / f"{stem}_labelled.txt").read_text(encoding="utf-8").split("\n"):
            text, _, label = line.rpartition("\t")
            text = " ".join(text.split())
            if text and not CRUDE.search(text):
                rows.setdefault(text.lower(), (text, ("negative", "positive")[int(label)], site))
    drawn = random.Random(0).sample(sorted(rows.values()), len(rows))
    for split, part in (("test", drawn[: len(drawn) // 5]), ("train", drawn[len(drawn) // 5 :])):
        path = Path(str(find_corpus_file("builtin:review-sentences", split, "data.train")))
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([("text", "label", "site"), *part])


def print_figures(corpus: str) -> None:
    """Print the figures of a corpus."""
    train, labels = read(corpus, "train")
    test, truth = read(corpus, "test")
    for name, texts in (("train", train), ("test", test)):
        words = [len(text.split()) for text in texts]
        print(f"{name}: {len(texts)} rows, words {statistics.mean(words):.1f} ({min(words)}-{max(words)})")
    every = TfidfVectorizer().fit_transform([*train, *test])
    cosine = (every @ every.T).toarray()
    np.fill_diagonal(cosine, 0.0)
    print(f"highest TF-IDF cosine of two texts: {cosine.max():.2f}")
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(train)
    for name, left, right in (
        ("TF-IDF of words and word pairs", tfidf.transform(train), tfidf.transform(test)),
        ("frozen sentence vectors", compute_sentence_vectors(train), compute_sentence_vectors(test)),
    ):
        for penalty in (1.0, 10.0):
            model = LogisticRegression(C=penalty, max_iter=2000).fit(left, labels)
            print(f"{name} with logistic regression (C = {penalty:g}): {100 * model.score(right, truth):.1f} %")


def main() -> None:
    """Print the figures, or write the published set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", choices=("patient-messages", "review-sentences"), default="patient-messages")
    parser.add_argument("--sentences", type=Path, metavar="FOLDER", help="write builtin:review-sentences from it")
    args = parser.parse_args()
    if args.sentences is not None:
        write_review_sentences(args.sentences)
    else:
        print_figures(args.figures)


if __name__ == "__main__":
    main()
