"""Plain modules from Python: training on both engines, exports that PyTorch and PEFT load alone, and refusals.

Also Transformers models that read neither tokens nor images.
"""

import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspan
from fedspan.models import loading, merging
from fedspan.models.heads import Head
from fedspan.models.plain import adopt_module, is_plain_module, read_dtype, read_state_dict, write_state_dict
from fedspan.progress.listener import Listener
from helpers import refusals, tiny
from helpers.refusals import refused
from helpers.trainer_clients import arguments as trainer_arguments


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """examples/plain_pytorch.py, with its model and task."""
    path = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"
    spec = importlib.util.spec_from_file_location("plain_pytorch", path)
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

    def on_start(self, prepared: Any, done: int, resumed: bool) -> None:
        self.texts.extend(prepared.notes)

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
    with refusals.refused("model", "pass such a model again as model="):
        fedspan.predict(merged, texts)
    assert torch.equal(logits(base, example), before)


def test_a_new_module_gets_the_weights_of_the_run(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    """In a new process, a module is a freshly initialized one: its own weights are not those of the run."""
    texts, fresh = [row["text"] for row in example.make_signals(4, 6)], example.Vibrations()
    expected = fedspan.predict(finished, texts, model=example.pretrain(5))
    assert fedspan.predict(finished, texts, model=fresh) == expected
    data = arguments(example)["data"]["factory-1"]
    assert fedspan.evaluate(finished, data=data, model=fresh) == fedspan.evaluate(
        finished, data=data, model=example.pretrain(5)
    )
    whole = (finished / "adapter" / "state_dict.safetensors").read_bytes()
    for given in (fresh, None):
        merged = fedspan.export(finished, tmp_path / "merged", form="merged", model=given)
        assert (merged / "state_dict.safetensors").read_bytes() == whole
        shutil.rmtree(merged)


def test_an_adapter_is_not_used_on_other_weights(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    """What no state dict holds needs the module with the weights that it had: a cut adapter, another round."""
    texts, fresh = [row["text"] for row in example.make_signals(4, 6)], example.Vibrations()
    cut = fedspan.export(finished, tmp_path / "cut", rank=1)
    assert not (cut / "state_dict.safetensors").exists()
    adapted = PeftModel.from_pretrained(example.pretrain(5), str(cut))
    answers = [example.KINDS[at] for at in logits(adapted, example).argmax(1).tolist()]
    assert [label for label, _ in fedspan.predict(cut, texts, model=example.pretrain(5))] == answers
    with refusals.refused("model", "frozen weights are not those with which the run began") as caught:
        fedspan.predict(cut, texts, model=fresh)
    assert caught.value.field == "model"
    objects = {"data": arguments(example)["data"], "model": fresh}
    other = 3 - fedspan.read_report(finished).best_round  # of two rounds, the one that the run did not export
    for call in (
        lambda: fedspan.export(finished, tmp_path / "other", round=other, **objects),
        lambda: fedspan.diagnose(finished, pairs=0, **objects),
    ):
        with refusals.refused("model", "frozen weights of the models are not those with which the run began"):
            call()


def test_no_hub_is_asked_for_the_name_of_a_class(
    example: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_downloads(monkeypatch)
    cut = fedspan.export(finished, tmp_path / "cut", rank=1)
    for folder in (finished, cut):
        with refusals.refused("model", r"a Vibrations that was passed from Python: pass such a model again"):
            fedspan.predict(folder, ["1 2"])
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    assert ModelCard.load(finished / "adapter" / "README.md").data.base_model is None


def test_the_card_has_the_call_that_starts_the_run_again(example: ModuleType, finished: Path, tmp_path: Path) -> None:
    card = (finished / "adapter" / "README.md").read_text()
    (call,) = (line for line in card.splitlines() if line.startswith("fedspan.run("))
    assert call.startswith('fedspan.run("config.yaml", "run", data=data, model=model, task=task)')
    given = {name: value for name, value in arguments(example).items() if name != "config"}
    fedspan.run(finished / "config.yaml", tmp_path / "run", **given)
    name = "adapter/state_dict.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_what_does_not_fit_is_refused(example: ModuleType, tmp_path: Path) -> None:
    def refuse(field: str, words: str, **changes: Any) -> None:
        given = arguments(example, **changes.pop("sections", {})) | changes
        with refused(field, re.escape(words)):
            fedspan.run(folder=tmp_path / "run", **given)

    attention = {"model": {"target_modules": ["out_proj"]}}
    refuse("model.target_modules", "uses its weight without a call", sections=attention)
    refuse("model.target_modules", "for example", sections={"model": {"target_modules": None}})
    checkpointing = {"model": {"gradient_checkpointing": True}}
    refuse("model.gradient_checkpointing", "does not support it", sections=checkpointing)
    refuse("task", "leave task out of the config", config={**arguments(example)["config"], "task": "regression"})
    refuse("model", "another nn.Module", model=object())


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
    with refusals.refused("folder", "cannot be loaded into the model"):
        read_state_dict(tmp_path, nn.Linear(3, 2))
    with refusals.refused("folder", "cannot be loaded into the model"):
        read_state_dict(tmp_path / "nowhere", model)
    assert is_plain_module(model)
    assert read_dtype(model.bfloat16()) == "bfloat16"
    assert read_dtype(object()) == "float32"


class SignalModel(transformers.PreTrainedModel):
    """The example's module as a model of Transformers' kind."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any, body: nn.Module) -> None:
        super().__init__(config)
        self.body, self.classifier = body, body.classifier
        body.classifier = nn.Identity()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))


def forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> None:
        raise AssertionError(f"asked for {name}")

    for kind in (loading.AutoTokenizer, loading.AutoImageProcessor, merging.AutoConfig):
        monkeypatch.setattr(kind, "from_pretrained", refuse)


def test_a_model_of_signals_needs_no_tokenizer(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_downloads(monkeypatch)
    notes, values = Notes(), arguments(example, federation={"rounds": 1})
    values["model"] = model = SignalModel(transformers.PretrainedConfig(num_labels=3), values["model"])
    report = fedspan.run(folder=tmp_path / "run", **values, listener=notes)
    assert any("model that was passed: " in text and "'input_ids'" in text for text in notes.texts)
    rows = [row["text"] for row in example.make_signals(2, 3)]
    assert len(fedspan.predict(tmp_path / "run", rows, model=model)) == 3
    merged = fedspan.export(tmp_path / "run", tmp_path / "merged", form="merged", model=model)
    assert (merged / "model.safetensors").is_file()
    assert report.scores["test"]["loss"] > 0
    values["config"]["model"]["head_init"] = "lda"
    with refusals.refused("model.head_init"):
        fedspan.run(folder=tmp_path / "named", **values)


def test_a_processor_that_cannot_be_exported_is_refused_at_the_start(example: ModuleType, tmp_path: Path) -> None:
    with refusals.refused("tokenizer", r"save_pretrained\(folder\) exports it") as caught:
        fedspan.run(folder=tmp_path / "run", **arguments(example), tokenizer=object())
    assert caught.value.field == "tokenizer"
    trainer = fedspan.TorchTrainer(nn.Sequential(nn.Linear(3, 2)), lambda round: None, 8, processor=object())
    with refusals.refused("tokenizer", r"save_pretrained\(folder\) exports it"):
        fedspan.simulate({"model": {"target_modules": ["0"]}}, tmp_path / "trainer", trainers={"a": trainer})


class WordClassifier(nn.Module):
    """A classifier of texts, as somebody writes it in PyTorch: it returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(tiny.VOCABULARY_SIZE, 8), nn.Linear(8, 12)
        self.dropout, self.out = nn.Dropout(0.1), nn.Linear(12, len(tiny.LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mean = (self.words(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.out(self.dropout(self.hidden(mean).relu()))


class PairOfOutputs(WordClassifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return super().forward(input_ids, attention_mask), None


def test_a_forward_may_return_its_logits(tiny_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    values = tiny.settings(tiny_folder, engine={"name": "batched"}, federation={"rounds": 1})
    values["model"] = {"target_modules": ["hidden"], "max_length": 16}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder / "bert")
    model = WordClassifier()
    report = fedspan.run(values, tmp_path / "run", model=model, tokenizer=tokenizer)
    scores = fedspan.evaluate(tmp_path / "run", model=model, tokenizer=tokenizer)
    assert scores["loss"] == pytest.approx(report.scores["test"]["loss"], rel=1e-5)
    with refused("model", "its forward returns tuple. Expected a tensor, or an object with logits"):
        fedspan.run(values, tmp_path / "other", model=PairOfOutputs(), tokenizer=tokenizer)
    values["model"]["modules_to_save"] = ["out"]
    with refused("model.modules_to_save", "'out' is also the end of 'lora_dropout'"):
        fedspan.run(values, tmp_path / "saved", model=model, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="cannot be applied to modules of type"):  # which PEFT would raise afterwards
        get_peft_model(WordClassifier(), LoraConfig(target_modules=["hidden"], modules_to_save=["out"]))


@pytest.fixture
def whisper() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "classifier_proj_size": 8, "num_mel_bins": 4}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    tokens = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    config = transformers.WhisperConfig(**sizes, **heads, **tokens, max_source_positions=3, num_labels=3)
    return transformers.WhisperForAudioClassification(config)


@pytest.mark.parametrize("has_extractor", [False, True])
def test_whisper_is_trained_by_a_task_of_one_s_own(
    has_extractor: bool, whisper: Any, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_downloads(monkeypatch)
    whisper.name_or_path = "somebody/whisper"  # whose tokenizer is not asked for
    kind: Any = example.SignalClassification

    class AudioClassification(kind):
        def predict(self, model: Any, batch: Any, *, generate: bool = False) -> Tensor:
            return model(input_features=batch["signal"].unflatten(1, (4, 6))).logits

    head = Head("AutoModelForAudioClassification", ("ForAudioClassification",), outputs="labels", is_new=True)
    task = replace(
        example.SIGNALS,
        name="audio-classification",
        head=head,
        build=lambda processor, settings, data: AudioClassification(settings.labels, settings.metric),
    )
    values = arguments(example, model={"target_modules": ["q_proj", "v_proj"]}, federation={"rounds": 1})
    notes, objects = Notes(), dict[str, Any]()
    if has_extractor:
        objects["tokenizer"] = transformers.WhisperFeatureExtractor(feature_size=4)
    fedspan.run(folder=tmp_path / "run", **{**values, "model": whisper, "task": task}, **objects, listener=notes)
    assert any("model that was passed: the model takes neither tokens nor images" in text for text in notes.texts)
    assert (tmp_path / "run" / "adapter" / "preprocessor_config.json").is_file() == has_extractor


def test_whisper_is_trained_by_a_trainer(whisper: Any, tmp_path: Path) -> None:
    rows = [{"input_features": torch.randn(4, 6).tolist(), "labels": at % 3} for at in range(8)]
    data = datasets.Dataset.from_list(rows).with_format("torch")
    trainer = transformers.Trainer(
        model=whisper,
        args=trainer_arguments(tmp_path / "trainer"),
        train_dataset=data.select(range(6)),
        eval_dataset=data.select(range(6, 8)),
    )
    config = {"model": {"target_modules": ["q_proj", "v_proj"]}, "method": {"r": 2}, "federation": {"rounds": 1}}
    report = fedspan.simulate(config, tmp_path / "run", trainers={"a": trainer})
    assert report.scores["validation"]["loss"] > 0
