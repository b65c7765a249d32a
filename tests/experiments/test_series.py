"""A series of runs: seeds, statistics, intervals of differences, verdicts, settings, folders, reused runs, tables."""

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from scipy import stats

import fedspan
from fedspan.config import parse_config
from fedspan.config.run import RunConfig
from fedspan.errors import FedspanError
from fedspan.experiments import execution, series, tables
from fedspan.experiments.intervals import Difference, compare_clients, compare_pairs, compare_to, estimate_difference
from fedspan.progress.formatting import format_size
from fedspan.run_folder import RunFolder
from fedspan.runs.integrity import format_config
from fedspan.runs.predictions import Items, read_items
from fedspan.tasks.label_scores import score_labels
from helpers.refusals import refused


def config(**changes: Any) -> RunConfig:
    return parse_config({"data": {"train": "train.csv"}, "seed": 1, **changes})


def test_seeds_are_different_whole_numbers() -> None:
    assert series.validate_seeds([0, 2**63 - 1]) == (0, 2**63 - 1)
    for seeds, why in (
        ([], "at least one whole number"),
        ([-1], "a whole number from 0"),
        ([2**63], "a whole number from 0"),
        ([True], "a whole number from 0"),
        ([0.5], "a whole number from 0"),
        ([3, 4, 3], "the seed 3 is given twice"),
    ):
        with refused("--seeds", why):
            series.validate_seeds(seeds)


def test_all_seeds_share_the_partition_of_the_first_unless_the_config_has_one() -> None:
    """The config itself stays as it is."""
    some = config(baselines=["centralized"])
    changed = series.set_seed(some, 7, 5, baselines=False)
    assert (changed.seed, changed.partition.seed, changed.baselines) == (7, 5, [])
    assert series.set_seed(some, 7, 5, baselines=True).baselines == ["centralized"]
    assert series.set_seed(config(partition={"seed": 3}), 7, 5, baselines=True).partition.seed == 3
    assert (some.seed, some.partition.seed) == (1, None)


def test_runs_of_other_data_or_another_metric_are_not_comparable() -> None:
    shared, same = config(), config(method={"name": "fedavg"})
    assert series.require_comparable(shared, same, "--methods", "fedavg") is same
    for changes, words in (
        ({"data": {"train": "other.csv"}}, "data"),
        ({"partition": {"clients": 3}}, "partition"),
        ({"seed": 2}, "seed"),
        ({"evaluation": {"metric": "loss"}}, "evaluation.metric"),
    ):
        with pytest.raises(FedspanError, match=words) as caught:
            series.require_comparable(shared, config(**changes), "--set", "a value")
        assert (caught.value.field, caught.value.value) == ("--set", "a value")


def test_statistics_have_no_value_if_any_is_missing() -> None:
    values = [1.0, 2.0, 6.0]
    assert series.compute_mean(values) == 3.0
    assert series.compute_deviation(values) == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    for function in (series.compute_mean, series.compute_deviation):
        assert function([1.0, None, 6.0]) is None
        assert function([]) is None
    assert series.compute_mean([5.0]) == 5.0
    assert series.compute_deviation([5.0]) is None


def test_a_metric_that_is_missing_or_not_finite_has_no_value() -> None:
    scores = {"accuracy": 1, "loss": math.nan, "perplexity": math.inf, "f1": None}
    assert series.get_finite(scores, "accuracy") == 1.0
    assert [series.get_finite(scores, name) for name in ("loss", "perplexity", "f1", "missing")] == [None] * 4
    assert series.get_finite(None, "accuracy") is None


def test_labels_beside_images_are_part_of_what_was_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, kind, values in (
        ("train-images-idx3-ubyte", 3, rng.integers(0, 256, (12, 8, 8), np.uint8)),
        ("train-labels-idx1-ubyte", 1, np.arange(12, dtype=np.uint8) % 2),
    ):
        header = struct.pack(f">BBBB{kind}I", 0, 0, 8, kind, *values.shape)
        (tmp_path / name).write_bytes(header + values.tobytes())
    images = str(tmp_path / "train-images-idx3-ubyte")
    config = parse_config(
        {
            "task": "image-classification",
            "data": {"train": images, "label": "label", "image": "image"},
            "model": {"name": "builtin:resnet-8", "image_size": 8, "target_modules": r"layer1\.0\.conv1"},
            "partition": {"clients": 2},
            "method": {"name": "fedit", "r": 2},
            "federation": {"rounds": 1},
        }
    )
    fedspan.run(config, tmp_path / "runs" / "run")
    known = execution.FinishedRuns([tmp_path / "runs"])
    assert known.copy(config, tmp_path / "copy")
    later = (tmp_path / "runs" / "run" / "config.yaml").stat().st_mtime + 1
    os.utime(tmp_path / "train-labels-idx1-ubyte", (later, later))
    assert not known.copy(config, tmp_path / "other")


