"""The best round of a run, and where it stops: by the metric, then the loss, then the later one; gains beyond noise."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import fedspan
from fedspan.config import RunConfig, parse_config
from fedspan.federation.evaluation import ClientScores, Evaluator
from fedspan.federation.plausibility import compute_trimmed_means
from fedspan.federation.progress import Progress
from fedspan.runs import selection
from fedspan.runs.selection import Best, ClientLoss, Selection, compute_gain, has_stalled, rate_round
from helpers import tiny
from helpers.listeners import Notes
from helpers.refusals import refused


def best_of(metric: str, *scores: dict[str, float] | None) -> int:
    return max(rate_round(metric, number, one) for number, one in enumerate(scores, 1)).round


def test_the_metric_decides_then_the_loss_and_then_the_later_round() -> None:
    assert best_of("accuracy", {"accuracy": 0.6, "loss": 9.0}, {"accuracy": 0.5, "loss": 0.1}) == 1
    assert best_of("perplexity", {"perplexity": 3.0, "loss": 1.1}, {"perplexity": 2.0, "loss": 0.7}) == 2
    tied = [{"accuracy": 0.6, "loss": loss} for loss in (0.9, 0.3, 0.5)]
    assert best_of("accuracy", *tied) == 2
    assert best_of("accuracy", *tied, tied[1]) == 4
    assert best_of("accuracy", *tied, {"accuracy": 0.6}) == 2  # without a loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_values_that_are_not_finite_can_be_stored_and_are_not_the_best(value: float) -> None:
    rated = rate_round("loss", 1, {"loss": value})
    assert all(math.isfinite(number) for number in rated)
    assert rate_round("loss", 2, {"loss": 5.0}) > rated or value == -math.inf


def scores_of(*losses: float, examples: float = 8.0, remote: bool = False) -> ClientScores:
    by_client = {f"c{number}": {"loss": loss, "examples": examples} for number, loss in enumerate(losses)}
    pooled = {"loss": sum(losses) / len(losses)}
    return ClientScores(pooled, by_client, dict(pooled) if remote else None)


def select(*rounds: ClientScores | None) -> Selection:
    """Select among rounds, the first of which is the start."""
    selection = Selection()
    for number, scores in enumerate(rounds):
        selection = selection.add("loss", number, scores)
    return selection


START = (0.9, 0.5, 0.2, 0.6)


def test_a_gain_is_that_of_all_examples_and_its_error_that_of_the_clients() -> None:
    start = {"a": ClientLoss(0.9, 10), "b": ClientLoss(0.5, 20), "c": ClientLoss(0.1, 70), "gone": ClientLoss(9.0, 50)}
    after = {"a": {"loss": 0.4, "examples": 10.0}, "b": {"loss": 0.4, "examples": 20.0}}
    after |= {"c": {"loss": 0.2, "examples": 70.0}, "new": {"loss": 0.0, "examples": 50.0}}
    gain = compute_gain(start, ClientScores({}, after))
    mean = 0.1 * 0.5 + 0.2 * 0.1 - 0.7 * 0.1
    variance = (0.1 * (0.5 - mean)) ** 2 + (0.2 * (0.1 - mean)) ** 2 + (0.7 * (-0.1 - mean)) ** 2
    variance /= 1 - (0.1**2 + 0.2**2 + 0.7**2)
    assert gain == pytest.approx((mean, variance**0.5))
    assert compute_gain({"gone": ClientLoss(9.0, 50)}, ClientScores({}, after)) is None


@pytest.mark.parametrize("remote", [False, True], ids=["plain", "trimmed"])
@pytest.mark.parametrize("shares", [[0.2] * 5, [0.1] * 10, [0.9, 0.1], [0.6, 0.1, 0.1, 0.1, 0.1]], ids=str)
def test_the_standard_error_is_the_deviation_of_the_gain(shares: list[float], remote: bool) -> None:
    """Of clients whose losses differ before and after by sampling noise alone."""
    rng, gains = np.random.default_rng(0), list[tuple[float, float]]()
    start = {f"c{number}": ClientLoss(2.0, share) for number, share in enumerate(shares)}
    for noise in rng.normal(0, 0.05 / np.sqrt(shares), (1500, len(shares))):
        rows = {
            id: {"loss": 2.0 - fall, "examples": share} for id, share, fall in zip(start, shares, noise, strict=True)
        }
        gain = compute_gain(start, ClientScores({}, rows, {} if remote else None))
        gains.append(gain)
    means, errors = np.array(gains).T
    ratio = float(np.sqrt(np.mean(errors**2)) / np.std(means))
    assert 0.95 < ratio < (1.4 if remote and len(shares) == 5 else 1.06)


def test_a_client_that_outweighs_all_others_must_gain_one_per_cent() -> None:
    start = {"a": ClientLoss(0.5, 1e15), "b": ClientLoss(0.5, 1.0)}
    rows = {"a": {"loss": 0.4, "examples": 1e15}, "b": {"loss": 0.5, "examples": 1.0}}
    assert compute_gain(start, ClientScores({}, rows)) == pytest.approx((0.1, 0.005))


@pytest.mark.parametrize("present", [5, 4, 3])
@pytest.mark.parametrize("loss", [0.0, 900.0])
def test_one_client_decides_nothing_where_others_missed_the_start(loss: float, present: int) -> None:
    def rows(*losses: float) -> ClientScores:
        by_client = {f"c{number}": {"loss": one, "examples": 8.0} for number, one in enumerate(losses)}
        return ClientScores({}, by_client, {})

    start = {f"c{number}": ClientLoss(1.0, 8.0) for number in range(5 - present, 5)}
    honest = rows(0.9, 0.91, 0.92, 0.93, 0.94)
    better, worse = compute_gain(start, rows(0.9, 0.91, 0.92, 0.93, loss)), compute_gain(start, rows(*[1.1] * 4, loss))
    assert compute_gain(start, honest) is not None
    assert better.mean > better.standard_error
    assert worse.mean < worse.standard_error


def test_a_round_replaces_the_start_if_its_gain_exceeds_its_standard_error() -> None:
    """The clients' losses differ by far more than they fall; only how unlike they fall counts."""
    alike = scores_of(*(loss - fall for loss, fall in zip(START, (0.02, 0.03, 0.02, 0.03), strict=True)))
    unlike = scores_of(*(loss - fall for loss, fall in zip(START, (0.3, -0.2, 0.1, -0.1), strict=True)))
    kept = select(scores_of(*START), unlike)
    assert kept.best.round == 0
    assert kept.improved.round == 1  # patience counts from the lowest loss
    replaced = select(scores_of(*START), unlike, alike)
    assert replaced.best.round == 2
    assert Selection.from_json(json.loads(json.dumps(replaced.to_json()))) == replaced


