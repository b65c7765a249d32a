"""Frozen prefixes: cached and stored hidden states give what computing them gives; where that can't be, no cache."""

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.values import Job, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.models.prefix import FrozenPrefix, list_live_modules
from fedspan.tasks.task import Examples
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.prefix import PrefixCache
from fedspan.training.prefix_rows import compute_prefix_key, share_prefixes, start_next_run, store_in_use
from fedspan.training.services import PLAIN
from helpers import tiny, tiny_decoders, tiny_images
from helpers.families import others_slow

MEMORY = EngineConfig(name="loop")
LAST: Mapping[str, Any] = {"layers_to_transform": [1]}
TEXTS = ("deep-bert", "roberta", "distilbert", "gpt2")
SINGLE = ("llama-lm", "qwen-lm", "opt-lm", "gemma-lm")
"""Compute parts of attention or norms in float32 whatever their format."""
KINDS = (*TEXTS, *(f"{family}-lm" for family in tiny_decoders.FAMILIES), "vit")


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, decoders: Path, images: Path) -> Mapping[str, Path]:
    return {"text": tiny_folder, "lm": decoders, "image": images}


def built(kind: str, folders: Mapping[str, Path], model: Mapping[str, Any] = LAST, **changes: Any) -> Prepared:
    """A run with target layers in the last of two blocks alone."""
    if kind == "vit":
        model = {"target_modules": ["q_proj", "v_proj", "fc1"], **model}
        return prepare(tiny_images.config(folders["image"], kind, model=model, **changes))
    if kind.endswith("-lm"):
        changes = {"evaluation": {"generate": False}, **changes}
        family = kind.removesuffix("-lm")
        return prepare(parse_config(tiny_decoders.settings(folders["lm"], family, model=model, **changes)))
    if kind == "distilbert":
        model = {"target_modules": ["q_lin", "v_lin", "lin1"], **model}
    return prepare(tiny.config(folders["text"], kind, model=model, **changes))


def store_in(budget: int, folder: Path | None = None) -> EngineConfig:
    """Options of the loop engine with so many bytes of memory for hidden states."""
    return EngineConfig(
        name="loop", prefix_memory=budget / 2**30, prefix_folder=None if folder is None else str(folder)
    )


def engine_of(prepared: Prepared, options: EngineConfig) -> LoopEngine:
    settings = prepared.config.build_training_settings()
    return LoopEngine(prepared.engine.adapted, prepared.task, settings, prepared.config.seed, options)


def job_of(prepared: Prepared, id: str, dtype: torch.dtype) -> Job:
    """A client's first job, with tensors that were moved off zero, in a number format."""
    job = prepared.evaluator.build_job(prepared.federation.begin(), id)
    rng = torch.Generator().manual_seed(1)
    tensors = {
        name: value.to(dtype) + 0.05 * torch.randn(value.shape, generator=rng, dtype=dtype)
        for name, value in job.tensors.items()
    }
    return replace(job, tensors=tensors)