def step(name: str, **changes: Any) -> series.Step:
    config = parse_config({"data": {"train": "train.csv"}, **changes})
    return series.Step(name, name, "fedit", 0, config)


KINDS: dict[str, Any] = {"config": dict, "seeds": list, "rounds": (int, type(None))}


def test_the_settings_of_a_series_come_back_or_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compare.yaml"
    with refused("folder", r"holds no compare\.yaml\. Give a config to start a new series"):
        execution.read_settings(tmp_path, "compare.yaml", KINDS)
    settings = {"config": {"seed": 1}, "seeds": [0, 1]}
    execution.open_series(tmp_path, "compare.yaml", {**settings, "rounds": None}, [])
    assert execution.read_settings(tmp_path, "compare.yaml", KINDS) == {**settings, "rounds": None}
    for text in ("{config: {}, seeds: 1, rounds: 1}", "{config: {}, seeds: []}", "- 1", ""):
        path.write_text(text)
        with pytest.raises(FedspanError, match="the settings config, seeds, rounds, as they were written"):
            execution.read_settings(tmp_path, "compare.yaml", KINDS)
    path.write_text("{")
    with pytest.raises(FedspanError, match="the file is not valid YAML"):
        execution.read_settings(tmp_path, "compare.yaml", KINDS)


def test_a_folder_holds_the_runs_of_one_series_and_nothing_else(tmp_path: Path) -> None:
    steps = [step("a"), step("b", seed=1)]
    (tmp_path / "file").touch()
    with refused("folder", r"is a file\. Choose another name"):
        execution.open_series(tmp_path / "file", "compare.yaml", {}, steps)
    with refused("folder", r"holds other files \(file\)\. Choose another folder"):
        execution.open_series(tmp_path, "compare.yaml", {}, steps)
    folder = tmp_path / "series"
    execution.open_series(folder, "compare.yaml", {"seeds": [0]}, steps)
    (folder / "compare.yaml.tmp-1").touch()
    (folder / "a").mkdir()
    RunFolder(folder / "a").config.write_text(format_config(steps[0].config))
    execution.open_series(folder, "compare.yaml", {"seeds": [0, 1]}, steps)
    assert yaml.safe_load((folder / "compare.yaml").read_text()) == {"seeds": [0, 1]}
    with refused("config", r"the run a in .* began with another config"):
        execution.open_series(folder, "compare.yaml", {}, [step("a", seed=5)])
    with refused("folder", "holds the run a, which does not belong to this series"):
        execution.open_series(folder, "compare.yaml", {}, steps[1:])


def test_a_command_line_is_shown_as_it_was_typed() -> None:
    for program in ("fedspan", "/usr/bin/fedspan", "/lib/fedspan/__main__.py"):
        assert execution.format_command_line([program, "compare", "a.yaml"]) == ["fedspan", "compare", "a.yaml"]
    assert execution.format_command_line(["/home/me/script.py", "x"]) == ["script.py", "x"]
    assert execution.format_command_line([]) == ["fedspan"]


def test_finished_runs_are_reused_within_a_context_alone() -> None:
    assert execution.get_reusable_runs() is None
    with execution.reuse_finished_runs([]):
        assert execution.get_reusable_runs() is not None
        assert not execution.get_reusable_runs().copy(step("a").config, Path("nowhere"))
    assert execution.get_reusable_runs() is None


TABLE = tables.Table(("method", "accuracy"), (("fedit", "95.4"), ("a|b", "")), 1, ("first note", "last note"))


def test_metrics_in_percent_have_one_decimal_and_others_four() -> None:
    assert tables.format_heading("best", "accuracy") == "best accuracy, %"
    assert "%" not in tables.format_heading("best", "loss")
    assert tables.format_mean("accuracy", 0.9543, 0.0071) == "95.4 ± 0.7"
    assert tables.format_mean("accuracy", 0.9543, None, sign=True) == "+95.4"
    assert tables.format_mean("accuracy", -0.01, None, sign=True) == "-1.0"
    assert tables.format_mean("loss", 0.5, 0.25) == "0.5000 ± 0.2500"
    assert tables.format_mean("loss", None, 0.25) == "-"