def test_the_round_with_the_larger_bound_of_its_gain_is_better() -> None:
    def after(*falls: float) -> ClientScores:
        return scores_of(*(loss - fall for loss, fall in zip(START, falls, strict=True)))

    steady, larger, erratic = after(0.1, 0.1, 0.1, 0.1), after(0.15, 0.2, 0.15, 0.2), after(0.9, 0.1, -0.2, 0.0)
    assert select(scores_of(*START), steady, larger, erratic).best == select(scores_of(*START), steady, larger).best
    assert select(scores_of(*START), larger, steady).best == select(scores_of(*START), larger).best


def test_a_single_client_must_gain_one_per_cent() -> None:
    def best(*losses: float) -> int | None:
        selected = select(*(scores_of(loss) for loss in losses)).best
        return selected and selected.round

    assert best(0.500, 0.497, 0.496) == 0
    assert best(0.500, 0.497, 0.494, 0.493) == 3


@pytest.mark.parametrize("loss", [0.0, 1000.0])
def test_one_client_that_measures_itself_decides_nothing(loss: float) -> None:
    start, fallen = [0.5] * 9, [0.4 + 0.001 * number for number in range(9)]
    honest = select(scores_of(*start, 0.5, remote=True), scores_of(*fallen, 0.4, remote=True)).best
    hostile = select(scores_of(*start, 0.5, remote=True), scores_of(*fallen, loss, remote=True)).best
    assert hostile.round == honest.round == 1
    worse = [0.6 + 0.001 * number for number in range(9)]
    kept = select(scores_of(*start, 0.5, remote=True), scores_of(*worse, loss, remote=True)).best
    assert kept.round == 0


