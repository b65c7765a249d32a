"""Several models that predict in one pass: the same predictions as alone, which models share one, and what cannot."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.values import Job
from fedspan.models.stacked import Unstackable
from fedspan.tasks.task import Examples
from fedspan.training import worker
from fedspan.training.batching import (
    ModelInputs,
    build_prediction_key,
    split_into_passes,
    split_job_windows,
    split_windows,
    stack_models,
    stack_on_shared_examples,
)
from helpers import tiny, tiny_decoders, tiny_images
from helpers.families import others_slow


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models shared each pass."""
    found: list[int] = []
    predict = worker.Worker.predict

    def counted(self: worker.Worker, models: Sequence[ModelInputs], examples: Examples) -> list[Tensor]:
        predictions = predict(self, models, examples)
        found.append(len(models))
        return predictions

    monkeypatch.setattr(worker.Worker, "predict", counted)
    return found


def prepared_run(kind: str, tiny_folder: Path, decoders: Path, images: Path, **changes: Any) -> Prepared:
    """A run with personal models, stacked three at once in two threads."""
    personal: dict[str, Any] = {
        "federation": {"clients_per_round": None},
        "method": {"name": "local-only", "r": 2},
        "training": {"optimizer": "sgd", "lr": 0.05},
        "engine": {"name": "batched", "clients_per_pass": 3, "workers": 2},
    }
    if kind.endswith("-lm"):
        made = tiny_decoders.settings(decoders, kind.removesuffix("-lm"))
    elif kind in ("vit", "resnet"):
        made = tiny_images.settings(images, kind)
    else:
        made = tiny.settings(tiny_folder, kind)
    for section, change in (*personal.items(), *changes.items()):
        made[section] = {**made.get(section, {}), **change}
    return prepare(parse_config(made))


def personal_models(prepared: Prepared, sizes: Sequence[int]) -> list[ModelInputs]:
    """The clients' models after a round, each with some of all examples, in turns."""
    federation, evaluator = prepared.federation, prepared.evaluator
    progress = federation.run_round(federation.begin()).progress
    jobs = [evaluator.build_job(progress, id) for id in federation.clients]
    rng = np.random.default_rng(0)
    return [
        (jobs[at % len(jobs)], rng.choice(len(prepared.train), size, replace=False)) for at, size in enumerate(sizes)
    ]


def largest_gap(prepared: Prepared, models: Sequence[ModelInputs], batch_size: int) -> float:
    """The largest relative distance of predictions of stacked models from those of each alone."""
    engine = prepared.engine
    stacked = list(engine.predict_each(iter(models), prepared.train, batch_size))
    alone = [engine.predict(job, prepared.train, indices, batch_size) for job, indices in models]
    assert [one.shape for one in stacked] == [one.shape for one in alone]
    first, second = (engine.predict(job, prepared.train, models[0][1], batch_size) for job, _ in models[:2])
    assert float((first - second).norm() / first.norm()) > 1e-3, "the models are too similar to be told apart"
    return max(float((one - other).norm() / other.norm()) for one, other in zip(stacked, alone, strict=True))


