"""Several methods and seeds on one division of the data: the runs, the table, going on, and what is refused."""

import csv
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspan
from fedspan import CompareReport, Watcher, load_config
from fedspan.experiments.comparison import CompareRow, plan_comparison
from fedspan.experiments.intervals import Difference
from fedspan.experiments.run_comparison import draw_comparison, write_figure
from fedspan.experiments.series import Step
from fedspan.runs.integrity import read_config
from fedspan.runs.report import read_report
from helpers import tiny
from helpers.listeners import RecordingWatcher
from helpers.refusals import refused


def values_of(folder: Path, **changes: Any) -> dict[str, Any]:
    changes = {"method": {"tau": 1}, "federation": {"rounds": 2}, **changes}
    return {**tiny.settings(folder, **changes), "baselines": ["local-only", "centralized"]}


def test_a_partition_that_the_config_names_is_kept(tiny_folder: Path) -> None:
    values = values_of(tiny_folder, partition={"seed": 77})
    plan = plan_comparison(values, ["fedloru"], [1, 2], {}, None)
    assert {step.config.partition.seed for step in plan.steps} == {77}


def test_a_score_that_is_missing_leaves_no_mean() -> None:
    row = CompareRow("fedit", (0.5, None), None, None, Difference(0.1), None, 1.0, 2.0, 3.0)
    report = CompareReport("pearson", "test", True, "flora", (0, 1), (row,), "folder")
    assert report.build_table().rows[0][1:4] == ("-", "+0.1000", "-")
    assert report.build_table().best is None
    assert report.tabulate_seeds().rows == (("fedit", "0.5000", "-"),)


METHODS = ("fedit", "fedloru")
SEEDS = (4, 1)


def asked(folder: Path) -> dict[str, Any]:
    return {
        "config": values_of(folder),
        "methods": METHODS,
        "seeds": SEEDS,
        "overrides_for": {"fedloru": ["training.lr=0.01"]},
    }


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompareReport, RecordingWatcher]:
    folder, watcher = tmp_path_factory.mktemp("comparison") / "made", RecordingWatcher()
    return folder, fedspan.compare(folder=folder, listener=watcher, **asked(tiny_folder)), watcher


def without_times(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "table.csv").open()))
    return [{name: cell for name, cell in row.items() if name != "seconds"} for row in rows]


def test_every_run_has_the_same_partition_and_is_an_ordinary_run(
    made: tuple[Path, CompareReport, RecordingWatcher], tiny_folder: Path, tmp_path: Path
) -> None:
    folder, _, watcher = made
    names = [f"{method}-seed{seed}" for method in METHODS for seed in SEEDS]
    assert watcher.planned == watcher.finished == names
    partitions = {json.loads((folder / name / "partition.json").read_text())["fingerprint"] for name in names}
    assert len(partitions) == 1
    for name in names:
        config = read_config(folder / name)
        assert config.partition.seed == SEEDS[0]
        assert config.seed == int(name.rpartition("seed")[2])
        assert bool(config.baselines) == name.startswith(METHODS[0])
    # Run in a process of many, it is bit for bit the run that it is alone.
    values = values_of(tiny_folder, method={}, partition={"seed": SEEDS[0]})
    fedspan.run({**values, "seed": SEEDS[1]}, tmp_path / "alone")
    file = Path("adapter") / "adapter_model.safetensors"
    assert (tmp_path / "alone" / file).read_bytes() == (folder / f"fedit-seed{SEEDS[1]}" / file).read_bytes()


def test_options_go_to_the_methods_that_have_them(made: tuple[Path, CompareReport, RecordingWatcher]) -> None:
    folder = made[0]
    configs = {method: read_config(folder / f"{method}-seed{SEEDS[0]}") for method in METHODS}
    assert configs["fedloru"].method.options == {"r": 2, "lora_alpha": 4, "tau": 1}
    assert configs["fedit"].method.options == {"r": 2, "lora_alpha": 4}
    assert [configs[method].training.lr for method in METHODS] == [0.02, 0.01]


