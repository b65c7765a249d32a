"""The page of a preset that was run, and the command that makes every page."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import all as every
import index as indexing
import pages
import pytest
import reasons
import reproduced
from hypotheses import HYPOTHESES

from fedspan.config import override, parse_config
from fedspan.reproduction.cells import list_cells, tabulate_settings
from fedspan.reproduction.presets import list_presets, load_preset
from fedspan.reproduction.reproduce import Reproduction
from fedspan.reproduction.verdicts import CellScore, judge

CLAIMS = Path(__file__).resolve().parents[2] / "claims"


def reproduce_preset(id: str, data: Path) -> Reproduction:
    """A preset whose first row is the best everywhere and whose last one failed."""
    preset = load_preset(id)
    cells = list_cells(preset, "small", str(data), None)
    scores: list[CellScore] = []
    for cell in cells:
        for at, label in enumerate(cell.configs):
            failed = at == len(cell.configs) - 1
            values = () if failed else tuple(0.9 - 0.1 * at + 0.001 * seed for seed in range(3))
            mean = None if failed else values[1]
            chosen = {"training.lr": 0.001}
            why = "a seed diverged" if failed else None
            scores.append(
                CellScore(cell.name, label, chosen, "accuracy", True, values, mean, 0.001, 2e6, 1e6, 3.0, why)
            )
    verdicts = judge(preset.claims, cells, scores)
    return Reproduction(id, "small", (0, 1, 2), tuple(scores), verdicts, str(data), tabulate_settings(cells))


def save_page(
    folder: Path, name: str, title: str, findings: list[dict[str, str]], setting: str = "", **facts: list[str]
) -> None:
    saved = {"name": name, "title": title, "paper": "A paper", "date": "2026-11-22", "findings": findings, **facts}
    (folder / f"{name}.json").write_text(json.dumps(saved), encoding="utf-8")
    (folder / f"{name}.md").write_text(f"# {title}\n\n## Setting\n\n{setting}", encoding="utf-8")


@pytest.mark.parametrize("id", ["rolora-table1", "fedloru-table1", "florg-table1", "fedgalore-table3"])
def test_the_page_of_a_preset(id: str, tmp_path: Path) -> None:
    found = reproduce_preset(id, tmp_path)
    reproduced.page(found, load_preset(id), tmp_path)
    page, saved = (tmp_path / f"{id}.md").read_text(), json.loads((tmp_path / f"{id}.json").read_text())
    assert len(saved["findings"]) == len(found.verdicts)
    for finding in saved["findings"]:
        assert f"| {finding['statement']} | {finding['measured']} | **{finding['verdict']}** |" in page
    assert f"({id}.svg)" in page
    assert "a seed diverged" in page
    grid = load_preset(id).get_sweep("small")["training.lr"]
    assert ("training.lr 0.001, the smallest: " in page) == (len(grid) > 1 and min(grid) == 0.001)
    assert all(" ".join(note.split()) in page for note in load_preset(id).notes)
    assert "<svg" in (tmp_path / f"{id}.svg").read_text()


def test_what_is_looked_into_is_a_cell_of_its_preset() -> None:
    """Every row's config is one, and no two rows of a look are the same."""
    for hypothesis in HYPOTHESES.values():
        cells = {cell.name: cell for cell in list_cells(load_preset(hypothesis.preset), "small", "DATA", "MODEL")}
        methods = load_preset(hypothesis.preset).methods
        configs = [
            parse_config(
                override(
                    dict(cells[hypothesis.cell].configs[row.label]),
                    (*row.list_changes("DATA"), f"method.name={row.key or methods[row.label].key}"),
                )
            )
            for row in hypothesis.rows
        ]
        assert len({config.model_dump_json() for config in configs}) == len({row.name for row in hypothesis.rows}) > 1
        assert all(config.seed == configs[0].seed for config in configs)


def test_the_headlines_count_comparisons_of_the_paper_s_system(tmp_path: Path) -> None:
    """By hand: three statements about FFA-LoRA, one of them not runnable; LoRA has one, and an outdated page none."""
    verdicts = ("holds", "holds", "contradicted", "not runnable here")
    findings = [
        {"statement": f"It is ahead ({at}): RoLoRA against FFA-LoRA", "measured": "", "verdict": verdict}
        for at, verdict in enumerate(verdicts)
    ]
    findings.append({"statement": "It lags: FFA-LoRA against RoLoRA", "measured": "", "verdict": "holds"})
    findings.append({"statement": "Once: RoLoRA against LoRA", "measured": "", "verdict": "holds"})
    setting = "| cell | clients | model | rounds |\n|---|---|---|---|\n"
    setting += "| a | 20, 10 a round | builtin:resnet-8 | 20 |\n| b | 5 | builtin:resnet-8 | 10 (LoRA); 40 (RoLoRA) |\n"
    save_page(tmp_path, "rolora-table1", "RoLoRA, Table 1: Accuracy", findings, setting)
    save_page(tmp_path, "rolora-table2", "RoLoRA, Table 2: Loss", findings, outdated=["another rate"])
    written = indexing.index(tmp_path)
    assert written["index.md"].count("- **Against ") == 1
    assert "- **Against FFA-LoRA:** 3 statements in favor of RoLoRA: 2 hold, 1 contradicted." in written["index.md"]
    assert "- **All 12 statements:** 4 hold, 1 contradicted, 1 not runnable, 6 outdated." in written["index.md"]
    assert "Experiments: [Table 1](rolora-table1.md), [Table 2](rolora-table2.md)." in written["index.md"]
    page = written["experiments.md"]
    fared, scale = "4 hold, 1 contradicted, 1 not runnable", "resnet-8; 5 to 20 clients; 10 to 40 rounds"
    assert f"| [Table 1: Accuracy](rolora-table1.md) | It is ahead (0) | {fared} | {scale} |" in page
    assert f"| [Table 2: Loss](rolora-table2.md) | It is ahead (0) | {fared} (outdated) |  |" in page


