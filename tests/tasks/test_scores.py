"""Metrics and losses against other libraries' values and plain loops; losses with offsets, and bounded by example."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
import torch
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import BILOU, IOB1, IOB2, IOBES, Entities
from sklearn.metrics import f1_score, matthews_corrcoef, ndcg_score
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.entities import convert_to_iob2, find_entities, list_labels, score_entities
from fedspan.tasks.label_scores import compute_f1, compute_matthews, count_labels
from fedspan.tasks.losses import OFFSETS, bound_loss, compute_guess_bound, get_loss_bound
from fedspan.tasks.metrics import METRICS, Metric
from fedspan.tasks.multi_label import MultiLabelClassification
from fedspan.tasks.preference import PreferenceOptions, PreferenceTuning
from fedspan.tasks.registry import register_task
from fedspan.tasks.regression import Regression
from fedspan.tasks.single_label import compute_class_offsets
from fedspan.tasks.task import Examples
from fedspan.tasks.text_embedding import measure_retrieval
from fedspan.tasks.text_scores import TEXT_METRICS, compute_text_scores, is_exact_match
from fedspan.tasks.token_scores import SCORES, compute_token_metrics, mark_ends, score_tokens
from helpers.fixed_logits import Fixed
from helpers.refusals import refused
from helpers.sharpened_task import OWN

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
    assert scores.f1 == pytest.approx(entity_f1(truths, guesses))
    assert scores.precision == pytest.approx(precision_score(truths, guesses))
    assert scores.recall == pytest.approx(recall_score(truths, guesses))
    assert 0 < scores.recall < 1


def test_labels_are_complete_and_without_entities_scores_are_zero() -> None:
    scores = score_entities([["O", "O"]], [["O", "O"]])
    assert (scores.precision, scores.recall, scores.f1) == (0, 0, 0)
    assert list_labels(["I-Gene", "O", "B-Drug"]) == ["O", "B-Drug", "I-Drug", "B-Gene", "I-Gene"]


@pytest.mark.parametrize(
    ("made_text", "wanted", "pattern", "same"),
    [
        ("four", "four", None, True),
        (" four\n", "four", None, True),
        ("four five", "four  five", None, True),
        ("four", "five", None, False),
        ("1,000", "1000.0", None, True),
        ("so it is\n#### 1,250", "first 3\n#### 1250", r"####\s*(\S+)", True),
        ("1250", "#### 1250", r"####\s*(\S+)", False),
        ("#### 1250", "1250", r"####\s*(\S+)", False),
        ("the correct answer is answer2", "answer2", r"answer\d", True),
        ("answer1 or answer2", "answer2", r"answer\d", False),
    ],
)
def test_what_counts_as_the_same_answer(made_text: str, wanted: str, pattern: str | None, same: bool) -> None:
    assert is_exact_match(made_text, wanted, pattern) == same


@pytest.mark.parametrize(("examples", "labels"), [(1, 2), (3, 5), (40, 2), (300, 4), (4000, 60)])
def test_single_labels(examples: int, labels: int) -> None:
    rng = np.random.default_rng(examples)
    targets = rng.integers(0, labels, examples)
    predicted = np.where(rng.random(examples) < 0.5, targets, rng.integers(0, labels, examples))
    true_K, predicted_K, correct_K = count_labels(targets, predicted, labels)
    f1_K = compute_f1(true_K, predicted_K, correct_K)
    expected = f1_score(targets, predicted, labels=range(labels), average=None, zero_division=0)
    assert f1_K.tolist() == np.asarray(expected).tolist()
    if len({*targets, *predicted}) > 1:
        assert compute_matthews(true_K, predicted_K, correct_K) == matthews_corrcoef(targets, predicted)


def test_several_labels_of_an_example() -> None:
    rng = np.random.default_rng(0)
    targets, predicted = rng.random((2, 30, 7)) < 0.3
    counts = targets.sum(0), predicted.sum(0), (targets & predicted).sum(0)
    assert compute_f1(*counts).tolist() == np.asarray(f1_score(targets, predicted, average=None)).tolist()
    micro = compute_f1(*(np.asarray(count.sum()) for count in counts))
    assert float(micro) == f1_score(targets, predicted, average="micro")


@pytest.mark.parametrize("truth", [[1, 1, 1], [0, 1, 2]])
def test_without_different_predictions_the_correlation_is_0(truth: list[int]) -> None:
    assert compute_matthews(*count_labels(np.array(truth), np.array([1, 1, 1]), 3)) == 0.0


def test_a_task_changes_only_the_metrics_that_it_registered() -> None:
    narrow, wide = ({"own_metric": Metric("own", True, maximum=maximum)} for maximum in (1.0, 9.0))
    owner = replace(OWN, name="owner", metrics=("own_metric",), custom_metrics=narrow)
    register_task(owner)
    register_task(replace(owner, name="other"))  # the same metric in another task
    with refused("metric", "'own_metric' is already the name of another metric"):
        register_task(replace(owner, name="other", custom_metrics=wide))
    register_task(replace(owner, custom_metrics=wide))
    assert METRICS["own_metric"] == wide["own_metric"]
    with refused("metric", "'loss' is already the name of another metric"):
        register_task(replace(owner, custom_metrics=wide | {"loss": Metric("x", True)}))


def test_recall_and_ndcg_of_documents_are_scikit_learns() -> None:
    texts = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
    draw = np.random.default_rng(4)
    anchors, positives = draw.integers(0, 20, 45), draw.integers(20, 60, 45)  # several positives of one anchor
    recall, ndcg = measure_retrieval(texts[anchors], texts[positives], anchors, positives, 10)
    queries, documents = np.unique(anchors), np.unique(positives)
    pairs = {*zip(anchors.tolist(), positives.tolist(), strict=True)}
    relevant = np.array([[(query, document) in pairs for document in documents] for query in queries])
    similarities = cosine_similarity(texts[torch.from_numpy(queries)], texts[torch.from_numpy(documents)])
    first = [set(np.argsort(-row)[:10].tolist()) for row in similarities]
    shares = [
        len(found & {*np.flatnonzero(row).tolist()}) / row.sum() for found, row in zip(first, relevant, strict=True)
    ]
    assert recall == pytest.approx(np.mean(shares))
    assert ndcg == pytest.approx(ndcg_score(relevant, similarities, k=10))
    assert 0 < ndcg < 1


def test_equal_vectors_find_no_documents_and_equal_positives_are_one() -> None:
    vectors, numbers = torch.ones(30, 4), np.arange(30)
    assert measure_retrieval(vectors, vectors, numbers, numbers) == (0.0, 0.0)
    broken = torch.full((30, 4), float("nan"))
    assert measure_retrieval(broken, broken, numbers, numbers) == (0.0, 0.0)
    vectors = torch.eye(3)
    anchors, positives = np.array([7, 7, 8]), np.array([0, 1, 1])
    recall, ndcg = measure_retrieval(vectors[[0, 0, 1]], vectors[[0, 1, 1]], anchors, positives, 1)
    assert recall == pytest.approx((1 / 2 + 1) / 2)
    assert ndcg == 1.0


REFERENCES = ["a man rides a horse on the beach", "two dogs play", "ein Mädchen, das liest"]


def test_equal_texts_have_the_highest_scores_and_others_none() -> None:
    best = compute_text_scores(REFERENCES, REFERENCES)
    assert best == {name: pytest.approx(metric.maximum) for name, metric in TEXT_METRICS.items()}
    worst = compute_text_scores(["", "", ""], REFERENCES)
    assert worst == {name: pytest.approx(0.0) for name in TEXT_METRICS}


def test_rouge_is_a_mean_of_f_measures_and_bleu_has_the_tokenizer_that_is_named() -> None:
    scores = compute_text_scores(["the man rides on a horse", "dogs"], REFERENCES[:2])
    # 5 of 6 words are among the 8 of the reference, and 1 of 1 among 3.
    assert scores["rouge_1"] == pytest.approx((2 * 6 / (6 + 8) + 2 * 1 / (1 + 3)) / 2)
    # 2 of 5 pairs of neighbors are among the 7 of the reference, "man rides" and "a horse"; a single word has none.
    assert scores["rouge_2"] == pytest.approx(2 * 2 / (5 + 7) / 2)
    # The longest common subsequence is "man rides a horse".
    assert scores["rouge_l"] == pytest.approx((2 * 4 / (6 + 8) + 2 * 1 / (1 + 3)) / 2)
    texts = ["a man rides the horse on the beach", "two dogs are playing", "ein Mädchen das liest"]
    for tokenizer in ("13a", "char", "none"):
        expected = sacrebleu.BLEU(tokenize=tokenizer).corpus_score(texts, [REFERENCES]).score
        assert compute_text_scores(texts, REFERENCES, tokenizer)["bleu"] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_sums_over_each_example_s_tokens(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets, numbers = torch.tensor([3, 0, 6, 6, 2]), torch.tensor([0, 2, 2, 0, 0])
    scores = score_tokens(logits, targets, numbers, 3)
    assert scores.shape == (3, SCORES)
    for example in range(3):
        tokens = [at for at in range(5) if int(numbers[at]) == example]
        losses = [-float(logits[at].log_softmax(0)[targets[at]]) for at in tokens]
        right = sum(int(logits[at].argmax()) == int(targets[at]) for at in tokens)
        assert scores[example].tolist() == pytest.approx([sum(losses), len(tokens), right], rel=1e-5)
    metrics = compute_token_metrics(scores)
    assert metrics["loss"] == pytest.approx(float(scores[:, 0].sum()) / 5, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["token_accuracy"] == pytest.approx(float(scores[:, 2].sum()) / 5)


def test_the_perplexity_of_a_diverged_model_is_finite() -> None:
    assert math.isfinite(compute_token_metrics(torch.tensor([[1e6, 2.0, 0.0]]))["perplexity"])


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (2, [[5, -1, -1, -1], [7, 8, 9, -1]]),
        ([2, 8], [[5, -1, -1, -1], [7, -1, -1, -1]]),
        (None, [[5, 2, 4, -1], [7, 8, 9, -1]]),
    ],
)
def test_ids_end_at_the_first_end(ends: int | list[int] | None, expected: list[list[int]]) -> None:
    assert mark_ends(torch.tensor([[5, 2, 4], [7, 8, 9]]), 4, ends).tolist() == expected


@pytest.fixture
def task(prepared: Prepared) -> SequenceClassification:
    return SequenceClassification(prepared.task.tokenizer, prepared.labels, 5)


def test_a_batch_s_offsets_enter_the_loss_but_no_prediction(task: SequenceClassification) -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    offsets = compute_class_offsets(np.array([2, 1, 1]), 4, 1.0)
    model, labels = Fixed(logits), torch.tensor([2, 1, 1])
    batch = {"input_ids": torch.ones(3, 2), "labels": labels, OFFSETS: offsets.expand(3, -1)}
    expected = -(logits + offsets).log_softmax(1)[range(3), labels]
    loss = task.compute_loss(model, batch)
    assert torch.equal(task.compute_client_losses(model, batch, torch.eye(3)), expected)
    assert float(loss.detach()) == pytest.approx(float(expected.mean().detach()))
    assert torch.equal(task.predict(model, batch), logits)
    loss.backward()
    assert (logits.grad[:, [0, 3]] == 0).all()  # classes that the client lacks
    assert (logits.grad[:, [1, 2]] != 0).all()


class Labeled:
    """Examples of which only the labels are known."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), np.int64)