def test_bytes_and_seconds() -> None:
    assert [tables.format_megabytes(n) for n in (None, 0, 1_234_567, 12_345_678)] == ["-", "0.000", "1.235", "12.3"]
    assert [tables.format_seconds(value) for value in (None, 0.0, 61.26)] == ["-", "0.0", "61.3"]
    sizes = (0, 999, 1000, 1_250_000, 99_940_000, 999_600_000, 3.2e12)
    assert [format_size(n) for n in sizes] == ["0 B", "999 B", "1.0 kB", "1.2 MB", "99.9 MB", "1.0 GB", "3.2 TB"]


def test_markdown_has_the_best_row_in_bold_and_no_cell_that_ends_a_column() -> None:
    assert tables.format_markdown(TABLE) == [
        "| method | accuracy |",
        "|---|---:|",
        "| fedit | 95.4 |",
        "| **a\\|b** |  |",
        "",
        "first note  ",
        "last note",
    ]


def write_run(folder: Path, fingerprint: str, torch: str = "2.8") -> None:
    files = RunFolder(folder)
    folder.mkdir()
    files.write_json(files.environment, {"platform": "Linux", "threads": 2, "torch": torch, "seed": 1, "command": []})
    files.write_json(files.partition, {"fingerprint": fingerprint})
    files.report.touch()
    os.utime(files.report, (0, 86400 * 365))


def test_a_table_states_its_command_machine_and_partition(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, "f" * 64)
    plain = [{"method": "fedit", "accuracy": 0.954}, {"method": "a,b", "accuracy": None}]
    tables.write_tables(tmp_path, "Title", TABLE, plain, ["fedspan", "compare", "my config"], ["a", "b"], TABLE)
    assert (tmp_path / "table.csv").read_text() == 'method,accuracy\nfedit,0.954\n"a,b",\n'
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[:6] == [
        "# Title",
        "",
        "Command: `fedspan compare 'my config'`  ",
        "Date: 1971-01-01.  ",
        "Machine: Linux, threads 2; torch 2.8.  ",
        f"Same partition of the data in all runs: {'f' * 16}.",
    ]
    assert lines.count("| method | accuracy |") == 2
    write_run(tmp_path / "c", "f" * 64, torch="2.9")
    tables.write_tables(tmp_path, "Title", TABLE, plain, [], ["a", "c"])
    assert "Also on: Linux, threads 2; torch 2.9.  " in (tmp_path / "table.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("better", "worse", "expected"),
    [
        ([3.0, 4.0, 5.0], [1.0, 2.0, 3.0], "holds"),
        ([1.0, 2.0, 3.0], [3.0, 4.0, 5.0], "contradicted"),
        ([10.0, 20.0, 30.0], [9.0, 19.0, 29.0], "holds"),  # paired: seeds differ by far more than methods
        ([1.0, 2.0, 9.0], [3.0, 1.0, 2.0], "inconclusive"),
        ([1.0, 1.0], [1.0, 1.0], "inconclusive"),
        ([9.0], [1.0], "inconclusive"),  # one seed says nothing of its error
    ],
)
def test_paired(better: list[float], worse: list[float], expected: str) -> None:
    assert compare_pairs(better, worse).verdict == expected


def test_the_border_is_student_s_for_the_number_of_seeds() -> None:
    """Differences 0, 1, 2 + shift: mean 1 + shift, standard error 1 / sqrt(3), two degrees of freedom."""
    half = 4.302653 / math.sqrt(3)
    border = half - 1
    for shift, expected in ((border - 1e-6, "inconclusive"), (border + 1e-6, "holds")):
        found = compare_pairs([shift, 1 + shift, 2 + shift], [0.0, 0.0, 0.0])
        assert found.verdict == expected
        assert found.half_width == pytest.approx(half)
    assert str(compare_pairs([0.0, 1.0, 2.0], [0.0, 0.0, 0.0])) == "+1.0 ± 2.5"
    assert str(compare_pairs([9.0], [1.0])) == "+8.0"
    near = [compare_to([55.0, 56.0, 57.0], 55.0, 1 + half + shift).verdict for shift in (-1e-6, 1e-6)]
    assert near == ["inconclusive", "holds"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([55.0, 56.0, 54.0], "holds"), ([70.0, 71.0, 72.0], "contradicted"), ([50.0, 60.0, 70.0], "inconclusive")],
)
def test_near(values: list[float], expected: str) -> None:
    assert compare_to(values, 55.0, 5.0).verdict == expected