def test_an_outdated_page_names_every_change_once_and_is_counted_apart(tmp_path: Path) -> None:
    """A new run of the page, which rewrites both of its files, removes the mark."""
    reproduced.page(reproduce_preset("fedloru-table1", tmp_path), load_preset("fedloru-table1"), tmp_path)
    page, facts = tmp_path / "fedloru-table1.md", tmp_path / "fedloru-table1.json"
    before, count = page.read_text(), len(json.loads(facts.read_text())["findings"])
    for change in ("alpha is 64", "alpha is 64", "norms train"):
        pages.mark(tmp_path, "fedloru-table1", change)
    pages.mark(tmp_path, "fedloru-table1", "It was on another machine.", "noted")
    note = (
        "\n\n**Outdated, not run with today's settings:** since this run, alpha is 64; norms train. The command above "
    )
    note += "runs it.\n\n**Note:** It was on another machine."
    assert page.read_text().replace(note, "") == before
    assert page.read_text().count(note) == 1
    written = indexing.index(tmp_path)
    assert f"| all | {count} | 0 | 0 | 0 | 0 | 0 | {count} | 0 |" in written["experiments.md"]
    assert written["statements.md"].count("**, outdated |") == count
    reproduced.page(reproduce_preset("fedloru-table1", tmp_path), load_preset("fedloru-table1"), tmp_path)
    assert page.read_text() == before
    assert "outdated" not in json.loads(facts.read_text())


def test_rows_that_learned_nothing_have_no_verdict(tmp_path: Path) -> None:
    """FedIT and FLoRA predict one class everywhere, FFA-LoRA learns with IID and loses it all, FedGaLore loses half."""
    preset = load_preset("fedgalore-figure1")
    by_label = {"FedGaLore": ((0.8, 0.81, 0.82), (0.66, 0.66, 0.67)), "FFA-LoRA": ((0.8, 0.8, 0.81), (0.5, 0.5, 0.5))}
    cells = list_cells(preset, "small", str(tmp_path), None)
    scores = tuple(
        CellScore(cell.name, label, {}, "accuracy", True, values, sum(values) / 3, stdev(values), 2e6, 1e6, 3.0)
        for at, cell in enumerate(cells)
        for label in cell.configs
        for values in (by_label.get(label, ((0.5, 0.5, 0.5),) * 2)[at],)
    )
    verdicts = judge(preset.claims, cells, scores)
    assert [one.verdict for one in verdicts] == ["contradicted", "holds", "contradicted", "contradicted"]
    found = Reproduction(preset.id, "small", (0, 1, 2), scores, verdicts, str(tmp_path), tabulate_settings(cells))
    for _ in range(2):  # a page that is completed again stays as it is
        reproduced.page(found, preset, tmp_path)
        pages.complete(tmp_path, preset)
        text = (tmp_path / "fedgalore-figure1.md").read_text()
        findings = json.loads((tmp_path / "fedgalore-figure1.json").read_text())["findings"]
        assert [one["verdict"] for one in findings] == ["inconclusive", "holds", "inconclusive", "contradicted"]
        assert findings[0]["measured"] == "by -14.7 ± 0.3 points of accuracy; FedIT learned nothing in iid"
        for one in findings:
            assert f"| {one['statement']} | {one['measured']} | **{one['verdict']}** |" in text


def test_statements_on_the_same_runs_are_counted_once(tmp_path: Path) -> None:
    """Table 2 has table 1's runs of A and B, and another run of C with the same difference, which is no repetition."""
    header = "| cell | method | held-out | seconds |\n|---|---|---|---|\n"
    rows = {"1": {"A": "1.1", "B": "2.2", "C": "3.3"}, "2": {"A": "1.1", "B": "2.2", "C": "4.4"}}
    for number, seconds in rows.items():
        findings = [
            {"statement": f"Statement {number}: A against {other}", "measured": "by +1.0 ± 0.1", "verdict": "holds"}
            for other in ("B", "C")
        ]
        name = f"florg-table{number}"
        save_page(tmp_path, name, f"FLoRG, Table {number}: Title", findings)
        table = "".join(f"| cell {number} | {method} | 0.5 | {value} |\n" for method, value in seconds.items())
        (tmp_path / f"{name}.md").write_text(f"{header}{table}\n## Setting\n", encoding="utf-8")
    written = indexing.index(tmp_path)
    assert "| all | 4 | 3 | 0 | 0 | 0 | 0 | 0 | 1 |" in written["experiments.md"]
    assert "| Statement 2: A against B | by +1.0 ± 0.1 | **holds**, repeated |" in written["statements.md"]