def test_the_table_is_that_of_the_reports(made: tuple[Path, CompareReport, RecordingWatcher]) -> None:
    """Every number again, by hand, from the report.json of each run."""
    folder, report, watcher = made
    reports = {
        method: [json.loads((folder / f"{method}-seed{seed}" / "report.json").read_text()) for seed in SEEDS]
        for method in METHODS
    }
    scores = {method: [made["scores"] for made in reports[method]] for method in METHODS}
    scores["start"] = [made["start"] for made in reports["fedit"]]
    for name in ("local-only", "centralized"):
        scores[name] = [made["baselines"][name]["scores"] for made in reports["fedit"]]
    assert [row.name for row in report.rows] == list(scores)
    assert (report.metric, report.measured, report.higher, report.against) == ("accuracy", "test", True, "fedit")
    reference = np.array([made["test"]["accuracy"] for made in scores["fedit"]])
    plain = {row["method"]: row for row in csv.DictReader((folder / "table.csv").open())}
    for row in report.rows:
        a, b = (made["test"]["accuracy"] for made in scores[row.name])
        mean, deviation = (a + b) / 2, abs(a - b) / math.sqrt(2)
        assert row.scores == (a, b)
        assert row.mean == pytest.approx(mean)
        assert row.deviation == pytest.approx(deviation)
        worst = [made["clients"]["worst"]["accuracy"] for made in scores[row.name]]
        assert row.worst == pytest.approx(sum(worst) / 2)
        if row.name == "fedit":
            assert row.difference is None
        else:
            apart = np.array([a, b]) - reference
            assert row.difference.mean == pytest.approx(apart.mean())
            by_seeds = abs(apart[0] - apart[1]) / 2
            assert row.difference.high - row.difference.mean >= 1.96 * by_seeds  # the test items add to it
            assert float(plain[row.name]["low"]) == row.difference.low
        assert float(plain[row.name]["mean"]) == row.mean
        if row.name in METHODS:
            assert row.bytes_up == np.mean([made["bytes"]["up"] for made in reports[row.name]])
            assert row.bytes_down == np.mean([made["bytes"]["down"] for made in reports[row.name]])
            assert row.seconds == pytest.approx(np.mean([made["seconds"] for made in reports[row.name]]))
        else:
            assert (row.bytes_up, row.bytes_down, row.seconds) == (None, None, None)
            assert plain[row.name]["bytes_up"] == ""
    assert watcher.scores["fedit-seed4"] == reference[0]
    page = (folder / "table.md").read_text()
    first = report.rows[0]
    latex = (folder / "table.tex").read_text()
    assert latex.count(r" \\") == 1 + len(report.rows)
    assert rf"{100 * first.mean:.1f} $\pm$ {100 * first.deviation:.1f} &" in latex.replace("\\textbf{", "").replace(
        "} &", " &"
    )
    assert f"{100 * first.mean:.1f} ± {100 * first.deviation:.1f}" in page
    for said in ("Command: `", "Date: 20", "Machine: ", "torch ", "fedspan ", "higher is better", "| seed 4 |"):
        assert said in page


