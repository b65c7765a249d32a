"""What is merged into the weights of a base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.parametrization import Factorized
from fedspan.core.values import Job
from fedspan.federation.progress import Progress
from fedspan.models.merging import export_merged, is_merging_required
from fedspan.runs.setup import Prepared
from helpers import tiny_images
from helpers.image_rounds import close, run_rounds, theirs


def factorized(made: Prepared, progress: Progress) -> Job:
    """The trained model with other factors in place of its weights."""
    job = made.evaluator.build_job(progress, None)
    tensors = {name: value for name, value in job.tensors.items() if name.startswith("extras/")}
    rng = torch.Generator().manual_seed(0)
    for layer in made.engine.adapted.spec.layers:
        tensors[f"{layer.name}/U"] = torch.randn(layer.out_features, 2, generator=rng) / 4
        tensors[f"{layer.name}/V"] = torch.randn(2, layer.in_features, generator=rng) / 4
    return Job({layer.name: Factorized() for layer in made.engine.adapted.spec.layers}, tensors, ())


@pytest.mark.parametrize("what", [pytest.param("factors", marks=pytest.mark.slow), "decay"])
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_what_is_no_change_of_the_base_is_written_whole(kind: str, what: str, images: Path, tmp_path: Path) -> None:
    """Factors in place of the weights, and a base that was scaled: the model on disk computes what the engine does."""
    made, progress = run_rounds(tiny_images.config(images, kind), 1)
    job, base = made.evaluator.build_job(progress, None), BaseUpdate()
    assert not is_merging_required(job, base)
    if what == "factors":
        job = factorized(made, progress)
    else:
        layers = made.engine.adapted.spec.layers
        base = base.add(Increment(1, {one.name: torch.ones(one.shape) / 50 for one in layers}, decay=0.7))
    assert is_merging_required(job, base)
    adapted = made.engine.adapted
    adapted.set_base(base)
    assert made.test is not None
    expected = made.engine.predict(job, made.test, np.arange(len(made.test)), 50)
    notes = {"base_model": made.config.model.name}
    export_merged(tmp_path, adapted, job, base, made.model.processor, notes)
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert close(theirs(made, back), expected)
    assert all(value.dtype == torch.float32 for value in back.parameters())
    adapted.set_base(BaseUpdate())
