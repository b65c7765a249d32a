"""Scores of generated texts: those of sacrebleu and rouge-score, and values worked out by hand."""

from __future__ import annotations

import pytest
import sacrebleu

from fedspan.tasks.text_scores import TEXT_METRICS, compute_text_scores

REFERENCES = ["a man rides a horse on the beach", "two dogs play", "ein Mädchen, das liest"]


def test_equal_texts_have_the_highest_scores_and_others_none() -> None:
    best = compute_text_scores(REFERENCES, REFERENCES)
    assert best == {name: pytest.approx(metric.maximum) for name, metric in TEXT_METRICS.items()}
    worst = compute_text_scores(["", "", ""], REFERENCES)
    assert worst == {name: pytest.approx(0.0) for name in TEXT_METRICS}


def test_rouge_is_a_mean_of_f_measures() -> None:
    scores = compute_text_scores(["the man rides on a horse", "dogs"], REFERENCES[:2])
    # 5 of 6 words are among the 8 of the reference, and 1 of 1 among 3.
    assert scores["rouge_1"] == pytest.approx((2 * 6 / (6 + 8) + 2 * 1 / (1 + 3)) / 2)
    # 2 of 5 pairs of neighbors are among the 7 of the reference, "man rides" and "a horse"; a single word has none.
    assert scores["rouge_2"] == pytest.approx(2 * 2 / (5 + 7) / 2)
    # The longest common subsequence is "man rides a horse".
    assert scores["rouge_l"] == pytest.approx((2 * 4 / (6 + 8) + 2 * 1 / (1 + 3)) / 2)


def test_bleu_has_the_tokenizer_that_is_named() -> None:
    texts = ["a man rides the horse on the beach", "two dogs are playing", "ein Mädchen das liest"]
    for tokenizer in ("13a", "char", "none"):
        expected = sacrebleu.BLEU(tokenize=tokenizer).corpus_score(texts, [REFERENCES]).score
        assert compute_text_scores(texts, REFERENCES, tokenizer)["bleu"] == pytest.approx(expected)
