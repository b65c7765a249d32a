"""Methods that need no pretrained weights, on a residual network's convolutions that nobody trained before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageClassification

from fedspan.config import RunConfig, parse_config
from fedspan.core.base import materialize
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import select_slots
from fedspan.federation.progress import Progress
from fedspan.runs.folder import RunFolder
from fedspan.runs.setup import Prepared, prepare
from fedspan.runs.trained_models import write_adapters
from helpers import tiny_convolutions


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_convolutions.save_pictures(tmp_path_factory.mktemp("scratch"))


def scratch_config(pictures: Path, method: dict[str, Any], **changes: Any) -> RunConfig:
    return parse_config(
        {
            "task": "image-classification",
            "seed": 3,
            "device": "cpu",
            "model": {
                "name": "builtin:resnet-8",
                "pretrained": False,
                "image_size": 9,
                "target_modules": ["conv1", "conv2", "downsample.0"],
            },
            "data": {"train": str(pictures), "test_fraction": 0.2},
            "partition": {"partitioner": "natural", "column": "domain"},
            "method": method,
            "federation": {"rounds": 3, "clients_per_round": 3, **changes},
            "training": {"lr": 0.02, "local_steps": 2, "batch_size": 5},
        }
    )


def weights(made: Prepared, progress: Progress, client: str | None = None) -> dict[str, Tensor]:
    """The target layers' effective weights, (O, I), in float64."""
    job, adapted = made.evaluator.build_job(progress, client), made.engine.adapted
    found: dict[str, Tensor] = {}
    for layer in adapted.spec.layers:
        base = materialize(adapted.get_weight(layer.name), progress.state.base, layer.name).double()
        slots = {slot: value.double() for slot, value in select_slots(job.tensors, layer.name).items()}
        found[layer.name] = base + compute_dense_change(job.parametrization[layer.name].compute_effective(slots), base)
    return found


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def require_export(made: Prepared, progress: Progress, place: Path) -> None:
    """Whoever has the folder, and nothing else, computes the same."""
    folder = write_adapters(made, progress, RunFolder(place))["global"]
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert made.test is not None
    batch = made.task.collate(made.test, range(len(made.test)), torch.device("cpu"))
    with torch.no_grad():
        theirs = made.task.predict(model, batch)
    ours = made.engine.predict(made.evaluator.build_job(progress, None), made.test, np.arange(len(made.test)), 50)
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-4)


def test_fedloru_builds_convolutions_of_nothing_but_its_factors(pictures: Path, tmp_path: Path) -> None:
    """The weight is the sum of s B A over accumulations: of what was drawn for the layer nothing is left."""
    made = prepare(scratch_config(pictures, {"name": "fedloru", "r": 4, "tau": 2, "from_scratch": True}))
    scaling, progress = 4.0, made.federation.begin()
    spec = made.engine.adapted.spec
    assert {layer.kernel for layer in spec.layers} == {(3, 3), (1, 1)}
    sums = {layer.name: torch.zeros(layer.shape, dtype=torch.float64) for layer in spec.layers}
    for round in range(3):
        tensors = made.evaluator.build_job(progress, None).tensors
        for name, weight in weights(made, progress).items():
            B, A = (select_slots(tensors, name)[slot].double() for slot in "BA")
            assert close(weight, sums[name] + scaling * B @ A)
            assert weight.norm() > 0.1
        result = made.federation.run_round(progress)
        if round == 1:  # what every factor was before it began again
            for name, weight in weights(made, result.progress).items():
                assert torch.linalg.matrix_rank(weight, rtol=1e-5) <= 4  # to rounding of float32
                sums[name] = weight
                assert not select_slots(made.evaluator.build_job(result.progress, None).tensors, name)["B"].any()
        for name, weight in weights(made, result.progress).items():
            assert not close(weight, weights(made, progress)[name], 1e-3)
        progress = result.progress
    assert progress.state.base.rho == 0.0
    require_export(made, progress, tmp_path)


def test_fedhm_takes_ranks_above_a_convolution_s_outputs(pictures: Path, tmp_path: Path) -> None:
    """The first convolution is 16 x 27 as PEFT unfolds it, and a 48 x 9 matrix to FedHM; the last one 192 x 192."""
    ranks = {"east": 2, "north": 20, "south": 100, "west": 192}
    made = prepare(scratch_config(pictures, {"name": "fedhm"}, ranks=ranks, clients_per_round=4))
    progress = made.federation.begin()
    for _ in range(2):
        whole = weights(made, progress)
        for id, rank in ranks.items():
            job = made.evaluator.build_job(progress, id)
            for layer in made.engine.adapted.spec.layers:
                assert select_slots(job.tensors, layer.name)["U"].shape[1] == min(rank, *layer.rectangle)
        for name, weight in weights(made, progress, "west").items():
            assert close(weight, whole[name])  # of full rank in every layer: nothing is cut
        smaller = weights(made, progress, "south")
        assert not close(smaller["layer3.0.conv2"], whole["layer3.0.conv2"], 0.01)
        assert close(smaller["conv1"], whole["conv1"])
        result = made.federation.run_round(progress)
        sizes = {one.client: one.payload for one in result.transfers if one.direction == "up"}
        assert sizes["east"] < sizes["north"] < sizes["south"] < sizes["west"]
        progress = result.progress
    require_export(made, progress, tmp_path)
