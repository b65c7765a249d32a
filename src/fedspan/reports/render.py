"""Render one or more runs as a single HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedspan
from fedspan.core.lowrank import LowRank
from fedspan.data.partition import ClientRow, Partition
from fedspan.diagnostics.round_diagnosis import Diagnosis
from fedspan.diagnostics.updates import compute_singular_values
from fedspan.errors import FedspanError, build_install_command
from fedspan.files import convert_disk_errors, read_bytes, write_atomic
from fedspan.reports.groups import RunGroup, group_runs
from fedspan.reports.run_data import RunData, read_runs
from fedspan.run_folder import RunFolder

_WEIGHTS = "adapter_model.safetensors"


def report(
    runs: str | Path | Sequence[str | Path], out: str | Path, *, diagnostics: bool = False, data: bool = True
) -> Path:
    """Write one self-contained HTML page about runs, which can be viewed offline.

    Args:
        runs: Folders of runs, finished or in progress, or of series (``compare``, ``sweep``, ``reproduce``), whose runs
            are all shown. Runs that differ only in their seed are grouped.
        out: File of the page; an existing file is replaced.
        diagnostics: Whether to run one more round of a run of each group and show the results of ``diagnose``.
        data: Whether to read the data again to show the clients' label counts, which are omitted if the data are not
            available.

    Returns:
        ``out``.

    Examples:
        >>> fedspan.report(["runs/first", "runs/second"], "report.html")

    Raises:
        FedspanError: If the extra ``fedspan[report]`` is missing, there are no runs, the runs use different metrics, or
            the file cannot be written.
    """
    try:
        import plotly  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise FedspanError(
            "report", None, problem=f"a report needs plotly ({error}). Run: {build_install_command('report')}"
        ) from None
    data_of_runs = read_runs([runs] if isinstance(runs, str | Path) else runs)
    for run in data_of_runs:
        if run.metric != data_of_runs[0].metric:
            problem = f"{data_of_runs[0].name} is judged by {data_of_runs[0].metric}, and {run.name} by {run.metric}"
            raise FedspanError("run folder", run.name, "runs that are judged by one metric", problem=problem)
    from fedspan.reports.page import PageContent, render_page

    groups, path = group_runs(data_of_runs), Path(out)
    content = PageContent(
        partition=_read_partition(data_of_runs[0]) if data else None,
        spectra=_compute_spectra(data_of_runs),
        diagnoses=_diagnose_groups(groups) if diagnostics else None,
    )
    title = f"{groups[0].label}" if len(groups) == 1 else f"{len(data_of_runs)} runs of {len(groups)} configurations"
    text = render_page(groups, content, title, fedspan.__version__)
    with convert_disk_errors(path.parent, "choose another file", "out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return path


def _read_partition(run: RunData) -> tuple[str, Sequence[ClientRow], Sequence[str]] | None:
    """Return the label counts of a run's clients; None if its data or its partition are not available."""
    run_folder = RunFolder(run.folder)
    if not run.config.task_definition.is_classifier or not run_folder.partition.is_file():
        return None
    try:
        parts = Partition.from_json(
            read_bytes(run_folder.partition).decode(errors="replace"), str(run_folder.partition)
        )
        loaded = run.config.load_examples()
        return run.name, parts.label_table(loaded.labels, loaded.train), loaded.labels
    except FedspanError:  # the data were moved or changed since
        return None


def _compute_spectra(runs: Sequence[RunData]) -> tuple[str, Mapping[str, Sequence[float]]] | None:
    """Return a run's name and the singular values of the first exported adapter's layers; None without an adapter."""
    for run in runs:
        for name in run.report.adapters.values() if run.report is not None else ():
            file = run.folder / name / _WEIGHTS
            if file.is_file() and (layers := _list_layers(load_file(file))):
                return run.name, layers
    return None


def _list_layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for name, A in tensors.items():
        layer, separator, rest = name.partition(".lora_A")
        B = tensors.get(f"{layer}.lora_B{rest}")
        if separator and B is not None:
            pair = LowRank(B.flatten(1).float(), A.flatten(1).float())
            values[layer.removeprefix("base_model.model.")] = compute_singular_values(pair).tolist()
    return values


def _diagnose_groups(groups: Sequence[RunGroup]) -> Mapping[str, Diagnosis]:
    from fedspan.runs.diagnose import diagnose  # imports Transformers, which most reports do not need

    return {group.label: diagnose(group.runs[0].folder, pairs=0) for group in groups}
