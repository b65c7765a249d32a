"""Options that change how a model trains: gradient checkpointing, dropout on adapters, a narrow base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.core.base import to_dense
from fedspan.core.parametrization import Effective, LoRA, Slots
from fedspan.core.values import Job, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import Assignment
from helpers import tiny
from helpers.first_jobs import first_job


def train(prepared: Prepared, job: Job, *, seed: int = 3, clients: tuple[str, ...] = ("north",)) -> Trained:
    """Of the last of the clients."""
    engine = type(prepared.engine)(prepared.engine.adapted, prepared.task, prepared.engine.settings, seed)
    trained = [
        engine.train(Assignment(id, 0, job, prepared.federation.clients[id].train, 0.1), prepared.train)
        for id in clients
    ]
    return trained[-1]


class Counting(LoRA):
    """LoRA that counts its uses."""

    uses = 0

    def compute_effective(self, slots: Slots) -> Effective:
        Counting.uses += 1
        return super().compute_effective(slots)


def test_gradient_checkpointing_gives_the_same_gradients(tiny_folder: Path, prepared: Prepared) -> None:
    """Bit for bit, with every layer computed twice."""
    config = tiny.config(tiny_folder, model={"gradient_checkpointing": True})
    checkpointed = prepare(config, prepared.partition)
    job = replace(first_job(prepared), steps=0)  # no step: only the mean raw gradient
    job = replace(job, parametrization={name: Counting(2.0) for name in job.parametrization})
    gradients, uses = [], []
    for made in (prepared, checkpointed):
        Counting.uses = 0
        gradients.append(train(made, job).gradient)
        uses.append(Counting.uses)
    assert uses[1] == 2 * uses[0] > 0
    assert gradients[0].keys() == set(job.trainable_names)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])
        assert gradient.any()


def test_dropout_on_adapters_is_a_function_of_its_key(tiny_folder: Path, prepared: Prepared) -> None:
    """The same draws again, whoever trained before; others for another seed or client."""
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.5}))
    job = first_job(prepared)
    once, again = train(made, job), train(made, job, clients=("south", "north"))
    other, without = train(made, job, seed=4), train(prepared, job)
    for name in job.trainable_names:
        assert torch.equal(once.tensors[name], again.tensors[name])
    name = job.trainable_names[0]
    assert len({tuple(run.tensors[name].flatten().tolist()) for run in (once, other, without)}) == 3


def test_dropout_zeroes_its_share_and_scales_the_rest(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.2}))
    job, drawn = first_job(prepared), list[Callable[[Tensor, str], Tensor]]()
    set_dropout = AdaptedModel.set_dropout

    def keep(self: AdaptedModel, dropout: Callable[[Tensor, str], Tensor] | None) -> None:
        set_dropout(self, dropout)
        if dropout is not None:
            drawn.append(dropout)

    monkeypatch.setattr(AdaptedModel, "set_dropout", keep)
    train(made, job)
    assert len(drawn) == 2  # passes
    x, kept = torch.full((20, 50), 4.0), set[tuple[bool, ...]]()
    for dropout in drawn:
        for layer in ("one", "other"):
            y = dropout(x, layer)
            assert set(y.unique().tolist()) == {0.0, 5.0}
            assert 0.15 < float((y == 0).double().mean()) < 0.25  # four standard deviations of 1000 draws
            kept.add(tuple((y == 0).flatten().tolist()))
    assert len(kept) == 4
    assert all(layer.dropout is None for layer in prepared.engine.adapted.layers.values())


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_every_step_decays_the_base(accumulate: int, tiny_folder: Path, prepared: Prepared) -> None:
    """The last, incomplete group of an accumulation is a step too: 3 passes, hence 3, 2 and 1 steps."""
    training = {"gradient_accumulation_steps": accumulate, "weight_decay": 0.5, "batch_size": 8, "local_steps": None}
    made = tiny.variant(prepared, tiny.config(tiny_folder, training=training))
    examples, job = made.federation.clients["west"].train[:20], replace(first_job(made), decay_base=True)
    trained = made.engine.train(Assignment("west", 0, job, examples, 0.1), made.train)
    assert trained.steps == -(-3 // accumulate)
    assert trained.decay == pytest.approx((1 - 0.1 * 0.5) ** trained.steps)


@pytest.mark.parametrize(("kind", "positions"), [("roberta", 34 - 1), ("bert", 32), ("gpt2", 32)])
def test_long_texts_are_cut_to_the_positions_there_are(
    kind: str, positions: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """RoBERTa's positions begin behind the padding's index; only the model says so if the tokenizer is silent."""
    folder = tmp_path / kind
    shutil.copytree(tiny_folder / kind, folder)
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    del described["model_max_length"]
    path.write_text(json.dumps(described))
    made = prepare(tiny.config(tiny_folder, kind=kind, model={"name": str(folder), "max_length": 500}))
    assert made.task.max_length == positions
    text = datasets.Dataset.from_dict({"text": ["word1 " * 60], "label": [0]})
    job = made.evaluator.build_job(made.federation.begin(), None)
    assert made.engine.predict(job, made.task.encode(text), np.array([0]), 1).isfinite().all()


def test_flora_on_a_narrow_base_keeps_its_update_in_float32(tiny_folder: Path, prepared: Prepared) -> None:
    """No bit of a bfloat16 weight changes in two rounds, though the model learns."""
    config = tiny.config(tiny_folder, model={"dtype": "bfloat16"}, method={"name": "flora"})
    narrow = prepare(config, prepared.partition)
    adapted = narrow.engine.adapted
    stored = {name: layer.stored_weight.detach().clone() for name, layer in adapted.layers.items()}
    progress = narrow.federation.begin()
    losses = []
    for _ in range(2):
        result = narrow.federation.run_round(progress)
        progress = result.progress
        losses.append(result.loss)
        narrow.evaluator.evaluate_clients(progress)
    for name, layer in adapted.layers.items():
        assert layer.stored_weight.dtype == torch.bfloat16
        assert torch.equal(layer.stored_weight, stored[name])
        total = to_dense(progress.state.base.total[name])
        assert total.dtype == torch.float32
        assert total.any()
    assert len(set(losses)) == 2
