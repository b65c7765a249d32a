"""What one example changes of an evaluation and of a private step, whatever weights the server chooses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.tensors import compute_norm, subtract
from fedspan.core.values import Job
from fedspan.training.jobs import Assignment
from helpers import tiny

CLIP, SCORE, TEXTS = 0.3, 2.5e38, 39
LOOP, PADDED = {"name": "loop"}, {"name": "batched", "padding_free": False}


def hostile_run(folder: Path, kind: str, engine: dict[str, Any], *, longer: bool, **changes: Any) -> Prepared:
    """A run whose first block prefers padding by more than a mask of the least number of float32 takes away.

    Padding has an embedding of its own, to which all words but word11 have the opposite one. The score of a query at
    such a word is about -SCORE, and at padding SCORE, before the mask. Texts with word11 prefer it to padding; a cache
    of hidden states is verified on these.

    Args:
        longer: Whether a client has another text, which is longer than its others.
    """
    path = tiny.save_model(kind, folder)
    rows = ["text,label,site"]
    for number in range(TEXTS):
        label, rest = tiny.LABELS[number % 4], " word9" * (number >= TEXTS // 2)
        first = 11 if number % 13 == 0 else number % 8
        rows.append(f"word{first} {label}{number % 5}{rest},{label},west")
    rows += [f"{'word11 ' * 14},lab,east", *[f"{'word1 ' * 12},lab,west"] * longer]
    (folder / "corpus.csv").write_text("\n".join(rows))
    model = transformers.BertModel.from_pretrained(path, num_attention_heads=16)  # of one entry: scores have no scale
    attention, words = model.encoder.layer[0].attention.self, model.embeddings.word_embeddings.weight
    direction = torch.randn(words.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        number = torch.arange(len(words))
        draws = (number == model.config.pad_token_id) | (number == tiny.VOCABULARY_SIZE - 1)
        words += torch.where(draws, 5.0, -5.0)[:, None] * direction
        pad = model.embeddings(torch.tensor([[model.config.pad_token_id]]))[0, 0]
        for layer, sign in ((attention.query, -1.0), (attention.key, 1.0)):
            layer.weight.copy_((sign * SCORE**0.5 * pad / pad.square().sum()).expand_as(layer.weight))
    model.save_pretrained(path)
    changes["model"] = {"target_modules": ["output.dense"], "attention": "eager", **changes.get("model", {})}
    whole = {
        "federation": {"clients_per_round": 1},
        "data": {"test_fraction": 0.0},
        "partition": {"validation": 0.0, "test": 0.0, "min_examples": 1},
    }
    config = tiny.config(folder, kind, engine=engine, **whole, **changes)
    return prepare(config, key=bytes(32))


def choose_job(run: Prepared) -> Job:
    federation = run.federation
    state, client = federation.begin().state, federation.clients["west"].client
    rng = torch.Generator().manual_seed(0)
    moved = {name: value + torch.randn(value.shape, generator=rng) for name, value in state.tensors.items()}
    return federation.method.start(federation.method.sync(replace(state, tensors=moved), client), client, {}, 0)


@pytest.mark.parametrize(
    ("kind", "engine", "model"),
    [
        ("bert", LOOP, {}),
        ("bert", PADDED, {}),
        ("deep-bert", LOOP, {"layers_to_transform": [1]}),  # hidden states of the first block are stored
    ],
)
def test_no_text_changes_the_predictions_of_others_in_an_evaluation_with_noise(
    kind: str, engine: dict[str, Any], model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[Tensor] = []
    for longer in (False, True):
        run = hostile_run(tmp_path, kind, engine, longer=longer, model=model)
        compute = run.task.compute_metrics

        def record(predictions: Tensor, *args: Any, compute: Any = compute) -> dict[str, float]:
            predicted.append(predictions)
            return compute(predictions, *args)

        monkeypatch.setattr(type(run.task), "compute_metrics", staticmethod(record))
        run.engine.evaluate(
            "west", choose_job(run), run.train, np.sort(run.federation.clients["west"].train), 64, bounded=True
        )
        monkeypatch.undo()
    assert torch.isfinite(predicted[0]).all()
    assert len(predicted[0]) == TEXTS
    assert torch.equal(predicted[0], predicted[1][:-1])


@pytest.mark.parametrize(
    ("kind", "model", "fails"),
    [("deep-bert", {"layers_to_transform": [1]}, ""), *(("bert", {}, place) for place in ("", "model", "collation"))],
)
def test_an_example_changes_a_private_step_of_a_node_by_its_own_gradient(
    kind: str, model: dict[str, Any], fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[dict[str, Tensor]] = []
    for longer in (False, True):
        training = {"optimizer": "sgd", "local_steps": 1, "batch_size": 64}
        privacy = {"mechanism": "dp-sgd", "noise": 1e-9, "clip": CLIP}
        run = hostile_run(tmp_path, kind, LOOP, longer=longer, model=model, training=training, privacy=privacy)
        collate, collated = run.task.collate, list[Sequence[int]]()

        def record(examples: Any, rows: Sequence[int], *args: Any, collate: Any = collate, seen: Any = collated) -> Any:
            seen.append(rows)
            if fails == "collation" and examples.lengths[rows].max() > 10:
                raise ValueError("no token for a word of the longer text")
            return collate(examples, rows, *args)

        def predict(model: Any, batch: Any, predict: Any = run.task.predict, **options: Any) -> Any:
            if batch["input_ids"].shape[1] > 10 and fails == "model":
                raise IndexError("no embedding for a word of the longer text")
            return predict(model, batch, **options)

        monkeypatch.setattr(run.task, "collate", record)
        monkeypatch.setattr(run.task, "predict", predict)
        job, indices = choose_job(run), np.sort(run.federation.clients["west"].train)
        trained = run.engine.train(Assignment("west", 0, job, indices, 1.0, None, 1e-9), run.train)
        change = subtract(trained.tensors, job.tensors)
        moved.append({name: value.double() * len(indices) for name, value in change.items()})
        collated.clear()
        run.engine.train(Assignment("west", 1, job, indices, 1.0, None, 1e-9), run.train)
        alone = sum(len(rows) == 1 for rows in collated)
        assert alone <= 2 + (fails == "collation"), "examples are collated alone once"
    assert compute_norm(moved[0]) > CLIP
    assert compute_norm(subtract(moved[1], moved[0])) <= CLIP * (0.01 if fails else 1.001)
