"""Pages about runs: sections, figures, tables, the verdict in words, and what cannot be rendered."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedspan
from fedspan.data.partition import ClientRow
from fedspan.diagnostics import measures
from helpers import tiny

pytest.importorskip("plotly", reason="the extra fedspan[report] is not installed")

from fedspan.experiments.tables import compute_majority
from fedspan.reports import charts, matrices
from fedspan.reports.groups import RunGroup, group_runs, list_distinguishing_settings, summarize_curve
from fedspan.reports.page import PageContent, render_page
from fedspan.reports.run_data import RunData, read_runs
from fedspan.reports.summary import format_score_with_unit, write_notes, write_sentences
from helpers import refusals

PAGE_BYTES = 7_000_000
"""Bytes that a page takes at most: most of them are the library that draws its figures."""


@pytest.fixture(scope="module")
def series(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods under two seeds, three rounds each."""
    folder = tmp_path_factory.mktemp("pages") / "series"
    values = tiny.settings(tiny_folder, federation={"rounds": 3})
    fedspan.compare(values, folder, ["fedit", "ffa-lora"], [0, 1])
    return folder


@pytest.fixture(scope="module")
def text(series: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of these runs."""
    out = fedspan.report(series, tmp_path_factory.mktemp("pages") / "report.html", diagnostics=True)
    assert out.stat().st_size < PAGE_BYTES
    return out.read_text(encoding="utf-8")


def figures(text: str) -> list[dict[str, Any]]:
    """The figures of a page, as their JSON in it."""
    found = re.search(r"const figures = (\[.*?\]);\n\n", text, re.DOTALL)
    return json.loads(found[1])


def compare_run(run: RunData, test: float, *, start: float, local: float, centralized: float) -> RunData:
    """A run with these scores on held-out examples, whose best round was the last of three."""
    scores = {
        name: {"test": {"accuracy": value}} for name, value in (("local-only", local), ("centralized", centralized))
    }
    baselines = {name: {"scores": score, "by_client": {"north": score["test"]}} for name, score in scores.items()}
    final = {"test": {"accuracy": test}}
    report = replace(run.report, scores=final, best_round=3, baselines=baselines, selected=True)
    rows = ({"round": 0, "test": {"accuracy": start}}, *run.rows)
    # Without recorded predictions, which would be those of other scores.
    return replace(run, report=report, rows=rows, folder=run.folder / "elsewhere")


def body(text: str) -> str:
    """Without plotly's own script."""
    return re.sub(r"<script>(?!\nconst figures).*?</script>", "", text, flags=re.DOTALL)


def test_every_section_is_there_and_every_figure_has_a_place(text: str) -> None:
    own = body(text)
    for title in ("Runs", "Score", "Validation", "Training loss", "Clients", "Classes", "Labels by client", "Traffic"):
        assert f"<h2>{title}</h2>" in own
    for title in ("Participation", "Diagnostics", "Singular values of the update", "Configuration"):
        assert f"<h2>{title}</h2>" in own
    made = figures(text)
    assert len(made) == own.count('class="figure"') == 10
    assert all(figure["data"] for figure in made)


def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)", body(text))
    assert text.count("plotly.js v") == 1


def test_mistakes(series: Path, tiny_folder: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "the folder of a run, or a folder with runs in it" in refused("report", tmp_path)
    other = tmp_path / "other"
    fedspan.run(tiny.config(tiny_folder, evaluation={"metric": "macro_f1"}, federation={"rounds": 1}), other)
    with refusals.refused(
        "run folder", r"is judged by accuracy, and other by macro_f1\. Expected runs that are judged by one metric"
    ):
        fedspan.report([series, other], tmp_path / "page.html")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with refusals.refused("out", r"`out`: '.*file' cannot be used: File exists\. Choose another file\."):
        fedspan.report(series, blocked / "page.html", data=False)


def test_a_run_at_work_and_data_that_are_gone(series: Path, tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    run.mkdir()
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "ledger.jsonl", "partition.json"):
        (run / name).write_bytes((series / "fedit-seed0" / name).read_bytes())
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("corpus.csv", "gone.csv"))
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 3" in text
    assert "Labels by client" not in text
    assert "Singular values" not in text
    assert "<b>run" not in body(text)
    (run / "metrics.jsonl").write_text("")
    text = fedspan.report(run, tmp_path / "page.html").read_text()
    assert "after round 0" in text
    assert "nan" not in re.findall(r"\w+", body(text))


