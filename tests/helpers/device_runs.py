"""The same runs on the CPU and on another device: every method, wrapper, kind of task and way of training."""

import copy
import csv
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.federation.head_start import start_head
from fedspan.methods.registry import METHODS
from fedspan.wrappers.registry import WRAPPERS

from . import (
    tiny,
    tiny_decoders,
    tiny_images,
    tiny_masked,
    tiny_pairs,
    tiny_preferences,
    tiny_seq2seq,
    tiny_tags,
    tiny_topics,
)
from .watched_rounds import OPTIONS, flat
from .wrapped_configs import TRAINING

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "loop": {"name": "loop"},
    "batched": {"name": "batched", "clients_per_pass": 2, "workers": 1},
}
Settings = Callable[[Path], dict[str, Any]]


def _run(kind: str = "bert", **changes: Any) -> Settings:
    """A run on one of the tiny models, with changed sections."""

    def settings(folder: Path) -> dict[str, Any]:
        if kind.endswith("-lm"):
            return tiny_decoders.settings(folder, kind.removesuffix("-lm"), **changes)
        if kind in tiny_images.TARGETS:
            return tiny_images.settings(folder, kind, **changes)
        return tiny.settings(folder, kind, **changes)

    return settings


def _regression(folder: Path) -> dict[str, Any]:
    data = {"train": str(folder / "numbers.csv"), "label": "length"}
    return {**tiny.settings(folder, data=data), "task": "regression"}


def _least_squares(folder: Path) -> dict[str, Any]:
    values = _regression(folder)
    return {**values, "model": {**values["model"], "head_init": "least-squares"}}


def _augmented(folder: Path) -> dict[str, Any]:
    options = {"crop_padding": 2, "flip": 0.5, "brightness": 0.2, "contrast": 0.2}
    return tiny_images.settings(folder) | {"task_options": options}