@pytest.mark.parametrize("kind", others_slow(["bert", "gpt2", "llama-lm", "vit", "resnet"], ["bert", "resnet"]))
def test_models_predict_together_what_they_predict_alone(
    kind: str, tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run(kind, tiny_folder, decoders, images)
    models = personal_models(prepared, [5, 3, 8, 1, 2, 7])
    assert largest_gap(prepared, models, 24) < 1e-5
    assert max(passes) == 3


@pytest.mark.parametrize("layers", [None, [1]], ids=["all-layers", "last-layer"])
def test_models_predict_the_same_examples_together_as_alone(
    layers: list[int] | None, tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """Five models in stacks of three and two; a batch of 12 examples takes three passes of four, or two of six."""
    prepared = prepared_run("deep-bert", tiny_folder, decoders, images, model={"layers_to_transform": layers})
    models, engine = personal_models(prepared, [1] * 5), prepared.engine
    indices = np.random.default_rng(1).permutation(len(prepared.train))[:12]
    jobs = [job for job, _ in models]
    stacked = list(engine.predict_shared_examples(iter(jobs), prepared.train, indices, 12))
    assert sorted(passes) == [2, 2, 3, 3, 3]
    alone = [engine.predict(job, prepared.train, indices, 12) for job in jobs]
    assert float((alone[0] - alone[1]).norm() / alone[0].norm()) > 1e-3, "the models are too similar to be told apart"
    gaps = [float((one - other).norm() / other.norm()) for one, other in zip(stacked, alone, strict=True)]
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"layers_to_transform": [1]}},
        pytest.param({"model": {"modules_to_save": ["LayerNorm", "pooler"]}}, marks=pytest.mark.slow),
        pytest.param({"training": {"lora_dropout": 0.4}}, marks=pytest.mark.slow),
        {"method": {"name": "fedsa-lora", "r": 3}},
        pytest.param({"method": {"name": "pfedlora", "r": 2}}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_trains_and_how(
    changes: dict[str, Any], tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("deep-bert", tiny_folder, decoders, images, **changes)
    assert largest_gap(prepared, personal_models(prepared, [4, 6, 3]), 18) < 1e-5
    assert passes == [3]


def test_packed_examples_predict_alone(tiny_folder: Path, decoders: Path, images: Path, passes: list[int]) -> None:
    prepared = prepared_run("llama-lm", tiny_folder, decoders, images, data={"packing": True})
    assert largest_gap(prepared, personal_models(prepared, [4, 2, 3]), 24) == 0.0
    assert passes == []


def test_the_evaluation_of_personal_models_is_stacked(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """The scores of every client are those of the loop engine."""
    parts = {"partition": {"validation": 0.2, "test": 0.2}}
    prepared = prepared_run("bert", tiny_folder, decoders, images, **parts)
    progress = prepared.federation.run_round(prepared.federation.begin()).progress
    scores = prepared.evaluator.evaluate_clients(progress)
    assert max(passes) > 1
    loop = prepared_run("bert", tiny_folder, decoders, images, **parts, engine={"name": "loop"})
    for found, expected in zip(scores, loop.evaluator.evaluate_clients(progress), strict=True):
        assert list(found.by_client) == list(expected.by_client)
        for id, row in expected.by_client.items():
            assert found.by_client[id] == pytest.approx(row, rel=1e-5)


def test_personal_models_share_passes_over_a_held_out_set(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    """The scores of every client are those of the loop engine."""
    scores: list[dict[str, Any]] = []
    for engine in ("batched", "loop"):
        prepared = prepared_run("bert", tiny_folder, decoders, images, engine={"name": engine})
        progress = prepared.federation.run_round(prepared.federation.begin()).progress
        passes.clear()
        scores.append(dict(prepared.evaluator.evaluate_heldout(progress, prepared.test)))
        assert max(passes, default=1) == (3 if engine == "batched" else 1)
    assert list(scores[0]) == list(scores[1])
    for id, row in scores[1].items():
        assert scores[0][id] == pytest.approx(row, rel=1e-5)


def test_a_global_model_predicts_a_held_out_set_alone(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images, method={"name": "fedit", "r": 2})
    assert prepared.evaluator.evaluate_heldout(prepared.federation.begin(), prepared.test).keys() == {"global"}
    assert passes == []


def test_models_that_cannot_share_passes_over_the_same_examples_predict_alone(
    tiny_folder: Path, decoders: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    jobs, engine = [job for job, _ in personal_models(prepared, [1, 1, 1])], prepared.engine
    calls: list[int] = []

    def refuse(self: worker.Worker, models: Sequence[ModelInputs], examples: Examples) -> list[Tensor]:
        calls.append(len(models))
        raise Unstackable("it mixes its examples")

    monkeypatch.setattr(worker.Worker, "predict", refuse)
    indices = np.arange(7)
    predictions = list(engine.predict_shared_examples(iter(jobs), prepared.train, indices, 4))
    assert calls == [3, 3], "each thread tries one pass"
    for job, rows in zip(jobs, predictions, strict=True):
        assert torch.equal(rows, engine.predict(job, prepared.train, indices, 4))


def test_models_that_cannot_share_a_pass_predict_alone(
    tiny_folder: Path, decoders: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    models = personal_models(prepared, [4, 2, 3])
    calls: list[int] = []

    def refuse(self: worker.Worker, models: Sequence[ModelInputs], examples: Examples) -> list[Tensor]:
        calls.append(len(models))
        raise Unstackable("it mixes its examples")

    monkeypatch.setattr(worker.Worker, "predict", refuse)
    assert largest_gap(prepared, models, 12) == 0.0
    assert calls == [3]
    assert largest_gap(prepared, models, 12) == 0.0
    assert calls == [3], "it is tried once"


def test_a_model_that_mixes_examples_is_detected(
    tiny_folder: Path, decoders: Path, images: Path, passes: list[int]
) -> None:
    prepared = prepared_run("bert", tiny_folder, decoders, images)
    models = personal_models(prepared, [4, 2, 3])
    prepared.engine.adapted.model.get_submodule("bert.embeddings").register_forward_hook(
        lambda _, __, output: output - output.mean(0, keepdim=True)
    )
    assert largest_gap(prepared, models, 12) == 0.0
    assert passes == []


def test_only_the_models_of_a_window_are_in_memory() -> None:
    requested: list[int] = []

    def models() -> Any:
        for size in (3, 3, 2, 9, 1):
            requested.append(size)
            yield Job({}, {}, ()), np.arange(size)

    made = split_windows(models(), 8)
    assert [len(indices) for _, indices in next(made)] == [3, 3, 2]
    assert requested == [3, 3, 2, 9], "one more shows that the window is full"
    assert [[len(indices) for _, indices in window] for window in made] == [[9], [1]]


def test_stacks_keep_the_batch_size_and_the_kinds_apart() -> None:
    def job(rank: int) -> Job:
        return Job({}, {"layer/A": torch.zeros(rank, 5)}, ())

    models = [(job(2), np.arange(3)), (job(4), np.arange(2)), (job(2), np.arange(6)), (job(2), np.arange(2))]
    assert build_prediction_key(models[0][0]) != build_prediction_key(models[1][0])
    assert stack_models(models, 8, 12) == [[2, 0], [3], [1]]
    assert stack_models(models, 1, 100) == [[2], [0], [3], [1]]
    assert stack_models([(replace(one), rows[:0]) for one, rows in models[:1]], 4, 4) == [[0]]


def test_stacks_on_the_same_examples_are_of_one_kind_and_their_passes_have_the_batch_size() -> None:
    jobs = [Job({}, {"layer/A": torch.zeros(rank, 5)}, ()) for rank in (2, 4, 2, 2, 4)]
    assert [len(window) for window in split_job_windows(iter(jobs), 2)] == [2, 2, 1]
    assert stack_on_shared_examples(jobs, 2, 64) == [[0, 2], [3], [1, 4]]
    assert stack_on_shared_examples(jobs, 8, 2) == [[0, 2], [3], [1, 4]], "a model has at least one row of a batch"
    batches = [np.arange(8), np.arange(8, 11)]
    parts = split_into_passes(batches, 3, 8)
    assert np.concatenate(parts).tolist() == list(range(11))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 2, 1]
    alone = [part.tolist() for batch in batches for part in split_into_passes([batch], 3, 8)]
    assert alone == [part.tolist() for part in parts]