def test_values_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare_pairs([1.0, 2.0], [1.0])


TARGETS = np.array([0, 1, 2] * 100)


def predict(wrong: int, start: int = 0, examples: str = "one") -> Items:
    """Predictions of which some in a row are wrong."""
    predicted = TARGETS.copy()
    predicted[start : start + wrong] = (predicted[start : start + wrong] + 1) % 3
    return Items(TARGETS, predicted[None], ("a", "b", "c"), examples)


def difference(first: list[Items], second: list[Items], metric: str = "accuracy") -> Difference:
    rows = np.arange(len(TARGETS))
    scores = [[items.compute_score(metric, rows) for items in side] for side in (first, second)]
    return estimate_difference(metric, *scores, list(zip(first, second, strict=True)))


def test_one_example_is_no_measurable_difference_and_many_are() -> None:
    found = difference([predict(30)], [predict(31)])
    assert found.mean == pytest.approx(1 / 300)
    assert not found.is_measurable
    assert found.describe("accuracy", "the start") == "not measurably different from the start (+0.3, -0.3 to +1.0)"
    found = difference([predict(30)], [predict(60)])
    error = np.repeat([1.0, 0.0], [30, 270]).std(ddof=1) / math.sqrt(300)
    assert (found.low, found.high) == pytest.approx((0.1 - 1.96 * error, 0.1 + 1.96 * error), abs=1e-4)
    assert found.describe("accuracy", "the start") == "10.0 points (6.6 to 13.4) above the start"
    assert difference([predict(60)], [predict(30)]).describe("accuracy", "it") == "10.0 points (6.6 to 13.4) below it"


def test_seeds_and_items_both_widen_the_interval() -> None:
    first, second = [predict(30), predict(20), predict(10)], [predict(60), predict(60), predict(60)]
    both = difference(first, second)
    seeds = estimate_difference("accuracy", [0.9, 0.9 + 1 / 30, 0.9 + 2 / 30], [0.8] * 3)
    half = stats.t.ppf(0.975, 2) * (1 / 30) / math.sqrt(3)
    assert seeds.high - seeds.mean == pytest.approx(half)
    assert seeds.describe("accuracy", "it").endswith("(5.1 to 21.6; without the noise of the test items) above it")
    by_seeds = (1 / 30) / math.sqrt(3)
    correct = [(items.predicted[0] == TARGETS).astype(float) for items in (*first, *second)]
    by_items = (np.mean(correct[:3], axis=0) - np.mean(correct[3:], axis=0)).std(ddof=1) / math.sqrt(300)
    total = math.hypot(by_seeds, by_items)
    assert both.high - both.mean == pytest.approx(stats.t.ppf(0.975, 2 * (total / by_seeds) ** 4) * total)


def test_other_metrics_are_resampled_and_without_items_one_seed_has_no_interval() -> None:
    found = difference([predict(30)], [predict(60)], "macro_f1")
    assert found.is_measurable
    assert found.high - found.low == pytest.approx(2 * 3.4e-2, rel=0.2)
    found = estimate_difference("loss", [0.5], [0.75], [(predict(1), predict(2))])  # a loss is no score of classes
    assert found == Difference(-0.25, note="one seed: no interval")
    assert found.describe("loss", "the start") == "0.2500 below the start (one seed: no interval)"


def test_clients_are_the_sample_of_their_own_tests() -> None:
    first = {f"c{number}": {"accuracy": 0.5 + number / 10} for number in range(4)}
    second = {id: {"accuracy": scores["accuracy"] - 0.2 + 0.01 * (-1) ** int(id[1])} for id, scores in first.items()}
    found = compare_clients("accuracy", first, second)
    assert found is not None
    assert found.is_measurable
    assert found.mean == pytest.approx(0.2)
    assert compare_clients("accuracy", first, {}) is None