def test_rounds_of_clients_that_hide_their_losses_are_not_selected() -> None:
    hidden = ClientScores({"accuracy": 0.9}, {"c0": {"accuracy": 0.9, "examples": 8.0}})
    selection = select(scores_of(*START), hidden)
    assert selection.best.round == 0
    json.dumps(selection.to_json(), allow_nan=False)


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_an_evaluation_that_no_client_answered_decides_nothing(missing: int) -> None:
    scores: list[ClientScores | None] = [scores_of(*(loss - 0.1 * number for loss in START)) for number in range(6)]
    scores[missing] = None
    for count in range(missing + 2, 7):
        selection = select(*scores[:count])
        assert selection.best.round == selection.improved.round == count - 1
    assert select(*scores[:3], None).best == select(*scores[:3]).best


def reported(*accuracies: float | None) -> ClientScores:
    """Scores of clients that report their own accuracies; None: the client was not measured."""
    rows = {
        f"c{number}": {"accuracy": one, "loss": 1 - one, "examples": 8.0}
        for number, one in enumerate(accuracies)
        if one is not None
    }
    pooled = {"accuracy": float(np.mean([row["accuracy"] for row in rows.values()])), "loss": 0.5}
    return ClientScores(pooled, rows, dict(pooled))


def select_reported(*rounds: ClientScores | None, metric: str = "accuracy") -> Selection:
    selection = Selection()
    for number, scores in enumerate(rounds, 1):
        selection = selection.add(metric, number, scores)
        selection = Selection.from_json(json.loads(json.dumps(selection.to_json())))
    return selection


def best_round(selection: Selection) -> int:
    return selection.best.round


@pytest.mark.parametrize("honest", [2, 3, 4])
def test_no_round_is_selected_that_all_other_clients_measured_as_worse(honest: int) -> None:
    """Whatever one client of three or more reports, and in whichever rounds it is silent."""
    rng = np.random.default_rng(honest)
    for metric in ("accuracy", "loss"):
        for _ in range(60):
            truth = rng.random((4, honest))
            lies = [rng.choice([0.0, 0.3, 0.7, 1.0]) if rng.random() < 0.7 else None for _ in truth]
            rounds = [reported(*row, lie) for row, lie in zip(truth.tolist(), lies, strict=True)]
            best = best_round(select_reported(*rounds, metric=metric)) - 1
            if honest > 2 or lies[0] is not None:  # else the first rounds have two clients, which select nothing
                assert all(truth[best].max() >= row.min() for row in truth)


def test_a_client_that_is_silent_in_one_round_moves_nothing() -> None:
    """The others became worse; without its low value, the mean of the second round would be better."""
    before, after = (0.70, 0.71, 0.72, 0.10), (0.69, 0.70, 0.71, None)
    assert best_round(select_reported(reported(*before), reported(*after))) == 1
    silent, back = (0.70, 0.71, 0.72, None), (0.60, 0.61, 0.62, 0.90)
    assert best_round(select_reported(reported(*before), reported(*silent), reported(*back))) == 2


def test_the_metrics_of_two_clients_select_nothing() -> None:
    best = [reported(0.9, 0.9), reported(0.5, 0.1), reported(0.4, 0.2)]
    selection = select_reported(*best)
    assert best_round(selection) == 3
    assert selection.improved == selection.best
    assert best_round(select_reported(*best, metric="loss")) == 3
    third = reported(0.4, 0.2, 0.3)  # from here on, three can be compared
    assert best_round(select_reported(*best, third)) == 4
    assert best_round(select_reported(*best, third, reported(0.3, 0.1, 0.2))) == 4
    assert best_round(select_reported(*best, third, reported(0.2, 0.1))) == 4
    assert best_round(select_reported(*best, third, None)) == 4


def test_without_scores_of_enough_clients_the_last_round_is_selected() -> None:
    rows = {f"c{number}": {"loss": 0.5, "examples": 8.0} for number in range(4)}
    lie = {**rows, "c3": {**rows["c3"], "f1": 1.0}}
    later = {id: {**row, "loss": 0.4} for id, row in rows.items()}
    rounds = [ClientScores({"loss": 0.5}, one, {}) for one in (lie, later)]
    assert best_round(select_reported(*rounds, metric="f1")) == 2
    selection = select(None, None, None)
    assert selection.best.round == 2
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection


STEP = 0.43


def stepped(*losses: float) -> ClientScores:
    """Scores of nodes that report these losses in steps, as they do where noise is cut to the range of a metric."""
    rows = {f"n{number}": {"loss": STEP * round(loss / STEP), "examples": 16.0} for number, loss in enumerate(losses)}
    means = compute_trimmed_means(rows, ["loss"])
    return ClientScores(means, rows, means, noisy=True)