def test_the_figure_has_the_scores_of_the_rounds(
    made: tuple[Path, CompareReport, RecordingWatcher], tiny_folder: Path
) -> None:
    folder, report, _ = made
    plan = plan_comparison(asked(tiny_folder)["config"], METHODS, SEEDS, {}, None)
    figure = draw_comparison(plan, report)
    by_round, by_bytes = ({line.get_label(): line.get_xydata() for line in axes.lines} for axes in figure.axes)
    assert list(by_round) == list(by_bytes) == [*METHODS, "local-only", "centralized"]
    for method in METHODS:
        logs = [(folder / f"{method}-seed{seed}" / "metrics.jsonl").read_text().splitlines() for seed in SEEDS]
        rows = [[row for line in log if (row := json.loads(line))["round"]] for log in logs]
        means = [100 * (a["test"]["accuracy"] + b["test"]["accuracy"]) / 2 for a, b in zip(*rows, strict=True)]
        assert by_round[method] == pytest.approx(np.column_stack([[1, 2], means]))
        sent = [sum(sum(row["bytes"].values()) for row in pair) / 2e6 for pair in zip(*rows, strict=True)]
        assert by_bytes[method] == pytest.approx(np.column_stack([sent, means]))
    assert set(by_round["centralized"][:, 1]) == {100 * report.rows[-1].mean}
    content = (folder / "figure.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    write_figure(plan, report, folder / "figure.pdf")
    assert (folder / "figure.pdf").read_bytes() == content


def test_another_reference_reruns_nothing(made: tuple[Path, CompareReport, RecordingWatcher], tmp_path: Path) -> None:
    folder, watcher = Path(shutil.copytree(made[0], tmp_path / "copy")), RecordingWatcher()
    report = fedspan.resume_compare(folder, against="centralized", listener=watcher)
    assert watcher.finished == []
    rows = {row.name: row for row in report.rows}
    assert rows["centralized"].difference is None
    for name in METHODS:
        mean, other = rows[name].mean, rows["centralized"].mean
        assert rows[name].difference.mean == pytest.approx(mean - other)


@pytest.mark.slow
def test_stopped_it_continues_to_the_same_table(
    made: tuple[Path, CompareReport, RecordingWatcher], tiny_folder: Path, tmp_path: Path
) -> None:
    """By the same call in the first run, then by the folder alone in a later one."""
    folder, whole = tmp_path / "stopped", made[0]
    with pytest.raises(KeyboardInterrupt):
        fedspan.compare(folder=folder, listener=RecordingWatcher("fedit-seed4", 1), **asked(tiny_folder))
    assert not (folder / "table.csv").exists()
    with pytest.raises(KeyboardInterrupt):
        fedspan.compare(folder=folder, listener=(second := RecordingWatcher("fedloru-seed4", 1)), **asked(tiny_folder))
    assert second.begun == {"fedit-seed4": 1, "fedit-seed1": 0, "fedloru-seed4": 0}
    third = RecordingWatcher()
    fedspan.resume_compare(folder, listener=third)
    assert third.begun["fedloru-seed4"] == 1
    assert third.finished == second.planned[2:]
    assert without_times(folder) == without_times(whole)
    for name in third.planned:
        file = Path(name) / "adapter"
        for one in (whole / file).rglob("*.safetensors"):
            assert one.read_bytes() == (folder / one.relative_to(whole)).read_bytes()


def test_seeds_can_be_added_and_other_configs_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "grows"
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    one = fedspan.compare(values, folder, ["fedit"], [0])
    assert (one.rows[0].deviation, one.rows[0].difference) == (None, None)
    assert "±" not in (folder / "table.md").read_text()
    assert "One seed (0)" in (folder / "table.md").read_text()
    watcher = RecordingWatcher()
    fedspan.compare(values, folder, ["fedit"], [0, 1], listener=watcher)
    assert watcher.finished == ["fedit-seed1"]
    before = (folder / "compare.yaml").read_text()
    with refused("config", r"the run fedit-seed0 in .* began with another config"):
        fedspan.compare(values, folder, ["fedit"], [0, 1], overrides=["training.lr=0.5"])
    with refused("folder", "holds the run fedit-seed1, which does not belong to this series"):
        fedspan.compare(values, folder, ["fedit"], [0])
    with refused("folder", "holds other files"):
        fedspan.sweep(values, folder, {"method.r": [1, 2]})
    assert (folder / "compare.yaml").read_text() == before


def test_a_mistake_that_only_a_run_finds_can_be_put_right_in_the_same_folder(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    with refused("method.r"):
        fedspan.compare(values, tmp_path / "made", ["fedit"], [0], overrides=["method.r=99"])
    assert fedspan.compare(values, tmp_path / "made", ["fedit"], [0]).rows[0].mean is not None


def test_without_a_test_set_the_clients_own_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(
        tiny_folder, data={"test_fraction": 0}, federation={"rounds": 1}, evaluation={"metric": "loss"}
    )
    report = fedspan.compare(values, tmp_path / "made", ["fedit", "flora"], [0])
    assert (report.metric, report.measured, report.higher) == ("loss", "clients", False)
    reports = [read_report(tmp_path / "made" / f"{key}-seed0") for key in ("fedit", "flora")]
    scores = [made["clients"]["loss"] for made in (reports[0].scores, reports[1].scores, reports[0].start)]
    assert [(row.name, row.mean) for row in report.rows] == list(zip(("fedit", "flora", "start"), scores, strict=True))
    assert report.rows[1].difference == Difference(scores[1] - scores[0], note="one seed: no interval")
    assert report.build_table().best is None
    assert "lower is better" in (tmp_path / "made" / "table.md").read_text()


def test_a_row_may_be_a_method_with_wrappers(tiny_folder: Path, tmp_path: Path) -> None:
    config = values_of(tiny_folder, method={"wrappers": [{"name": "fedprox", "mu": 0.3}]}, federation={"rounds": 1})
    rows = ["fedit", "fedit+fedadam"]
    report = fedspan.compare(
        {**config, "baselines": []},
        tmp_path / "out",
        rows,
        [0],
        overrides_for={"fedit+fedadam": ["method.wrappers.1.lr=0.07"]},
    )
    assert [row.name for row in report.rows] == [*rows, "start"]
    stored = [load_config(tmp_path / "out" / f"{row}-seed0" / "config.yaml").method for row in rows]
    assert [method.title for method in stored] == ["fedit+fedprox", "fedit+fedprox+fedadam"]
    assert stored[1].wrappers[0].options == {"mu": 0.3}
    assert stored[1].wrappers[1].options == {"lr": 0.07}
    assert report.rows[0].scores != report.rows[1].scores or report.rows[0].worst != report.rows[1].worst


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"methods": ["fedit", "rolara"]}, "--methods"),
        ({"methods": ["fedit", "fedit"]}, "--methods"),
        ({"methods": []}, "--methods"),
        ({"methods": ["fedprox"]}, "--methods"),  # a wrapper
        ({"methods": ["fedit+fedproks"]}, "--methods"),
        ({"seeds": []}, "--seeds"),
        ({"seeds": [0, 1, 0]}, "--seeds"),
        ({"seeds": [-1]}, "--seeds"),
        ({"against": "flora"}, "--against"),
        ({"overrides": ["method.tao=3"]}, "method.tao"),
        ({"overrides": ["method=fedit"]}, "method"),
        ({"overrides_for": {"flora": ["method.r=3"]}}, "--set-for"),
        ({"overrides_for": {"fedit": ["method.tau=3"]}}, "method.tau"),
        ({"overrides_for": {"fedit": ["training.rate=3"]}}, "training.rate"),
        ({"overrides_for": {"fedit": ["method.name=flora"]}}, "--set-for"),
        ({"overrides_for": {"fedit": ["partition.alpha=3"]}}, "--set-for"),
        ({"overrides_for": {"fedit": ["evaluation.metric=loss"]}}, "--set-for"),
    ],
)
def test_mistakes_are_named_at_once(change: dict[str, Any], field: str, tiny_folder: Path, tmp_path: Path) -> None:
    call = {"config": values_of(tiny_folder), "methods": ["fedit", "fedloru"], "seeds": [0], **change}
    call["config"].pop("baselines")
    with refused(field):
        fedspan.compare(folder=tmp_path / "made", **call)
    assert not (tmp_path / "made").exists()


def test_data_that_changed_in_between_are_noticed(tiny_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.csv"
    lines = (tiny_folder / "corpus.csv").read_text().splitlines(keepends=True)
    corpus.write_text("".join(lines))
    values = tiny.settings(tiny_folder, data={"train": str(corpus)}, federation={"rounds": 1})
    fedspan.compare(values, tmp_path / "made", ["fedit"], [0])
    corpus.write_text("".join(lines[:-3]))
    with refused("partition", "have different partitions, because the data changed"):
        fedspan.compare(values, tmp_path / "made", ["fedit"], [0, 1])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_comparison_has_one_view_of_runs(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, finished = _Terminal(), list[str]()
    monkeypatch.setattr("sys.stderr", terminal)

    class Own(Watcher):
        def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
            finished.append(step.name)

    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], listener=Own())
    assert finished == ["fedit-seed0", "rolora-seed0"]
    assert "2 runs in 0:" in terminal.getvalue()
    assert "rounds in" not in terminal.getvalue(), "the runs have no bars of their own"
    terminal.truncate(0)
    fedspan.compare(values, tmp_path / "two", ["fedit", "rolora"], seeds=[0], progress=False)
    assert terminal.getvalue() == ""
