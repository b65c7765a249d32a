"""Output hidden states of a model's frozen prefix: computed once an example, stored in memory or in a mapped file.

An engine has one cache for each data set; in a series (``prefix_rows.share_prefixes``) it reuses those of the previous
run.

Shapes: N examples, T tokens, D features of a hidden state.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Condition, Lock

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import to_device
from fedspan.models.adapted import AdaptedModel
from fedspan.models.calls import enter_evaluation
from fedspan.models.offload import is_offloaded
from fedspan.models.prefix import FrozenPrefix, NoPrefix, list_live_modules
from fedspan.tasks.losses import get_logits
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import Padding, split_evaluation_batches
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import convert_out_of_memory, is_explained
from fedspan.training.prefix_rows import PrefixRows, PrefixStore, compute_prefix_key, store_in_use
from fedspan.training.stages import Stages

_GIB = 2**30
_SAMPLE = 4
"""Number of examples on which a cache is verified."""


class PrefixCache:
    """The hidden states of a data set's examples.

    Args:
        task: The learning problem, which builds the batches.
        budget: Memory in bytes.
        file: The memory-mapped file for hidden states that exceed the budget. It is newly created and unlinked at once,
            so that it ends with the process.
        store: Store with equal hidden states of the previous run; None: they end with this cache.

    Raises:
        NoPrefix: If there is neither memory nor a file for them, or if the number of an example's hidden states is
            neither its length nor the same for all.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        adapted: AdaptedModel,
        task: Task,
        examples: Examples,
        *,
        budget: int,
        file: Path | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.prefix, self.adapted, self.task, self.examples = prefix, adapted, task, examples
        self.padding: Padding | None = None
        """Runs passes of ``ensure`` without padding; None: they are padded."""
        lengths = np.asarray(examples.lengths)
        if not len(lengths):
            raise NoPrefix("there are no examples")
        extremes = [int(lengths.argmin()), int(lengths.argmax())]
        states = [self._compute([index]) for index in extremes]
        self.tokens = _compute_token_counts(lengths, extremes, [hidden.shape[1] for hidden in states])
        """Number of hidden states of each example, int64, (N,)."""
        self._tokens = torch.from_numpy(self.tokens)
        self._starts = 1 + self._tokens.cumsum(0) - self._tokens  # the first row is zero: padding points at it
        shape, dtype = (1 + int(self.tokens.sum()), states[0].shape[2]), states[0].dtype
        self.nbytes = shape[0] * shape[1] * dtype.itemsize
        """Bytes of all hidden states together."""

        def allocate() -> PrefixRows:
            return PrefixRows.make(shape, dtype, len(lengths), budget, file)

        self._stored = (
            allocate()
            if store is None
            else store.get_rows(compute_prefix_key(adapted, prefix, task, examples), allocate)
        )
        self._rows = self._stored.values
        self.mapped = self._stored.mapped
        """Whether the hidden states are in a file."""
        self.computed = np.zeros(len(lengths), bool)
        """Whether each example's hidden states were requested and are computed, (N,)."""
        self._claimed = np.zeros(len(lengths), bool)  # a thread is computing them
        self._changed = Condition()

    @classmethod
    def make(
        cls,
        adapted: AdaptedModel,
        task: Task,
        examples: Examples,
        *,
        live: Collection[str] | None = None,
        budget: int,
        file: Path | None = None,
        store: PrefixStore | None = None,
        padding: Padding | None = None,
    ) -> tuple[PrefixCache | None, str]:
        """Make a cache that is verified on the logits of a few examples, or return None and the reason why not.

        The model has its bare base afterwards (``AdaptedModel.install`` of nothing).

        Args:
            adapted: The model.
            task: The learning problem.
            examples: The data set.
            live: Modules that change; None: all target layers and extras.
            budget: Memory in bytes.
            file: The file for hidden states that exceed the budget.
            store: Store with the hidden states of the previous run.
            padding: Runs passes without padding; None: they are padded.
        """
        try:
            if getattr(task, "packing", False):
                raise NoPrefix("a batch's examples are packed into one row")
            if hasattr(task, "collate_for_training"):
                raise NoPrefix("a part of the inputs is drawn at random for every batch")
            if getattr(task, "has_several_passes", False):
                raise NoPrefix("each of an example's texts has a pass of its own")
            prefix = FrozenPrefix.search(adapted, list_live_modules(adapted) if live is None else live)
            adapted.install({}, {}, frozenset())
            cache = cls(prefix, adapted, task, examples, budget=budget, file=file, store=store)
            cache.padding = padding
            cache.verify()
        except NoPrefix as error:
            return None, str(error)
        except Exception as error:  # in passes through the whole model, each example fails alone
            if is_explained(error):
                raise
            return None, f"the model fails on an example ({type(error).__name__}: {error})"
        return cache, ""

    def create_replica(self, adapted: AdaptedModel, padding: Padding | None = None) -> PrefixCache:
        """Return a cache with the same hidden states for a replica of the model, in another thread."""
        cache = copy.copy(self)
        cache.prefix, cache.adapted, cache.padding = self.prefix.on(adapted), adapted, padding
        return cache

    def count_missing(self, indices: np.ndarray) -> int:
        """Count the examples whose hidden states are not computed yet."""
        return int(np.count_nonzero(~self.computed[np.unique(indices)]))

    def ensure(
        self,
        parts: Sequence[np.ndarray],
        batch_size: int,
        run: Callable[[Callable[[PrefixCache], None]], None] | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> None:
        """Compute the missing hidden states of some sets of examples, each in batches of similar length.

        The last bits of an example may depend on which other examples were missing: they are reproducible if the same
        sets (a client's part, a held-out set) are requested.

        Args:
            parts: The sets' examples.
            batch_size: Number of examples in a forward pass.
            run: Calls a function with this cache and its replicas, each in a thread; None: with this cache.
            on_done: Called with the number of examples of every batch that is done.
        """
        while True:
            with self._changed:
                if all(self.computed[part].all() for part in parts):
                    return
                claimed: list[np.ndarray] = []
                for part in map(np.unique, parts):
                    claimed.append(part[~(self.computed[part] | self._claimed[part])])
                    self._claimed[claimed[-1]] = True
                if not any(map(len, claimed)):  # other threads are computing them
                    self._changed.wait()
                    continue
            batches = [batch for part in claimed for batch in split_evaluation_batches(part, self.tokens, batch_size)]
            remaining = iter(batches)  # which threads share

            def compute(cache: PrefixCache, remaining: Iterator[np.ndarray] = remaining) -> None:
                for batch in remaining:
                    cache._store(batch)
                    if on_done is not None:
                        on_done(len(batch))

            try:
                compute(self) if run is None else run(compute)
            finally:  # another thread or call may compute what an error left undone
                with self._changed:
                    self._claimed[np.concatenate(claimed)] = False
                    self._changed.notify_all()

    def _store(self, batch: np.ndarray) -> None:
        """Compute the hidden states of a batch, unless the previous run stored them."""
        if not self._stored.has_rows(batch):
            hidden = self._compute(batch.tolist(), padding=self.padding).cpu()
            self._stored.invalidate(batch)
            self._write(batch, hidden)
            self._stored.mark_written(batch)
        self.computed[batch] = True

    def compute_hidden(self, indices: Sequence[int], tokens: int | None = None) -> Tensor:
        """Return hidden states on the model's device, (examples, tokens, D), zero beyond each example's own.

        Args:
            indices: Examples that ``ensure`` has computed.
            tokens: Number of tokens of the batch; None: that of its longest example.
        """
        examples = np.asarray(indices, dtype=np.int64)
        if not self.computed[examples].all():
            raise ValueError(
                f"no hidden states of examples {examples[~self.computed[examples]].tolist()[:5]} were computed"
            )
        rows = self._compute_row_numbers(examples, int(self.tokens[examples].max()) if tokens is None else tokens)
        return to_device(self._rows.index_select(0, rows.flatten()).view(*rows.shape, -1), self.adapted.device)

    def verify(self) -> None:
        """Verify the cache on a few examples.

        Raises:
            NoPrefix: If logits differ by more than rounding, or if hidden states in training differ from those in
                evaluation.
        """
        order = np.argsort(self.tokens, kind="stable")
        sample = order[np.unique(np.linspace(0, len(order) - 1, _SAMPLE).astype(np.int64))]
        self.ensure([sample], 1)  # hidden states that are stored do not depend on other examples
        batch = self.task.collate(self.examples, sample.tolist(), self.adapted.device)
        hidden = self.compute_hidden(sample.tolist())
        with enter_evaluation(self.adapted.model):
            expected = self._compute_logits(batch, sample)
            with self.prefix.feed(hidden):
                logits = self._compute_logits(batch, sample)
        error = _compute_relative_error(logits, expected)
        if not error <= _get_tolerance(hidden.dtype):
            raise NoPrefix(f"logits differ by {error:.1e} when hidden states are taken from the cache")
        in_evaluation = self._compute(sample.tolist())
        for _ in range(2):
            error = _compute_relative_error(self._compute(sample.tolist(), training=True), in_evaluation)
            if not error <= _get_tolerance(hidden.dtype):
                raise NoPrefix(f"hidden states differ by {error:.1e} between training and evaluation")

    def _compute_logits(self, batch: object, sample: np.ndarray) -> Tensor:
        """Return the model's logits in a forward pass; logits by token without those of padding."""
        outputs: list[Tensor] = []
        model = self.adapted.model
        handle = model.register_forward_hook(lambda _, __, output: outputs.append(get_logits(output)))
        try:
            self.task.compute_loss(model, batch)  # pyright: ignore[reportArgumentType]
        finally:
            handle.remove()
        logits = outputs[0]
        if logits.ndim < 3:
            return logits
        return logits[(torch.arange(logits.shape[1]) < self._tokens[sample][:, None]).to(logits.device)]

    def _compute(self, indices: Sequence[int], *, training: bool = False, padding: Padding | None = None) -> Tensor:
        """Compute the prefix's output, (examples, T, D); without ``padding``, in a padded pass."""
        model, device = self.adapted.model, self.adapted.device
        cards = [device] if device.type == "cuda" else []
        with enter_evaluation(model), torch.random.fork_rng(cards, enabled=training):  # verify() only
            if training:
                self.adapted.train_mode(frozenset())
            batch, lengths = self.task.collate(self.examples, indices, device), self.examples.lengths[indices]
            faster = nullcontext() if padding is None else padding.remove_padding(batch, lengths, same_attention=True)
            with faster as layout, self.prefix.record() as recorded:
                self.task.compute_loss(model, batch)
        hidden = recorded.hidden if layout is None else layout.unpack(recorded.hidden)
        if hidden.ndim != 3 or len(hidden) != len(indices):
            raise NoPrefix(f"{len(indices)} examples have hidden states of shape {tuple(hidden.shape)}")
        return hidden

    def _compute_row_numbers(self, indices: np.ndarray, tokens: int) -> Tensor:
        """Return the rows of examples' hidden states, (examples, tokens); 0 beyond their own."""
        position = torch.arange(tokens)
        return torch.where(position < self._tokens[indices][:, None], self._starts[indices][:, None] + position, 0)

    def _write(self, indices: np.ndarray, hidden: Tensor) -> None:
        rows = self._compute_row_numbers(indices, hidden.shape[1])
        self._rows.index_copy_(0, rows[rows > 0], hidden[rows > 0])


def _compute_token_counts(lengths: np.ndarray, extremes: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Derive the number of hidden states of each example from those of the shortest and the longest."""
    if list(counts) == lengths[list(extremes)].tolist():
        return lengths.astype(np.int64)
    if len(set(counts)) == 1:
        return np.full(len(lengths), counts[0], np.int64)
    raise NoPrefix(f"examples of lengths {lengths[list(extremes)].tolist()} have {list(counts)} hidden states")


def _compute_relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def _get_tolerance(dtype: torch.dtype) -> float:
    """Return the relative tolerance for the effect of padding in a number format.

    In float64 it is float32's rounding: many decoders compute softmax and norms in float32, whatever their format.
    """
    return {64: 1e-6, 32: 1e-4}.get(torch.finfo(dtype).bits, 5e-2)


class PrefixCaches:
    """The caches of an engine, one for each data set that it is given; none without ``prefix_cache``.

    Args:
        batch_size: Number of examples in the forward passes that compute hidden states.
        stages: Reports how many examples are done; None: it is not reported.
        padding: Runs passes without padding; None: they are padded.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        task: Task,
        settings: EngineConfig,
        batch_size: int,
        stages: Stages | None = None,
        padding: Padding | None = None,
    ) -> None:
        self.adapted, self.task, self.settings = adapted, task, settings
        self._batch_size, self._padding = batch_size, padding
        self.stages = stages or Stages()
        self._lock = Lock()
        self._caches: dict[int, tuple[Examples, PrefixCache | None, str]] = {}  # a held data set keeps its id
        self._replicas: dict[int, PrefixCache] = {}
        self._store = store_in_use()

    def create_replica(self, adapted: AdaptedModel, padding: Padding | None = None) -> PrefixCaches:
        """Return the same caches for a replica of the model, in another thread."""
        caches = copy.copy(self)
        caches.adapted, caches._padding, caches._replicas = adapted, padding, {}
        return caches

    def get_cache(self, examples: Examples) -> PrefixCache | None:
        """Return the cache of a data set, or None. Its first use installs the model's bare base."""
        if not self.settings.prefix_cache:
            return None
        key = id(examples)
        with self._lock:
            if key not in self._caches:
                self._caches[key] = (examples, *self._create(examples))
            cache = self._caches[key][1]
        if cache is not None and key not in self._replicas:
            is_own = cache.adapted is self.adapted
            self._replicas[key] = cache if is_own else cache.create_replica(self.adapted, self._padding)
        return None if cache is None else self._replicas[key]

    def drop(self, examples: Examples) -> None:
        """Store nothing of a data set from now on, in any replica."""
        self._caches[id(examples)] = (examples, None, "the model fails on an example")

    def _create(self, examples: Examples) -> tuple[PrefixCache | None, str]:
        used_bytes = sum(
            cache.nbytes for _, cache, _ in self._caches.values() if cache is not None and not cache.mapped
        )
        folder, name = self.settings.prefix_folder, f"prefix-{os.getpid()}-{len(self._caches)}.bin"
        file = None if folder is None else Path(folder) / name
        budget = int(self.settings.prefix_memory * _GIB) - used_bytes
        # Weights that are offloaded cannot be digested for another run without reading them all.
        store = None if any(map(is_offloaded, self.adapted.model.modules())) else self._store
        if self._padding is not None and len(examples.lengths):
            self._padding.ensure(examples)  # in every order of calls, so that a resumed run computes the same bits
        return PrefixCache.make(
            self.adapted, self.task, examples, budget=budget, file=file, store=store, padding=self._padding
        )

    def explain_refusal(self, examples: Examples) -> str | None:
        """Return the reason why a data set has no cache; None if it has one."""
        if self.get_cache(examples) is not None:
            return None
        return "it was not asked for" if not self.settings.prefix_cache else self._caches[id(examples)][2]

    def ensure(
        self,
        examples: Examples,
        parts: Sequence[np.ndarray],
        run: Callable[[Callable[[PrefixCaches], None]], None] | None = None,
    ) -> None:
        """Call ``PrefixCache.ensure``, if there is a cache.

        Args:
            examples: The data set.
            parts: Sets of its examples.
            run: Calls a function with these caches and their replicas, each in a thread; None: with these.
        """
        cache = self.get_cache(examples)
        if cache is None:
            return
        missing, size = sum(map(cache.count_missing, parts)), self._batch_size
        if missing:
            memory = convert_out_of_memory(self.adapted.device, "evaluation.batch_size", size, "examples in a batch")

            def run_caches(compute: Callable[[PrefixCache], None]) -> None:
                def compute_share(caches: PrefixCaches) -> None:
                    if caches._padding is not None:
                        caches._padding.ensure(examples)
                    replica = caches.get_cache(examples)
                    assert replica is not None
                    compute(replica)

                compute_share(self) if run is None else run(compute_share)

            with memory, self.stages.stage("hidden states", missing):
                cache.ensure(parts, size, run_caches, lambda count: self.stages.advance("hidden states", count))

    def feed(self, examples: Examples, indices: Sequence[int]) -> AbstractContextManager[None]:
        """Let forward passes of a batch of examples skip the prefix within this context, if there is a prefix.

        Args:
            examples: A data set that ``ensure`` has seen; passes over any other run the prefix.
            indices: Examples that ``ensure`` has computed.
        """
        cache = self._replicas.get(id(examples))  # no cache is made here: the model must not change during a job
        if cache is None or self._caches[id(examples)][1] is None:
            return nullcontext()
        return cache.prefix.feed(cache.compute_hidden(indices))
