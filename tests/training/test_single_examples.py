"""What one example changes of a step and of an evaluation on a node, whatever model the server chooses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.tensors import compute_norm, subtract
from fedspan.core.values import Job
from fedspan.training.jobs import Assignment
from helpers import tiny

CLIP = 0.3
LARGEST = 3.3e38
"""An attention score near the largest number of float32, which a mask of the smallest one does not hide."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A run whose words, unlike padding, all have a direction in common, as a larger model's do."""
    folder = tmp_path_factory.mktemp("tiny")
    path = tiny.save_model("bert", folder)
    tiny.save_corpus(folder)
    model = transformers.BertModel.from_pretrained(path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[1:] -= 5 * embed_padding(model, longest=10)
    model.save_pretrained(path)
    config = tiny.config(
        folder,
        model={"target_modules": ["query", "key"], "attention": "eager"},
        engine={"padding_free": False},
        training={"optimizer": "sgd", "lr": 1.0, "local_steps": 1, "batch_size": 64},
        privacy={"mechanism": "dp-sgd", "noise": 1e-9, "clip": CLIP},
    )
    prepared = prepare(config)
    assert prepared.engine.private is not None
    prepared.engine.private.privacy = replace(prepared.engine.private.privacy, secret=True)
    return prepared


def embed_padding(model: transformers.BertModel, longest: int) -> torch.Tensor:
    """The hidden state of padding at the last position of the longest text."""
    with torch.no_grad():
        return model.embeddings(torch.tensor([[0]]), position_ids=torch.tensor([[longest - 1]]))[0, 0]


def choose_job(run: Prepared) -> Job:
    """A job whose first token attends to padding at the longest text's last position if there is any."""
    federation, model = run.federation, run.engine.adapted.model
    state, data = federation.begin().state, federation.clients["west"]
    with torch.no_grad():
        first = model.bert.embeddings(torch.tensor([[2]]))[0, 0]
    directions = {"query": first, "key": embed_padding(model.bert, int(run.train.lengths[data.train].max()))}
    tensors, rng = dict(state.tensors), torch.Generator().manual_seed(0)
    for name, value in state.tensors.items():
        layer, _, slot = name.rpartition("/")
        if name.startswith("extras/"):
            tensors[name] = 10 * torch.randn(value.shape, generator=rng)
            continue
        tensors[name] = torch.zeros_like(value)
        direction = directions[layer.rpartition(".")[2]]
        if slot == "A":
            tensors[name][0] = direction / direction.square().sum()
        else:
            tensors[name][:, 0] = (LARGEST / 8**0.5) ** 0.5 / (data.client.scaling or 1.0)  # heads of eight entries
    sent = federation.method.sync(replace(state, tensors=tensors), data.client)
    return federation.method.start(sent, data.client, {}, 0)


def split_longest(run: Prepared) -> tuple[np.ndarray, np.ndarray]:
    """The examples of a client of which one is longest, and those others."""
    indices = np.sort(run.federation.clients["west"].train)
    lengths = run.train.lengths[indices]
    others = indices[lengths < lengths.max()]
    return np.append(others, indices[lengths.argmax()]), others


def test_an_example_changes_bounded_metrics_by_its_own_share(run: Prepared) -> None:
    job, (every, others) = choose_job(run), split_longest(run)
    measured = [run.engine.evaluate("west", job, run.train, part, 64, bounded=True) for part in (every, others)]
    for name, most in (("accuracy", 1.0), ("loss", run.task.loss_bound)):
        change = measured[0][name] * len(every) - measured[1][name] * len(others)
        assert -1e-3 <= change <= most + 1e-3, name


def test_an_example_changes_a_private_step_by_its_own_gradient(run: Prepared) -> None:
    job, moved = choose_job(run), []
    for part in split_longest(run):
        trained = run.engine.train(Assignment("west", 0, job, part, 1.0, None, 1e-9), run.train)
        change = subtract(trained.tensors, job.tensors)
        moved.append({name: value.double() * len(part) for name, value in change.items() if "extras" in name})
    assert compute_norm(moved[1]) > CLIP
    assert compute_norm(subtract(moved[0], moved[1])) <= CLIP * 1.01