TASK = SequenceClassification(None, ("a", "b", "c"), 16)
BOUND = 2 * math.log(3)


def measure(logits_BK: Tensor, examples: Examples) -> float:
    rows = range(len(examples))
    metrics = {"loss": TASK.compute_metrics(logits_BK, examples, rows)["loss"], "accuracy": 0.5}
    bounded = bound_loss(TASK, metrics, logits_BK, examples, rows)
    assert bounded["accuracy"] == 0.5
    return bounded["loss"]


def test_each_example_counts_up_to_twice_the_loss_of_a_guess() -> None:
    logits_BK = torch.tensor([[0.0, 0.0, 0.0], [1e30, 0.0, 0.0], [3.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    examples = Labeled([0, 1, 0, 2])
    third = float(-logits_BK[2].double().log_softmax(0)[0])
    assert get_loss_bound(TASK) == compute_guess_bound(3) == pytest.approx(BOUND)
    assert measure(logits_BK, examples) == pytest.approx((math.log(3) + BOUND + third + BOUND) / 4)
    logits_BK = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) / 4
    examples = Labeled([row % 3 for row in range(20)])
    assert measure(logits_BK, examples) == pytest.approx(TASK.compute_metrics(logits_BK, examples, range(20))["loss"])


def test_a_prediction_that_is_no_number_counts_alone_with_the_bound() -> None:
    """A server chooses a head whose outputs overflow, in both directions, for one text."""
    task, predictions, examples = Regression(None, 16), torch.tensor([[1.0], [math.nan], [2.0]]), Labeled([1, 1, 2])
    metrics = task.compute_metrics(predictions, examples, range(3))
    assert bound_loss(task, metrics, predictions, examples, range(3)) == {"loss": get_loss_bound(task) / 3}


def test_biases_of_different_sizes_write_no_counts_into_a_loss() -> None:
    """Each label's bias is so much larger than the last one's that the unbounded loss is a number of three digits."""
    count, values = 12, set[float]()
    biases = -torch.tensor([0.0, 10.0, 10.0 * (count + 1)])
    splits = [split for split in itertools.product(range(count + 1), repeat=3) if sum(split) == count]
    for split in splits:
        examples = Labeled([label for label, times in enumerate(split) for _ in range(times)])
        values.add(round(measure(biases.expand(count, 3), examples), 6))
    assert len(splits) == 91
    assert len(values) == count + 1  # the number of examples with the first label, which loses nothing


@pytest.mark.parametrize(("loss", "bound"), [("sigmoid", 2 * math.log(2)), ("hinge", 2.0), ("ipo", 50.0)])
def test_preferences_count_up_to_twice_the_loss_of_the_reference(loss: str, bound: float) -> None:
    options = PreferenceOptions(loss=loss)
    task = PreferenceTuning(None, options)
    assert get_loss_bound(task) == pytest.approx(bound)


def test_several_labels_count_up_to_twice_a_guess_of_each() -> None:
    assert get_loss_bound(MultiLabelClassification.__new__(MultiLabelClassification)) == pytest.approx(2 * math.log(2))
