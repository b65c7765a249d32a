"""Text embedding: losses, metrics and exports as sentence-transformers has them, and inference of columns."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedspan
from fedspan.assembly.run import prepare
from fedspan.config import parse_config
from fedspan.config.starter import write_starter_config
from fedspan.tasks.embedding_losses import (
    compute_contrastive,
    compute_cosent,
    compute_cosine_error,
    compute_multiple_negatives,
)
from fedspan.tasks.text_embedding import split_vectors
from helpers import tiny_pairs
from helpers.refusals import refused

LIBRARY: Any = pytest.importorskip("sentence_transformers", reason="needs fedspan[sentence-transformers]")
EVALUATION: Any = pytest.importorskip("sentence_transformers.evaluation")
TEXTS = ["admin1 word3", "lab2 word1 lab3 word5 billing1", "symptom4"]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_scored_pairs_train_export_and_predict_vectors(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_pairs.settings(tiny_folder, tmp_path, scored=True, federation={"rounds": 2})
    report = fedspan.run(values, tmp_path / "run")
    assert report.metric == "loss"
    encoder = LIBRARY.SentenceTransformer(str(tmp_path / "run" / "adapter"), device="cpu")
    vectors = torch.tensor(fedspan.predict(tmp_path / "run", TEXTS))
    torch.testing.assert_close(vectors, torch.from_numpy(encoder.encode(TEXTS)), rtol=1e-4, atol=1e-5)
    assert "model.similarity" in (tmp_path / "run" / "adapter" / "README.md").read_text()
    # Of pairs, the cosine.
    (same, other) = fedspan.predict(tmp_path / "run", [(TEXTS[0], TEXTS[0]), (TEXTS[0], TEXTS[1])])
    assert same == pytest.approx(1, abs=1e-5)
    assert other == pytest.approx(float(torch.cosine_similarity(vectors[0], vectors[1], dim=0)), abs=1e-5)
    with refused("texts", "texts alone"):
        fedspan.predict(tmp_path / "run", [TEXTS[0], (TEXTS[0], TEXTS[1])])
    # Spearman is that of the library's evaluator.
    path = tmp_path / "scored.csv"
    measured = fedspan.evaluate(tmp_path / "run", data=str(path), text="a", text_pair="b", label="score")
    rows = read_rows(path)
    evaluator = EVALUATION.EmbeddingSimilarityEvaluator(
        [row["a"] for row in rows], [row["b"] for row in rows], [float(row["score"]) for row in rows]
    )
    assert measured["spearman"] == pytest.approx(evaluator(encoder)["spearman_cosine"], abs=1e-3)
    # A merged model is a sentence encoder of its own, and the adapter starts another run.
    fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged")
    merged = LIBRARY.SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    torch.testing.assert_close(torch.from_numpy(merged.encode(TEXTS)), vectors, rtol=1e-3, atol=1e-4)
    values["model"]["adapter"] = str(tmp_path / "run" / "adapter")
    again = prepare(parse_config(values))
    job = again.evaluator.build_job(again.federation.begin(), None)
    starting, _ = split_vectors(again.engine.predict(job, again.train, np.arange(2), 2))
    trained = torch.tensor(fedspan.predict(tmp_path / "run", [row["a"] for row in rows]))
    distances = (starting[:, None] - trained).abs().amax(2).amin(1)  # the rows were shuffled
    assert float(distances.max()) < 1e-4


def test_retrieval_of_a_run_is_that_of_the_librarys_evaluator(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny_pairs.settings(tiny_folder, tmp_path, federation={"rounds": 1}, model={"pooling": "cls"})
    fedspan.run(values, tmp_path / "run")
    path = tmp_path / "pairs.csv"
    measured = fedspan.evaluate(tmp_path / "run", data=str(path), text="query", text_pair="found")
    rows = read_rows(path)
    relevant: dict[str, set[str]] = {}
    for row in rows:
        relevant.setdefault(row["query"], set()).add(row["found"])
    evaluator = EVALUATION.InformationRetrievalEvaluator(
        {text: text for text in relevant}, {row["found"]: row["found"] for row in rows}, relevant
    )
    encoder = LIBRARY.SentenceTransformer(str(tmp_path / "run" / "adapter"), device="cpu")
    scores = evaluator(encoder)
    assert measured["ndcg_at_10"] == pytest.approx(scores["cosine_ndcg@10"], abs=1e-4)
    assert measured["recall_at_10"] == pytest.approx(scores["cosine_recall@10"], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "options", "field", "expected"),
    [
        ({"text_pair": None}, {}, "data.text_pair", "column of positives"),
        ({"roles": {"negative": "a"}}, {}, "data.label", "triplets have no score"),
        ({"label": None}, {"loss": "cosent"}, "data.label", "column of scores"),
        ({}, {"loss": "multiple-negatives"}, "task_options.loss", "without a score"),
        ({}, {"loss": "cosine-similarity"}, "data.label", "from -1 to 1"),
        ({}, {"loss": "contrastive"}, "data.label", "1 for similar"),
        ({}, {"scale": 0}, "task_options.scale", "greater than 0"),
    ],
)
def test_mistakes_in_scored_columns_and_options_are_named(
    changes: dict[str, Any], options: dict[str, Any], field: str, expected: str, tiny_folder: Path, tmp_path: Path
) -> None:
    values = tiny_pairs.settings(tiny_folder, tmp_path, scored=True, data=changes)
    with refused(field, expected):
        prepare(parse_config({**values, "task_options": options}))


def test_init_infers_embedding_columns_only_on_request(tmp_path: Path) -> None:
    path = tiny_pairs.save_scored_pairs(tmp_path / "scored.csv")
    assert write_starter_config(path, tmp_path / "a.yaml").config.task != "text-embedding"
    written = write_starter_config(path, tmp_path / "b.yaml", task="text-embedding").config
    assert (written.task, written.data.text, written.data.text_pair) == ("text-embedding", "a", "b")
    assert (written.data.label, written.partition.column) == ("score", "site")


def test_dp_sgd_is_refused_for_embedding_losses_that_compare_examples(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="needs fedspan[privacy]")
    values = tiny_pairs.settings(tiny_folder, tmp_path, scored=True)
    del values["federation"]["clients_per_round"]
    values["privacy"] = {"mechanism": "dp-sgd", "clip": 1.0, "noise": 1.0, "delta": 1e-3}
    with refused("privacy.mechanism"):
        fedspan.run(values, tmp_path / "run")


LOSSES = pytest.importorskip("sentence_transformers.losses", reason="needs fedspan[sentence-transformers]")
EXAMPLES, FEATURES = 9, 5
OWNERS = ([0, 3, 4], [7], [1, 2, 5, 8])
"""Examples of each client; the one at 6 belongs to none."""


def draw_vectors() -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(EXAMPLES, FEATURES, generator=rng) for _ in range(3)]


SCORES = torch.tensor([0.1, 0.9, 0.4, 0.4, 1.0, 0.0, 0.6, 0.3, 0.4])
LABELS = (SCORES > 0.35).float()
Ours = Callable[[list[Tensor], Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], Any], Ours, Tensor | None]] = {
    "pairs": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:2], mask, 20.0),
        None,
    ),
    "triplets": (
        lambda: LOSSES.MultipleNegativesRankingLoss(None, scale=7.0),
        lambda vectors, mask: compute_multiple_negatives(vectors[0], vectors[1:], mask, 7.0),
        None,
    ),
    "cosent": (
        lambda: LOSSES.CoSENTLoss(None),
        lambda vectors, mask: compute_cosent(F.cosine_similarity(*vectors[:2]), SCORES, mask, 20.0),
        SCORES,
    ),
    "cosine": (
        lambda: LOSSES.CosineSimilarityLoss(None),
        lambda vectors, mask: compute_cosine_error(F.cosine_similarity(*vectors[:2]), SCORES, mask),
        SCORES,
    ),
    "contrastive": (
        lambda: LOSSES.ContrastiveLoss(None, margin=0.7),
        lambda vectors, mask: compute_contrastive(F.cosine_similarity(*vectors[:2]), LABELS, mask, 0.7),
        LABELS,
    ),
}


def mask_of(*owners: list[int]) -> Tensor:
    mask_CB = torch.zeros(len(owners), EXAMPLES)
    for client, own in enumerate(owners):
        mask_CB[client, own] = 1
    return mask_CB


@pytest.mark.parametrize("name", CASES)
def test_each_clients_loss_and_gradient_are_the_librarys_on_its_own_vectors(name: str) -> None:
    make, compute, targets = CASES[name]
    vectors = [vectors.requires_grad_() for vectors in draw_vectors()]
    count = 3 if name == "triplets" else 2
    losses_C = compute(vectors, mask_of(*OWNERS))
    ours = torch.autograd.grad(losses_C.sum(), vectors[:count])
    expected = [
        make().compute_loss_from_embeddings(
            [one[own] for one in vectors[:count]], None if targets is None else targets[own]
        )
        for own in OWNERS
    ]
    torch.testing.assert_close(losses_C, torch.stack(expected), rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad(torch.stack(expected).sum(), vectors[:count])
    for gradient, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-6)
    assert not ours[0][6].any()  # the example of no client


@pytest.mark.parametrize("name", CASES)
def test_other_clients_vectors_change_nothing(name: str) -> None:
    compute, vectors = CASES[name][1], draw_vectors()
    before = compute(vectors, mask_of(*OWNERS))
    changed = [one.clone() for one in vectors]
    for one in changed:
        one[OWNERS[2]] += 1
    after = compute(changed, mask_of(*OWNERS))
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    assert float(after[2]) != float(before[2])