def trained(engine: LoopEngine, prepared: Prepared, job: Job, id: str) -> Trained:
    return engine.train(Assignment(id, 0, job, prepared.federation.clients[id].train, 0.02), prepared.train)


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest relative distance between tensors of one name."""
    assert set(left) == set(right)
    return max(
        float((left[name].double() - right[name].double()).norm() / left[name].double().norm().clamp(min=1e-12))
        for name in left
    )


@contextmanager
def uses(adapted: AdaptedModel) -> Generator[list[int]]:
    """Within this context, how many examples went through a layer inside the first block, pass by pass."""
    model = adapted.model
    lists = (one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == 2)
    inside = next(module for module in next(lists)[0].modules() if type(module).__name__.endswith("Norm"))
    seen: list[int] = []
    handle = inside.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", others_slow(KINDS, ["deep-bert", "llama-lm"]))
def test_a_job_in_float64_is_the_same(kind: str, folders: Mapping[str, Path]) -> None:
    """1e-9; padding alone moves more where a model computes softmax and norms in float32 whatever its format."""
    prepared = built(kind, folders, training={"local_steps": None, "local_epochs": 2, "batch_size": 4})
    prepared.engine.adapted.model.double()
    tolerance = 1e-6 if kind in SINGLE else 1e-9
    id = list(prepared.federation.clients)[-1]
    job = job_of(prepared, id, torch.float64)
    plain, cached = engine_of(prepared, PLAIN), engine_of(prepared, MEMORY)
    wanted = trained(plain, prepared, job, id)
    assert cached.prefixes.explain_refusal(prepared.train) is None
    found = trained(cached, prepared, job, id)
    assert apart(wanted.tensors, found.tensors) < tolerance
    assert found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=tolerance)
    assert apart(job.tensors, found.tensors) > 1e-3
    with uses(prepared.engine.adapted) as seen:
        trained(cached, prepared, job, id)
        assert not seen
        trained(plain, prepared, job, id)
        assert seen


@pytest.mark.parametrize("kind", others_slow(KINDS, ["roberta", "gpt2-lm"]))
def test_predictions_are_the_same_in_float32(kind: str, folders: Mapping[str, Path]) -> None:
    prepared = built(kind, folders)
    id = next(iter(prepared.federation.clients))
    job, indices = job_of(prepared, id, torch.float32), np.arange(len(prepared.train))[::-1]
    cached = engine_of(prepared, MEMORY)
    wanted = engine_of(prepared, PLAIN).predict(job, prepared.train, indices, 7)
    with uses(prepared.engine.adapted) as seen:
        found = cached.predict(job, prepared.train, indices, 7)
        seen.clear()
        again = cached.predict(job, prepared.train, indices, 11)
        assert not seen
    assert torch.allclose(wanted, found, rtol=1e-4, atol=1e-5)
    assert torch.allclose(wanted, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fedgalore", "lora-a2", "ffa-lora", "fedavg"])
def test_methods_that_inspect_more_than_factors(method: str, folders: Mapping[str, Path]) -> None:
    """Projectors from whole gradients, probes, dense weights; adapters' dropout draws the same masks."""
    prepared = built(
        "deep-bert", folders, method={"name": method}, training={"lora_dropout": 0.3 if method == "ffa-lora" else 0.0}
    )
    prepared.engine.adapted.model.double()
    job = job_of(prepared, "south", torch.float64)
    wanted = trained(engine_of(prepared, PLAIN), prepared, job, "south")
    found = trained(engine_of(prepared, MEMORY), prepared, job, "south")
    assert apart(wanted.tensors, found.tensors) < 1e-9
    if wanted.gradient:
        assert apart(wanted.gradient, found.gradient) < 1e-9


def test_a_whole_federation_whose_base_moves(folders: Mapping[str, Path]) -> None:
    """FLoRA merges into the base every round; clients are drawn again; float32 with SGD."""
    prepared = built("deep-bert", folders, method={"name": "flora", "r": 2}, training={"optimizer": "sgd", "lr": 0.05})
    states: list[Mapping[str, Tensor]] = []
    for options in (PLAIN, MEMORY):
        tiny.use_engine(prepared.federation, engine_of(prepared, options))
        progress = tiny.run_all_rounds(prepared)
        total = {name: delta for name, delta in progress.state.base.total.items() if isinstance(delta, Tensor)}
        assert len(total) == len(prepared.engine.adapted.layers)
        states.append({**progress.state.tensors, **total})
    assert apart(*states) < 1e-5


def test_each_example_is_computed_once(folders: Mapping[str, Path]) -> None:
    prepared = built("deep-bert", folders, training={"local_steps": None, "local_epochs": 3})
    adapted, part = prepared.engine.adapted, prepared.federation.clients["south"].train
    engine = engine_of(prepared, MEMORY)
    assert engine.prefixes.get_cache(prepared.train) is not None
    job = job_of(prepared, "south", torch.float32)
    with uses(adapted) as seen:
        trained(engine, prepared, job, "south")
        assert len(part) - 4 <= sum(seen) <= len(part)  # the four on which it was tried are known
        seen.clear()
        engine.predict(job, prepared.train, part[:9], 4)
        assert not seen


