"""Rows of the head of classes that a client lacks, with ``training.head_updates: own-classes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.config import parse_config
from fedspan.core.tensors import is_extra, join_extra_name
from fedspan.core.values import Trained
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.head import NoOutputLayer, OutputLayer
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import Assignment
from helpers import tiny

KINDS = {"partitioner": "pathological", "classes_per_client": 2, "clients": 3, "column": None}


def settings(folder: Path, engine: str, updates: str, **changes: Any) -> dict[str, Any]:
    """Three clients with two of the four classes each, and weight decay, which moves rows without a gradient."""
    training = {"head_updates": updates, "weight_decay": 0.1, "local_steps": 3}
    made = tiny.settings(folder, **{"partition": KINDS, "training": training, **changes})
    made["federation"]["clients_per_round"] = None
    made["engine"] = {"name": engine, **({"clients_per_pass": 3, "workers": 2} if engine == "batched" else {})}
    return made


def train(prepared: Prepared) -> list[tuple[Assignment, Trained, set[int]]]:
    """Run a round; return every client's job, its result, and the classes that the client has."""
    jobs: list[tuple[Assignment, Trained]] = []
    federation = prepared.federation
    federation.run_round(federation.begin(), on_trained=lambda assignment, trained: jobs.append((assignment, trained)))
    labels: np.ndarray = prepared.train.labels  # type: ignore[attr-defined]
    return [(assignment, trained, set(labels[assignment.indices].tolist())) for assignment, trained in jobs]


def moved_rows(assignment: Assignment, trained: Trained) -> dict[str, set[int]]:
    """Rows that differ after training, by tensor of the head."""

    def rows(name: str, value: Tensor) -> set[int]:
        differs = value != assignment.job.tensors[name]
        return set(differs.reshape(len(value), -1).any(1).nonzero().flatten().tolist())

    return {name: rows(name, value) for name, value in trained.tensors.items() if is_extra(name)}


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("updates", ["all", "own-classes"])
def test_a_client_moves_the_rows_of_its_own_classes(engine: str, updates: str, tiny_folder: Path) -> None:
    jobs = train(prepare(parse_config(settings(tiny_folder, engine, updates))))
    assert len(jobs) == 3
    assert all(len(classes) == 2 for _, _, classes in jobs)
    for assignment, trained, classes in jobs:
        expected = classes if updates == "own-classes" else set(range(len(tiny.LABELS)))
        assert moved_rows(assignment, trained) == dict.fromkeys(
            map(join_extra_name, ("classifier.weight", "classifier.bias")), expected
        )


def test_without_weight_decay_the_adjustment_of_logits_moves_the_same_rows(tiny_folder: Path) -> None:
    training = {"logit_adjustment": 1.0, "weight_decay": 0.0, "local_steps": 3}
    adjusted = settings(tiny_folder, "loop", "all", training=training)
    restricted = settings(tiny_folder, "loop", "all", training={**training, "head_updates": "own-classes"})
    first, second = (tiny.final_tensors(prepare(parse_config(made))) for made in (adjusted, restricted))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(("method", "secure"), [("lora-a2", None), ("fedit", {})])
def test_methods_with_masks_of_their_own_and_secure_sums(method: str, secure: Any, tiny_folder: Path) -> None:
    """LoRA-A2 sends the slots that its masks select; a secure sum is that in plaintext to its rounding."""
    made = settings(tiny_folder, "batched", "own-classes", method={"name": method}, federation={"rounds": 2})
    if secure is not None:
        pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
        made["federation"]["clip_ratio"] = None
    plain = tiny.final_tensors(prepare(parse_config(made)))
    made["federation"]["secure"] = secure
    made["engine"] = {"name": "loop"}
    other = tiny.final_tensors(prepare(parse_config(made)))
    for name, value in plain.items():
        torch.testing.assert_close(other[name], value, atol=2e-3 if secure is not None else 1e-5, rtol=1e-4)


def test_a_head_without_a_row_for_each_class(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(adapted: AdaptedModel) -> OutputLayer:
        raise NoOutputLayer("2 linear layers of its head have 4 outputs")

    monkeypatch.setattr("fedspan.training.services.find_output_layer", find)
    with pytest.raises(FedspanError, match="no row for each class: 2 linear layers") as caught:
        prepare(parse_config(settings(tiny_folder, "loop", "own-classes")))
    assert caught.value.field == "training.head_updates"
    prepare(parse_config(settings(tiny_folder, "loop", "all")))


def test_where_it_cannot_apply(tiny_folder: Path) -> None:
    cases = {
        "regression has no classes": {"task": "regression"},
        "dp-sgd does not protect which classes a client has": {"privacy": {"mechanism": "dp-sgd", "noise": 1.0}},
        "model.extras: frozen trains no row of the head": {"model": {"extras": "frozen"}},
        "scaffold would count": {
            "method": {"name": "fedit", "wrappers": [{"name": "scaffold", "variate": "gradient"}]},
            "training": {"head_updates": "own-classes", "max_grad_norm": 0.0},
        },
    }
    for reason, changes in cases.items():
        made = {**tiny.settings(tiny_folder, training={"head_updates": "own-classes"}), **changes}
        with pytest.raises(FedspanError, match=reason) as caught:
            parse_config(made)
        assert (caught.value.field, caught.value.value) == ("training.head_updates", "own-classes")
