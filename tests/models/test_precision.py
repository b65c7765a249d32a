"""Extras of a narrow base train in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedspan.models import unpadded
from fedspan.models.adapted import AdaptedModel
from fedspan.models.precision import compute_tolerance, has_narrow_weights, keep_in_float32
from fedspan.models.unpadded import Unpadded
from fedspan.runs.setup import Prepared, prepare
from fedspan.training.jobs import Assignment
from helpers import tiny
from helpers.first_jobs import first_job


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_extras_of_a_narrow_base_train_in_float32(dtype: str, tiny_folder: Path, prepared: Prepared) -> None:
    """A step of 1e-5 moves every weight of the head, which a narrow format rounds away; frozen weights stay narrow.

    Embeddings (tied to nothing here), a normalization in the middle and the head: integer inputs, inner and outer ones.
    """
    saved = ["word_embeddings", "LayerNorm"]
    model = {"dtype": dtype, "modules_to_save": saved}
    narrow = prepare(tiny.config(tiny_folder, model=model), prepared.partition)
    adapted = narrow.engine.adapted
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in adapted.extras} >= {*saved, "classifier"}
    for path, parameter in adapted.model.named_parameters():
        assert parameter.dtype == (torch.float32 if path in adapted.extras else getattr(torch, dtype))
    job = first_job(narrow)
    start = {name: value.clone() for name, value in job.tensors.items()}
    indices = narrow.federation.clients["north"].train
    trained = narrow.engine.train(Assignment("north", 0, job, indices, 1e-5), narrow.train)
    head = "extras/classifier.weight"
    moved = trained.tensors[head] != start[head]
    assert trained.tensors[head].dtype == torch.float32
    assert moved.all()
    rounded = getattr(torch, dtype)
    assert (trained.tensors[head].to(rounded) != start[head].to(rounded)).double().mean() < 0.5


class Tied(nn.Module):
    """Embeddings and an output layer that share one parameter, with a frozen layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.lm_head = nn.Linear(5, 7, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.inner(self.embed_tokens(ids)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tied_weights_stay_tied_and_every_owner_is_cast(dtype: torch.dtype) -> None:
    """The first owner's conversion is that of the shared parameter; the second one needs its casts all the same."""
    model = Tied().to(dtype)
    weight = model.get_parameter("embed_tokens.weight")
    keep_in_float32(model, [weight])
    assert model.lm_head.weight is model.embed_tokens.weight is weight
    assert weight.dtype == torch.float32
    assert model.inner.weight.dtype == dtype
    logits = model(torch.tensor([[1, 6, 3]]))
    assert logits.shape == (1, 3, 7)
    assert logits.dtype == dtype
    logits.float().square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 5e-2), (torch.bfloat16, 5e-2)])
def test_the_tolerance_is_that_of_the_narrowest_weights(dtype: torch.dtype, tolerance: float) -> None:
    """Wherever they are: trained embeddings are the first parameter and float32, on a base that is not."""
    layers = nn.Embedding(7, 5), nn.Linear(5, 3).to(dtype), nn.LayerNorm(3)
    for order in (layers, layers[::-1]):
        assert compute_tolerance(nn.Sequential(*order)) == tolerance
    quantized = nn.Linear(5, 3)
    quantized.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.uint8), requires_grad=False)
    assert not has_narrow_weights(quantized)


def test_attention_over_texts_of_variable_length_does_not_depend_on_trained_embeddings(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are float32, while attention computes in the base's half precision."""
    model = {"dtype": "bfloat16", "modules_to_save": ["word_embeddings"]}
    adapted = prepare(tiny.config(tiny_folder, model=model), prepared.partition).engine.adapted
    assert next(adapted.model.parameters()).dtype == torch.float32
    monkeypatch.setattr(AdaptedModel, "device", torch.device("cuda"))
    monkeypatch.setattr(unpadded, "import_variable_attention", lambda: len)
    assert Unpadded(adapted).variable
    assert not Unpadded(prepared.engine.adapted).variable