def test_hidden_states_are_zero_behind_each_example_s_own_and_come_in_the_model_s_format(
    folders: Mapping[str, Path],
) -> None:
    prepared = built("deep-bert", folders, {**LAST, "dtype": "bfloat16"})
    cache, reason = PrefixCache.make(prepared.engine.adapted, prepared.task, prepared.train, budget=1 << 20)
    assert cache is not None, reason
    indices = [int(prepared.train.lengths.argmin()), int(prepared.train.lengths.argmax()), 3]
    cache.ensure([np.array(indices)], 2)
    hidden = cache.compute_hidden(indices, 14)
    assert hidden.dtype == torch.bfloat16
    assert hidden.shape == (3, 14, 16)
    for row, index in zip(hidden, indices, strict=True):
        own = int(prepared.train.lengths[index])
        assert (row[:own].abs().sum(1) > 0).all()
        assert not row[own:].any()
    assert torch.equal(cache.compute_hidden(indices[:1]), hidden[:1, : int(prepared.train.lengths[indices[0]])])


def test_a_model_in_bfloat16(folders: Mapping[str, Path]) -> None:
    prepared = built("deep-bert", folders, {**LAST, "dtype": "bfloat16"})
    job = job_of(prepared, "south", torch.float32)
    engine = engine_of(prepared, MEMORY)
    assert engine.prefixes.explain_refusal(prepared.train) is None
    found = trained(engine, prepared, job, "south")
    assert apart(trained(engine_of(prepared, PLAIN), prepared, job, "south").tensors, found.tensors) < 0.02


