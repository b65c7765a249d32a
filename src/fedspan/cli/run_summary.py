"""The summary of a run: scores next to the baselines, cost, and use of the adapter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fedspan.cli.formatting import create_table
from fedspan.experiments.intervals import compare_clients, estimate_difference
from fedspan.experiments.tables import compute_majority, describe_extension, describe_majority
from fedspan.models.names import get_architecture, resolve_model
from fedspan.progress.formatting import format_duration, format_score, format_size, shorten
from fedspan.runs.predictions import Items, read_items
from fedspan.runs.report import SELECTION_NOTE, STATISTICS_NOTE, RunReport, format_final_rounds
from fedspan.tasks.definition import TargetType
from fedspan.tasks.metrics import METRICS
from fedspan.tasks.registry import get_task

_NO_SCORES = (
    "no scores were measured: there is no test set, and no client has enough validation or test examples (a node needs "
    "limits.evaluation_examples of them; one with its own trainer limits.evaluation_epsilon: null, too)"
)
_MAX_FAILURES = 5
_TARGET_COLUMNS: Mapping[TargetType, str] = {
    "labels": "labels",
    "number": "number",
    "text": "answer",
    "other": "expected",
}


def show_report(out: Console, report: RunReport, folder: Path) -> None:
    """Print the report of the run in ``folder``."""
    table = _make_score_table(report)
    out.print(Text(_NO_SCORES, "dim") if table is None else table)
    items = read_items(folder)
    majority, reached = compute_majority(report.metric, items), (report.scores.get("test") or {}).get(report.metric)
    is_useless = majority is not None and reached is not None and reached < majority
    sentences = (
        SELECTION_NOTE if report.selected and report.scores.keys() == {"validation"} else "",
        "The result is below the majority class: it is worse than always predicting one label." if is_useless else "",
        _describe_gain(report, folder, items),
        describe_majority(report.metric, items),
        describe_extension(report, folder),
        _describe_start(report),
    )
    for sentence in sentences:
        if sentence:
            out.print(Text(sentence))
            out.print()
    for line in _list_failures(report):
        out.print(Text.assemble((f"{'failures':<10}", "dim"), shorten(line, max(40, out.width - 10))))
    for warning in report.warnings:
        out.print(Text.assemble(("warning: ", "bold red"), (warning, "red")), soft_wrap=True)
    if not report.adapters:
        out.print(Text("every client's own adapter is on its data owner's node", "dim"))
        return
    id, path = next(iter(report.adapters.items()))
    adapter, is_personal = folder / path, id != "global"
    sample = "image.png" if get_task(report.task).has_image_inputs else '"your text"'
    kind = "adapter" if (adapter / "adapter_config.json").is_file() else "model"
    selection = "best by validation" if report.selected else "last round"
    whose = f" --client {shlex.quote(id)}" if is_personal else ""
    facts = {
        "traffic": "; ".join(_describe_traffic(report)),
        "time": f"{format_duration(report.seconds)} for {report.rounds} {'round' if report.rounds == 1 else 'rounds'}",
        "round": f"{report.best_round}, {selection}"
        + (f", and {format_final_rounds(report.final_rounds)}" if report.final_rounds else ""),
        f"{kind}s" if is_personal else kind: f"{adapter.parent} (one for each client)" if is_personal else str(adapter),
        **({"privacy": _describe_privacy(report.privacy)} if report.privacy else {}),
        "report": str(folder / "report.json"),
        "try": f"fedspan predict {shlex.quote(str(folder))} {sample}{whose}",
    }
    for name, fact in facts.items():
        out.print(Text.assemble((f"{name:<10}", "dim"), fact), soft_wrap=True)
    out.print()
    for line in render_peft_snippet(adapter):
        out.print(Text(f"  {line}", "cyan"), soft_wrap=True)
    if report.examples:
        out.print(_render_examples(report, out.width))


def _describe_privacy(spent: Mapping[str, Any]) -> str:
    unit = "an example" if spent["mechanism"] == "dp-sgd" else "a client"
    epsilon = "without bound" if spent["epsilon"] is None else f"{spent['epsilon']:.3g}"
    source = ", noise from the seed: for experiments only" if spent["randomness"] != "secret" else ""
    return f"epsilon {epsilon} at delta {spent['delta']:g} for {unit} ({spent['mechanism']}{source})"


def _describe_traffic(report: RunReport) -> list[str]:
    parts = [f"{format_size(report.bytes['down'])} down, {format_size(report.bytes['up'])} up"]
    for purpose, count in report.other_bytes.items():
        parts.append(f"{purpose}: {format_size(count['down'])} down, {format_size(count['up'])} up")
    return parts


def _list_failures(report: RunReport) -> list[str]:
    """List how often each client failed, with its last error; the most frequent first."""
    often = sorted(report.failures.items(), key=lambda item: (-item[1]["count"], item[0]))
    lines = [
        f"{client} {'once' if failures['count'] == 1 else str(failures['count']) + ' times'}, "
        f"last in round {failures['round']}: {failures['reason']}"
        for client, failures in often[:_MAX_FAILURES]
    ]
    remainder = f"and {len(often) - _MAX_FAILURES} more clients, in report.json"
    return [*lines, remainder] if len(often) > _MAX_FAILURES else lines


def _make_score_table(report: RunReport) -> Table | None:
    """Make the table of test scores, or of validation scores where there are no others; None without any."""
    heldout, has_client_scores, metric = "test" in report.scores, "clients" in report.scores, report.metric
    has_validation_alone = not (heldout or has_client_scores) and "validation" in report.scores
    if not (heldout or has_client_scores or has_validation_alone):
        return None
    # The selection metric, and the next one that the task measures.
    metrics = list(
        dict.fromkeys(
            [metric, *(name for name in get_task(report.task).summary_metrics if name in report.scores.get("test", ()))]
        )
    )
    rows = {
        report.method: report.scores,
        **({"start": report.start} if report.start.keys() & {"test", "clients", "validation"} else {}),
        **{name: baseline["scores"] for name, baseline in report.baselines.items()},
    }
    has_worst = any((scores.get("test") or {}).get("worst") for scores in rows.values())  # of personal models
    table = create_table()
    table.add_column("", no_wrap=True)
    if heldout:
        for name in metrics[:3]:
            table.add_column(f"held-out\n{METRICS[name].title}", justify="right")
        if has_worst:
            table.add_column("held-out\nworst client", justify="right", no_wrap=True)
    if has_client_scores:
        table.add_column("client tests\nmean", justify="right")
        table.add_column("client tests\nworst client", justify="right", no_wrap=True)
    if has_validation_alone:
        table.add_column(f"validation\n{METRICS[metric].title}", justify="right")
    for name, scores in rows.items():
        cells: list[str] = []
        if heldout:
            test = scores.get("test") or {}
            cells += [
                *(format_score(metric_name, test.get(metric_name)) for metric_name in metrics[:3]),
                *([_format_worst(test, metric)] if has_worst else []),
            ]
        if has_client_scores:
            clients = scores.get("clients") or {}
            cells += [format_score(metric, clients.get(metric)), _format_worst(clients, metric)]
        if has_validation_alone:
            cells.append(format_score(metric, (scores.get("validation") or {}).get(metric)))
        table.add_row(name, *cells, style="bold" if name == report.method else "")
    return table


def _format_worst(scores: Mapping[str, Any], metric: str) -> str:
    worst = scores.get("worst")
    return "" if worst is None else f"{shorten(worst['client'], 12)} {format_score(metric, worst[metric])}"


def _describe_gain(report: RunReport, folder: Path, items: Items | None) -> str:
    """Compare the federation's model with the start and the baselines, a sentence for each kind of test.

    The start has no scores by client, so it is not compared on the clients' own tests.
    """
    if not report.baselines:
        return ""
    title, metric = METRICS[report.metric].title, report.metric
    scores = {"start": report.start, **{name: baseline["scores"] for name, baseline in report.baselines.items()}}
    names = {"start": "the start", "local-only": "local-only training", "centralized": "centralized training"}
    reached, heldout, own = (report.scores.get("test") or {}).get(metric), list[str](), list[str]()
    for name, title_of_other in names.items():
        other = (scores.get(name, {}).get("test") or {}).get(metric)
        if reached is not None and other is not None:
            of_other = read_items(folder, "start") if name == "start" else read_items(folder / "baselines" / name)
            pair = None if items is None or of_other is None else (items, of_other)
            whole_title = f"{title_of_other} (mean client)" if name == "local-only" else title_of_other
            heldout.append(estimate_difference(metric, [reached], [other], [pair]).describe(metric, whole_title))
        by_client = report.baselines.get(name, {}).get("by_client", {})
        if (difference := compare_clients(metric, report.by_client, by_client)) is not None:
            own.append(difference.describe(metric, title_of_other))
    subjects = {f"Held-out {title}": heldout, f"The clients' mean {title} on their own tests": own}
    return " ".join(f"{subject} is {_join(parts)}." for subject, parts in subjects.items() if parts)


def _join(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if parts[1:] else parts[0]


def _describe_start(report: RunReport) -> str:
    kind = report.start.get("head_init")
    if kind is None:
        return ""
    if kind == "random":
        return f"The head was initialized at random, because too few clients sent statistics: {report.start['reason']}."
    whose = {
        "local-only": "in local-only training from the client's own",
        "centralized": "in centralized training from those of all clients",
    }
    others = [text for name, text in whose.items() if name in report.baselines]
    return (
        f"The head is initialized from statistics of all clients' examples ({kind})"
        + "".join(f", {description}" for description in others)
        + "."
        + (f" {STATISTICS_NOTE}" if report.start.get("simulated") else "")
    )


def render_peft_snippet(adapter: Path) -> list[str]:
    """Return a few lines of Python that load an adapter, or a model that was exported whole."""
    notes = json.loads((adapter / "fedspan.json").read_text(encoding="utf-8"))
    if notes["pooling"] is not None:
        outputs = "vectors" if get_task(notes["task"]).is_embedding else "logits"
        is_packaged = (adapter / "adapter_config.json").is_file() and notes["base_model"].startswith("builtin:")
        # An adapter names its base by hub id, and the weights of a package are not in the hub's cache.
        merging = ["import fedspan", f'fedspan.export("{adapter}", "merged", form="merged")'] if is_packaged else []
        return [
            *merging,
            "import sentence_transformers",
            f'model = sentence_transformers.SentenceTransformer("{"merged" if is_packaged else adapter}")',
            f"model.encode(texts)  # the {outputs}",
        ]
    if not (adapter / "adapter_config.json").is_file():
        imports = ["import fedspan.models.resnet"] if get_architecture(notes["base_model"]) else []
        auto = get_task(notes["task"]).model_head.auto_class
        return ["import transformers", *imports, f'model = transformers.{auto}.from_pretrained("{adapter}")']
    revision = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("revision")
    head = get_task(notes["task"]).model_head
    options = [f"num_labels={len(notes['labels']) or 1}"] if head.outputs is not None else []
    if head.has_image_inputs:  # published models have other classes
        options.append("ignore_mismatched_sizes=True")
    options += [f"revision={revision!r}"] if revision else []
    more = "".join(f", {option}" for option in options)
    # MobileNet reads attributes of a convolution that PEFT's wrapper lacks, so images get a model without wrappers.
    merge = ".merge_and_unload()" if head.has_image_inputs else ""
    base = resolve_model(notes["base_model"])
    return [
        "import peft, transformers",
        f'base = transformers.{head.auto_class}.from_pretrained("{base}"{more})',
        f'model = peft.PeftModel.from_pretrained(base, "{adapter}"){merge}',
    ]


def _render_examples(report: RunReport, width: int) -> RenderableType:
    task = get_task(report.task)
    if task.target_type == "text":
        return _render_dialogues(report, width)
    table = create_table()
    labels = max(len("prediction"), *(len(row[key]) for row in report.examples for key in ("label", "prediction")))
    labels = min(labels, (width - 30) // 2)
    description = "a held-out image" if task.has_image_inputs else "a held-out text"
    table.add_column(description, width=min(90, width - 2 * labels - 6))
    table.add_column(_TARGET_COLUMNS.get(task.target_type, "label"), no_wrap=True, max_width=labels)
    table.add_column("prediction", no_wrap=True, max_width=labels)
    for row in report.examples:
        color = ""  # a predicted number is neither right nor wrong
        if task.has_labels:
            color = "green" if row["label"] == row["prediction"] else "red"
        cells = [shorten(row[key], 400) for key in ("text", "label", "prediction")]
        table.add_row(*map(Text, cells[:2]), Text(cells[2], color))
    return table


def _render_dialogues(report: RunReport, width: int) -> Text:
    """Render held-out prompts with the true and the predicted answer, one line each; a prompt's end is shown."""
    shown, room = Text("\n"), max(20, width - 10)
    for row in report.examples:
        prompt = " ".join(row["text"].split())
        prompt = prompt if len(prompt) <= room else "…" + prompt[1 - room :]
        for name, text in (("prompt", prompt), ("answer", row["label"]), ("model", row["prediction"])):
            shown.append(f"{name:<8}", "dim")
            shown.append(f"{shorten(text, room)}\n", "bold" if name == "model" else "")
        shown.append("\n")
    return shown
