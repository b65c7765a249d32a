"""Cost of a run, estimated before it starts and before a model is downloaded, at the measured speed of this machine.

Only the engine itself is timed, a few seconds on random weights and examples of about the planned length: a machine's
peak predicts little about training that spends its time on small products, norms and Python. A model of more than
``_WHOLE`` bytes is timed with two of its blocks; the measured FLOP/s are assumed for its other blocks as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fedspan.assembly.engine import choose_device, compute_max_length, make_engine, set_algorithms
from fedspan.assembly.model import build_empty_model, get_pooling
from fedspan.assembly.task import collect_task_settings
from fedspan.config import ConfigLike, RunConfig, parse_config, to_plain_values
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_extra_name
from fedspan.core.values import Group, Job, LayerSpec
from fedspan.data.catalogue import DatasetEntry, get_dataset_entry
from fedspan.data.multiple_files import has_placeholders
from fedspan.data.partition import partition
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.planning.accelerators import HERE, UTILIZATION, DeviceSpeed, get_accelerator_speed
from fedspan.planning.compute import PlannedPasses, Trains
from fedspan.planning.plan import Plan, add_time, plan_run, prepare_model
from fedspan.planning.traffic import Computation
from fedspan.tasks.encoding import Ragged
from fedspan.tasks.images import EncodedImages
from fedspan.tasks.registry import get_task
from fedspan.training.batched import BatchedEngine
from fedspan.training.engine import Engine
from fedspan.training.jobs import Assignment
from fedspan.training.stacking import StackingPlan

_WHOLE = 1 << 30  # maximum bytes of a model that is timed with all of its blocks
_BLOCKS = 2  # blocks of a larger model
_SECONDS = 2.0  # time for one client alone, and for several at once, after a first step of each
_CLIENTS, _STEPS = 16, 64  # maximum clients whose jobs are measured, and maximum steps of a client
_MIN_CLIENTS = 4  # minimum clients that are timed at once
_FIRST_ID = 5  # first token id; padding and other special tokens have smaller ids in most vocabularies


def measure_speed(
    config: RunConfig,
    labels: Sequence[str],
    architecture: Mapping[str, Any] | None,
    *,
    base: int,
    length: int | None,
    clients: int,
    steps: int | None,
) -> DeviceSpeed:
    """Measure the speed of this machine with a run's device, threads, number format, engine and batches.

    Args:
        architecture: Transformers config as for ``models.empty.load_empty``.
        length: Mean tokens of an example; None: the maximum length.
        steps: Optimizer steps of a client in a round; None: unknown.

    Raises:
        FedspanError: If the run can't be timed here: its base is quantized, or this machine lacks its device.
    """
    if config.model.quantization is not None:
        problem = f"a base in {config.model.quantization} cannot be timed without its weights"
        raise FedspanError("--device", HERE, "a GPU's name", problem=problem)
    device, threads, depth = choose_device(config.device), torch.get_num_threads(), None
    set_algorithms(config.deterministic, device)
    if base > _WHOLE:
        depth = _BLOCKS
        all_layers = config.model.model_copy(update={"layers_to_transform": None, "layers_pattern": None})
        config = config.model_copy(update={"model": all_layers})
    threads_here = config.threads if config.cluster is None else config.cluster.threads_per_worker
    if threads_here is not None:
        torch.set_num_threads(threads_here)
    try:
        bench = _Bench(config, tuple(labels), architecture, device, depth, length)
        single = bench.time_single()
        parallel, start = single, 0.0
        if isinstance(bench.engine, BatchedEngine):
            parallel, start = bench.time_parallel(-(-clients // config.active_workers), steps)
    finally:
        torch.set_num_threads(threads)
    return DeviceSpeed(HERE, single, parallel, start=start)


class _Bench:
    """An engine with a model, synthetic examples and synthetic jobs.

    Args:
        architecture: Transformers config as for ``models.empty.load_empty``.
        depth: Blocks of the model; None: all.
        length: Mean tokens of an example; None: the maximum length.
    """

    def __init__(
        self,
        config: RunConfig,
        labels: tuple[str, ...],
        architecture: Mapping[str, Any] | None,
        device: torch.device,
        depth: int | None,
        length: int | None,
    ) -> None:
        self._config = config
        adapted = build_empty_model(config, labels, architecture, device, depth)
        longest = compute_max_length(config, None, adapted.model)
        passes = PlannedPasses(config, build_empty_model(config, labels, architecture, depth=depth))
        length = None if passes.longest is None else length or longest
        task_settings = collect_task_settings(config, labels, longest, get_pooling(config))
        task = get_task(config.task).build(_get_processor_attributes(adapted), task_settings, config.data)
        settings = config.build_training_settings()
        self.engine: Engine = make_engine(config, adapted, task, settings, None)
        self._batch = settings.batch_size * settings.gradient_accumulation_steps
        self._examples: Any = _build_examples(config, adapted, len(labels), length, longest, self._batch * _STEPS)
        rank = config.build_method(adapted.spec).r
        kinds = {LayerSpec("", *layer.shape, layer.kernel) for layer in adapted.spec.layers}
        computations = {kind: Computation(rank=rank, moves=frozenset("AB")) for kind in kinds}
        prefix = passes.prefix if config.engine.prefix_cache else None
        cost = passes.count_cost(Trains(computations, bool(adapted.extras)), settings.batch_size, length, prefix)
        self._step = (cost.forward + cost.backward) * settings.gradient_accumulation_steps
        self._job = _build_job(adapted, rank)

    def time_single(self) -> float:
        """Measure the FLOP/s of one client."""
        if isinstance(self.engine, BatchedEngine):
            self.engine.stacking = StackingPlan(1, 1)
        self._measure_seconds(1, 1)
        first = self._measure_seconds(1, 1)
        steps = int(min(_STEPS, max(1, _SECONDS / first)))
        return steps * self._step / self._measure_seconds(1, steps)

    def time_parallel(self, clients: int, steps: int | None) -> tuple[float, float]:
        """Measure the FLOP/s of the stacking plan that the engine finds best, and the seconds of finding it."""
        assert isinstance(self.engine, BatchedEngine)
        planned, self.engine.stacking, steps = steps or _STEPS, None, min(_STEPS, steps or _STEPS)
        began = time.perf_counter()
        assignments = [self._make_assignment(f"client-{number}", steps) for number in range(min(clients, _CLIENTS))]
        rounds = self._config.federation.rounds * planned / steps
        stacking = self.engine.choose_plan(assignments, clients, self._examples, rounds)
        measuring = time.perf_counter() - began
        clients = min(
            clients, max(_MIN_CLIENTS, 2 * stacking.clients_per_pass * stacking.workers)
        )  # enough to form batches
        first = self._measure_seconds(clients, 1)
        steps_each = int(min(steps, max(1, _SECONDS / first)))
        return clients * steps_each * self._step / self._measure_seconds(clients, steps_each), measuring

    def _make_assignment(self, client: str, steps: int) -> Assignment:
        indices = np.arange(self._batch * steps)
        lr = self.engine.settings.optimizer_spec.lr
        return Assignment(client, 0, replace(self._job, steps=steps), indices, lr)

    def _measure_seconds(self, clients: int, steps: int) -> float:
        self.engine.prepare(self._examples, [np.arange(self._batch * steps)])
        sizes = {f"client-{number}": self._batch * steps for number in range(clients)}
        began = time.perf_counter()
        self.engine.train_all(
            self._examples, sizes, lambda client: self._make_assignment(client, steps), lambda *_: None
        )
        return time.perf_counter() - began


def _get_processor_attributes(adapted: AdaptedModel) -> Any:
    """Return the attributes of a tokenizer or an image processor that tasks read for encoded examples."""
    padding = int(getattr(getattr(adapted.model, "config", None), "pad_token_id", None) or 0)
    return SimpleNamespace(
        pad_token_id=padding, pad_token_type_id=0, do_rescale=True, rescale_factor=1 / 255, do_normalize=False
    )


def _build_job(adapted: AdaptedModel, rank: int) -> Job:
    """Build a job of LoRA for all target layers, and the extras."""
    rng = torch.Generator().manual_seed(0)
    tensors = {join_extra_name(path): adapted.get_initial(path).cpu() for path in adapted.get_values()}
    for layer in adapted.spec.layers:
        outputs, inputs = layer.shape
        tensors[f"{layer.name}/A"] = torch.randn(rank, inputs, generator=rng) / inputs
        tensors[f"{layer.name}/B"] = torch.zeros(outputs, rank)
    moving = tuple(name for name in tensors if name not in {join_extra_name(path) for path in adapted.buffers})
    buffers = frozenset(join_extra_name(path) for path in adapted.buffers)
    parametrization = {layer.name: LoRA(1.0) for layer in adapted.spec.layers}
    return Job(parametrization, tensors, (Group(moving),), buffers=buffers)


def _build_examples(
    config: RunConfig, adapted: AdaptedModel, labels: int, length: int | None, longest: int, count: int
) -> Any:
    """Build examples for the task; lengths are evenly spaced from half to one and a half times the mean length."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, max(1, labels), count)
    model: Any = adapted.model
    if length is None:
        size = config.model.image_size or getattr(model.config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else size
        return EncodedImages(
            rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8), classes, np.ones(count, np.int64)
        )
    spread = min(length / 2, longest - length)
    lengths = np.rint(rng.permutation(np.linspace(length - spread, length + spread, count))).astype(np.int64)
    lengths = lengths.clip(2 if longest > 1 else 1, longest)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = Ragged([rng.integers(min(_FIRST_ID, vocabulary - 1), vocabulary, tokens).tolist() for tokens in lengths])
    make_examples = get_task(config.task).make_examples
    if make_examples is None:
        problem = f"the time of {config.task} is not measured on this machine"
        raise FedspanError("--device", "here", "the name of a GPU", problem=problem)
    return make_examples(ids, classes)


