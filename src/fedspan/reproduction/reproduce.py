"""Reproduction of a paper's table: learning rates selected by validation, then all seeds, then the verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from fedspan.config import parse_config
from fedspan.core.tensors import compute_norm, split_extras, subtract
from fedspan.errors import FedspanError
from fedspan.experiments.execution import format_command_line, read_settings, reuse_finished_runs
from fedspan.experiments.run_comparison import compare
from fedspan.experiments.run_search import sweep
from fedspan.experiments.series import Watcher, compute_deviation, compute_mean
from fedspan.experiments.series_bar import open_watcher
from fedspan.experiments.tables import Table, format_markdown, format_mean, format_megabytes, format_seconds
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.logs import read_lines
from fedspan.reports.curves import read_curve
from fedspan.reproduction.cells import DATA, IMAGE_MODEL, MODEL, Cell, list_cells, name_row_folders, tabulate_settings
from fedspan.reproduction.presets import Preset, Protocol, Scale, load_preset, require_scale
from fedspan.reproduction.verdicts import COSTS, CellScore, Judged, judge, tabulate_verdicts
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.diagnose import diagnose
from fedspan.runs.report import read_report
from fedspan.training.prefix_rows import share_prefixes
from fedspan.transports.ray.sharing import share_teams

REPRODUCE = "reproduce.yaml"
_SETTINGS = {
    "command": list,
    "id": str,
    "scale": str,
    "data": (str, type(None)),
    "model": (str, type(None)),
    "overrides": list,
    "reuse": list,
    "seeds": (list, type(None)),
    "protocol": str,
}


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table; ``table.md`` and ``table.json`` in its folder have the same content."""

    id: str
    scale: Scale
    seeds: tuple[int, ...]
    scores: tuple[CellScore, ...]
    verdicts: tuple[Judged, ...]
    """Verdicts on the paper's statements."""
    folder: str
    settings: Table
    protocol: Protocol = "best"

    def build_table(self) -> Table:
        """Tabulate the scores for people to read."""
        rows = tuple(
            (
                score.cell,
                score.method,
                score.failed or format_mean(score.metric, score.mean, score.deviation),
                ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in score.selected.items()) or "-",
                format_megabytes(score.bytes_down),
                format_megabytes(score.bytes_up),
                format_seconds(score.seconds),
            )
            for score in self.scores
        )
        numbers = ", ".join(map(str, self.seeds))
        metrics = ", ".join(dict.fromkeys(score.metric for score in self.scores if score.metric))
        several = len(self.seeds) > 1
        subject = f"Mean ± standard deviation over the seeds {numbers}" if several else f"One seed ({numbers})"
        notes = (f"{subject}; {metrics}. MB and seconds are those of one run.",)
        return Table(("cell", "method", "held-out", "chosen", "MB down", "MB up", "seconds"), rows, None, notes)

    def build_value_table(self) -> Table | None:
        """Tabulate the scores by value of ``evaluation.by``, and their unweighted mean; None if there are none."""
        values = list(dict.fromkeys(value for score in self.scores for value in score.by_value))
        if not values:
            return None
        rows: list[tuple[str, ...]] = []
        for score in self.scores:
            columns = [score.by_value.get(value, ()) for value in values]
            means = [compute_mean(seed_scores) for seed_scores in zip(*columns, strict=False)]
            cells = [*columns, means]
            texts = (format_mean(score.metric, compute_mean(cell), compute_deviation(cell)) for cell in cells)
            rows.append((score.cell, score.method, *texts))
        notes = ("Scores on the held-out examples of each value, and their mean, in which each value counts alike.",)
        return Table(("cell", "method", *values, "mean"), tuple(rows), None, notes)


def reproduce(
    id: str,
    folder: str | Path,
    *,
    scale: Scale = "small",
    data: str | Path | None = None,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    reuse: Sequence[str | Path] = (),
    seeds: Sequence[int] | None = None,
    protocol: Protocol = "best",
    listener: Watcher | None = None,
    progress: bool | None = None,
) -> Reproduction:
    """Reproduce a preset: in every cell and for every row, sweep on the first seed by validation, then run all seeds.

    If interrupted, the same call resumes: every run is an ordinary one, in ``folder/<cell>/<method>/``. A run that has
    finished elsewhere in the folder or in ``reuse`` is copied (same config, versions, machine and threads, and no local
    file changed since), unless seconds are compared.

    Args:
        id: Id of the preset.
        folder: Folder for the runs and the tables; empty, not yet existing, or of this preset at this scale.
        scale: ``small`` or ``full``.
        data: Folder with local data sets, if the preset reads files.
        model: Folder with a model, if the preset requires one.
        overrides: Changes to all configs, each ``section.field=value``; a field that they set is not swept.
        reuse: Folders with other reproductions or runs; they are not changed.
        seeds: Seeds that replace the preset's; a single one gives scores, but no verdict.
        protocol: ``best``: the values of the preset's sweep are selected for each row; ``matched``: all rows have the
            values that the preset's ``matched`` names.
        listener: Listener that receives all events.
        progress: Whether to show progress bars on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        The scores of all cells, and the verdict on each of the paper's statements.

    Examples:
        >>> fedspan.reproduce("rolora-table1", "runs/table1", data="data", model="roberta-large")

    Raises:
        FedspanError: If an argument, a config or the folder has an error that the user can correct.
    """
    for folder_of_runs in reuse:
        if not Path(folder_of_runs).is_dir():
            raise FedspanError("--reuse", str(folder_of_runs), "a folder that holds finished runs")
    settings = {
        "command": format_command_line(sys.argv),
        "id": id,
        "scale": scale,
        # absolute paths: configs of another working directory are not treated as equal
        "data": None if data is None else os.path.abspath(data),
        "model": None if model is None else os.path.abspath(model),
        "overrides": list(overrides),
        "reuse": [os.path.abspath(folder) for folder in reuse],
        "seeds": None if seeds is None else list(seeds),
        "protocol": protocol,
    }
    with open_watcher(listener, progress) as watcher:
        return _run(settings, Path(folder), watcher)


