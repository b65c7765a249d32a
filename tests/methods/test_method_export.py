"""Adapters that a federation writes, read back by PEFT alone on a model that is loaded again: the same logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from fedspan.federation.progress import Progress
from fedspan.methods.registry import METHODS
from fedspan.runs.folder import RunFolder
from fedspan.runs.setup import Prepared, prepare
from fedspan.runs.trained_models import write_adapters
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family, others_slow
from helpers.watched_rounds import method_config

MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "bert": ("bert", {}),
    "gpt2": ("gpt2", {}),  # Conv1D: weights are stored transposed (fan_in_fan_out)
    "bert-last-layer": ("deep-bert", {"layers_to_transform": [1]}),
    "bert-local-head": ("bert", {"extras": "local"}),
}


@pytest.fixture(scope="module", params=others_slow(MODELS, ["bert", "gpt2"]))
def case(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> tuple[str, Prepared]:
    """A model with the target layers of its case, loaded once for all methods."""
    kind, model = MODELS[request.param]
    config = tiny.config(tiny_folder, kind, model=model)
    return request.param, prepare(config, prepared.partition)


def logits_by_peft(prepared: Prepared, adapter: Path) -> Tensor:
    if (adapter / "adapter_config.json").is_file():
        model = PeftModel.from_pretrained(tiny.fresh_classifier(prepared.config.model.name), str(adapter)).eval()
    else:  # written whole
        model = AutoModelForSequenceClassification.from_pretrained(adapter).eval()
    examples = prepared.test
    assert examples is not None
    with torch.no_grad():
        batch = prepared.task.collate(examples, range(len(examples)), torch.device("cpu"))
        return prepared.task.predict(model, batch)


def logits_by_engine(prepared: Prepared, progress: Progress, client: str | None) -> Tensor:
    examples = prepared.test
    assert examples is not None
    job = prepared.evaluator.build_job(progress, client)
    return prepared.engine.predict(job, examples, np.arange(len(examples)), len(examples))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_pretrained_weights_that_count_as_zero_are_gone_from_what_is_written(
    case: tuple[str, Prepared], tiny_folder: Path, tmp_path: Path
) -> None:
    """FedLoRU from scratch: rho = 0, which no adapter expresses, so the model is written whole."""
    name, loaded = case
    kind, model = MODELS[name]
    config = method_config(
        tiny_folder,
        "fedloru",
        kind,
        model={**model, "extras": "average"},
        federation={"rounds": 3},
        method={"from_scratch": True},
    )
    prepared = tiny.variant(loaded, config)
    progress = prepared.federation.begin()
    for _ in range(3):
        progress = prepared.federation.run_round(progress).progress
    assert progress.state.base.rho == 0.0
    assert progress.state.base.total
    folder = write_adapters(prepared, progress, RunFolder(tmp_path))["global"]
    expected = logits_by_engine(prepared, progress, None)
    assert torch.allclose(logits_by_peft(prepared, folder), expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_peft_gives_the_engine_s_logits(
    key: str, case: tuple[str, Prepared], tiny_folder: Path, tmp_path: Path
) -> None:
    name, loaded = case
    kind, model = MODELS[name]
    rounds = {"rounds": 2, "clients_per_round": 2}
    training = {"lr": 0.05, "weight_decay": 0}  # no adapter can say that the base itself has decayed
    config = method_config(tiny_folder, key, kind, model=model, federation=rounds, training=training)
    prepared = tiny.variant(loaded, config)
    begin = progress = prepared.federation.begin()
    for _ in range(2):
        progress = prepared.federation.run_round(progress).progress
    folders = write_adapters(prepared, progress, RunFolder(tmp_path))
    personal = METHODS[key].claims.personal or name == "bert-local-head"
    assert set(folders) == (set(prepared.federation.clients) if personal else {"global"})
    gained = 0.0
    for id, folder in folders.items():
        client = None if id == "global" else id
        expected = logits_by_engine(prepared, progress, client)
        assert torch.allclose(logits_by_peft(prepared, folder), expected, rtol=0, atol=1e-4)
        gained = max(gained, float((expected - logits_by_engine(prepared, begin, client)).abs().max()))
        notes = json.loads((folder / "fedspan.json").read_text())
        assert (notes["method"], notes["round"], notes["client"]) == (key, 2, client)
    assert gained > 0.01, "training changed nothing"
    if personal:  # whoever was trained has a model of its own
        models = {id: logits_by_engine(prepared, progress, id) for id in progress.last_rounds}
        assert len({tuple(model.flatten().tolist()) for model in models.values()}) == len(models) > 1