def plan(
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    architecture: Mapping[str, Any] | None = None,
    clients: int | None = None,
    examples: int | None = None,
    labels: int | None = None,
    length: int | None = None,
    device: str | None = None,
    utilization: float | None = None,
    mbit: float | None = None,
) -> Plan:
    """Estimate the trainable parameters, bytes, steps, FLOPs, memory and time of a run from its config and its model's.

    Args:
        config: Path of a YAML file, the same as plain values, or a ``RunConfig``.
        overrides: Changes to the config, each ``section.field=value``.
        architecture: A Transformers config as plain values with its ``model_type``, in place of the named model's; left
            out, the model's own ``config.json`` is read (from the hub, if it is there).
        clients: Clients of the federation; left out: ``partition.clients``, or for a natural partition, as many as the
            data have.
        examples: Examples of the training set; left out: the catalogue's number for ``data.dataset``, or the number in
            the data.
        labels: Number of classes; left out: that of the config, of the catalogue, or of the data. The data are read for
            any of these three numbers only if they are a file or a folder on this machine.
        length: Mean tokens of a text of an example, for FLOPs and time; left out: as many as ``model.max_length`` and
            the model allow.
        device: Device that clients train on: a GPU (``A100``, see ``fedspan.planning.accelerators``), or ``here``, this
            machine, on which some seconds of training are timed; left out: no time is planned.
        utilization: Share of a GPU's peak that training reaches; left out: 0.35, explained in
            ``fedspan.planning.accelerators``.
        mbit: Megabits a second between a client and the server; left out: no transfer is planned.

    Returns:
        The numbers; those of which nothing is known, such as the time without a ``device``, are None.

    Examples:
        >>> fedspan.plan("config.yaml", device="A100", mbit=100)

    Raises:
        FedspanError: If the config, the data or an argument has an error that the user can correct.
    """
    checked = (
        config if isinstance(config, RunConfig) and not overrides else parse_config(to_plain_values(config, overrides))
    )
    plans = plan_configs(
        {"": checked},
        architecture=architecture,
        clients=clients,
        examples=examples,
        labels=labels,
        length=length,
        device=device,
        utilization=utilization,
        mbit=mbit,
    )
    if isinstance(plans[""], FedspanError):
        raise plans[""]
    return plans[""]


