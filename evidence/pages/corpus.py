"""The built-in corpora: figures of the datasheet of the patients' messages, and the files of the banking queries.

    python -m evidence.pages.corpus
    python -m evidence.pages.corpus --banking77 FOLDER

The figures are sizes, the closest pair of messages, and two classifiers without any fine-tuning, trained on train.csv
and scored on test.csv. With ``--banking77``, the script writes ``builtin:banking-queries`` into the source instead,
from ``train.csv`` and ``test.csv`` of the data set.
"""

import argparse
import csv
import statistics
from pathlib import Path

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, AutoTokenizer

from fedspan.data.builtin import find_corpus_file
from fedspan.models.names import resolve_model

INTENTS = 20
"""Number of intents of the banking queries, of 77."""


def read(split: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a split."""
    path = find_corpus_file("builtin:patient-messages", split, "data.train")
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


def write_banking_queries(folder: Path) -> None:
    """Write the rows of the first intents by name, from the data set's files in ``folder``."""
    intents = set[str]()
    for split in ("train", "test"):
        with (folder / f"{split}.csv").open(newline="", encoding="utf-8") as file:
            rows = [(row["text"].strip(), row["category"]) for row in csv.DictReader(file)]
        intents = intents or set(sorted({label for _, label in rows})[:INTENTS])
        path = Path(str(find_corpus_file("builtin:banking-queries", split, "data.train")))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("text", "label"))
            writer.writerows(row for row in rows if row[1] in intents)


def print_figures() -> None:
    """Print the figures of the patients' messages."""
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


def main() -> None:
    """Print the figures, or write the banking queries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--banking77", type=Path, metavar="FOLDER", help="write builtin:banking-queries from it")
    args = parser.parse_args()
    if args.banking77 is None:
        print_figures()
    else:
        write_banking_queries(args.banking77)


if __name__ == "__main__":
    main()
