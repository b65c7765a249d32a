"""Plain modules from Python: training on both engines, exports that PyTorch and PEFT load alone, and refusals."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspan
from fedspan.errors import FedspanError
from fedspan.models.plain import adopt_module, is_plain_module, read_dtype, read_state_dict, write_state_dict
from fedspan.runs.callbacks import Listener


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """examples/plain_pytorch.py, with its model and task."""
    path = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"
    spec = importlib.util.spec_from_file_location("plain_pytorch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_pytorch"] = module  # which its dataclasses look up
    spec.loader.exec_module(module)
    return module


def arguments(example: ModuleType, engine: str = "loop", **changes: Any) -> dict[str, Any]:
    """The arguments of a run of two rounds."""
    config: dict[str, Any] = {
        "device": "cpu",
        "model": {"target_modules": ["embed", "linear1", "linear2", "hidden"]},
        "method": {"name": "fedit", "r": 2},
        "federation": {"rounds": 2},
        "training": {"lr": 0.02, "batch_size": 4, "local_steps": 3},
        "engine": {"name": engine, **({"clients_per_pass": 3, "workers": 1} if engine == "batched" else {})},
    }
    for section, change in changes.items():
        config[section] = {**config[section], **change}
    signals = {f"factory-{number}": example.make_signals(number, 20) for number in range(1, 4)}
    return {"config": config, "data": signals, "model": example.pretrain(5), "task": example.SIGNALS}


class Notes(Listener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_note(self, text: str) -> None:
        self.texts.append(text)


def logits(model: nn.Module, example: ModuleType) -> Tensor:
    rows = [[float(number) for number in row["text"].split()] for row in example.make_signals(4, 6)]
    with torch.no_grad():
        return model.eval()(torch.tensor(rows))


@pytest.fixture(scope="module")
def finished(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the loop engine, not to be changed."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    fedspan.run(folder=folder, **arguments(example))
    return folder


def test_clients_share_passes_with_the_loop_s_result(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    notes = Notes()
    fedspan.run(folder=tmp_path / "run", **arguments(example, "batched"), listener=notes)
    assert not [text for text in notes.texts if "one by one" in text]
    ours = load_file(tmp_path / "run" / "adapter" / "state_dict.safetensors")
    for name, value in load_file(finished / "adapter" / "state_dict.safetensors").items():
        assert torch.allclose(value, ours[name], rtol=1e-3, atol=1e-5), name


def test_an_export_loads_without_fedspan(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    """By PyTorch alone, by PEFT on the module that the run began with, and merged; the base is the caller's own."""
    base = example.pretrain(5)
    before = logits(base, example)
    whole = example.Vibrations()
    whole.load_state_dict(load_file(finished / "adapter" / "state_dict.safetensors"))
    expected = logits(whole, example)
    assert not torch.allclose(before, expected, atol=1e-2)
    adapted = PeftModel.from_pretrained(example.pretrain(5), str(finished / "adapter"))
    assert torch.allclose(logits(adapted.merge_and_unload(), example), expected, atol=1e-5)
    texts = [row["text"] for row in example.make_signals(4, 6)]
    answers = [example.KINDS[at] for at in expected.argmax(1).tolist()]
    assert [label for label, _ in fedspan.predict(finished, texts, model=base)] == answers
    merged = fedspan.export(finished, tmp_path / "merged", form="merged", model=base)
    assert sorted(path.name for path in merged.iterdir()) == ["README.md", "fedspan.json", "state_dict.safetensors"]
    assert 'load_file("FOLDER/state_dict.safetensors")' in (merged / "README.md").read_text()
    alone = example.Vibrations()
    alone.load_state_dict(load_file(merged / "state_dict.safetensors"))
    assert torch.allclose(logits(alone, example), expected, atol=1e-5)
    assert [label for label, _ in fedspan.predict(merged, texts, model=example.Vibrations())] == answers
    with pytest.raises(FedspanError, match="pass such a model again as model="):
        fedspan.predict(merged, texts)
    assert torch.equal(logits(base, example), before)


def test_the_same_call_resumes(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    class Stop(Listener):
        def on_round_finish(self, row: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedspan.run(folder=tmp_path / "run", **arguments(example), resume=True, listener=Stop())
    fedspan.run(folder=tmp_path / "run", **arguments(example), resume=True)
    name = "adapter/state_dict.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_what_does_not_fit_is_refused(example: ModuleType, tmp_path: Path) -> None:
    def refused(field: str, words: str, **changes: Any) -> None:
        given = arguments(example, **changes.pop("sections", {})) | changes
        with pytest.raises(FedspanError) as caught:
            fedspan.run(folder=tmp_path / "run", **given)
        assert caught.value.field == field
        assert words in str(caught.value)

    attention = {"model": {"target_modules": ["out_proj"]}}
    refused("model.target_modules", "uses its weight without a call", sections=attention)
    refused("model.target_modules", "for example", sections={"model": {"target_modules": None}})
    checkpointing = {"model": {"gradient_checkpointing": True}}
    refused("model.gradient_checkpointing", "does not support it", sections=checkpointing)
    refused("task", "leave task out of the config", config={**arguments(example)["config"], "task": "regression"})
    refused("model", "another nn.Module", model=object())


class Mixed(nn.Module):
    """Batch means enter the result: examples of a batch are not independent."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(24, 20)
        self.classifier = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.classifier(torch.relu(h - h.mean(0)))


def test_a_module_that_mixes_examples_trains_one_by_one(example: ModuleType, tmp_path: Path) -> None:
    given = arguments(example, "batched", model={"target_modules": ["hidden"]})
    torch.manual_seed(0)
    notes = Notes()
    fedspan.run(folder=tmp_path / "run", **{**given, "model": Mixed()}, listener=notes)
    assert any("one by one" in text and "when two clients share a pass" in text for text in notes.texts)


def test_an_adopted_module_is_a_copy_without_dropout() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True), nn.LSTM(8, 8, 2))
    model[1].dropout = 0.3
    adopted = adopt_module(model.train())
    assert not adopted.training
    x = torch.randn(3, 5, 8)
    assert torch.allclose(adopted.train()(x)[0], adopted.eval()(x)[0], atol=1e-5)
    assert model[0].dropout.p == model[0].self_attn.dropout == model[1].dropout == 0.3


def test_tied_weights_are_written_and_damaged_ones_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    write_state_dict(tmp_path, model.state_dict())
    read_state_dict(tmp_path, model)
    with pytest.raises(FedspanError, match="cannot be loaded into the model"):
        read_state_dict(tmp_path, nn.Linear(3, 2))
    with pytest.raises(FedspanError, match="cannot be loaded into the model"):
        read_state_dict(tmp_path / "nowhere", model)
    assert is_plain_module(model)
    assert read_dtype(model.bfloat16()) == "bfloat16"
    assert read_dtype(object()) == "float32"