def test_clients_without_both_scores_are_counted() -> None:
    first: dict[str, dict[str, float]] = {f"c{number}": {"accuracy": 0.5 + number / 10} for number in range(3)}
    second = {"c0": {"accuracy": 0.4}, "c1": {"accuracy": 0.4}, "c2": {}, "c3": {"accuracy": 0.4}}
    found = compare_clients("accuracy", first, second)
    assert found is not None
    assert found.note == "2 of 4 clients have both scores"
    assert found.describe("accuracy", "it").endswith("; 2 of 4 clients have both scores)")
    one = compare_clients("accuracy", {"a": {"accuracy": 0.5}, "b": {"accuracy": math.nan}}, {"a": {"accuracy": 0.4}})
    assert one is not None
    assert one.low is None
    assert one.describe("accuracy", "it") == (
        "10.0 points above it (one client: no interval; 1 of 2 clients have both scores)"
    )


def test_equal_differences_have_no_interval() -> None:
    found = estimate_difference("accuracy", [0.9, 0.8], [0.8, 0.7])  # equal but for rounding
    assert found.low is None
    assert (
        found.describe("accuracy", "it") == "10.0 points above it (all 2 seeds have the same difference: no interval)"
    )
    assert difference([predict(30)], [predict(30)]).describe("accuracy", "it") == "equal to it"
    by_client = {id: {"accuracy": 0.5} for id in "ab"}
    assert compare_clients("accuracy", by_client, by_client) == Difference(
        0.0, note="all 2 clients have the same difference: no interval"
    )


def test_a_score_that_is_not_a_number_is_not_compared() -> None:
    for first in ([math.nan], [0.5, math.nan]):
        found = estimate_difference("accuracy", first, [0.5] * len(first))
        assert not found.is_measurable
        assert found.describe("accuracy", "it") == "not comparable with it (a score is not a number)"


def test_test_items_count_only_if_both_sides_have_the_same() -> None:
    """Equal targets are not enough; and where each seed has a test set of its own, the spread includes the items."""
    scores = [0.9, 0.8], [0.7, 0.75]
    others = [(predict(30, examples=name), predict(60, examples=f"other {name}")) for name in ("one", "two")]
    assert estimate_difference("accuracy", *scores, others).note == "without the noise of the test items"
    own = [(predict(30, examples=name), predict(60, examples=name)) for name in ("one", "two")]
    alone = estimate_difference("accuracy", *scores, own)
    assert alone.note == ""
    assert alone.high - alone.mean == pytest.approx(stats.t.ppf(0.975, 1) * 0.075)
    with pytest.raises(ValueError, match="1 pairs of predictions for 2 seeds"):
        estimate_difference("accuracy", *scores, own[:1])


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    targets, predicted = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 1])
    assert score_labels("macro_f1", targets, predicted) == pytest.approx(
        metrics.f1_score(targets, predicted, average="macro")
    )
    assert score_labels("f1", targets, predicted) == pytest.approx(metrics.f1_score(targets, predicted))
    assert score_labels("matthews", targets, predicted) == pytest.approx(metrics.matthews_corrcoef(targets, predicted))


def test_the_majority_class_is_that_of_the_targets() -> None:
    items = Items(np.array([0, 0, 0, 1]), np.zeros((1, 4), np.int32), ("a", "b"), "one")
    assert tables.describe_majority("accuracy", items).startswith("Majority class: 75.0 % of the held-out")
    assert tables.describe_majority("loss", items) == tables.describe_majority("accuracy", None) == ""


@pytest.mark.parametrize(
    ("predicted", "labels"),
    [([[0, 1]], '["a", "b"]'), ([[0, 1, 2]], '["a", "b"]'), ([[0, 1, 1]], "7"), ([[0, 1, 1]], '"ab"')],
)
def test_damaged_predictions_are_refused(tmp_path: Path, predicted: list[list[int]], labels: str) -> None:
    assert read_items(tmp_path) is None
    (tmp_path / "predictions").mkdir()
    tensors = {"targets": np.zeros(3, np.int32), "predicted": np.array(predicted, np.int32)}
    path = tmp_path / "predictions" / "result.safetensors"
    metadata = {"fedspan": f'{{"labels": {labels}, "examples": "one"}}'}
    save_file(tensors, path, metadata)
    with pytest.raises(FedspanError, match="predictions as fedspan writes them"):
        read_items(tmp_path)
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, path, metadata)
    with pytest.raises(FedspanError, match="predictions as fedspan writes them"):
        read_items(tmp_path)