def resume_reproduction(
    folder: str | Path, *, listener: Watcher | None = None, progress: bool | None = None
) -> Reproduction:
    """Resume a reproduction under its original settings.

    Args:
        folder: Folder of the reproduction.
        listener: Listener that receives all events.
        progress: Whether to show progress bars, as for ``reproduce``.

    Returns:
        The result, as of ``reproduce``.

    Examples:
        >>> fedspan.resume_reproduction("runs/table1")

    Raises:
        FedspanError: If no reproduction was started in the folder, or for the reasons of ``reproduce``.
    """
    settings = read_settings(Path(folder), REPRODUCE, _SETTINGS)
    existing = [path for path in settings["reuse"] if Path(path).is_dir()]  # other runs are rerun
    with open_watcher(listener, progress) as watcher:
        return _run({**settings, "reuse": existing}, Path(folder), watcher)


def _run(settings: Mapping[str, Any], folder: Path, watcher: Watcher) -> Reproduction:
    preset, scale = load_preset(settings["id"]), settings["scale"]
    require_scale(scale)
    seeds = preset.get_seeds(scale) if settings["seeds"] is None else tuple(settings["seeds"])
    candidates = preset.get_candidates(scale, settings["protocol"], settings["overrides"])
    cells = list_cells(preset, scale, settings["data"], settings["model"], settings["overrides"])
    for cell in cells:
        for values in cell.configs.values():
            _require_paths(values)
            parse_config(values)
    reusable = [*map(Path, settings["reuse"]), *([folder] if folder.is_dir() else [])]
    with share_prefixes(), share_teams(), nullcontext() if preset.timed else reuse_finished_runs(reusable):
        _open_folder(folder, settings)
        scores = tuple(
            _run_row(preset, candidates, seeds, cell, label, folder / cell.name / name, watcher)
            for cell in cells
            for label, name in name_row_folders(cell.configs).items()
        )
    verdicts = judge(preset.claims, cells, scores)
    report = Reproduction(
        id=preset.id,
        scale=scale,
        seeds=seeds,
        scores=scores,
        verdicts=verdicts,
        folder=str(folder),
        settings=tabulate_settings(cells),
        protocol=settings["protocol"],
    )
    _write(report, preset, settings["command"])
    return report


def _require_paths(values: Mapping[str, Any]) -> None:
    text = json.dumps(values)
    for token, option, description in (
        (DATA, "--data", "a folder with local data sets, named as their publishers name them (docs/reproducing.md)"),
        (MODEL, "--model", "a folder with a causal language model in Transformers' format"),
        (IMAGE_MODEL, "--model", "a folder with an image classifier in Transformers' format"),
    ):
        if token in text:
            raise FedspanError(option, None, description)


def _open_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / REPRODUCE
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not path.is_file())):
        raise FedspanError("folder", str(folder), problem=f"{str(folder)!r} holds other files. Choose another folder")
    if path.is_file():
        stored = read_settings(folder, REPRODUCE, _SETTINGS)
        for name in ("id", "scale", "overrides", "protocol"):
            if stored[name] != settings[name]:
                raise FedspanError(
                    "folder",
                    str(folder),
                    problem=f"{str(folder)!r} was started with {name} {stored[name]!r}. Choose another folder",
                )
    with convert_disk_errors(folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True).encode())


