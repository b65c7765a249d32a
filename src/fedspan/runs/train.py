"""Start and resume of runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fedspan.assembly.cluster import connect_workers
from fedspan.assembly.run import Prepared, collect_objects, prepare
from fedspan.config import RunConfig, override, parse_config
from fedspan.config.reading import ConfigLike, to_plain_values
from fedspan.data.files import FROM_TRAINERS, IN_MEMORY
from fedspan.data.objects import CLIENT
from fedspan.errors import FedspanError
from fedspan.models.names import FROM_PYTHON
from fedspan.models.plain import read_dtype
from fedspan.progress.bar import ProgressBar, has_bar
from fedspan.progress.listener import Listener, Listeners
from fedspan.progress.trackers import TrackingListener
from fedspan.progress.view import RunView
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.extension import has_effect, require_extensible
from fedspan.runs.integrity import read_config, require_intact
from fedspan.runs.privacy_budget import load_noise_key
from fedspan.runs.report import RunReport, is_run, read_report
from fedspan.tasks.definition import TaskDefinition
from fedspan.tasks.registry import is_installed, register_task
from fedspan.transports.ray import require_ray


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    folder: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    task: TaskDefinition | str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> RunReport:
    """Run a federation to its end: train, export the best round's adapters, compare with the baselines, report.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``.
        folder: Folder of the run; empty, or not existing yet.
        data: Examples in place of ``data.train``: a ``datasets.Dataset`` or ``DatasetDict``, a pandas or Polars
            DataFrame, a list of dicts; a dict of these by client (or by ``train`` and ``test``), or a function of a
            client's number. By client, each is a client of its own, and ``partition`` is left out of the config.
        model: A Transformers model or another ``nn.Module`` in place of ``model.name``; it is copied, and the exported
            adapter names its ``name_or_path`` or its class.
        tokenizer: The tokenizer or image processor; None: that of the model's name, and none of another module.
        task: The task in place of the config's: its definition, which is registered, or its name.
        overrides: Changes to the config, each ``section.field=value``.
        resume: Whether to resume, as ``resume(folder)`` does, if the folder holds a run of this config. The config may
            have more rounds (``federation.rounds``) or more patience (``federation.early_stopping``) than the run,
            which is then extended, even if it is finished. Deadlines, engine and
            cluster may differ, too.
        listener: Listener that receives the events of the run (a ``fedspan.Listener``).
        track: Trackers that receive the numbers of every round in addition to the run folder: ``tensorboard``,
            ``wandb``, ``mlflow``, ``trackio``; the named packages must be installed.
        progress: Whether to show a progress bar on standard error; None: if that is a terminal, or in a notebook.

    Returns:
        Scores, bytes, the best round and the files of the run, as in ``report.json``.

    Examples:
        >>> report = fedspan.run("config.yaml", "runs/first", overrides=["method.name=rolora"])
        >>> report.scores["test"]["accuracy"]
        0.976

    Raises:
        FedspanError: If the run fails for a reason that the user can correct.
    """
    values = _to_values(config, overrides)
    config, build = _set_objects(values if task is None else _set_task(values, task), data, model, tokenizer)
    _require_shared_task(config)
    if resume and is_run(folder):
        return _resume(folder, config, listener, track, progress, build)
    with _open_listener(listener, track, folder, progress) as listeners:
        return start.run(config, folder, listener=listeners, host=_open_host(config), build=build)


def simulate(
    config: RunConfig | Mapping[str, Any] | str | Path,
    folder: str | Path,
    *,
    trainers: Mapping[str, Any],
    overrides: Sequence[str] = (),
    resume: bool = False,
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> RunReport:
    """Run a federation of several owners on this machine, each of which trains with its own trainer.

    The config decides method, optimizer, learning-rate schedule, and steps or epochs of a round. Model, data, batch
    size, loss, evaluation, precision and callbacks are the trainers' own; all models have equal frozen weights.

    Args:
        config: The path of a YAML file, its content as plain values, or a ``RunConfig``, without ``data``, ``task``,
            ``partition`` and the model's name.
        folder: Folder of the run; empty, or not existing yet.
        trainers: The clients' trainers by client id: a ``transformers.Trainer`` or one derived from it (of TRL or
            sentence-transformers) each, a ``TorchTrainer``, or a function without arguments that makes one.
        overrides: Changes to the config, each ``section.field=value``.
        resume: Whether to resume, if the folder holds a run of this config, after its last finished round.
        listener: Listener that receives the events of the run (a ``fedspan.Listener``).
        track: Trackers, as for ``run``.
        progress: Whether to show a progress bar, as for ``run``.

    Returns:
        Scores, bytes and the best round, as of ``run``.

    Examples:
        >>> trainers = {"east": trainer_of_east, "west": trainer_of_west}
        >>> fedspan.simulate("config.yaml", "runs/first", trainers=trainers)

    Raises:
        FedspanError: If the run fails for a reason that the user can correct.
    """
    from fedspan.assembly.own_trainers import (
        TrainerRuns,
        adopt_trainers,
        require_used,
    )  # imports PEFT and Transformers' trainer

    adopted = adopt_trainers(trainers)
    base_config = _to_values(config, overrides)
    values = _set_trainers(base_config, next(iter(adopted.values())).model)
    config_values = base_config.model_dump(exclude_unset=True) if isinstance(base_config, RunConfig) else base_config
    values.require_simulated()
    require_used(values, is_complete=_get_section(config_values, "data").get("train") == FROM_TRAINERS)
    with closing(TrainerRuns(adopted)) as built:
        if resume and is_run(folder):
            return _resume(folder, values, listener, track, progress, built.prepare)
        with _open_listener(listener, track, folder, progress) as listeners:
            return start.run(values, folder, listener=listeners, build=built.prepare)


def _set_trainers(config: RunConfig | dict[str, Any], model: Any) -> RunConfig:
    """Return the config of a run whose clients train with their own trainers."""
    values = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, RunConfig) else dict(config)
    data = _get_section(values, "data")
    if data.get("train", FROM_TRAINERS) != FROM_TRAINERS or data.get("test") is not None or data.get("dataset"):
        problem = "the examples of this run are the trainers' own; leave data out"
        raise FedspanError("data", data.get("train") or data.get("dataset"), problem=problem)
    if values.get("task", "trainer") != "trainer":
        problem = "the task of this run is what the trainers define; leave task out"
        raise FedspanError("task", values["task"], problem=problem)
    named = _get_section(values, "model")
    dtype = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
    if named.get("dtype", dtype) != dtype:
        problem = f"the trainers' models have the number format {dtype}; leave model.dtype out"
        raise FedspanError("model.dtype", named["dtype"], problem=problem)
    partition = _build_natural_partition(_get_section(values, "partition"))
    values |= {"task": "trainer", "data": {**data, "train": FROM_TRAINERS}, "partition": partition}
    return parse_config({**values, "model": _build_model_section(named, model)})


@contextmanager
def _open_listener(
    listener: Listener | None, track: Sequence[str], folder: str | Path, progress: bool | None
) -> Generator[Listener]:
    """Yield a listener that forwards all events to the given one, to a progress bar, and to trackers, where wanted.

    Above the bar is the table of rounds, except in a notebook, where each line would be an output of its own.
    """
    with ExitStack() as stack:
        listeners = listener or Listener()
        if has_bar(progress):
            bar = ProgressBar() if Console().is_jupyter else RunView(None, Path(folder))
            listeners = Listeners(listeners, stack.enter_context(bar))
        if track:
            listeners = stack.enter_context(closing(TrackingListener(listeners, track, Path(folder))))
        yield listeners


def _set_task(config: RunConfig | dict[str, Any], task: TaskDefinition | str) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, RunConfig) else dict(config)
    if not isinstance(task, str):
        register_task(task)
        task = task.name
    if values.get("task", task) != task:
        problem = f"the task {task} was passed from Python; leave task out of the config"
        raise FedspanError("task", values["task"], problem=problem)
    return {**values, "task": task}


def _require_shared_task(config: RunConfig) -> None:
    if config.cluster is not None and not is_installed(config.task):
        problem = f"it trains in other processes, in which the task {config.task} is not registered"
        expected = "no cluster, or a task of an installed package (an entry point in fedspan.tasks)"
        raise FedspanError("cluster", config.task, expected, problem=problem)


def _to_values(config: ConfigLike, overrides: Sequence[str]) -> RunConfig | dict[str, Any]:
    """Return a config as plain values with the overrides; a ``RunConfig`` without any as it is."""
    return config if isinstance(config, RunConfig) and not overrides else to_plain_values(config, overrides)


def _set_objects(
    config: RunConfig | dict[str, Any], data: Any, model: Any, tokenizer: Any
) -> tuple[RunConfig, start.Build]:
    """Return the config of a run with objects passed from Python, and the function that builds the run."""
    if data is None and model is None and tokenizer is None:
        return config if isinstance(config, RunConfig) else parse_config(config), prepare
    values = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, RunConfig) else dict(config)
    if data is not None:
        section = {**_get_section(values, "data"), "train": IN_MEMORY}
        section.pop("test", None)
        values["data"] = section
    if model is not None:
        values["model"] = _build_model_section(_get_section(values, "model"), model)
    parsed = parse_config(values)
    _require_no_processes(parsed, model, tokenizer)
    objects = collect_objects(parsed, "fedspan.run", data, model, tokenizer)
    if objects.data is not None:
        if "test" in objects.data.sources:
            values["data"] = {**values["data"], "test": IN_MEMORY}
        if objects.data.by_client:
            values["partition"] = _build_natural_partition(_get_section(values, "partition"))
    return parse_config(values), partial(prepare, objects=objects)


def _require_no_processes(config: RunConfig, model: Any, tokenizer: Any) -> None:
    """Check that the objects that were passed to a run are needed in this process only."""
    if config.cluster is not None and (model is not None or tokenizer is not None):
        problem = "workers load the model themselves, by its name; only data can be passed to a run on a cluster"
        raise FedspanError("model" if model is not None else "tokenizer", None, problem=problem)


def _get_section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name) or {}
    return dict(section) if isinstance(section, Mapping) else {"": section}  # reported by the parser


def _build_model_section(section: Mapping[str, Any], model: Any) -> dict[str, Any]:
    if str(section.get("name", "")).startswith(FROM_PYTHON):  # of a run's own config.yaml
        section = {option: value for option, value in section.items() if option != "name"}
    for option in ("name", "revision", "quantization"):
        if section.get(option) is not None:
            problem = f"a model was passed from Python; leave model.{option} out"
            raise FedspanError(f"model.{option}", section[option], problem=problem)
    if section.get("pooling", "auto") not in ("auto", "stock"):
        problem = "a model that was passed from Python pools as it does; pass its name as model.name to choose"
        raise FedspanError("model.pooling", section["pooling"], "auto", problem=problem)
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return {**section, "name": f"{FROM_PYTHON}{name}", "dtype": read_dtype(model)}


def _build_natural_partition(section: Mapping[str, Any]) -> dict[str, Any]:
    if section.get("partitioner", "natural") != "natural" or section.get("column", CLIENT) != CLIENT:
        problem = "the data were passed by client, which is their partition; leave partitioner and column out"
        raise FedspanError("partition.partitioner", section.get("partitioner"), problem=problem)
    return {**section, "partitioner": "natural", "column": CLIENT}


def resume(
    folder: str | Path,
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    overrides: Sequence[str] = (),
    listener: Listener | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
) -> RunReport:
    """Resume a run after its last finished round; for a finished run, only read its report.

    On the same machine, with as many threads, the adapter is bit for bit that of a run that was never interrupted.

    Args:
        folder: Folder of the run.
        data: The data, if the run began with data passed from Python.
        model: The model, if the run began with one passed from Python, with its weights as they were then.
        tokenizer: The tokenizer, if the run began with one passed from Python.
        overrides: Changes that extend the run, finished or not: ``federation.rounds=40`` for more rounds, where the
            learning-rate schedule does not spread over all rounds; ``federation.early_stopping=10`` or ``=null`` for
            more patience. It ends with the same bits as a run that was planned so. A run that is not finished may also
            get other deadlines, another engine or another cluster, such as
            ``cluster.workers=4``.
        listener: Listener that receives the events of the run.
        track: Trackers, as for ``run``.
        progress: Whether to show a progress bar, as for ``run``.

    Returns:
        The report, as of ``run``.

    Examples:
        >>> fedspan.resume("runs/first", overrides=["federation.rounds=40"])

    Raises:
        FedspanError: If there is no run, another process works on it, its latest checkpoint is damaged, or the run
            cannot be extended in this way.
    """
    config = None
    if overrides and is_run(folder):
        config = parse_config(override(read_config(folder).model_dump(mode="json"), overrides))
    if not is_run(folder) or (config is None and RunFolder(folder).report.is_file()):
        return _resume(folder, config, listener, track, progress, prepare)
    used = config or read_config(folder)  # engine and cluster may have changed since the run began
    if data is not None or model is not None or tokenizer is not None:
        _require_no_processes(used, model, tokenizer)
    objects = collect_objects(used, "fedspan.resume", data, model, tokenizer)
    return _resume(folder, config, listener, track, progress, partial(prepare, objects=objects))


def _resume(
    folder: str | Path,
    config: RunConfig | None,
    listener: Listener | None,
    track: Sequence[str],
    progress: bool | None,
    build: start.Build,
) -> RunReport:
    """Resume a run, or read its report if it is finished under this config (None: its own)."""
    stored = read_config(folder) if is_run(folder) else None
    if config is not None and stored is not None:
        require_extensible(RunFolder(folder), stored, config)
        config = config if has_effect(RunFolder(folder), stored, config) else None
    if config is None and stored is not None and RunFolder(folder).report.is_file():
        require_intact(RunFolder(folder))
        return read_report(folder)
    used = config or stored
    if used is not None:
        _require_shared_task(used)
    host = None if used is None else _open_host(used)
    with _open_listener(listener, track, folder, progress) as listeners:
        return start.run(config, folder, resume=True, listener=listeners, host=host, build=build)


def _open_host(config: RunConfig) -> start.HostRun | None:
    """Return the host that connects a run to its clients; None: they are simulated in this process."""
    config.require_simulated()
    if config.cluster is not None:
        require_ray()
        return _simulate_on_cluster
    return None


def _simulate_on_cluster(
    run_folder: RunFolder, prepared: Prepared, run_rounds: Callable[[Prepared], RunReport]
) -> RunReport:
    """Run a federation with its clients on the workers of a cluster (``start.HostRun``)."""
    from fedspan.transports.ray.team import open_team

    assert prepared.config.cluster is not None
    with open_team(prepared.config.cluster) as team:
        return run_rounds(connect_workers(prepared, team, load_noise_key(run_folder.path, prepared.config)))