def get_rounds(selection: Selection) -> tuple[int, int]:
    """Return the best round, and the one from which early stopping counts."""
    return selection.best.round, selection.improved.round


def test_a_falling_loss_that_steps_hide_postpones_early_stopping() -> None:
    """The loss falls by less than a step of 0.43 in each round, and then rises by more."""
    hidden = [stepped(*[0.6 - 0.03 * number] * 5) for number in range(6)]
    assert len({scores.pooled["loss"] for scores in hidden}) == 1
    assert get_rounds(select_reported(*hidden, metric="loss")) == (6, 6)
    risen = [stepped(*[0.9] * 5)] * 2
    assert get_rounds(select_reported(*hidden, *risen, metric="loss")) == (6, 6)
    exact = [replace(scores, noisy=False) for scores in hidden]  # equal exact losses: the model does not change
    assert get_rounds(select_reported(*exact, metric="loss")) == (6, 1)


def test_a_round_that_equals_the_start_by_reported_losses_replaces_it() -> None:
    rounds = [stepped(0.5, 0.6, 0.5, 0.3, 0.3), stepped(0.4, 0.5, 0.5, 0.3, 0.3), stepped(0.4, 0.4, 0.4, 0.3, 0.3)]
    assert get_rounds(select(*rounds)) == (2, 2)
    assert get_rounds(select(*rounds, stepped(*[0.9] * 5))) == (2, 2)
    # Sums of floats depend on the order of their terms
    rounds = [stepped(0.0, *row, 3 * STEP) for row in ((STEP, 3 * STEP, 3 * STEP), (3 * STEP, 3 * STEP, STEP))]
    means = [scores.pooled["loss"] for scores in rounds]
    assert means[0] != means[1] == pytest.approx(means[0], rel=1e-15)
    for order in (rounds, rounds[::-1]):
        assert get_rounds(select_reported(*order, metric="loss")) == (2, 2)


def test_exact_scores_select_the_last_of_the_best_rounds_and_stall_from_the_first() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ranks = [tuple(row) for row in rng.integers(0, 3, (6, 2)).tolist()]
        selection = Selection()
        for number, (accuracy, loss) in enumerate(ranks, 1):
            selection = selection.add(
                "accuracy", number, ClientScores({"accuracy": accuracy / 3, "loss": -loss / 3}, {})
            )
        last = max(number for number, rank in enumerate(ranks, 1) if rank == max(ranks))
        assert get_rounds(selection) == (last, 1 + ranks.index(max(ranks)))


