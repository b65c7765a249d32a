"""The same runs on the CPU and on the pretend device, in a process of its own: ``python -m helpers.pretend_runs FILE``.

Writes one JSON object: under ``names``, the names of all runs; under ``runs``, for every run that was asked for, the
largest relative distance between the two results, or the error on the device; under ``refusals``, what the device
answers to mistakes; under ``waits``, how often the host waits for it in the inner loop.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from fedspan.config import parse_config
from fedspan.federation.head_start import start_head
from fedspan.methods.registry import METHODS
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.stacking import wait_for
from fedspan.wrappers.registry import WRAPPERS
from helpers import pretend_device, tiny, tiny_decoders, tiny_images, tiny_preferences, tiny_seq2seq
from helpers.watched_rounds import OPTIONS, flat
from helpers.wrapped_configs import TRAINING

__all__ = ["ENGINES", "RUNS"]

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


def _preferences(folder: Path) -> dict[str, Any]:
    return tiny_preferences.settings(folder, folder)


def _pairs(folder: Path) -> dict[str, Any]:
    return tiny_seq2seq.settings(folder)


METHOD_RUNS = {key: _run(method={"name": key, **OPTIONS.get(key, {})}) for key in METHODS}
WRAPPER_RUNS = {
    key: _run(method={"wrappers": [key]}, training={"lr": 0.02, **TRAINING.get(key, {})}) for key in WRAPPERS
}
OTHER_RUNS: dict[str, Settings] = {
    "privacy central": _run(
        privacy={"mechanism": "central", "noise": 0.1, "clip": 0.5}, federation={"weights": "uniform"}
    ),
    "privacy local": _run(privacy={"mechanism": "local", "noise": 0.1, "clip": 0.5}),
    "privacy dp-sgd": _run(privacy={"mechanism": "dp-sgd", "noise": 0.1, "clip": 0.5}),
    "secure sums": _run(federation={"secure": {}}),
    "median": _run(federation={"reduction": "median"}),
    "task causal-lm": _run("llama-lm"),
    "task causal-lm packed": _run("llama-lm", data={"packing": True}),
    "task preference": _preferences,
    "task seq2seq": _pairs,
    "task regression": _regression,
    "task images": _run("vit"),
    "task images, batch norm": _run("resnet"),
    "task images from scratch": _run("builtin:resnet-8", model={"pretrained": False}),
    "conv1d": _run("gpt2"),
    "roberta": _run("roberta"),
    "prefix cache": _run(model={"layers_to_transform": [1]}),
    "head start": _run(model={"head_init": "class-means"}),
    "dropout": _run(training={"lora_dropout": 0.4}),
    "accumulation": _run(training={"gradient_accumulation_steps": 2}),
    "momentum": _run(training={"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "optimizer_state": "keep"}),
    "moments kept": _run(training={"optimizer_state": "keep", "weight_decay": 0.1}),
    "logit adjustment": _run(training={"logit_adjustment": 1.0}),
    "head updates": _run(training={"head_updates": "own-classes"}),
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
    assert prepared.test is not None
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
    for kind in ("bert", "roberta", "gpt2"):
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


def refusals() -> dict[str, str | None]:
    """The messages of operations that an accelerator refuses; None where the pretend device carries one out."""
    here, away = torch.ones(2, 2, device=pretend_device.DEVICE), torch.ones(2, 2)
    attempts: dict[str, Callable[[], object]] = {
        "sum": lambda: here + away,
        "product": lambda: away @ here,
        "indices on the device": lambda: away[here[0].long()],
        "numpy": lambda: here.numpy(),
    }
    messages: dict[str, str | None] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = None
        except (RuntimeError, TypeError) as error:
            messages[name] = str(error)
    return messages


def compare(settings: dict[str, Any], engine: str) -> float | str:
    """The distance between a run's results on the two devices, or the device's error."""
    settings["engine"] = {**ENGINES[engine], **settings["engine"], "name": engine}
    expected = result(settings, "cpu")
    try:
        return distance(expected, result(settings, str(pretend_device.DEVICE)))
    except Exception:
        return traceback.format_exc()


def inner_waits(settings: dict[str, Any]) -> dict[str, int]:
    """How often more the host waits in a round of six batched steps by client than in one of two, by operator."""
    counts: list[Counter[str]] = []
    for steps in (2, 6):
        values = copy.deepcopy(settings)
        values["model"].setdefault("attention", "eager")
        values |= {"device": str(pretend_device.DEVICE), "engine": ENGINES["batched"]}
        values["training"]["local_steps"] = steps
        prepared = prepare(parse_config(values))
        progress = prepared.federation.begin()
        with pretend_device.count_synchronizations() as counter:
            prepared.federation.run_round(progress)
        assert counter  # results are read at the end of a job
        counts.append(Counter(counter))
    return dict(counts[1] - counts[0])


def clock_waits() -> dict[str, int]:
    """How often a clock waits for the device, and for the CPU."""
    with pretend_device.count_synchronizations() as counter:
        wait_for(pretend_device.DEVICE)
        wait_for(torch.device("cpu"))
    return dict(counter)


def main(target: Path, names: list[str]) -> None:
    """Run the named runs (``NAME/ENGINE``; without names all, with each engine) on both devices."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["FEDSPAN_CACHE"] = str(folder / "cache")
        save_models(folder)
        for name in names or [f"{run}/{engine}" for run in RUNS for engine in ENGINES]:
            run, _, engine = name.partition("/")
            start = time.perf_counter()
            results[name] = {"gap": compare(RUNS[run](folder), engine), "seconds": time.perf_counter() - start}
        waits = {name: inner_waits(RUNS[name](folder)) for name in ("method fedit", "task causal-lm", "task images")}
        waits["clock"] = clock_waits()
    found = {"names": list(RUNS), "runs": results, "refusals": refusals(), "waits": waits}
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
