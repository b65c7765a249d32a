"""The figures of the built-in corpus's datasheet: ``python benchmarks/corpus.py``.

Sizes, the closest pair of messages, and two classifiers without any fine-tuning, trained on train.csv and scored on
test.csv.
"""

from __future__ import annotations

import csv
import statistics

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoTokenizer

from fedspan.data.builtin import find_corpus_file
from fedspan.models.names import resolve_model


def read(split: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a split."""
    path = find_corpus_file("builtin:patient-messages", split, "data.train")
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    return [row["text"] for row in rows], [row["label"] for row in rows]


@torch.no_grad()
def compute_sentence_vectors(texts: list[str]) -> np.ndarray:
    """Mean-pooled vectors of the frozen model, normalised: (texts, hidden)."""
    folder = resolve_model("builtin:all-minilm-l6-v2")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    vectors: list[np.ndarray] = []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, truncation=True, return_tensors="pt")
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
    return np.concatenate(vectors)


def main() -> None:
    """Print everything."""
    train, labels = read("train")
    test, truth = read("test")
    for name, texts in (("train", train), ("test", test)):
        words = [len(text.split()) for text in texts]
        print(f"{name}: {len(texts)} rows, words {statistics.mean(words):.1f} ({min(words)}-{max(words)})")
    every = TfidfVectorizer().fit_transform([*train, *test])
    cosine = (every @ every.T).toarray()
    np.fill_diagonal(cosine, 0.0)
    print(f"highest TF-IDF cosine of two messages: {cosine.max():.2f}")
    tfidf = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(train)
    for name, left, right in (
        ("TF-IDF of words and word pairs", tfidf.transform(train), tfidf.transform(test)),
        ("frozen sentence vectors", compute_sentence_vectors(train), compute_sentence_vectors(test)),
    ):
        model = LogisticRegression(C=10.0, max_iter=2000).fit(left, labels)
        print(f"{name} with logistic regression: {100 * model.score(right, truth):.1f} %")


if __name__ == "__main__":
    main()