def test_a_run_chooses_by_these_rules(tiny_folder: Path, tmp_path: Path) -> None:
    """Few examples give many ties; the first of tied rounds was exported once."""
    values = tiny.settings(tiny_folder, federation={"rounds": 5}, training={"lr": 2e-3})
    report = fedspan.run(values, tmp_path / "run")
    rows = [json.loads(line)["validation"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [(row["accuracy"], -row["loss"]) for row in rows]
    assert scores[report.best_round - 1] == max(scores)
    assert report.scores["validation"] == pytest.approx(rows[report.best_round - 1])
    first = next(at for at, score in enumerate(scores, 1) if score[0] == max(scores)[0])
    assert report.best_round >= first


SCORES = {1: 0.2, 2: 0.5, 3: 0.4, 4: 0.1, 5: 0.3, 6: 0.9}


def run_with_reports(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    out: Path,
    *rounds: dict[str, float],
    early_stopping: int | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run with scripted reports of the clients; return the lines of metrics and the notes."""

    def evaluate_clients(evaluator: Evaluator, progress: Progress) -> tuple[ClientScores | None, None]:
        if not (accuracies := rounds[progress.state.round - 1]):
            return None, None
        rows = {id: {"accuracy": one, "loss": 1 - one, "examples": 8.0} for id, one in accuracies.items()}
        pooled = {name: fmean(row[name] for row in rows.values()) for name in ("accuracy", "loss")}
        return ClientScores(pooled, rows, compute_trimmed_means(rows, pooled)), None

    notes = Notes()
    monkeypatch.setattr(Evaluator, "evaluate_clients", evaluate_clients)
    settings = tiny.settings(folder, federation={"rounds": len(rounds), "early_stopping": early_stopping})
    fedspan.run(settings, out, listener=notes)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], notes.notes


def test_the_logged_means_decide(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path) -> None:
    """A silent client counts with its last metrics, so the mean over the round's own clients would mislead a reader."""
    rounds = [{"a": 0.8, "b": 0.7, "c": 0.1}, {"a": 0.75, "b": 0.65}, {"a": 0.8, "b": 0.7, "c": 0.6}]
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "run", *rounds)
    assert [row["validation_trimmed"]["accuracy"] for row in rows] == pytest.approx([0.7, 0.65, 0.7])
    assert rows[1]["validation"]["accuracy"] == pytest.approx(0.7)
    ranks = [(row["validation_trimmed"]["accuracy"], -row["validation_trimmed"]["loss"]) for row in rows]
    for count, row in enumerate(rows, 1):
        assert row["best_round"] == 1 + max(range(count), key=lambda index: (*ranks[index], index))
    assert not any("nodes sent validation metrics" in note for note in notes)


def test_a_note_counts_the_measured_clients(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path) -> None:
    rounds = [{"a": 0.8, "b": 0.7}, {"a": 0.5, "b": 0.4}, {"a": 0.4, "b": 0.3, "c": 0.3}, {"a": 0.2, "b": 0.1}]
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "run", *rounds)
    assert [row.get("best_round") for row in rows] == [None, None, 3, 3]  # too few clients select none
    assert ["validation_trimmed" in row for row in rows] == [False, False, True, True]
    (note,) = [note for note in notes if "nodes sent validation metrics" in note]
    assert re.match(r"only 2 of \d+ nodes sent", note)
    rows, notes = run_with_reports(monkeypatch, tiny_folder, tmp_path / "none", {}, {}, {}, early_stopping=1)
    assert len(rows) == 3
    assert len([note for note in notes if note.startswith("only 0 of ")]) == 1


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rounds of every run the scores above."""
    monkeypatch.setattr(selection, "rate_round", lambda metric, number, _: Best(SCORES[number], 0.0, number))


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    federation = {"rounds": 6, "early_stopping": 2, **changes.pop("federation", {})}
    return tiny.settings(folder, federation=federation, **changes)


def config(folder: Path, every: int) -> RunConfig:
    return parse_config(values(folder, federation={"early_stopping": 3}, evaluation={"every": every}))


def test_a_run_has_stalled_after_as_many_evaluated_rounds_without_a_better_one(tiny_folder: Path) -> None:
    each, third, second = config(tiny_folder, 1), config(tiny_folder, 2), Best(0.5, 0.0, 2)
    stalled = [has_stalled(each, number, second) for number in (2, 3, 4, 5, 6)]
    assert stalled == [False, False, False, True, True]
    stalled = [has_stalled(third, number, second) for number in (4, 5, 6)]
    assert stalled == [False, False, True]  # round 5 is not evaluated
    assert not has_stalled(each, 9, None)
    assert not has_stalled(parse_config(tiny.settings(tiny_folder)), 9, Best(0.5, 0.0, 1))


@pytest.mark.usefixtures("scored")
def test_a_run_stops_and_exports_its_best_round(tiny_folder: Path, tmp_path: Path) -> None:
    listener = Notes()
    report = fedspan.run(values(tiny_folder), tmp_path / "run", listener=listener)
    assert (report.rounds, report.best_round) == (4, 2)
    expected = "the validation score has not improved since round 2 (federation.early_stopping)"
    assert listener.notes[-1] == f"stopped after round 4: {expected}"
    patient = fedspan.run(values(tiny_folder, federation={"early_stopping": 4}), tmp_path / "patient")
    assert (patient.rounds, patient.best_round) == (6, 6)


@pytest.mark.usefixtures("scored")
def test_the_note_names_the_loss_where_it_decides(tiny_folder: Path, tmp_path: Path) -> None:
    listener = Notes()
    fedspan.run(values(tiny_folder, evaluation={"best_by": "loss"}), tmp_path / "run", listener=listener)
    expected = "the validation loss has not fallen since round 2 (federation.early_stopping)"
    assert f"stopped after round 4: {expected}" in listener.notes


def test_it_needs_validation_parts(tiny_folder: Path) -> None:
    partition = {**values(tiny_folder)["partition"], "validation": 0.0}
    with refused("federation.early_stopping"):
        parse_config({**values(tiny_folder), "partition": partition})
