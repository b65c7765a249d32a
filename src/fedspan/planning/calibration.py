"""Measured training speed of this machine: a few seconds of the run's work, on random weights.

Only the engine itself is timed, on examples of about the planned length: a machine's peak predicts little about
training that spends its time on small products, norms and Python. A model of more than ``_WHOLE`` bytes is timed with
two of its blocks; the measured FLOP/s are assumed for its other blocks as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fedspan.assembly.engine import choose_device, compute_max_length, make_engine, set_algorithms
from fedspan.assembly.model import build_empty_model, get_pooling
from fedspan.assembly.task import collect_task_settings
from fedspan.config import RunConfig
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_extra_name
from fedspan.core.values import Group, Job, LayerSpec
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.planning.accelerators import HERE, DeviceSpeed
from fedspan.planning.compute import PlannedPasses, Trains
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
        base: Bytes of its model.
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
        self.engine: Engine = make_engine(config, adapted, task, settings)
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