def plan_configs(
    configs: Mapping[str, RunConfig],
    *,
    architecture: Mapping[str, Any] | None = None,
    clients: int | None = None,
    examples: int | None = None,
    labels: int | None = None,
    length: int | None = None,
    device: str | None = None,
    utilization: float | None = None,
    mbit: float | None = None,
) -> dict[str, Plan | FedspanError]:
    """Estimate the cost of runs that differ only in their method; the arguments besides the configs are ``plan``'s.

    Returns:
        The plan of each run, or the reason why it can't be planned (such as a rank that is too large for its layers,
        or mixed ranks that it does not support).
    """
    first = next(iter(configs.values()))
    clients, examples, labels = _collect_facts(first, clients, examples, labels)
    has_gpu = device not in (None, HERE)
    if utilization is not None and not has_gpu:
        raise FedspanError("--utilization", utilization, problem="it needs the name of a GPU (--device; device=)")
    # The attention implementation of clients with a GPU may differ from this machine's.
    changes = {"device": "cuda"} if has_gpu and first.device == "auto" else {}
    model = prepare_model(first.model_copy(update=changes), labels, architecture)
    plans: dict[str, Plan | FedspanError] = {}
    speed: DeviceSpeed | None = None
    for name, config in configs.items():
        try:
            estimate = plan_run(config, model, clients, examples, length=length, mbit=mbit)
        except FedspanError as error:
            plans[name] = error
            continue
        if device is not None:
            speed = speed or _get_speed(config, estimate, device, utilization, labels, architecture)
            estimate = add_time(estimate, speed, config)
        plans[name] = estimate
    return plans


