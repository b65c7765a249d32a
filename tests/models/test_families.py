"""Architecture families through the ordinary path: what stacks, what trains one by one, and what is refused, and why.

Their models are built from their Transformers configs with random weights. docs/models.md has the table.
"""

import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from fedspan.errors import FedspanError
from fedspan.models.heads import get_head
from fedspan.run_folder import RunFolder
from fedspan.runs.trained_models import write_adapters
from helpers import tiny_families
from helpers.families import others_slow
from helpers.tiny_families import FAMILIES, IMAGES, LANGUAGE, PAIRS

FAST = ("bert", "deberta-v2", "t5", "mamba", "swin")
ALONE = {"deberta-v2": "attention.self.query_proj is given one input for all examples of a batch"}
"""Families whose clients train one by one with PEFT's default target modules, and why."""
NO_HEAD = ("whisper",)
"""Families for which no built-in task has a head."""
REFUSED = {
    "modernbert": "Expected names of modules, for example Wi, Wo, Wqkv.",
    "mamba": "Expected names of modules, for example in_proj, x_proj.",
    "convnext": "Expected names of modules, for example downsampling_layer.1, patch_embeddings, pwconv1, pwconv2.",
    "swin": "Expected names of modules, for example fc1, fc2, k_proj, o_proj, projection, q_proj.",
    "dinov2": "Expected names of modules, for example fc1, fc2, k_proj, o_proj, projection, q_proj.",
    "clip": "Expected names of modules, for example fc1, fc2, k_proj, out_proj, patch_embedding, q_proj.",
    "mobilenet_v2": "Expected names of modules, for example conv_1x1.convolution, expand_1x1.convolution, "
    "first_conv.convolution, reduce_1x1.convolution.",
    **{
        f"{family}-seq2seq": "Expected names of modules, for example fc1, fc2, k_proj, out_proj, q_proj, v_proj."
        for family in ("marian", "mbart", "m2m100")
    },
}
"""Families for which PEFT has no default target modules, and what the error suggests."""
SHARED = ("value_proj", "dense")
"""Target modules with which clients of a DeBERTa-v3 share passes: those that no relative positions enter."""

trainable = pytest.mark.parametrize("key", others_slow([key for key in FAMILIES if key not in NO_HEAD], FAST))
methods = pytest.mark.parametrize("method", ["fedit", pytest.param("rolora", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    tiny_families.save_data(folder)
    return folder


@methods
@trainable
def test_a_family_trains_equally_on_both_engines(key: str, method: str, folder: Path) -> None:
    """Adapter, head and loss are equal up to rounding; where clients train one by one, bit for bit."""
    outcome = tiny_families.compare(folder, key, method, FAMILIES[key].targets)
    assert outcome.moved
    assert math.isclose(*outcome.losses, rel_tol=1e-5)
    if key not in ALONE:
        assert outcome.alone is None
        assert outcome.gap < 2e-4
    else:
        assert ALONE[key] in str(outcome.alone)
        assert outcome.gap == 0.0


@pytest.mark.parametrize("key", others_slow(REFUSED, ["modernbert", "mamba", "clip"]))
def test_the_error_names_modules_that_can_be_targets(key: str, folder: Path) -> None:
    with pytest.raises(FedspanError, match="PEFT has no default for the architecture") as caught:
        tiny_families.compare(folder, key)
    assert caught.value.field == "model.target_modules"
    assert str(caught.value).endswith(REFUSED[key])
    suggested = REFUSED[key].removesuffix(".").partition("for example ")[2].split(", ")
    _, progress, _ = tiny_families.train(tiny_families.settings(folder, key, target_modules=suggested))
    assert progress.state.round == 2


def test_deberta_shares_passes_where_no_relative_positions_enter(folder: Path) -> None:
    outcome = tiny_families.compare(folder, "deberta-v2", targets=list(SHARED))
    assert outcome.alone is None
    assert outcome.gap < 2e-4


@pytest.mark.parametrize("name", ["dt_proj", "out_proj"])
def test_layers_of_mamba_that_are_not_called_are_refused(name: str, folder: Path) -> None:
    for targets in ([name], "all-linear"):
        with pytest.raises(FedspanError, match="of a Mamba layer, ") as caught:
            tiny_families.compare(folder, "mamba", targets=targets)
        assert str(caught.value).endswith("Expected other modules, for example in_proj, x_proj.")


def test_a_router_of_experts_is_refused(folder: Path) -> None:
    with pytest.raises(FedspanError, match=r"'model\.layers\.0\.mlp\.gate' is a MixtralTopKRouter, which cannot"):
        tiny_families.compare(folder, "mixtral", targets=["gate"])


@pytest.mark.parametrize("key", NO_HEAD)
def test_a_family_without_a_head_for_the_task_is_refused(key: str, folder: Path) -> None:
    missing = "AutoModelForSequenceClassification"
    problem = f"has the architecture '{key}', for which Transformers has no {missing}. A task of your own"
    for changes in ({}, {"pretrained": False}):
        values = tiny_families.settings(folder, key, **changes)
        with pytest.raises(FedspanError, match=problem) as caught:
            tiny_families.train(values)
        assert caught.value.field == "model.name"


def test_the_encoder_of_t5_pools(folder: Path) -> None:
    values = tiny_families.settings(folder, "t5", pooling="mean")
    loop, progress, loss = tiny_families.train(values)
    assert not any("decoder" in name for name in loop.engine.adapted.layers)
    _, same, other = tiny_families.train({**values, "engine": {"name": "batched", "clients_per_pass": 3, "workers": 1}})
    assert loss == pytest.approx(other, rel=1e-5)
    for name, value in progress.state.tensors.items():
        assert torch.allclose(value, same.state.tensors[name], rtol=1e-3, atol=1e-5)


@trainable
def test_what_peft_loads_gives_the_run_s_numbers(key: str, folder: Path, tmp_path: Path) -> None:
    family = FAMILIES[key]
    prepared, progress, _ = tiny_families.train(tiny_families.settings(folder, key, target_modules=family.targets))
    adapter = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    kind = get_head(prepared.config.task_definition.head).load_class()
    options = {} if family.task in (LANGUAGE, PAIRS) else {"num_labels": len(prepared.labels)}
    eager = {} if family.task == IMAGES else {"attn_implementation": "eager"}
    base = kind.from_pretrained(folder / key, **options, **({} if key == "mamba" else eager))
    base.config.pad_token_id = 0
    theirs: nn.Module = PeftModel.from_pretrained(base, str(adapter)).eval()
    if key == "mobilenet_v2":  # its padding reads attributes that PEFT's wrappers of convolutions lack
        theirs = theirs.merge_and_unload()
    batch = prepared.task.collate(prepared.train, [0, 5, 9], torch.device("cpu"))
    own = ("target_tokens",) if family.task == PAIRS else ("labels", "position_ids")  # decoders read shifted labels
    inputs = {name: value for name, value in batch.items() if name not in own}
    adapted, job = prepared.engine.adapted, prepared.evaluator.build_job(progress, None)
    adapted.model.eval()
    adapted.install(job.parametrization, job.tensors, frozenset())
    with torch.no_grad():
        ours, logits = adapted.model(**inputs).logits, theirs(**inputs).logits
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-4)