RANKED = ("fedgalore", "fedmomentum")
"""Methods that factor gradients or updates: a query's gradient has rank one where a single block reads one token."""
METHOD_RUNS = {
    key: _run("deep-bert" if key in RANKED else "bert", method={"name": key, **OPTIONS.get(key, {})}) for key in METHODS
}
WRAPPER_RUNS = {
    key: _run(method={"wrappers": [key]}, training={"lr": 0.02, **TRAINING.get(key, {})}) for key in WRAPPERS
}
OTHER_RUNS: dict[str, Settings] = {
    "privacy central": _run(
        privacy={"mechanism": "central", "noise": 0.1, "clip": 0.5}, federation={"weights": "uniform"}
    ),
    "privacy local": _run(privacy={"mechanism": "local", "noise": 0.1, "clip": 0.5}),
    "privacy dp-sgd": _run(privacy={"mechanism": "dp-sgd", "noise": 0.1, "clip": 0.5}),
    "secure aggregation": _run(federation={"secure": {}}),
    "median": _run(federation={"reduction": "median"}),
    "task causal-lm": _run("llama-lm"),
    "task causal-lm packed": _run("llama-lm", data={"packing": True}),
    "task preference": lambda folder: tiny_preferences.settings(folder, folder),
    "task seq2seq": lambda folder: tiny_seq2seq.settings(folder),
    "task regression": _regression,
    "task token-classification": lambda folder: tiny_tags.settings(folder, folder),
    "task multi-label-classification": lambda folder: tiny_topics.settings(folder, folder),
    "task masked-lm": lambda folder: tiny_masked.settings(folder),
    "task text-embedding": lambda folder: tiny_pairs.settings(folder, folder),
    "task text-embedding of scored pairs": lambda folder: tiny_pairs.settings(folder, folder, scored=True),
    "task images": _run("vit"),
    "task images, batch norm": _run("resnet"),
    "task images, augmented": _augmented,
    "task images from scratch": _run("builtin:resnet-8", model={"pretrained": False}),
    "conv1d": _run("gpt2"),
    "roberta": _run("roberta"),
    "prefix cache": _run("deep-bert", model={"layers_to_transform": [1]}),
    "head start": _run(model={"head_init": "class-means"}),
    "head start lda": _run(model={"head_init": "lda"}),
    "head start least-squares": _least_squares,
    "dropout": _run(training={"lora_dropout": 0.4}),
    "accumulation": _run(training={"gradient_accumulation_steps": 2}),
    "momentum": _run(training={"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "optimizer_state": "keep"}),
    "moments kept": _run(training={"optimizer_state": "keep", "weight_decay": 0.1}),
    "logit adjustment": _run(training={"logit_adjustment": 1.0}),
    "gradient checkpointing": _run(model={"gradient_checkpointing": True}),
    "bfloat16": _run(model={"dtype": "bfloat16"}),
    "whole modules": _run(model={"modules_to_save": ["LayerNorm", "pooler"]}),
    "embeddings": _run(model={"target_modules": ["word_embeddings", "query"]}),
    "pooling": _run(model={"pooling": "mean"}),
    "fused attention": _run(model={"attention": "sdpa"}),
    "threads": _run(engine={"workers": 2}),
}
RUNS: dict[str, Settings] = {
    **{f"method {key}": run for key, run in METHOD_RUNS.items()},
    **{f"wrapper {key}": run for key, run in WRAPPER_RUNS.items()},
    **OTHER_RUNS,
}
"""Every method, wrapper, kind of task and way of training, by name."""
WAITS = (
    *("method fedit", "method rolora", "method la-lora", "wrapper scaffold", "wrapper fedprox"),
    *("dropout", "accumulation", "task causal-lm", "task seq2seq", "task token-classification", "task images"),
)
"""Runs whose inner loop is watched for waits of the host."""


def result(settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Everything that two rounds and an evaluation of a run leave, by where it stands."""
    values = copy.deepcopy(settings)
    values["model"].setdefault("attention", "eager")  # the engine's default depends on the device
    clients = 3 if values["federation"].get("secure") is not None else 2  # two alone would not hide in a sum
    values |= {"device": device, "federation": {**values["federation"], "rounds": 2, "clients_per_round": clients}}
    prepared: Prepared = prepare(parse_config(values))
    progress = prepared.federation.begin()
    if prepared.head is not None:
        progress = start_head(prepared.federation, progress, prepared.head)
    while progress.state.round < prepared.federation.settings.rounds:
        progress = prepared.federation.run_round(progress).progress
    evaluator = prepared.evaluator
    scores = evaluator.evaluate_clients(progress), evaluator.evaluate_heldout(progress, prepared.test, generate=True)
    return flat([progress, scores])


def distance(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The largest relative distance between tensors and numbers; everything else must be equal."""
    assert expected.keys() == found.keys()
    gaps = [0.0]
    for path, value in expected.items():
        other = found[path]
        if isinstance(value, Tensor):
            assert other.device.type == "cpu", f"{path} is on {other.device}"
            assert (value.dtype, value.shape) == (other.dtype, other.shape), path
            if not torch.equal(value, other):
                gaps.append(float((value.double() - other.double()).norm() / value.double().norm().clamp(min=1e-3)))
        elif isinstance(value, float):
            gaps.append(0.0 if value == other else abs(value - other) / max(abs(value), 1e-3))
        elif isinstance(value, int | str | None):
            assert value == other, path
    return max(gaps)


def save_models(folder: Path) -> None:
    """All models and data of the runs."""
    for kind in ("bert", "deep-bert", "roberta", "gpt2"):
        tiny.save_model(kind, folder)
    for kind in ("vit", "resnet"):
        tiny_images.save_model(kind, folder)
    tiny_decoders.save_decoder("llama", folder)
    tiny_decoders.save_questions(folder)
    tiny_images.save_pictures(folder)
    corpus = tiny.save_corpus(folder)
    with corpus.open(newline="") as source, (folder / "numbers.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "length", "site"])
        writer.writerows([row["text"], len(row["text"]) / 10, row["site"]] for row in csv.DictReader(source))


def compare(settings: dict[str, Any], engine: str, device: str) -> float:
    """The distance between a run's results on a device and on the CPU."""
    settings["engine"] = {**ENGINES[engine], **settings["engine"], "name": engine}
    return distance(result(settings, "cpu"), result(settings, device))


def inner_waits(
    settings: dict[str, Any], device: str, count: Callable[[], AbstractContextManager[Mapping[str, int]]]
) -> dict[str, int]:
    """How often more the host waits in a round of six batched steps by client than in one of two, by place."""
    counts: list[Counter[str]] = []
    for steps in (2, 6):
        values = copy.deepcopy(settings)
        values["model"].setdefault("attention", "eager")
        values |= {"device": device, "engine": ENGINES["batched"]}
        values["training"]["local_steps"] = steps
        prepared = prepare(parse_config(values))
        progress = prepared.federation.begin()
        with count() as counter:
            prepared.federation.run_round(progress)
        assert counter  # results are read at the end of a job
        counts.append(Counter(counter))
    return dict(counts[1] - counts[0])