def _run_row(
    preset: Preset,
    candidates: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    cell: Cell,
    label: str,
    folder: Path,
    watcher: Watcher,
) -> CellScore:
    """Run one row in one cell: the sweep, if there are several values to try, and the seeds."""
    config: Any = cell.configs[label]
    best_values: Mapping[str, object] = {}
    if any(len(values) > 1 for values in candidates.values()):
        search = sweep(config, folder / "sweep", candidates, seeds=seeds[:1], listener=watcher, progress=False)
        if search.best is None:
            reason = "every learning rate diverged"
            return CellScore(cell.name, label, {}, "", True, (), None, None, None, None, None, reason)
        best_values, config = search.trials[0].values, search.best
    elif candidates:
        best_values = {path: values[0] for path, values in candidates.items()}
    texts = [f"{path}={json.dumps(value)}" for path, value in best_values.items()]
    key = preset.methods[label].key
    try:
        report = compare(config, folder / "seeds", [key], seeds, overrides=texts, listener=watcher, progress=False)
    except FedspanError as error:
        if error.field != "training.lr":  # the only error of training itself: it diverges
            raise
        return CellScore(cell.name, label, best_values, "", True, (), None, None, None, None, None, "a seed diverged")
    row = report.rows[0]
    measures = {claim.measure for claim in preset.claims}
    runs = [RunFolder(folder / "seeds" / f"{key}-seed{seed}") for seed in seeds]
    measurements = [measure(run_folder.path, sorted(measures & MEASURED)) for run_folder in runs]
    return CellScore(
        cell=cell.name,
        method=label,
        selected=best_values,
        metric=report.metric,
        higher=report.higher,
        scores=row.scores,
        mean=row.mean,
        deviation=row.deviation,
        bytes_down=row.bytes_down,
        bytes_up=row.bytes_up,
        seconds=row.seconds,
        measured={
            name: tuple(measurement[name] for measurement in measurements) for name in sorted(measures & MEASURED)
        },
        curves=tuple(read_curve(run_folder, report.metric) for run_folder in runs) if measures & set(COSTS) else (),
        by_value=_collect_by_value(runs, report.metric),
    )


def _collect_by_value(runs: Sequence[RunFolder], metric: str) -> dict[str, tuple[float | None, ...]]:
    by_seed = [read_report(run_folder.path).by_value for run_folder in runs]
    values = dict.fromkeys(value for scores in by_seed for value in scores)
    return {value: tuple(scores.get(value, {}).get(metric) for scores in by_seed) for value in values}


def _write(report: Reproduction, preset: Preset, command: Sequence[str]) -> None:
    folder = Path(report.folder)
    lines = [f"# {preset.paper}: {preset.item}", "", preset.title, "", f"Command: `{' '.join(command)}`", ""]
    tables = (report.settings, report.build_table(), report.build_value_table(), tabulate_verdicts(report.verdicts))
    for table in tables:
        lines += [] if table is None else [*format_markdown(table), ""]
    lines += ["Notes:", ""]
    lines += [f"- {' '.join(note.split())}" for note in preset.notes]
    with convert_disk_errors(folder):
        write_atomic(folder / "table.md", ("\n".join(lines) + "\n").encode())
        plain = json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False)
        write_atomic(folder / "table.json", (plain + "\n").encode())


MEASURED = frozenset({"exact_match", "alignment", "barrier", "state_step"})
_PAIRS = 3


def measure(folder: Path, names: Collection[str]) -> dict[str, float | None]:
    """Compute some of ``MEASURED``; None if a measure has no value.

    ``exact_match`` is the report's, on the held-out set, if answers were generated;
    ``alignment`` is the mean over the examined rounds of the run's second half (``evaluation.diagnostics``), or that of
    one more round (``fedspan.diagnose``) if there are none;
    ``barrier`` is that of one more round, averaged over three pairs of clients;
    ``state_step`` is how far the last round moved the server's tensors of the target layers, relative to their norm.
    """
    values: dict[str, float | None] = {}
    recorded = _list_recorded_alignments(RunFolder(folder)) if "alignment" in names else []
    if recorded:
        values["alignment"] = sum(recorded) / len(recorded)
    if "barrier" in names or ("alignment" in names and not recorded):
        diagnosis = diagnose(folder, pairs=_PAIRS if "barrier" in names else 0)
        heights = [barrier.height for barrier in diagnosis.barriers]
        values.setdefault("alignment", None if math.isnan(diagnosis.alignment) else diagnosis.alignment)
        values["barrier"] = sum(heights) / len(heights) if heights else None
    if "exact_match" in names:
        values["exact_match"] = read_report(folder).scores.get("test", {}).get("exact_match")
    if "state_step" in names:
        values["state_step"] = _compute_state_step(RunFolder(folder))
    return {name: values[name] for name in names}


def _list_recorded_alignments(run_folder: RunFolder) -> list[float]:
    """Return the alignment in the examined rounds of the second half that have a value."""
    rows = cast("Sequence[Mapping[str, Any]]", list(read_lines(run_folder.metrics)))
    alignments = [row["diagnostics"].get("alignment") for row in rows[len(rows) // 2 :] if "diagnostics" in row]
    return [float(value) for value in alignments if isinstance(value, int | float) and math.isfinite(value)]


def _compute_state_step(run_folder: RunFolder) -> float | None:
    last = load_checkpoint(checkpoints.select_checkpoint(run_folder, "last")).state
    if last.round < 2:
        return None
    before = load_checkpoint(checkpoints.select_checkpoint(run_folder, last.round - 1)).state
    old, new = (split_extras(state.tensors)[0] for state in (before, last))
    if set(old) != set(new) or any(old[name].shape != new[name].shape for name in old):
        return None
    size = compute_norm(old)
    return compute_norm(subtract(new, old)) / size if size > 0 else None
