"""The work of the engine benchmark: fedspan's configs, and the same work written down for the peers.

A plan is a folder with ``plan.json`` (tokens, labels, who holds what, batches, settings) and ``start.safetensors`` (the
adapter that everybody begins with, under PEFT's names), so that peers need neither fedspan nor a tokenizer.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.tensors import is_extra
from fedspan.core.values import Job
from fedspan.models.names import resolve_model
from fedspan.training.batching import draw_job_batches, draw_training_batches
from fedspan.training.jobs import Assignment

MODEL = "builtin:all-minilm-l6-v2"
RANK, ALPHA, RATE, CLIP, ROUNDS = 8, 16, 2e-3, 1.0, 1000
CHECKED = 2
"""Rounds at the beginning in which everybody takes fedspan's batches, so that losses can be compared."""


@dataclass(frozen=True)
class Work:
    """One federation, as every contender trains it.

    Args:
        data: Folder with Banking77's train.csv and test.csv.
        batch: Number of examples of a step.
        examples: Number of examples of each client.
        clients: Number of clients, identically distributed.
        layers: Number of the model's layers that are adapted; None: all.
        threads: Number of threads of the CPU.
        seed: Seed of every random draw.
    """

    data: Path
    batch: int
    examples: int
    clients: int = 50
    layers: tuple[int, ...] | None = None
    threads: int = 2
    seed: int = 0

    def values(self, dtype: str = "float32", engine: dict[str, Any] | None = None) -> dict[str, Any]:
        """fedspan's config, as a user would write it; all examples are for training, and nothing is evaluated."""
        return {
            "seed": self.seed,
            "threads": self.threads,
            "device": "cpu",
            "model": {
                "name": MODEL,
                "dtype": dtype,
                "target_modules": ["query", "value"],
                "pooling": "stock",  # the peers' classifier and start
                "head_init": "random",
                **({} if self.layers is None else {"layers_to_transform": list(self.layers)}),
            },
            "data": {
                "train": str(self.data / "train.csv"),
                "label": "category",
                "test_fraction": 0,
                "max_examples": self.clients * self.examples,
            },
            "partition": {"partitioner": "iid", "clients": self.clients, "validation": 0, "test": 0},
            "method": {"name": "fedit", "r": RANK, "lora_alpha": ALPHA},
            "federation": {"rounds": ROUNDS},
            "training": {"lr": RATE, "batch_size": self.batch, "max_grad_norm": CLIP},
            "engine": engine or {},
        }


def write_plan(work: Work, folder: Path, rounds: int) -> Path:
    """Write down a work's data, batches and start for the peers.

    Args:
        work: The work that is trained.
        folder: Folder for the plan; it is created if it does not exist.
        rounds: Number of rounds for which the centralized loop's bucketed batches are written.
    """
    prepared = prepare(parse_config(work.values(engine={"name": "loop"})))
    job, all_clients = _build_job(prepared), prepared.federation.clients
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_start(job), folder / "start.safetensors")
    plan = {
        "model": resolve_model(MODEL),
        "labels": len(prepared.labels),
        "layers": work.layers,
        "modules_to_save": sorted(_list_saved(prepared)),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lr": RATE,
        "max_grad_norm": CLIP,
        "batch": work.batch,
        "threads": work.threads,
        "seed": work.seed,
        "input_ids": [list(map(int, ids)) for ids in prepared.train.encodings["input_ids"]],
        "targets": prepared.train.labels.tolist(),
        "clients": [client_data.train.tolist() for client_data in all_clients.values()],
        "checked": [
            [
                _draw_batches(prepared, Assignment(id, round, job, client_data.train, RATE))
                for id, client_data in all_clients.items()
            ]
            for round in range(CHECKED)
        ],
        "bucketed": [_draw_centralized(work, prepared, round) for round in range(rounds)],
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def _draw_batches(prepared: Prepared, assignment: Assignment) -> list[list[int]]:
    engine = prepared.engine
    return [batch.tolist() for batch in draw_job_batches(engine.settings, engine.seed, assignment, prepared.train)]


def _draw_centralized(work: Work, prepared: Prepared, round: int) -> list[list[int]]:
    """One epoch over everybody's examples, in fedspan's buckets."""
    batches = draw_training_batches(
        np.concatenate([client_data.train for client_data in prepared.federation.clients.values()]),
        prepared.train.lengths,
        batch_size=work.batch,
        epochs=1,
        batches=None,
        seed=work.seed,
        key=(round, "centralized"),
        group_by_length=True,
    )
    return [batch.tolist() for batch in batches]


def _list_saved(prepared: Prepared) -> set[str]:
    """Modules that train whole."""
    return {path.rpartition(".")[0] for path in prepared.engine.adapted.spec.extras}


def _build_job(prepared: Prepared) -> Job:
    """What a client trains in the first round."""
    method = prepared.federation.method
    job = method.start(
        method.sync(prepared.federation.begin().state, None), None, {}, prepared.federation.begin().state.round
    )
    assert isinstance(job, Job)
    return job


def _start(job: Job) -> dict[str, Any]:
    """The first round's tensors under the names of PEFT's state dict."""
    start: dict[str, Any] = {}
    for name, value in job.tensors.items():
        layer, _, slot = name.partition("/")
        path = slot if is_extra(name) else f"{layer}.lora_{slot}.weight"
        start[f"base_model.model.{path}"] = value.contiguous()
    return start
