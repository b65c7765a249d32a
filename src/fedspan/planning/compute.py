"""Cost of local training: FLOPs and memory of a pass, counted on a model without weights.

The only input from the method is what its layers compute with (``traffic.Computation``) in its first job, with
the largest rank. Savings from a frozen base are counted as autograd realizes them: no gradients of frozen weights, and
no backward pass below the first layer that trains.

The cost of a pass is that of the operations of a real one on tensors of the meta device, derived from their shapes. A
product of matrices (m, k) and (k, n) counts as 2 m k n FLOPs; sums, norms and activations, which take time but hardly
any FLOPs, are left out, as in the published figures of accelerators.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fedspan.assembly.engine import compute_max_length
from fedspan.config import RunConfig
from fedspan.core.tensors import join_extra_name
from fedspan.core.values import LayerSpec
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import has_own_decoder_inputs
from fedspan.models.prefix import FrozenPrefix, list_live_modules
from fedspan.planning.traffic import Computation, StandIn
from fedspan.tasks.losses import upcast
from fedspan.training.config import TrainingSettings


@dataclass(frozen=True)
class Trains:
    """The trained parts of a model."""

    computations: Mapping[LayerSpec, Computation]
    """Computation of the layers, by kind of target layer."""
    extras: bool


_GIB = 1 << 30


@dataclass(frozen=True)
class Compute:
    """FLOPs of local training, counting a multiplication and an addition as two; evaluations are excluded."""

    length: int | None
    """Tokens of an example that are counted; None for images."""
    example: int
    """FLOPs of a forward and a backward pass of one example."""
    once: int
    """FLOPs of an example's hidden states at the end of the model's frozen prefix, which a client stores for all later
    passes; 0 without such a prefix or without room for them, where ``example`` includes all FLOPs."""
    step: int
    client: int | None
    """FLOPs of a client's round (of the mean client, if clients differ), without ``once``; None if its number of
    examples is unknown."""
    run: int | None
    """FLOPs of all clients and rounds, including ``once``; None likewise."""
    first: int | None
    """FLOPs of ``once`` for all examples of a client; None likewise."""
    amortized: int | None
    """FLOPs of ``once`` for all clients, as included in ``run``; None likewise."""

    @property
    def above(self) -> float:
        """Share of the weights that a pass reads: those above the stored hidden states, estimated by their FLOPs."""
        return self.example / (self.example + 2 * self.once)  # frozen layers: backward costs the same as forward


@dataclass(frozen=True)
class Prefix:
    """The frozen blocks whose hidden states are stored."""

    frozen: FrozenPrefix
    features: int
    dtype: torch.dtype

    def count_bytes(self, tokens: int) -> int:
        """Return the bytes of the hidden states of this many tokens."""
        return tokens * self.features * self.dtype.itemsize


class PlannedPasses:
    """Passes of a model without weights; each cost is counted only once.

    Args:
        config: Config of the run, of which the task, data and batches are used.

    Passes raise FedspanError for a model whose own code reads tensor values, or has no operation for its dtype.
    """

    def __init__(self, config: RunConfig, adapted: AdaptedModel) -> None:
        self._adapted, self._name = adapted, config.model.name
        self._task, self._packing = config.task_definition, config.data.packing
        count = self._task.count_passes
        self._passes = 1 if count is None else count(config.data)
        self.longest = None if self._task.has_image_inputs else compute_max_length(config, None, adapted.model)
        """Maximum tokens of an example; None for images."""
        self._size = config.model.image_size
        self._known: dict[tuple[object, ...], PassCost] = {}
        self._prefix: Prefix | None = None
        self._searched = False

    def count_cost(self, trains: Trains, rows: int, length: int | None, prefix: Prefix | None = None) -> PassCost:
        """Count the cost of a pass of a batch; its ``peak`` excludes the gradients of what trains."""
        key = (tuple(sorted(trains.computations.items(), key=repr)), trains.extras, rows, length, prefix is not None)
        if key not in self._known:
            self._known[key] = self._meter_pass(trains, rows, length, prefix)
        return self._known[key]

    def _meter_pass(self, trains: Trains, rows: int, length: int | None, prefix: Prefix | None) -> PassCost:
        trained, inputs = self._install(trains), self._build_inputs(rows * self._passes, length)
        with ExitStack() as contexts:
            if prefix is not None and length is not None:
                hidden = torch.empty(rows, length, prefix.features, device="meta", dtype=prefix.dtype)
                contexts.enter_context(prefix.frozen.feed(hidden))
            cost = meter_pass(lambda: self._compute_loss(inputs))
        gradients = sum(value.grad.untyped_storage().nbytes() for value in trained if value.grad is not None)
        self._install(Trains({}, False))
        return replace(cost, peak=max(0, cost.peak - gradients))

    def _install(self, trains: Trains) -> list[Tensor]:
        """Install stand-ins for a method's tensors in the model, and return those that have a gradient."""
        adapted = self._adapted
        parametrization, tensors, names = dict[str, StandIn](), dict[str, Tensor](), set[str]()
        for layer in adapted.spec.layers:
            computation = trains.computations.get(LayerSpec("", *layer.shape, layer.kernel))
            if computation is None:
                continue
            parametrization[layer.name] = standin = StandIn(computation)
            for slot, shape in standin.shapes(*layer.shape).items():
                tensors[f"{layer.name}/{slot}"] = torch.empty(shape, device="meta")
            names |= {f"{layer.name}/{slot}" for slot in computation.moves}
        moving = frozenset(join_extra_name(path) for path in adapted.buffers) if trains.extras else frozenset[str]()
        if trains.extras:
            names |= {join_extra_name(path) for path in adapted.extras}
        adapted.train_mode(moving)
        live = adapted.install(parametrization, tensors, frozenset(names))
        return [value for value in (*live.values(), *adapted.extras.values()) if value.requires_grad]

    def _build_inputs(self, rows: int, length: int | None) -> dict[str, Tensor]:
        model: Any = self._adapted.model
        if length is None:
            size = self._size or getattr(model.config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            return {"pixel_values": torch.empty(rows, 3, height, width, device="meta", dtype=model.dtype)}
        if self._packing:
            ids = torch.empty(1, rows * length, dtype=torch.long, device="meta")
            return {"input_ids": ids, "position_ids": torch.empty_like(ids)}
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        targets = {"decoder_input_ids": torch.empty_like(ids)} if has_own_decoder_inputs(model) else {}
        return {"input_ids": ids, "attention_mask": torch.empty_like(ids), **targets}

    def _run_model(self, inputs: Mapping[str, Any]) -> Any:
        try:
            return self._adapted.model(**inputs)
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:  # of the model's code
            reason = next(iter(str(error).splitlines()), "")[:120]
            expected = "a model that can be planned, one that computes without its weights, in another dtype perhaps"
            raise FedspanError("model.name", self._name, f"{expected} ({type(error).__name__}: {reason})") from error

    def _compute_loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        generates = self._task.is_generative or has_own_decoder_inputs(self._adapted.model)
        options = {"use_cache": False} if generates else {}
        logits: Tensor = self._run_model({**inputs, **options})[0]
        if self._task.is_generative:  # upper bound: the loss of all tokens
            logits = logits[:, :-1]
        logits = logits.flatten(0, -2)
        labels = torch.empty(len(logits), dtype=torch.long, device="meta")
        return F.cross_entropy(upcast(logits), labels)

    @property
    def prefix(self) -> Prefix | None:
        """The model's frozen prefix; None if it has none, batches are packed, or examples have several passes."""
        is_cached = not self._packing and self._passes == 1 and not has_own_decoder_inputs(self._adapted.model)
        if not self._searched and is_cached and self.longest is not None:
            self._install(Trains({}, False))
            with Meter(), torch.no_grad():
                frozen = FrozenPrefix.find(self._adapted, list_live_modules(self._adapted))
                if frozen is not None:
                    with frozen.record() as recorded:
                        self._run_model(self._build_inputs(1, 2))
                    self._prefix = Prefix(frozen, recorded.hidden.shape[-1], recorded.hidden.dtype)
        self._searched = True
        return self._prefix

    def count_prefix_flops(self, prefix: Prefix, rows: int, length: int) -> int:
        """Count the FLOPs of a batch's hidden states at the end of the prefix."""
        self._install(Trains({}, False))
        inputs = self._build_inputs(rows, length)
        with Meter() as meter, torch.no_grad(), prefix.frozen.record():
            self._run_model(inputs)
        return meter.flops


@dataclass(frozen=True)
class LocalTraining:
    """Cost of the clients' training."""

    compute: Compute
    activations: int
    """Peak bytes of a pass of a batch of the longest examples, without gradients."""
    cache: int
    """Bytes of the hidden states that a client stores."""


def compute_training_cost(
    config: RunConfig,
    passes: PlannedPasses,
    trains: Trains,
    examples: float | None,
    length: int | None,
    cohorts: Sequence[Sequence[int]],
) -> LocalTraining:
    """Compute the cost of the clients' training.

    Args:
        examples: Mean examples of a client; None: unknown.
        length: Mean tokens of an example; None: the maximum length.
        cohorts: Positions of each round's clients.

    Raises:
        FedspanError: If no example can have this length.
    """
    longest = passes.longest
    if length is not None and (longest is None or not isinstance(length, int) or not 1 <= length <= longest):
        if longest is None:
            raise FedspanError("--length", length, problem="images have no length. Leave the option out")
        raise FedspanError("--length", length, f"a whole number from 1 to {longest}")
    length, settings, batch = length or longest, config.build_training_settings(), config.training.batch_size
    examples_seen = _count_round_examples(settings, examples)
    own_examples = examples_seen if examples is None else examples
    prefix = passes.prefix if config.engine.prefix_cache else None
    cache = 0 if prefix is None or length is None else prefix.count_bytes(math.ceil((own_examples or 0) * length))
    if cache > config.engine.prefix_memory * _GIB and config.engine.prefix_folder is None:
        prefix, cache = None, 0
    cost = passes.count_cost(trains, batch, length, prefix)
    example = (cost.forward + cost.backward) // batch
    once = 0 if prefix is None or length is None else passes.count_prefix_flops(prefix, batch, length) // batch
    client = None if examples_seen is None else round(examples_seen * example)
    run = first = stored = None
    if client is not None and own_examples is not None:
        selected, first = [index for cohort in cohorts for index in cohort], round(once * own_examples)
        run = client * len(selected) + (stored := first * len({*selected}))
    step = example * batch * settings.gradient_accumulation_steps
    compute = Compute(length, example, once, step, client, run, first, stored)
    return LocalTraining(compute, passes.count_cost(trains, batch, longest, prefix).peak, cache)


def _count_round_examples(settings: TrainingSettings, examples: float | None) -> float | None:
    """Return the examples that a client trains on in a round, counting repetitions."""
    if settings.local_steps is not None:
        return settings.local_steps * settings.batch_size * settings.gradient_accumulation_steps
    return None if examples is None else examples * settings.local_epochs


@dataclass(frozen=True)
class PassCost:
    """Cost of one pass of a batch."""

    forward: int
    backward: int
    """FLOPs of the backward pass, those of recomputed activations included."""
    peak: int
    """Largest number of bytes that the pass has allocated and not yet released, gradients included."""


def meter_pass(loss: Callable[[], Tensor]) -> PassCost:
    """Meter a forward and backward pass; only a forward pass if nothing in it has a gradient.

    Args:
        loss: Function that runs the forward pass on the meta device; its result is summed.
    """
    with Meter() as meter:
        value = loss()
        forward = meter.flops
        if value.requires_grad:
            value.sum().backward()
    return PassCost(forward, meter.flops - forward, meter.peak)


class Meter(TorchDispatchMode):
    """Counter of the FLOPs of all operations and of the bytes of their results until these are released.

    If a model branches on values that do not exist (is all of the mask 1?), the answer is yes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.peak = 0
        """Bytes."""
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        inputs = {_get_address(value) for value in _list_tensors((args, kwargs))}
        for value in _list_tensors(result):
            if (address := _get_address(value)) not in inputs and address not in self._sizes:
                self._count(address, value.untyped_storage())
        return result

    def _count(self, address: int, storage: torch.UntypedStorage) -> None:
        self._sizes[address] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._release, address)

    def _release(self, address: int) -> None:
        self._now -= self._sizes.pop(address)


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _get_address(value: Tensor) -> int:
    """Return an identifier of a storage that holds nothing, and so has no pointer to data."""
    return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