def test_the_readme_has_the_index_s_counts() -> None:
    parts, _ = indexing.read_pages(CLAIMS.parent / "docs" / "claims")
    count = Counter(
        indexing.classify(page, finding) for pages in parts.values() for page in pages for finding in page["findings"]
    )
    counts = [count[name] for name in ("holds", "contradicted", "inconclusive", "not runnable here", "outdated")]
    text = " ".join((CLAIMS.parent / "README.md").read_text(encoding="utf-8").split())
    sentence = re.search(r"Of (\d+ statements, .*?) \(\[claims\]", text)
    numbers = [int(number) for number in re.findall(r"\d+", sentence[1])]
    assert numbers == [count.total(), *counts, count["repeated"] + count["not run"]]


@pytest.mark.parametrize(("name", "folders"), [("fedloru-pacs", ["seed-3", "seed-5"]), ("fedloru-steps", [""])])
def test_a_hypothesis_with_partitions_draws_one_for_each_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, folders: list[str]
) -> None:
    """A comparison has one partition for all of its seeds, so that each seed takes a comparison of its own."""
    calls: list[tuple[Path, tuple[int, ...], list[str]]] = []

    def compare(_: object, folder: Path, keys: list[str], seeds: list[int], *, overrides: list[str]) -> SimpleNamespace:
        calls.append((folder, tuple(seeds), overrides))
        row = SimpleNamespace(scores=tuple(seed / 10 for seed in seeds), bytes_down=1.0, bytes_up=2.0, seconds=3.0)
        return SimpleNamespace(metric="accuracy", higher=True, rows=[row])

    monkeypatch.setattr(reasons, "compare", compare)
    args = SimpleNamespace(data=Path("sets"), model=None, seeds=[3, 5], overrides=[])
    scores = reasons.run_rows(HYPOTHESES[name], args, tmp_path)
    assert [folder for folder, _, _ in calls] == [
        tmp_path / f"row-{row}" / folder for row in (0, 1) for folder in folders
    ]
    assert {seeds for _, seeds, _ in calls} == ({(3,), (5,)} if len(folders) > 1 else {(3, 5)})
    assert [("data.train=sets/pacs/{domain}.tar" in overrides) for _, _, overrides in calls] == [
        name == "fedloru-pacs"
    ] * len(calls)
    assert [score.scores for score in scores] == [(0.3, 0.5)] * 2
    assert scores[0].mean == pytest.approx(0.4)
    assert scores[0].deviation == pytest.approx(0.02**0.5)


def test_contradicted_headlines_have_a_cause_with_a_page() -> None:
    folder = CLAIMS.parent / "docs" / "claims"
    contradicted = set[str]()
    for name, statement in indexing.HEADLINES:
        findings = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["findings"]
        verdicts = {one["verdict"] for one in findings if one["statement"].startswith(f"{statement}: ")}
        contradicted |= {statement} if "contradicted" in verdicts else set()
    assert set(indexing.CAUSES) == contradicted
    for cause in indexing.CAUSES.values():
        pages = re.findall(r"\]\((\S+\.md)\)", cause)
        assert pages
        assert all((folder / page).is_file() for page in pages)


def test_results_in_bfloat16_are_outdated() -> None:
    """The index says that no verdict on them counts."""
    for path in (CLAIMS.parent / "docs" / "claims").glob("*.json"):
        saved = json.loads(path.read_text(encoding="utf-8"))
        assert "outdated" in saved or "bfloat16" not in " ".join(saved.get("noted", ())), path.name


def test_every_script_and_preset_has_its_place() -> None:
    pages = [job.page for job in every.JOBS]
    assert len(set(pages)) == len(pages)
    libraries = {"curvature", "linear_model", "planted_views"}
    helpers = {"all", "index", "hypotheses", "pages", "report", "reproduced"} | libraries
    scripts = {path.stem for path in CLAIMS.glob("*.py")} - helpers
    presets = {preset.id for preset in list_presets()}
    presets |= {f"{preset.id}-matched" for preset in list_presets() if preset.small.matched}
    assert scripts <= set(pages) <= scripts | presets
    for job in every.JOBS:
        assert (CLAIMS / job.words[0]).is_file()
    made = {job.page: job for job in every.JOBS}
    assert {page.partition("-")[0] for page in every.QUICK} == {"rolora", "fedloru", "fedgalore", "florg"}
    assert set(every.QUICK) <= {page for page, _ in indexing.HEADLINES}
    for page in every.QUICK:
        assert made[page].quick == ("--seeds", "0", "--set", *every.SHORT)
        for cell in list_cells(load_preset(page), "small", "DATA", "MODEL", every.SHORT):
            assert {parse_config(config).training.lr for config in cell.configs.values()} == {0.01}
