"""Hidden states that outlive a run: the next run of a series computes less, and has the bits that it has alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.models.prefix import FrozenPrefix, list_live_modules
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import PrefixSettings
from fedspan.training.loop import LoopEngine
from fedspan.training.prefix import PrefixCache
from fedspan.training.prefix_rows import compute_prefix_key, share_prefixes, start_next_run, store_in_use
from helpers import tiny

SETTINGS = PrefixSettings(1 << 30, None, 8)
LAST: Mapping[str, Any] = {"layers_to_transform": [1]}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Examples of every pass through a prefix."""
    found: list[int] = []
    original = PrefixCache._compute

    def counted(self: PrefixCache, indices: Any, **options: Any) -> Any:
        found.append(len(indices))
        return original(self, indices, **options)

    monkeypatch.setattr(PrefixCache, "_compute", counted)
    return found


def built(folder: Path, **changes: Any) -> Prepared:
    return prepare(tiny.config(folder, "deep-bert", model=LAST, **changes))


def cache_of(prepared: Prepared, settings: PrefixSettings = SETTINGS) -> PrefixCache:
    """That of an engine made now."""
    engine = LoopEngine(
        prepared.engine.adapted,
        prepared.task,
        prepared.config.build_training_settings(),
        prepared.config.seed,
        settings,
    )
    cache = engine.prefixes.get_cache(prepared.train)
    assert cache is not None
    return cache


def parts(prepared: Prepared) -> list[np.ndarray]:
    return [prepared.federation.clients[id].train for id in prepared.federation.clients]


def filled(cache: PrefixCache, sets: list[np.ndarray]) -> list[torch.Tensor]:
    for indices in sets:
        cache.ensure(indices, SETTINGS.batch_size)
    return [cache.compute_hidden(indices.tolist()) for indices in sets]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_the_next_run_computes_nothing_that_the_last_one_did(tiny_folder: Path, computed: list[int]) -> None:
    sets = parts(built(tiny_folder))
    alone = filled(cache_of(built(tiny_folder)), sets)
    whole = sum(computed)
    with share_prefixes():
        for turn in range(3):
            computed.clear()
            start_next_run()
            assert same(filled(cache_of(built(tiny_folder)), sets), alone)
            assert (sum(computed) == whole) is (turn == 0)
        assert sum(computed) < whole - sum(map(len, sets)) / 2  # what is left is the trial on a few examples
    assert store_in_use() is None


def test_another_partition_has_the_bits_that_it_has_alone_and_so_has_the_first_after_it(tiny_folder: Path) -> None:
    prepared = built(tiny_folder)
    mine = parts(prepared)
    joined = np.concatenate(mine)
    others = [joined[::2], joined[1::2]]
    wanted = [filled(cache_of(built(tiny_folder)), sets) for sets in (mine, others)]
    with share_prefixes():
        for turn in (0, 1, 0, 0):
            start_next_run()
            found = filled(cache_of(prepared), (mine, others)[turn])
            assert same(found, wanted[turn])


def test_a_write_that_breaks_off_leaves_no_rows_to_be_taken_over(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = built(tiny_folder)
    mine = parts(prepared)
    other = np.concatenate(mine)[::-1].copy()
    wanted = filled(cache_of(built(tiny_folder)), mine)
    with share_prefixes():
        start_next_run()
        filled(cache_of(prepared), mine)
        start_next_run()
        cache = cache_of(prepared)

        def torn(indices: np.ndarray, hidden: torch.Tensor) -> None:
            cache._rows.zero_()
            raise MemoryError

        monkeypatch.setattr(cache, "_write", torn)
        with pytest.raises(MemoryError):
            cache.ensure(other, 5)
        assert not any(cache._stored.has_rows(indices) for indices in (other[:5], np.sort(other)[:5]))
        taken = [index for index in range(len(cache.computed)) if cache._stored._batch_of[index] >= 0]
        assert len(taken) < len(cache.computed)
    assert all(value.any() for value in wanted)


def test_what_is_computed_is_known_by_all_that_it_depends_on(tiny_folder: Path) -> None:
    prepared = built(tiny_folder)
    adapted = prepared.engine.adapted
    prefix = FrozenPrefix.search(adapted, list_live_modules(adapted))

    def key(**changes: Any) -> bytes:
        given = {"adapted": adapted, "prefix": prefix, "task": prepared.task, "examples": prepared.train}
        return compute_prefix_key(**{**given, **changes})

    first = key()
    assert key() == first
    with torch.no_grad():
        adapted.model.get_parameter("classifier.weight").add_(1)  # trained: no part of it
    assert key() == first
    assert prepared.test is not None
    assert key(examples=prepared.test) != first
    weight = adapted.model.get_parameter("bert.embeddings.word_embeddings.weight")
    with torch.no_grad():
        weight[3, 0] += 1e-6
    assert key() != first
    threads = torch.get_num_threads()
    try:
        before = key()
        torch.set_num_threads(threads + 1)
        assert key() != before
    finally:
        torch.set_num_threads(threads)


def test_what_the_next_run_does_not_need_is_let_go(tiny_folder: Path) -> None:
    with share_prefixes():
        start_next_run()
        prepared = built(tiny_folder)
        rows = weakref.ref(cache_of(prepared)._stored)
        gc.collect()
        assert rows() is not None
        with torch.no_grad():
            prepared.engine.adapted.model.get_parameter("bert.embeddings.word_embeddings.weight").mul_(2)
        start_next_run()
        kept = cache_of(prepared)
        gc.collect()
        assert rows() is None
        assert kept.computed.any()


@pytest.mark.slow
def test_a_series_has_the_bits_of_its_runs_alone(tiny_folder: Path, tmp_path: Path, computed: list[int]) -> None:
    values = tiny.settings(tiny_folder, "deep-bert", model=LAST, federation={"rounds": 2})
    fedspan.compare(values, tmp_path / "series", ["fedit", "ffa-lora"], [3, 4])
    shared = sum(computed)
    runs = sorted(path.parent for path in (tmp_path / "series").glob("*/report.json"))
    assert len(runs) == 4
    computed.clear()
    for run in runs:
        alone = tmp_path / run.name
        fedspan.run(run / "config.yaml", alone)
        files = sorted(path.relative_to(alone) for path in alone.rglob("adapter_model.safetensors"))
        assert files
        for file in files:
            left, right = load_file(run / file), load_file(alone / file)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert shared < 0.6 * sum(computed)
