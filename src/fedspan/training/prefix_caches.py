"""The prefix caches of an engine: one for each data set that it trains on or evaluates.

An engine is made for one run: in a series (``prefix_rows.shared_prefixes``) it reuses what the previous run computed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import numpy as np

from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task
from fedspan.training.prefix import PrefixCache
from fedspan.training.prefix_rows import store_in_use
from fedspan.training.settings import PrefixSettings

__all__ = ["PrefixCaches"]


class PrefixCaches:
    """The caches of an engine, one for each data set that it is given; without settings, none.

    Args:
        adapted: The model.
        task: The learning problem.
        settings: Storage of hidden states, or None.
    """

    def __init__(self, adapted: AdaptedModel, task: Task, settings: PrefixSettings | None) -> None:
        self.adapted, self.task, self.settings = adapted, task, settings
        self._lock = Lock()
        self._made: dict[int, tuple[Examples, PrefixCache | None, str]] = {}  # a held data set keeps its id
        self._own: dict[int, PrefixCache] = {}
        self._store = store_in_use()

    def replica(self, adapted: AdaptedModel) -> PrefixCaches:
        """Return the same caches for a replica of the model, in another thread."""
        made = copy.copy(self)
        made.adapted, made._own = adapted, {}
        return made

    def cache(self, examples: Examples) -> PrefixCache | None:
        """Return the cache of a data set, or None. Its first use installs the model's bare base."""
        if self.settings is None:
            return None
        key = id(examples)
        with self._lock:
            if key not in self._made:
                self._made[key] = (examples, *self._new(examples, self.settings))
            made = self._made[key][1]
        if made is not None and key not in self._own:
            self._own[key] = made if made.adapted is self.adapted else made.replica(self.adapted)
        return self._own.get(key)

    def _new(self, examples: Examples, settings: PrefixSettings) -> tuple[PrefixCache | None, str]:
        taken = sum(made.nbytes for _, made, _ in self._made.values() if made is not None and not made.mapped)
        file = None if settings.folder is None else settings.folder / f"prefix-{os.getpid()}-{len(self._made)}.bin"
        budget = settings.budget - taken
        return PrefixCache.make(self.adapted, self.task, examples, budget=budget, file=file, store=self._store)

    def why_not(self, examples: Examples) -> str | None:
        """Return the reason why a data set has no cache; None if it has one."""
        if self.cache(examples) is not None:
            return None
        return "it was not asked for" if self.settings is None else self._made[id(examples)][2]

    def ensure(self, examples: Examples, indices: np.ndarray) -> None:
        """Call ``PrefixCache.ensure`` if there is a cache."""
        cache = self.cache(examples)
        if cache is not None and self.settings is not None:
            cache.ensure(indices, self.settings.batch_size)

    def feed(self, examples: Examples, indices: Sequence[int]) -> AbstractContextManager[None]:
        """Let forward passes of a batch of examples skip the prefix within this context, if there is a prefix.

        Args:
            examples: A data set that ``ensure`` has seen; passes over any other run the prefix.
            indices: Examples that ``ensure`` has computed.
        """
        cache = self._own.get(id(examples))  # no cache is made here: the model must not change during a job
        return nullcontext() if cache is None else cache.prefix.feed(cache.hidden(indices))