def test_beyond_the_budget_a_file_holds_them_and_leaves_nothing_behind(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    prepared = built("deep-bert", folders)
    job = job_of(prepared, "south", torch.float32)
    inside, mapped = (engine_of(prepared, store_in(budget, tmp_path / "made" / "here")) for budget in (1 << 20, 0))
    caches = [engine.prefixes.get_cache(prepared.train) for engine in (inside, mapped)]
    assert [cache is not None and cache.mapped for cache in caches] == [False, True]
    results = [trained(engine, prepared, job, "south") for engine in (inside, mapped)]
    for name, value in results[0].tensors.items():
        assert torch.equal(value, results[1].tensors[name])
    assert list((tmp_path / "made" / "here").iterdir()) == []


def test_the_budget_is_for_all_data_sets_together(folders: Mapping[str, Path]) -> None:
    prepared = built("deep-bert", folders)
    adapted, task = prepared.engine.adapted, prepared.task
    cache, reason = PrefixCache.make(adapted, task, prepared.train, budget=1 << 20)
    assert cache is not None, reason
    assert cache.nbytes == (1 + int(prepared.train.lengths.sum())) * 16 * 4
    engine = engine_of(prepared, store_in(cache.nbytes))
    assert engine.prefixes.explain_refusal(prepared.train) is None
    assert str(engine.prefixes.explain_refusal(prepared.test)).endswith("exceed the budget of 0, and there is no file")
    job = job_of(prepared, "south", torch.float32)
    indices = np.arange(len(prepared.test))
    wanted = engine_of(prepared, PLAIN).predict(job, prepared.test, indices, 5)
    assert torch.equal(engine.predict(job, prepared.test, indices, 5), wanted)


def test_a_folder_that_can_not_be_made(folders: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    prepared = built("deep-bert", folders)
    engine = engine_of(prepared, store_in(0, tmp_path / "file"))
    assert "can't hold" in str(engine.prefixes.explain_refusal(prepared.train))


@pytest.mark.parametrize("kind", ["llama-lm", "gpt2-lm"])
def test_generation_does_not_use_it(kind: str, folders: Mapping[str, Path]) -> None:
    prepared = built(kind, folders, evaluation={"generate": True})
    id = next(iter(prepared.federation.clients))
    job, indices = job_of(prepared, id, torch.float32), np.arange(9)
    engine = engine_of(prepared, MEMORY)
    engine.predict(job, prepared.train, indices, 4)
    wanted = engine_of(prepared, PLAIN).predict(job, prepared.train, indices, 4, generate=True)
    assert torch.equal(engine.predict(job, prepared.train, indices, 4, generate=True), wanted)


def _dropping(prepared: Prepared) -> None:
    for module in prepared.engine.adapted.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1


def _dropping_attention(prepared: Prepared) -> None:
    for module in prepared.engine.adapted.model.modules():
        if "attention_dropout" in vars(module):
            vars(module)["attention_dropout"] = 0.4


def _mixing(prepared: Prepared) -> None:
    """Examples of a batch see each other in the embeddings."""
    words = prepared.engine.adapted.model.get_submodule("bert.embeddings.word_embeddings")
    words.register_forward_hook(lambda _, __, output: output - output.mean(0, keepdim=True))


def _measuring(prepared: Prepared) -> None:
    """A norm over a batch's examples, in evaluation too."""
    model: Any = prepared.engine.adapted.model
    norm = nn.BatchNorm1d(16, track_running_stats=False, device=prepared.engine.adapted.device)
    model.bert.embeddings.LayerNorm.register_forward_hook(lambda _, __, output: norm(output.mT).mT)
    model.bert.embeddings.norm = norm


def saving(module: str) -> Mapping[str, Any]:
    return {**LAST, "modules_to_save": [module]}


@pytest.mark.parametrize(
    ("kind", "model", "spoil", "reason"),
    [
        ("deep-bert", {}, None, "bert.encoder.layer.0.attention.self.query changes, and it is used in the first block"),
        ("deep-bert", saving("word_embeddings"), None, "word_embeddings changes"),
        ("gpt2-lm", saving("lm_head"), None, "lm_head changes, and it is used in the first block or before it"),
        ("vit", saving("patch_embeddings"), None, "patch_embeddings.projection changes"),
        ("deep-bert", {**LAST, "gradient_checkpointing": True}, None, "gradient checkpointing"),
        ("deep-bert", LAST, _dropping, "bert.embeddings.dropout draws at random (dropout 0.1)"),
        ("llama-lm", LAST, _dropping_attention, "between training and evaluation"),
        ("deep-bert", LAST, _mixing, "when hidden states are taken from the cache"),
        ("deep-bert", LAST, _measuring, "when hidden states are taken from the cache"),
    ],
)
def test_there_is_none_where_it_would_not_be_exact(
    kind: str,
    model: Mapping[str, Any],
    spoil: Callable[[Prepared], None] | None,
    reason: str,
    folders: Mapping[str, Path],
) -> None:
    prepared = built(kind, folders, model)
    if spoil is not None:
        spoil(prepared)
    engine = engine_of(prepared, MEMORY)
    modes = [module.training for module in prepared.engine.adapted.model.modules()]
    random = torch.get_rng_state()
    assert reason in str(engine.prefixes.explain_refusal(prepared.train))
    assert torch.equal(torch.get_rng_state(), random)
    assert modes == [module.training for module in prepared.engine.adapted.model.modules()]
    if spoil is None:
        id = next(iter(prepared.federation.clients))
        job = job_of(prepared, id, torch.float32)
        wanted = trained(engine_of(prepared, PLAIN), prepared, job, id)
        assert apart(wanted.tensors, trained(engine, prepared, job, id).tensors) == 0


def test_packed_examples_have_none(folders: Mapping[str, Path]) -> None:
    prepared = built("llama-lm", folders, data={"packing": True})
    assert (
        engine_of(prepared, MEMORY).prefixes.explain_refusal(prepared.train)
        == "a batch's examples are packed into one row"
    )


def test_images_through_convolutions_have_none(images: Path) -> None:
    prepared = prepare(parse_config(tiny_images.settings(images, "resnet")))
    engine = engine_of(prepared, MEMORY)
    assert "no list of blocks" in str(engine.prefixes.explain_refusal(prepared.train))


def test_a_data_set_that_was_not_asked_for_is_computed_whole(folders: Mapping[str, Path]) -> None:
    """In mid-job nothing may be tried on the model."""
    prepared = built("deep-bert", folders)
    prefixes = engine_of(prepared, MEMORY).prefixes
    batch = prepared.task.collate(prepared.train, [0, 1], prepared.engine.adapted.device)
    with uses(prepared.engine.adapted) as seen, prefixes.feed(prepared.train, [0, 1]):
        prepared.task.compute_loss(prepared.engine.adapted.model, batch)
        assert seen == [2]


class Interrupting:
    """A task that is interrupted in its n-th batch."""

    def __init__(self, task: Any, batches: int) -> None:
        self.task, self.left = task, batches

    def collate(self, examples: Examples, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.task.collate(examples, indices, device)

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self.task.compute_loss(model, batch)


def test_interrupted_and_taken_up_again(folders: Mapping[str, Path]) -> None:
    prepared = built("deep-bert", folders)
    adapted = prepared.engine.adapted
    whole, reason = PrefixCache.make(adapted, prepared.task, prepared.train, budget=1 << 20)
    cache, _ = PrefixCache.make(adapted, prepared.task, prepared.train, budget=1 << 20)
    assert whole is not None, reason
    indices = np.arange(40)
    whole.ensure([indices], 8)
    own = [vars(module).get("forward") for module in adapted.model.modules()]
    cache.task = Interrupting(prepared.task, 3)
    adapted.train_mode(frozenset())
    with pytest.raises(KeyboardInterrupt):
        cache.ensure([indices], 8)
    assert adapted.model.training
    assert own == [vars(module).get("forward") for module in adapted.model.modules()]
    with pytest.raises(ValueError, match="no hidden states of examples"):
        cache.compute_hidden(indices.tolist())
    cache.ensure([indices], 8)
    assert torch.allclose(
        cache.compute_hidden(indices.tolist()), whole.compute_hidden(indices.tolist()), rtol=1e-5, atol=1e-6
    )


def test_a_pass_that_fails_leaves_the_model_as_it_was(folders: Mapping[str, Path]) -> None:
    prepared = built("distilbert", folders)
    adapted = prepared.engine.adapted
    cache, reason = PrefixCache.make(adapted, prepared.task, prepared.train, budget=1 << 20)
    assert cache is not None, reason
    own = [vars(module).get("forward") for module in adapted.model.modules()]
    cache.ensure([np.arange(4)], 4)
    batch = prepared.task.collate(prepared.train, [0, 1], adapted.device)
    with pytest.raises(ValueError, match="hidden states of shape"), cache.prefix.feed(cache.compute_hidden([0, 1, 2])):
        prepared.task.compute_loss(adapted.model, batch)
    assert own == [vars(module).get("forward") for module in adapted.model.modules()]


def test_replicas_in_threads_share_what_is_computed(folders: Mapping[str, Path]) -> None:
    prepared = built("deep-bert", folders)
    adapted = prepared.engine.adapted
    first = engine_of(prepared, MEMORY).prefixes
    assert first.get_cache(prepared.train) is not None
    others = [first.create_replica(adapted.create_replica()) for _ in range(3)]
    indices = np.arange(len(prepared.train))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                others[number].ensure(prepared.train, [indices[number * 20 :]])
        except BaseException as error:  # a thread's own would be lost
            errors.append(error)

    with uses(others[0].adapted) as one, uses(others[1].adapted) as two, uses(others[2].adapted) as three:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sum(one) + sum(two) + sum(three) == len(indices) - 4  # those on which it was tried were known
    chosen = [5, 60, 99]
    batch = prepared.task.collate(prepared.train, chosen, adapted.device)
    for caches in (first, *others):
        caches.ensure(prepared.train, [np.array(chosen)])
        with torch.no_grad():
            wanted = prepared.task.compute_loss(caches.adapted.model.eval(), batch)
            with caches.feed(prepared.train, chosen):
                assert torch.allclose(prepared.task.compute_loss(caches.adapted.model, batch), wanted, rtol=1e-5)


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


def build_deep(folder: Path, **changes: Any) -> Prepared:
    return prepare(tiny.config(folder, "deep-bert", model=LAST, **changes))


def cache_of(prepared: Prepared, options: EngineConfig = MEMORY) -> PrefixCache:
    """That of an engine made now."""
    engine = LoopEngine(
        prepared.engine.adapted,
        prepared.task,
        prepared.config.build_training_settings(),
        prepared.config.seed,
        options,
        hidden_batch_size=8,
    )
    cache = engine.prefixes.get_cache(prepared.train)
    return cache


def parts(prepared: Prepared) -> list[np.ndarray]:
    return [prepared.federation.clients[id].train for id in prepared.federation.clients]


def filled(cache: PrefixCache, sets: list[np.ndarray]) -> list[torch.Tensor]:
    for indices in sets:
        cache.ensure([indices], 8)
    return [cache.compute_hidden(indices.tolist()) for indices in sets]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_the_next_run_computes_nothing_that_the_last_one_did(tiny_folder: Path, computed: list[int]) -> None:
    sets = parts(build_deep(tiny_folder))
    alone = filled(cache_of(build_deep(tiny_folder)), sets)
    whole = sum(computed)
    with share_prefixes():
        for turn in range(3):
            computed.clear()
            start_next_run()
            assert same(filled(cache_of(build_deep(tiny_folder)), sets), alone)
            assert (sum(computed) == whole) is (turn == 0)
        assert sum(computed) < whole - sum(map(len, sets)) / 2  # what is left is the trial on a few examples
    assert store_in_use() is None


def test_another_partition_has_the_bits_that_it_has_alone_and_so_has_the_first_after_it(tiny_folder: Path) -> None:
    prepared = build_deep(tiny_folder)
    mine = parts(prepared)
    joined = np.concatenate(mine)
    others = [joined[::2], joined[1::2]]
    wanted = [filled(cache_of(build_deep(tiny_folder)), sets) for sets in (mine, others)]
    with share_prefixes():
        for turn in (0, 1, 0, 0):
            start_next_run()
            found = filled(cache_of(prepared), (mine, others)[turn])
            assert same(found, wanted[turn])


def test_a_write_that_breaks_off_leaves_no_rows_to_be_taken_over(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = build_deep(tiny_folder)
    mine = parts(prepared)
    other = np.concatenate(mine)[::-1].copy()
    wanted = filled(cache_of(build_deep(tiny_folder)), mine)
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
            cache.ensure([other], 5)
        assert not any(cache._stored.has_rows(indices) for indices in (other[:5], np.sort(other)[:5]))
        taken = [index for index in range(len(cache.computed)) if cache._stored._batch_of[index] >= 0]
        assert len(taken) < len(cache.computed)
    assert all(value.any() for value in wanted)


def test_what_is_computed_is_known_by_all_that_it_depends_on(tiny_folder: Path) -> None:
    prepared = build_deep(tiny_folder)
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
        prepared = build_deep(tiny_folder)
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


def test_threads_of_an_engine_share_the_batches(tiny_folder: Path, computed: list[int]) -> None:
    """Each batch is computed once, from one part's examples, and as one thread computes it."""
    prepared = build_deep(tiny_folder, engine={"name": "batched", "workers": 2}, evaluation={"batch_size": 8})
    mine = parts(prepared)
    mine.append(np.concatenate([mine[0][:3], mine[1]]))  # no example is computed twice
    expected = filled(cache_of(prepared), mine)
    sizes = sorted(computed)
    computed.clear()
    prepared.engine.prepare(prepared.train, mine)
    assert sorted(computed) == sizes
    assert len(prepared.engine._workers) == 2
    cache = prepared.engine.prefixes.get_cache(prepared.train)
    for indices, hidden in zip(mine, expected, strict=True):
        assert torch.allclose(cache.compute_hidden(indices.tolist()), hidden, rtol=1e-5, atol=1e-6)
    computed.clear()
    prepared.engine.prepare(prepared.train, mine)
    assert not computed