def test_baselines_are_level_lines_rows_and_marks_of_every_client(series: Path) -> None:
    first, _, other, _ = read_runs([series])
    compared = compare_run(first, 0.975, start=0.971, local=0.606, centralized=0.972)
    groups = group_runs([compared, other])
    figure = charts.draw_course(groups, {run.name: {1: 0.5, 2: 0.6} for run in (compared, other)}, "", True, True)
    lines = {line.get("name"): line["y"] for line in json.loads(figure.to_json() or "")["data"]}
    assert lines["fedit: local-only"] == [0.606, 0.606]
    assert lines["fedit: centralized"] == [0.972, 0.972]
    assert not any(name.startswith("ffa-lora:") for name in lines)
    text = render_page(groups[:1], PageContent(), "title", "version")
    for name, score in (("start", "97.1 %"), ("local-only", "60.6 %"), ("centralized", "97.2 %")):
        assert f"<tr><td>fedit: {name}</td><td>0</td><td>{score}</td>" in text
    (clients,) = [figure for figure in figures(text) if figure["data"][0].get("mode") == "markers"]
    assert [marks["name"] for marks in clients["data"]] == ["fedit", "local-only", "centralized"]


def test_lines_are_told_apart_without_color(text: str) -> None:
    lines = [trace for trace in figures(text)[0]["data"] if "name" in trace]
    assert len({(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in lines}) == len(lines) == 2
    bars = next(figure["data"] for figure in figures(text) if figure["data"][0].get("type") == "bar")
    assert len({bar["marker"]["pattern"]["shape"] for bar in bars}) == len(bars)


def test_numbers_are_those_of_the_runs(series: Path, text: str) -> None:
    runs = read_runs([series])
    assert [run.name for run in runs] == sorted(one.parent.name for one in series.glob("*/report.json"))
    groups = group_runs(runs)
    assert [[run.config.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    assert {group.label for group in groups} == {"fedit", "ffa-lora"}
    assert set(list_distinguishing_settings([group.runs[0] for group in groups])) == {"method.name"}
    for group in groups:
        made = summarize_curve(group, {run.name: charts.get_scores(run) for run in group.runs})
        assert made.rounds == (1, 2, 3)
        for run in group.runs:
            assert run.bytes == sum(run.report.bytes.values())
            assert run.final == run.report.scores["test"]["accuracy"]
        assert made.bytes[-1] == sum(run.bytes for run in group.runs) / 2
        assert made.seconds[0] < made.seconds[-1]
        assert all(low <= mean <= high for low, mean, high in zip(made.low, made.mean, made.high, strict=True))
        assert format_score_with_unit("accuracy", group.runs[0].final) in text
    buttons = figures(text)[0]["layout"]["updatemenus"][0]["buttons"]
    assert [button["label"] for button in buttons] == ["by rounds", "by bytes", "by time"]
    assert all(len(button["args"][0]["x"]) == len(figures(text)[0]["data"]) for button in buttons)


def run(*rows: dict[str, Any]) -> Any:
    return SimpleNamespace(name="first", folder=Path("first"), rows=rows)


def test_labels_are_drawn_as_shares_and_many_without_numbers() -> None:
    rows = [ClientRow("east", (3, 1), 3, 1, 0), ClientRow("west", (0, 0), 0, 0, 0)]
    (heatmap,) = matrices.partition(rows, ["a", "b"]).data
    assert [list(line) for line in heatmap.z] == [[0.75, 0.25], [0.0, 0.0]]
    assert (list(heatmap.x), list(heatmap.y)) == (["a", "b"], ["east", "west"])
    assert [list(line) for line in heatmap.text] == [["3", "1"], ["0", "0"]]
    rows = [ClientRow("east", (1,) * 13, 13, 0, 0)]
    (heatmap,) = matrices.partition(rows, [f"label {number}" for number in range(13)]).data
    assert set(heatmap.text[0]) == {""}


def test_who_took_part_and_who_failed_is_drawn_by_round() -> None:
    """The measured start is no round; a failure is drawn over the participation."""
    found = run(
        {"round": 0, "cohort": []},
        {"round": 1, "cohort": ["west", "east"], "failures": [{"client": "west", "reason": "late"}]},
        {"round": 2, "cohort": ["west"], "failures": [{"client": "north"}, "damaged", {}]},
    )
    (heatmap,) = matrices.draw_participation(found).data
    assert (list(heatmap.x), list(heatmap.y)) == ([1, 2], ["east", "north", "west"])
    assert [list(line) for line in heatmap.z] == [[1.0, 0.0], [0.0, 0.5], [0.5, 1.0]]
    assert [list(line) for line in heatmap.text] == [["", ""], ["", "x"], ["x", ""]]


def test_diagnostics_are_drawn_by_layer_with_a_menu_of_those_that_have_values() -> None:
    first, second, *_ = measures.MEASURES
    layers = [{"m.h.0.a": {first.key: 0.5}}, {"m.h.0.a": {first.key: 0.25}, "m.out": {second.key: 2.0}}]
    rows = [{"round": 2 * number, "diagnostics": {"layers": one}} for number, one in enumerate(layers, start=1)]
    figure = matrices.draw_rounds(run({"round": 1}, *rows))
    assert [[list(line) for line in heatmap.z] for heatmap in figure.data] == [
        [[0.5, 0.25], [None, None]],
        [[None, None], [None, 2.0]],
    ]
    assert [(map.visible, *map.y) for map in figure.data] == [(True, "0.a", "m.out"), (False, "0.a", "m.out")]
    assert [names[0] for names in figure.data[0].hovertext] == ["m.h.0.a", "m.out"]
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == [first.title, second.title]
    assert [list(button.args[0]["visible"]) for button in menu.buttons] == [[True, False], [False, True]]
    assert matrices.draw_rounds(run({"round": 1})) is None


def test_the_table_tells_held_out_scores_from_those_of_the_clients_own_tests(series: Path) -> None:
    (run,) = read_runs([series / "fedit-seed0"])
    worst = {"client": "north", "accuracy": 0.5}
    both = {"test": {"accuracy": 0.6}, "clients": {"accuracy": 0.8, "worst": worst}}
    for parts, heads, cells in (
        (
            ("test", "clients"),
            ("held-out accuracy", "accuracy on the clients&#x27; own tests", "worst client there"),
            ("60.0 %", "80.0 %", "50.0 % (north)"),
        ),
        (("clients",), ("accuracy on the clients&#x27; own tests", "worst client there"), ("80.0 %", "50.0 % (north)")),
        (("test",), ("held-out accuracy",), ("60.0 %",)),
    ):
        changed = replace(
            run, report=replace(run.report, scores={part: both[part] for part in parts}, start={}), rows=()
        )
        text = render_page(group_runs([changed]), PageContent(), "title", "version")
        head = "".join(f"<th>{name}</th>" for name in ("run", "seed", *heads, "best round"))
        assert head in text
        assert f"<td>0</td>{''.join(f'<td>{cell}</td>' for cell in cells)}" in text


def with_scores(runs: tuple[RunData, ...], scores: dict[str, list[float]]) -> tuple[RunData, ...]:
    made: list[RunData] = []
    for run in runs:
        value = scores[run.config.method.name][run.config.seed]
        report = replace(run.report, scores={"test": {"accuracy": value}}, best_round=2)
        made.append(replace(run, report=report))
    return tuple(made)


def test_the_verdict_is_computed(series: Path) -> None:
    runs = read_runs([series])
    scores = {"fedit": [0.80, 0.82], "ffa-lora": [0.701, 0.719]}
    sure = " ".join(write_sentences(group_runs(with_scores(runs, scores))))
    assert "fedit has the best accuracy, 81.0 ± 1.4 % (mean of 2 seeds), at the best of 3 rounds by validation." in sure
    assert re.search(r"It is 10\.0 points \([\d.]+ to [\d.]+\) above ffa-lora\.", sure)
    assert "ffa-lora sends the least" in sure
    close = " ".join(write_sentences(group_runs(with_scores(runs, {"fedit": [0.80, 0.70], "ffa-lora": [0.70, 0.79]}))))
    assert "It is not measurably different from ffa-lora (+0.5, " in close
    alone = " ".join(write_sentences(group_runs(with_scores(runs[:1], {"fedit": [0.8], "ffa-lora": [0.7]}))))
    assert "The accuracy of fedit is 80.0 % (one seed), at the best of 3 rounds by validation." in alone
    assert "Before the first round it was" in alone  # its head is random
    (last,) = with_scores(runs[:1], {"fedit": [0.8]})
    last = replace(last, report=replace(last.report, selected=False))
    assert "The accuracy of fedit is 80.0 % (one seed), after 3 rounds." in " ".join(
        write_sentences(group_runs([last]))
    )
    majority = compute_majority("accuracy", runs[0].read_items())
    low = write_sentences(group_runs(with_scores(runs[:1], {"fedit": [majority - 0.01]})))[0]
    assert f"{100 * majority - 1:.1f} %, below the majority class ({100 * majority:.1f} %) (one seed)" in low
    failing = with_scores(runs[:1], {"fedit": [0.8]})
    failures = {"north": {"count": 3}, "west": {"count": 1}}
    failing = (replace(failing[0], report=replace(failing[0].report, failures=failures)),)
    assert "4 replies did not count, 3 of them north's." in " ".join(write_sentences(group_runs(failing)))


def test_the_verdict_names_the_start_and_the_baselines(series: Path) -> None:
    first, second, other, _ = read_runs([series])
    above = compare_run(first, 0.975, start=0.971, local=0.606, centralized=0.972)
    (group,) = group_runs([above])
    assert group.references == {"start": 0.971, "local-only": 0.606, "centralized": 0.972}
    assert write_sentences([group])[:3] == (
        "The accuracy of fedit is 97.5 % (one seed), at the best of 3 rounds by validation.",
        "Before the first round it was 97.1 %; the result is 0.4 points above the start (one seed: no interval).",
        "Local-only training (mean client) reached 60.6 %; the result is 36.9 points above it (one seed: no interval). "
        "Centralized training reached 97.2 %; the result is 0.3 points above it (one seed: no interval).",
    )
    extension = f"extend with fedspan run --resume {above.folder} --set federation.rounds=4"
    assert f"Validation still improves: {extension}" in write_notes([group])
    earlier = replace(above, report=replace(above.report, best_round=2))
    assert not any("extend" in note for note in write_notes(group_runs([earlier])))
    below = compare_run(second, 0.955, start=0.971, local=0.606, centralized=0.992)
    groups = group_runs([above, below, other])
    means = " ".join(write_sentences(groups[:1]))
    assert "Before the first round it was 97.1 %; the result is not measurably different from the start" in means
    assert "Centralized training reached 98.2 %; the result is not measurably different from it (-1.7, " in means


def test_the_verdict_names_the_clients_own_tests_beside_held_out_examples(series: Path) -> None:
    compared = compare_run(read_runs([series])[0], 0.975, start=0.971, local=0.606, centralized=0.972)
    assert not any("own tests" in sentence for sentence in write_sentences([RunGroup("fedit", (compared,))]))
    scores = {
        name: {**compared.references[name], "clients": {"accuracy": 0.911}} for name in ("local-only", "centralized")
    }
    report = replace(
        compared.report,
        scores={**compared.report.scores, "clients": {"accuracy": 0.971}},
        baselines={name: {"scores": score, "by_client": {}} for name, score in scores.items()},
    )
    start = {**compared.rows[0], "clients": {"accuracy": 0.979}}
    group = RunGroup("fedit", (replace(compared, report=report, rows=(start, *compared.rows[1:])),))
    assert group.client_means == {"result": 0.971, "start": 0.979, "local-only": 0.911, "centralized": 0.911}
    assert (
        "On their own tests, the clients' mean is 97.1 % (97.9 % before the first round, "
        "91.1 % with local-only training, 91.1 % with centralized training)."
    ) in write_sentences([group])


def test_the_worst_client_is_that_of_the_metric(series: Path) -> None:
    (run,) = read_runs([series / "fedit-seed0"])

    def said(metric: str, values: list[float]) -> str:
        own = {f"c{number}": {metric: value} for number, value in enumerate(values)}
        config = run.config.model_copy(
            update={"evaluation": run.config.evaluation.model_copy(update={"metric": metric})}
        )
        report = replace(run.report, scores={"test": {metric: 0.5}}, by_client=own)
        return " ".join(write_sentences(group_runs([replace(run, config=config, report=report)])))

    assert "The worst client, c1, is 5.0 points below the clients' mean." in said("accuracy", [0.9, 0.8])
    assert "The worst client, c1, is 0.0100 above the clients' mean." in said("loss", [0.50, 0.52])


def test_scores() -> None:
    assert format_score_with_unit("loss", 0.5, 0.01) == "0.5000 ± 0.0100"
    assert format_score_with_unit("accuracy", None) == "-"


LINK = '<a href="https://example.org/">look</a>'


def test_no_text_of_others_is_a_link(series: Path) -> None:
    run = read_runs([series])[0]
    assert run.report is not None
    report = replace(run.report, by_client={LINK: {"accuracy": 0.5}, "b": {"accuracy": 0.25}})
    rows = tuple({**row, "cohort": [LINK], "failures": [{"client": LINK, "reason": LINK}]} for row in run.rows)
    group = RunGroup(LINK, (replace(run, name=LINK, report=report, rows=rows),))
    content = PageContent((LINK, [ClientRow(LINK, (1, 0), 1, 0, 0)], (LINK, "b")), (LINK, {LINK: [2.0, 1.0]}))
    page = render_page([group], content, LINK, LINK)
    before, _, after = page.partition("<script>")
    assert "<a href" not in before
    assert "<a href" not in after.rpartition("</script>")[2]
    drawn = json.dumps(figures(page))
    assert set(re.findall(r"<[^>]*>", drawn)) == {"<extra>", "</extra>"}
    assert drawn.count("&lt;a href") >= 6  # clients, participants, labels, layers, legends