def _collect_facts(
    config: RunConfig, clients: int | None, examples: int | None, labels: int | None
) -> tuple[int | None, int | None, int]:
    """Return clients, examples and labels as given, from the config or the catalogue, or as counted in a local file."""
    for name, value in (("clients", clients), ("examples", examples), ("labels", labels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FedspanError(name, value, "a whole number from 1")
    in_catalogue = _get_entry(config) is not None
    natural = clients is None and config.partition.partitioner == "natural"
    unnamed = labels is None and not config.data.labels
    if natural or (not in_catalogue and (unnamed or examples is None)):
        counts = _count_local(config)
        if counts is not None:
            clients = counts[0] if natural else clients
            examples = counts[1] if examples is None else examples
            labels = counts[2] if labels is None else labels
    examples = get_known_examples(config) if examples is None else examples
    return clients, examples, get_known_labels(config) if labels is None else labels


def _count_local(config: RunConfig) -> tuple[int, int, int] | None:
    """Return the clients, training examples and labels of data on this machine; None for other data."""
    train = config.data.train
    if train is None or not (train.startswith("builtin:") or Path(train).exists() or has_placeholders(train)):
        return None
    data = config.load_examples()
    clients = config.partition.clients
    if config.partition.partitioner == "natural":
        clients = len(partition(data.train, config.partition, config.data_seed, groups=data.groups).clients)
    return clients, len(data.train), len(data.labels) if get_task(config.task).has_labels else 0


def _get_speed(
    config: RunConfig,
    estimate: Plan,
    device: str,
    utilization: float | None,
    labels: int,
    architecture: Mapping[str, Any] | None,
) -> DeviceSpeed:
    if device != HERE:
        return get_accelerator_speed(device, config.model.dtype, UTILIZATION if utilization is None else utilization)
    return measure_speed(
        config,
        config.data.labels or [str(number) for number in range(labels)],
        architecture,
        base=estimate.client.base,
        length=estimate.compute.length,
        clients=estimate.cohort,
        steps=estimate.steps,
    )


def get_known_labels(config: RunConfig) -> int:
    """Return the number of classes in the data of a config; 0 if the task has none."""
    if not get_task(config.task).has_labels:
        return 0
    data, entry = config.data, _get_entry(config)
    count = len(data.labels) if data.labels else entry.classes if entry else None
    if count is None:
        expected = "the labels, a data set of fedspan data in data.dataset, or the number of labels (--labels; labels=)"
        raise FedspanError("data.labels", None, expected)
    return count if data.first_labels is None else min(count, data.first_labels)


def get_known_examples(config: RunConfig) -> int | None:
    """Return the number of training examples without reading any; None if it is unknown."""
    data, entry = config.data, _get_entry(config)
    if entry is None or data.first_labels is not None:
        return data.max_examples
    count = entry.rows.train
    if data.test is None and data.test_split is None:
        count = round(count * (1 - data.test_fraction))
    return count if data.max_examples is None else min(count, data.max_examples)


def _get_entry(config: RunConfig) -> DatasetEntry | None:
    return None if config.data.dataset is None else get_dataset_entry(config.data.dataset, "data.dataset")
