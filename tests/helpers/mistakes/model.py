"""Mistakes in naming a model, in its files, and in the adapter that a run starts from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch

from fedspan.models.names import resolve_model

from ..mistakes.world import LONG_NAME, Mistake, World, cut, edit_json

WEIGHTS, ADAPTER = "adapter_model.safetensors", "adapter_config.json"


def _model(**model: Any) -> Callable[[World], object]:
    return lambda world: world.prepare(model=model)


def _config(**changes: Any) -> Callable[[World], object]:
    return lambda world: world.model(lambda folder: edit_json(folder / "config.json", **changes))


def _write(name: str, content: str | bytes) -> Callable[[World], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda world: world.model(lambda folder: (folder / name).write_bytes(data))


def _without(*names: str) -> Callable[[World], object]:
    return lambda world: world.model(lambda folder: [(folder / name).unlink() for name in names])


def _without_library(world: World) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        world.prepare(model={"quantization": "nf4"})


def _without_package(world: World) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        resolve_model("builtin:all-minilm-l6-v2")


def _plain_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, "chat_template": None}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def _no_template(world: World) -> None:
    from fedspan.assembly.run import prepare
    from fedspan.config import parse_config

    world.model(_plain_tokenizer, "llama-lm")
    from .. import tiny_decoders

    changes: dict[str, Any] = {"model": {"name": "model"}, "data": {"chat": True}}
    prepare(parse_config(tiny_decoders.settings(world.tiny, **changes)))


def _adapter(change: Callable[[Path], object]) -> Callable[[World], object]:
    def provoke(world: World) -> None:
        folder = world.export()
        change(folder)
        world.prepare(model={"adapter": os.path.relpath(folder)})

    return provoke


def _tensors(change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> Callable[[World], object]:
    def changed(folder: Path) -> None:
        path, made = folder / WEIGHTS, {}
        for name, value in safetensors.torch.load_file(path).items():
            made |= change(name, value)
        safetensors.torch.save_file(made, path)

    return _adapter(changed)


def _other_targets(world: World) -> None:
    folder = world.export()
    world.prepare(model={"adapter": os.path.relpath(folder), "target_modules": ["query"]})


def _other_labels(world: World) -> None:
    folder = world.export()
    world.prepare(model={"adapter": os.path.relpath(folder)}, data={"first_labels": 3})


def _unloadable(what: str, provoke: Callable[[World], object]) -> Mistake:
    """A mistake after which a model cannot be loaded."""
    return Mistake(what, "model.name", provoke, "cannot be loaded (")


def _no_adapter(what: str, provoke: Callable[[World], object]) -> Mistake:
    """A mistake after which there is no adapter to start from."""
    return Mistake(what, "model.adapter", provoke, WEIGHTS + " (")


NAMES = [
    _unloadable("A hub id that is neither cached nor reachable.", _model(name="nobody/nothing")),
    _unloadable("A name that cannot be a hub id.", _model(name="my model")),
    _unloadable("A name that is too long for the file system.", _model(name=LONG_NAME)),
    _unloadable("The home folder of an unknown user.", _model(name="~nobodyx/m")),
    Mistake("An unknown built-in model.", "model.name", lambda world: resolve_model("builtin:minilm")),
    Mistake("The built-in model's package is missing.", "model.name", _without_package),
    Mistake("bitsandbytes is missing.", "model.quantization", _without_library),
]
FOLDERS = [
    _unloadable("The folder is empty.", lambda world: world.prepare(model={"name": "."})),
    _unloadable("There is no config.json.", _without("config.json")),
    _unloadable("config.json is truncated.", _write("config.json", "{")),
    _unloadable("config.json holds null.", _write("config.json", "null")),
    _unloadable("A size in config.json is a word.", _config(hidden_size="x")),
    _unloadable("The number of attention heads is 0.", _config(num_attention_heads=0)),
    _unloadable("An unknown architecture.", _config(model_type="x")),
    Mistake("The layers have other shapes than in config.json.", "model.name", _config(intermediate_size=32)),
    Mistake("The weights of one layer are missing.", "model.name", _config(num_hidden_layers=2)),
    _unloadable("There are no weights.", _without("model.safetensors")),
    _unloadable("The weights are not a safetensors file.", _write("model.safetensors", "x" * 99)),
    _unloadable(
        "The file of weights is truncated.", lambda world: world.model(lambda folder: cut(folder / "model.safetensors"))
    ),
    Mistake("There is no tokenizer.", "model.name", _without("tokenizer.json", "tokenizer_config.json")),
    _unloadable("tokenizer.json is truncated.", _write("tokenizer.json", '{"a')),
    _unloadable("tokenizer.json is a list.", _write("tokenizer.json", "[]")),
    Mistake(
        "An encoder is used for causal-lm.",
        "model.name",
        lambda world: world.decoder(model={"name": str(world.tiny / "bert"), "target_modules": ["query"]}),
    ),
]
LAYERS = [
    Mistake("A target module is misspelt.", "model.target_modules", _model(target_modules=["quary"])),
    Mistake("A target is not a linear layer.", "model.target_modules", _model(target_modules=["LayerNorm"])),
    Mistake(
        "The targets are not a regular expression.",
        "model.target_modules",
        _model(target_modules="(query"),
        "names of layers (",
    ),
    Mistake(
        "The targets' pattern has too large a repetition.",
        "model.target_modules",
        _model(target_modules="a{99999999999999999999}"),
        "names of layers (",
    ),
    Mistake("A layer that the model does not have.", "model.target_modules", _model(layers_to_transform=[9])),
    Mistake("A module to save is misspelt.", "model.modules_to_save", _model(modules_to_save=["poler"])),
    Mistake("The rank is larger than a layer.", "method.r", lambda world: world.prepare(method={"r": 17})),
    Mistake(
        "A rank for an unknown client.",
        "federation.ranks.weast",
        lambda world: world.prepare(federation={"ranks": {"weast": 2}}),
    ),
    Mistake(
        "A client's rank is too large.",
        "federation.ranks.west",
        lambda world: world.prepare(federation={"ranks": {"west": 99}}),
    ),
    Mistake(
        "Different ranks with a method that takes one.",
        "federation.ranks.west",
        lambda world: world.prepare(federation={"ranks": {"west": 1}}),
    ),
    Mistake(
        "More clients per round than there are.",
        "federation.clients_per_round",
        lambda world: world.prepare(federation={"clients_per_round": 9}),
    ),
    Mistake("F1 with four labels.", "evaluation.metric", lambda world: world.prepare(evaluation={"metric": "f1"})),
    Mistake("chat with a model that has no chat template.", "data.chat", _no_template),
    Mistake("packing with an OPT model.", "data.packing", lambda world: world.decoder("opt", data={"packing": True})),
    Mistake(
        "An answer is too long, and long answers are refused.",
        "model.max_length",
        lambda world: world.decoder(model={"max_length": 4}, data={"long_answers": "refuse"}),
    ),
]
STARTS = [
    _no_adapter("The folder does not exist.", _model(adapter="no/such")),
    _no_adapter("The home folder of an unknown user.", _model(adapter="~nobodyx/a")),
    _no_adapter("The file of weights is truncated.", _adapter(lambda folder: cut(folder / WEIGHTS))),
    _no_adapter("Its config is truncated.", _adapter(lambda folder: cut(folder / ADAPTER))),
    Mistake(
        "It is not a LoRA adapter.",
        "model.adapter",
        _adapter(lambda folder: (folder / ADAPTER).write_text('{"peft_type": "IA3"}')),
    ),
    Mistake(
        "It is a DoRA adapter.", "model.adapter", _adapter(lambda folder: edit_json(folder / ADAPTER, use_dora=True))
    ),
    Mistake(
        "Its rank is 0.",
        "model.adapter",
        _adapter(lambda folder: edit_json(folder / ADAPTER, rank_pattern={".*": 0})),
        "lora_alpha (",
    ),
    Mistake(
        "Its alpha is not a number.",
        "model.adapter",
        _adapter(lambda folder: edit_json(folder / ADAPTER, lora_alpha="x")),
        "lora_alpha (",
    ),
    Mistake("It adapts a layer that is not a target.", "model.adapter", _other_targets),
    Mistake("Its head has other labels.", "model.adapter", _other_labels),
    Mistake(
        "Its factors belong to another model.",
        "model.adapter",
        _tensors(lambda name, value: {name: value[:, :1].clone() if "lora_A" in name else value}),
    ),
    Mistake(
        "A and B have different ranks.",
        "model.adapter",
        _tensors(lambda name, value: {name: value[:1].clone() if "lora_A" in name else value}),
    ),
    Mistake(
        "It has A without B.", "model.adapter", _tensors(lambda name, value: {} if "lora_B" in name else {name: value})
    ),
    Mistake(
        "It saves a module that this run does not train.",
        "model.adapter",
        _tensors(lambda name, value: {name: value, "base_model.model.bert.pooler.x": value.clone()}),
    ),
]
