"""Target layers whose weights a model uses without calling them are refused; layers without a use are not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

import fedspan
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.direct_uses import forbid_direct_uses
from fedspan.training.trainers import trainer_engine
from fedspan.training.trainers.trainer_engine import TrainerEngine
from helpers import tiny


class Parts(nn.Module):
    """A model that calls ``called``, uses the weight of ``read`` or of ``both``, and has an expert without inputs."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.called, self.read, self.both, self.expert = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.noise, self.used = nn.BatchNorm1d(6), nn.Dropout(0.5), used

    def forward(self, x: Tensor) -> Tensor:
        x = self.noise(self.norm(self.both(self.called(x))))
        return x if self.used == "none" else F.linear(x, getattr(self, self.used).weight)


TARGETS = ["called", "read", "both", "expert"]


def adapt(model: nn.Module) -> AdaptedModel:
    return AdaptedModel(model, {name: model.get_submodule(name) for name in TARGETS}, {})


@pytest.mark.parametrize("used", ["read", "both"])
def test_a_weight_that_is_used_without_a_call_is_refused_by_name(used: str) -> None:
    adapted = adapt(Parts(used).train())
    with (
        pytest.raises(FedspanError, match=f"the model uses the weight of '{used}' without calling the layer") as caught,
        forbid_direct_uses(adapted),
    ):
        adapted.model(torch.randn(4, 6))
    assert caught.value.field == "model.target_modules"
    assert adapted.model.training
    assert "forward" not in vars(adapted.model)


def test_calls_and_layers_without_a_use_are_accepted_and_leave_no_trace() -> None:
    adapted = adapt(Parts("none").train())
    mean = adapted.model.norm.running_mean.clone()
    with forbid_direct_uses(adapted):
        adapted.model(torch.randn(4, 6))
        adapted.model.read.weight.norm()  # a penalty of the loss is outside of the model
    assert torch.equal(adapted.model.norm.running_mean, mean)
    assert all(layer.observe is None for layer in adapted.layers.values())


def make_trainer(used: str) -> fedspan.TorchTrainer:
    torch.manual_seed(2)
    model = Parts(used)
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train(round: fedspan.TrainingRound) -> None:
        for rows in round.batches(torch.arange(8).split(4)):
            loss = (model(x[rows]) - y[rows]).square().mean()
            loss.backward()
            round.step(loss, len(rows))

    return fedspan.TorchTrainer(model, train, 8)


@pytest.mark.parametrize("used", ["read", "both"])
def test_a_trainer_s_model_is_checked_in_its_first_pass(used: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model": {"target_modules": TARGETS}, "method": {"r": 2}, "federation": {"rounds": 1}}
    with pytest.raises(FedspanError, match=f"uses the weight of '{used}' without calling the layer"):
        fedspan.simulate(config, tmp_path / "run", trainers={"a": make_trainer(used)})


def test_the_check_of_a_trainer_s_model_changes_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {"model": {"target_modules": TARGETS}, "method": {"r": 2}, "federation": {"rounds": 1}}
    checked: list[AdaptedModel] = []

    def check(adapted: AdaptedModel) -> AbstractContextManager[None]:
        checked.append(adapted)
        return forbid_direct_uses(adapted)

    monkeypatch.setattr(trainer_engine, "forbid_direct_uses", check)
    fedspan.simulate(config, tmp_path / "checked", trainers={"a": make_trainer("none")})
    assert len(checked) == 1
    monkeypatch.setattr(TrainerEngine, "_check_first_pass", lambda *_: nullcontext())
    fedspan.simulate(config, tmp_path / "unchecked", trainers={"a": make_trainer("none")})
    assert len(checked) == 1
    expected, found = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("unchecked", "checked")
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class ReadingConfig(PretrainedConfig):
    model_type = "reading-encoder"


class ReadingEncoder(PreTrainedModel):
    """A text classifier that uses the weight of ``read`` without a call."""

    config_class = ReadingConfig
    base_model_prefix = "encoder"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.called, self.read = nn.Embedding(tiny.VOCABULARY_SIZE, 6), nn.Linear(6, 7), nn.Linear(7, 5)
        self.classifier = nn.Linear(5, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, labels: Any = None, **_: Any) -> Any:
        logits = self.classifier(F.linear(self.called(self.embed(input_ids)[:, 0]), self.read.weight))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_an_engine_checks_a_model_before_it_trains(tiny_folder: Path, tmp_path: Path, engine: str) -> None:
    objects: dict[str, Any] = {
        "model": ReadingEncoder(ReadingConfig(num_labels=len(tiny.LABELS))),
        "tokenizer": AutoTokenizer.from_pretrained(tiny_folder / "bert"),
    }

    def run(*targets: str) -> None:
        settings = tiny.settings(tiny_folder, model={"target_modules": list(targets)}, engine={"name": engine})
        del settings["model"]["name"]
        fedspan.run(settings, tmp_path / targets[-1], **objects)

    with pytest.raises(FedspanError, match="the model uses the weight of 'read' without calling the layer"):
        run("called", "read")
    assert not (tmp_path / "read" / "metrics.jsonl").read_text()  # no round is done
    run("called")
