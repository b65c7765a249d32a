"""The HTML page: one self-contained file with one copy of Plotly's script."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import plotly.io
import plotly.utils
from plotly.offline import get_plotlyjs

from fedspan.data.partition import ClientRow
from fedspan.diagnostics.measures import MEASURES
from fedspan.diagnostics.round_diagnosis import Diagnosis
from fedspan.progress.formatting import format_size
from fedspan.reports import charts, matrices
from fedspan.reports.charts import Figure
from fedspan.reports.groups import RunGroup, list_distinguishing_settings
from fedspan.reports.run_data import Row, RunData
from fedspan.reports.summary import format_score_with_unit, write_notes, write_sentences
from fedspan.runs.report import SELECTION_NOTE
from fedspan.tasks.label_scores import compute_f1, count_labels
from fedspan.tasks.metrics import METRICS


@dataclass(frozen=True)
class PageContent:
    """Content of the page beyond the groups' run data.

    Args:
        partition: Name of a run, label counts of its clients, and names of the labels; None if the data are not
            available.
        spectra: Name of a run, and the singular values of its adapter's layers, by layer.
    """

    partition: tuple[str, Sequence[ClientRow], Sequence[str]] | None = None
    spectra: tuple[str, Mapping[str, Sequence[float]]] | None = None
    diagnoses: Mapping[str, Diagnosis] | None = None


class _Page:
    """Sections of the page, and the figures for their placeholders."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.figures: list[str] = []

    def add_section(self, title: str, *content: str) -> None:
        self.parts.append(f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>")

    def add_figure(self, figure: Figure, description: str) -> str:
        """Return the placeholder of a figure; ``description`` is its description for screen readers."""
        number = len(self.figures)
        self.figures.append(_escape_script(_escape_markup(figure.to_json())))
        return f'<div class="figure" id="figure-{number}" role="img" aria-label="{html.escape(description)}"></div>'


def render_page(groups: Sequence[RunGroup], content: PageContent, title: str, version: str) -> str:
    """Render the whole page as HTML."""
    sections, runs = _Page(), [run for group in groups for run in group.runs]
    metric = runs[0].metric
    percent = METRICS[metric].is_percentage
    sections.parts.append(f'<p class="verdict">{html.escape(" ".join(write_sentences(groups)))}</p>')
    sections.parts += [f'<p class="note">{html.escape(note)}</p>' for note in write_notes(groups)]
    sections.add_section("Runs", _render_summary(groups))
    scores = {run.name: charts.get_scores(run) for run in runs}
    losses = {run.name: charts.get_losses(run) for run in runs}
    if any(scores.values()):
        figure = charts.draw_course(groups, scores, METRICS[metric].title, percent, with_baselines=True)
        bands = "<p>Lines are means over the seeds, bands reach from the least to the most.</p>"
        note = bands if any(len(group.runs) > 1 for group in groups) else ""
        sections.add_section("Score", sections.add_figure(figure, f"{metric} by round"), note)
    validation = {run.name: charts.get_validation(run) for run in runs}
    if any(validation.values()):
        selecting = runs[0].config.evaluation.get_selection_metric(metric)
        title_of_metric, is_share = METRICS[selecting].title, METRICS[selecting].is_percentage
        figure = charts.draw_course(groups, validation, title_of_metric, is_share)
        is_selected = any(run.report is not None and run.report.selected for run in runs)
        note = f"<p>On the clients' validation parts.{' ' + SELECTION_NOTE if is_selected else ''}</p>"
        sections.add_section("Validation", sections.add_figure(figure, f"validation {selecting} by round"), note)
    if any(losses.values()):
        sections.add_section(
            "Training loss", sections.add_figure(charts.draw_course(groups, losses, "loss", False), "loss by round")
        )
    if (figure := charts.draw_clients(groups, metric)) is not None:
        note = "<p>Of the best round's models, on each client's own test part; the worst is at the bottom.</p>"
        sections.add_section("Clients", sections.add_figure(figure, f"{metric} of every client"), note)
    _add_classes(sections, runs)
    if content.partition is not None:
        name, rows, labels = content.partition
        figure = sections.add_figure(matrices.partition(rows, labels), "examples of each label by client")
        sections.add_section("Labels by client", f"<p>{html.escape(name)}</p>", figure)
    sections.add_section(
        "Traffic", sections.add_figure(charts.draw_traffic(groups), "bytes down and up"), _render_ledger(groups)
    )
    participated = [group.runs[0] for group in groups if any("cohort" in row for row in group.runs[0].rows)]
    if participated:
        figure = matrices.draw_participation(participated[0])
        note = f"<p>{html.escape(participated[0].name)}; blue: participated, x: its reply did not count.</p>"
        sections.add_section("Participation", note, sections.add_figure(figure, "participation of clients by round"))
    _add_diagnostics(sections, groups, content.diagnoses)
    if content.spectra is not None and (figure := charts.draw_spectra(content.spectra[1])) is not None:
        note = f"<p>{html.escape(content.spectra[0])}: the adapter's update by layer.</p>"
        sections.add_section("Singular values of the update", note, sections.add_figure(figure, "singular values"))
    if (figure := charts.draw_privacy(runs)) is not None:
        sections.add_section("Privacy", sections.add_figure(figure, "epsilon by round"))
    sections.add_section("Configuration", _render_configuration(groups))
    return _render_html(sections, title, version)


def _add_classes(sections: _Page, runs: Sequence[RunData]) -> None:
    """Add the scores by class, and the confusion matrix, of the first run with recorded predictions."""
    run, items = next(((run, items) for run in runs if (items := run.read_items()) is not None), (None, None))
    if run is None or items is None:
        return
    figure = sections.add_figure(matrices.draw_confusion(items), "true and predicted classes")
    models = len(items.predicted)
    true_K, predicted_K, correct_K = count_labels(
        np.tile(items.targets, models), items.predicted.reshape(-1), len(items.labels)
    )
    precision_K, recall_K = correct_K / np.maximum(predicted_K, 1), correct_K / np.maximum(true_K, 1)
    shares_K = zip(precision_K, recall_K, compute_f1(true_K, predicted_K, correct_K), strict=True)
    rows = [
        (label, f"{count / models:.0f}", *(f"{100 * share:.1f} %" for share in shares))
        for label, count, shares in zip(items.labels, true_K, shares_K, strict=True)
    ]
    head = ("class", "examples", "precision", "recall", "F1")
    note = f"<p>{html.escape(run.name)}, on the held-out examples; a row is a true class.</p>"
    sections.add_section("Classes", note, figure, _render_details("Scores by class", _render_table(head, rows)))


def _add_diagnostics(sections: _Page, groups: Sequence[RunGroup], diagnoses: Mapping[str, Diagnosis] | None) -> None:
    """Add the diagnostics recorded during one run of each group, and those of one additional round."""
    parts: list[str] = []
    for run in (group.runs[0] for group in groups):
        if (figure := matrices.draw_rounds(run)) is not None:
            parts += [
                f"<p>{html.escape(run.name)}, by round.</p>",
                sections.add_figure(figure, f"diagnostics of {run.name}"),
            ]
    if diagnoses:
        figure = sections.add_figure(charts.draw_layers(diagnoses), "diagnostics by layer")
        parts += ["<p>Of one more round after the last.</p>", figure]
    if parts:
        table = _render_table(("measure", "how to read it", "source"), [(m.title, m.reads, m.source) for m in MEASURES])
        sections.add_section("Diagnostics", *parts, _render_details("How to read", table))


def _render_summary(groups: Sequence[RunGroup]) -> str:
    metric = groups[0].runs[0].metric
    runs = [run for group in groups for run in group.runs]
    scored = [scores for run in runs for scores in (run.result, *run.references.values())]
    has_clients = any(scores.get("clients") for scores in scored)
    has_heldout = any(scores.get("test") for scores in scored) or not has_clients

    def format_scores(scores: Row) -> tuple[str, ...]:
        heldout, clients = (scores.get(part) or {} for part in ("test", "clients"))
        worst = clients.get("worst")
        worst_text = f"{format_score_with_unit(metric, worst.get(metric))} ({worst['client']})" if worst else "-"
        cells = (format_score_with_unit(metric, heldout.get(metric)),) if has_heldout else ()
        return (*cells, *((format_score_with_unit(metric, clients.get(metric)), worst_text) if has_clients else ()))

    rows: list[tuple[str, ...]] = []
    for group in groups:
        for run in group.runs:
            state = "finished" if run.report is not None else f"after round {run.rounds}"
            best = "-" if run.report is None else str(run.report.best_round)
            seconds = "-" if math.isnan(run.seconds) else f"{run.seconds:.0f} s"
            cells = (*format_scores(run.result), best, format_size(run.bytes), seconds, _format_epsilon(run), state)
            rows.append((group.label, str(run.config.seed), *cells))
            for name, scores in run.references.items():
                cells = (*format_scores(scores), *["-"] * 4, "")
                rows.append((f"{group.label}: {name}", str(run.config.seed), *cells))
    title = METRICS[metric].title
    heads = (f"held-out {title}",) if has_heldout else ()
    heads += (f"{title} on the clients' own tests", "worst client there") if has_clients else ()
    return _render_table(("run", "seed", *heads, "best round", "bytes", "rounds' time", "epsilon", "state"), rows)


def _format_epsilon(run: RunData) -> str:
    epsilon = None if run.report is None else run.report.privacy.get("epsilon")
    return "-" if not isinstance(epsilon, int | float) else f"{epsilon:.3g}"


def _render_ledger(groups: Sequence[RunGroup]) -> str:
    rows: list[tuple[str, ...]] = []
    for group in groups:
        for run in group.runs:
            for direction in ("down", "up"):
                tally = run.totals.run(direction)
                mean = tally.bytes / tally.messages if tally.messages else 0.0
                sizes = (format_size(tally.bytes), format_size(tally.payload), format_size(mean))
                rows.append((f"{group.label}, seed {run.config.seed}", direction, str(tally.messages), *sizes))
            for purpose, count in run.totals.out_of_round.items():
                rows.append(
                    (f"{group.label}, seed {run.config.seed}", purpose, "-", format_size(sum(count.values())), "-", "-")
                )
    head = ("run", "what", "messages", "as sent", "tensor data in it", "a message")
    return _render_details("The ledger", _render_table(head, rows))


def _render_configuration(groups: Sequence[RunGroup]) -> str:
    first = [group.runs[0] for group in groups]
    differing = list_distinguishing_settings(first)
    parts: list[str] = []
    if len(groups) > 1:
        rows = [
            (path, *("-" if value is None else str(value) for value in values)) for path, values in differing.items()
        ]
        head = ("what differs", *(group.label for group in groups))
        parts.append(_render_table(head, rows) if rows else "<p>All runs have one configuration.</p>")
    for group in groups:
        text = json.dumps(group.runs[0].config.model_dump(mode="json"), indent=1, ensure_ascii=False)
        parts.append(_render_details(group.label, f"<pre>{html.escape(text)}</pre>"))
    return "".join(parts)


def _render_details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def _escape_markup(figure: str | None) -> str:
    """Escape every text in the JSON of a figure: Plotly draws tags in names, such as those of links, as markup.

    Only figures themselves write hover templates, which end with a tag of Plotly's own.
    """

    def escape(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key == "hovertemplate" else html.escape(value, quote=False)
        if isinstance(value, dict):
            return {name: escape(inner, name) for name, inner in cast("dict[str, Any]", value).items()}
        return [escape(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value

    return json.dumps(escape(json.loads(figure or "{}")))


def _escape_script(text: str) -> str:
    """Return JSON that is safe within a script element, whatever names it holds."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_STYLE = """
:root {
  color-scheme: light dark; --page: #ffffff; --text: #1a1a1a; --quiet: #595959; --rule: #dddddd; --mark: #0072b2;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --text: #e8eaed; --quiet: #a8b0ba; --rule: #39414b; --mark: #56b4e9; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 72rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif;
  background: var(--page); color: var(--text);
}
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.05rem; border-left: 4px solid var(--mark); padding: .25rem 0 .25rem 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.figure { width: 100%; } pre { overflow-x: auto; font-size: .8rem; } summary { cursor: pointer; margin: .5rem 0; }
footer { margin: 3rem 0 1rem; color: var(--quiet); font-size: .85rem; }
"""
_SCRIPT = """
const options = {responsive: true, displaylogo: false, displayModeBar: false};
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  figures.forEach((figure, number) => {
    let text = JSON.stringify(figure);
    if (dark.matches) for (const [light, pale] of Object.entries(onDark)) text = text.replaceAll(light, pale);
    const {data, layout} = JSON.parse(text);
    if (dark.matches) layout.template = darkTemplate;
    Plotly.react("figure-" + number, data, layout, options);
  });
}
draw();
dark.addEventListener("change", draw);
"""


def _build_dark_template() -> str:
    """Return Plotly's template for a dark page, on the page's own background, as JSON."""
    template = plotly.io.templates["plotly_dark"].to_plotly_json()
    template["layout"]["plot_bgcolor"] = "rgba(0,0,0,0)"
    # Plotly paints a pressed button pale in every theme, so all buttons have dark text on a pale ground.
    template["layout"]["updatemenudefaults"] = {
        "bgcolor": "#aab8c8",
        "bordercolor": "#506784",
        "font": {"color": "#15181c"},
    }
    return _escape_script(json.dumps(template, cls=plotly.utils.PlotlyJSONEncoder))


def _render_html(sections: _Page, title: str, version: str) -> str:
    figures = ",\n".join(sections.figures)
    escaped = html.escape(title)
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<link rel="icon" href="data:,">\n<title>{escaped}</title>\n<style>{_STYLE}</style>\n</head>',
            f"<body>\n<h1>{escaped}</h1>",
            *sections.parts,
            f"<footer>fedspan {html.escape(version)}. Nothing on this page is loaded from elsewhere.</footer>",
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\nconst figures = [{figures}];\n",
            f"const onDark = {json.dumps(charts.ON_DARK)};\nconst darkTemplate = {_build_dark_template()};",
            f"{_SCRIPT}</script>\n</body>\n</html>\n",
        )
    )
