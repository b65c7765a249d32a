"""Mistakes in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedspan.config import load_config, override, parse_config
from fedspan.runs.devices import choose_device
from helpers.mistakes.world import Mistake, World


def _parse(**changes: Any) -> Callable[[World], object]:
    """A config with a change; ``section__field`` stands for section.field."""
    values: dict[str, Any] = {"data": {"train": "train.csv"}}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            values[section] = {**values.get(section, {}), field: value}
        else:
            values[section] = value
    return lambda world: parse_config(values)


def _yaml(content: str | bytes) -> Callable[[World], object]:
    return lambda world: load_config(world.file("my.yaml", content))


def _set(text: str) -> Callable[[World], object]:
    return lambda world: parse_config(override({"data": {"train": "train.csv"}, "seed": 1}, [text]))


def _no_config(world: World) -> None:
    from fedspan.cli.train import run

    run()


def _unknown_method(world: World) -> None:
    from fedspan.cli.methods import methods

    methods("fedsa")


def _unknown_dataset(world: World) -> None:
    from fedspan.cli.data import data

    data("sst")


def _no_device(id: str, what: str, provoke: Callable[[World], object]) -> Mistake:
    """A device that the machine does not have."""
    return Mistake(id, what, "device", provoke, "has no device ")


FILES = [
    Mistake("missing", "The file does not exist.", "config", lambda world: load_config("my.yaml")),
    Mistake("not-utf-8", "The file is in Latin-1.", "config", _yaml("# Schlüssel".encode("latin-1")), "a YAML file ("),
    Mistake("folder", "The path is a folder.", "config", lambda world: load_config(world.folder)),
    Mistake("zero-byte", "The path contains a null byte.", "config", lambda world: load_config("a\0b")),
    Mistake("yaml", "A bracket is not closed.", "config", _yaml("data: {train: x.csv\n"), "valid YAML ("),
    Mistake("tabs", "A line is indented with a tab.", "config", _yaml("data:\n\ttrain: x.csv\n"), "valid YAML ("),
    Mistake("month-13", "A date has the month 13.", "config", _yaml("data: 2026-13-01"), "valid YAML ("),
    Mistake(
        "deep", "Brackets are nested a thousand levels deep.", "config", _yaml("data: " + "[" * 1100), "valid YAML ("
    ),
    Mistake("list", "The file holds a list.", "config", _yaml("- data\n")),
    Mistake("empty", "The file is empty.", "config", _yaml("")),
    Mistake(
        "holds-itself", "A section contains itself through a YAML anchor.", "config", _yaml("data: &a {train: *a}\n")
    ),
    Mistake("set-no-equals", "`--set method.r`", "--set", _set("method.r")),
    Mistake("set-no-field", "`--set =3`", "--set", _set("=3")),
    Mistake("set-into-value", "`--set seed.value=3`", "--set", _set("seed.value=3")),
    Mistake(
        "set-position",
        "`--set data.labels.2=c` with two labels.",
        "--set",
        lambda world: override({"data": {"labels": ["a", "b"]}}, ["data.labels.2=c"]),
    ),
    Mistake("set-no-yaml", "`--set seed=[`", "--set", _set("seed=[")),
    Mistake("no-config", "`fedspan run` without a file.", "CONFIG", _no_config),
]
FIELDS = [
    Mistake("unknown-section", "A section is misspelt.", "methd", _parse(methd={"name": "fedit"})),
    Mistake("unknown-field", "A field is misnamed.", "training.learning_rate", _parse(training__learning_rate=1)),
    Mistake("no-data", "There is no data section.", "data", lambda world: parse_config({"seed": 1})),
    Mistake("no-train", "No training data are named.", "data.train", _parse(data={})),
    Mistake("wrong-type", "A word instead of a number.", "federation.rounds", _parse(federation__rounds="many")),
    Mistake("fraction", "The number of rounds is not an integer.", "federation.rounds", _parse(federation__rounds=2.5)),
    Mistake("section-is-list", "A section is a list.", "training", _parse(training=[1])),
    Mistake("zero-rounds", "The number of rounds is 0.", "federation.rounds", _parse(federation__rounds=0)),
    Mistake("zero-clients", "The number of clients is 0.", "partition.clients", _parse(partition__clients=0)),
    Mistake("negative-seed", "The seed is negative.", "seed", _parse(seed=-1)),
    Mistake("huge-seed", "The seed has thousands of digits.", "seed", _parse(seed=16**5000)),
    Mistake("threads", "The number of threads is far too large.", "threads", _parse(threads=10**9)),
    Mistake("lr-inf", "The learning rate is infinite.", "training.lr", _parse(training__lr=float("inf"))),
    Mistake("lr-nan", "The learning rate is NaN.", "training.lr", _parse(training__lr=float("nan"))),
    Mistake("betas", "Both betas of AdamW are 1.", "training.betas", _parse(training__betas=[1, 1])),
    Mistake("dropout", "The dropout rate is 1.", "training.lora_dropout", _parse(training__lora_dropout=1)),
    Mistake("choice", "An unknown optimizer.", "training.optimizer", _parse(training__optimizer="adam")),
    Mistake("dtype", "An unknown number format.", "model.dtype", _parse(model__dtype="fp16")),
    Mistake("empty-name", "The model's name is empty.", "model.name", _parse(model__name="")),
    Mistake("method", "An unknown method.", "method.name", _parse(method__name="fedot")),
    Mistake("method-shown", "`fedspan methods fedsa`", "METHOD", _unknown_method),
    Mistake("method-wrapper", "A wrapper instead of a method.", "method.name", _parse(method__name="fedprox")),
    Mistake("wrapper", "An unknown wrapper.", "method.wrappers.0", _parse(method__wrappers=["fedprocks"])),
    Mistake("wrapper-method", "A method as a wrapper.", "method.wrappers.0", _parse(method__wrappers=["rolora"])),
    Mistake("wrapper-number", "A number instead of a wrapper.", "method.wrappers.0", _parse(method__wrappers=[0.1])),
    Mistake(
        "wrapper-option",
        "An option that the wrapper does not have.",
        "method.wrappers.0.lr",
        _parse(method__wrappers=[{"name": "fedprox", "lr": 0.1}]),
    ),
    Mistake(
        "wrapper-range",
        "beta1 of FedAdam is 1.",
        "method.wrappers.1.beta1",
        _parse(method__wrappers=["fedprox", {"name": "fedadam", "beta1": 1}]),
    ),
    Mistake(
        "wrapper-twice", "Two server optimizers.", "method.wrappers.1", _parse(method__wrappers=["fedadam", "fedavgm"])
    ),
    Mistake(
        "wrapper-stack",
        "A server optimizer around FLoRA.",
        "method.wrappers.0",
        _parse(method={"name": "flora", "wrappers": ["fedadam"]}),
    ),
    Mistake(
        "wrapper-reinitialized",
        "A server optimizer for factors that are re-initialized every round.",
        "method.wrappers.0",
        _parse(method={"name": "fedloru", "tau": 1, "wrappers": ["fedyogi"]}),
    ),
    Mistake(
        "wrapper-order",
        "FedPAQ inside a server optimizer instead of outside.",
        "method.wrappers.1",
        _parse(method__wrappers=["fedpaq", "fedadam"]),
    ),
    Mistake(
        "wrapper-adamw", "SCAFFOLD's option II under AdamW.", "method.wrappers.0", _parse(method__wrappers=["scaffold"])
    ),
    Mistake(
        "wrapper-clipping",
        "SCAFFOLD with raw gradients while training clips them.",
        "method.wrappers.0",
        _parse(method__wrappers=[{"name": "scaffold", "variate": "gradient"}]),
    ),
    Mistake(
        "wrapper-nothing",
        "FedProx around local-only training.",
        "method.wrappers.0",
        _parse(method={"name": "local-only", "wrappers": ["fedprox"]}),
    ),
    Mistake("ranks-number", "A single number as the clients' ranks.", "federation.ranks", _parse(federation__ranks=8)),
    Mistake(
        "ranks-assign",
        "An unknown way to assign ranks.",
        "federation.ranks",
        _parse(federation__ranks={"assign": "size", "of": [4, 8]}),
    ),
    Mistake("ranks-zero", "A rank of 0.", "federation.ranks.1", _parse(federation__ranks=[4, 0])),
    Mistake(
        "ranks-shares",
        "The clients' shares do not sum to 1.",
        "federation.ranks.of",
        _parse(federation__ranks={"assign": "fractions", "of": {4: 0.5, 8: 0.3}}),
    ),
    Mistake(
        "ranks-field",
        "A misspelt field of drawn ranks.",
        "federation.ranks.sed",
        _parse(federation__ranks={"assign": "draw", "of": [4, 8], "sed": 1}),
    ),
    Mistake(
        "secure-stack",
        "Secure aggregation with a method that needs single replies.",
        "federation.secure",
        _parse(method__name="flora", federation__secure={}),
    ),
    Mistake(
        "secure-median",
        "Secure aggregation with the median of replies.",
        "federation.secure",
        _parse(federation={"secure": {}, "reduction": "median"}),
    ),
    Mistake(
        "secure-nothing",
        "Secure aggregation with local-only training.",
        "federation.secure",
        _parse(method__name="local-only", federation__secure={}),
    ),
    Mistake(
        "secure-bits",
        "Secure aggregation in integers of 16 bits.",
        "federation.secure.bits",
        _parse(federation__secure={"bits": 16}),
    ),
    Mistake(
        "secure-threshold",
        "The threshold for opening masks is half of a neighborhood.",
        "federation.secure.threshold",
        _parse(federation__secure={"threshold": 0.5}),
    ),
    Mistake(
        "secure-field",
        "A misspelt field of secure aggregation.",
        "federation.secure.cliping",
        _parse(federation__secure={"cliping": 1}),
    ),
    Mistake(
        "conditions-on-flower",
        "Simulated conditions on Flower's simulation engine.",
        "simulation",
        _parse(simulation={"dropout": 0.1}, engine__name="flower-sim"),
    ),
    Mistake(
        "cluster-address",
        "The address of a cluster has no port.",
        "cluster.address",
        _parse(cluster={"address": "head", "workers": 2}),
    ),
    Mistake(
        "cluster-on-flower",
        "A cluster with Flower's simulation engine.",
        "engine.name",
        _parse(cluster={"workers": 2}, engine__name="flower-sim"),
    ),
    Mistake(
        "cluster-diagnostics",
        "Diagnostics of client updates on a cluster.",
        "evaluation.diagnostics",
        _parse(cluster={"workers": 2}, evaluation__diagnostics=1),
    ),
    Mistake(
        "cluster-device",
        "A GPU on a cluster whose workers have none.",
        "device",
        _parse(cluster={"workers": 2}, device="cuda"),
    ),
    Mistake(
        "cluster-baselines",
        "Baselines on a cluster whose workers use the GPUs.",
        "baselines",
        _parse(cluster={"workers": 2, "gpus_per_worker": 1}, baselines=["local"]),
    ),
    Mistake("option", "An option of another method.", "method.tau", _parse(method={"name": "fedit", "tau": 3})),
    Mistake("option-type", "The rank is not a number.", "method.r", _parse(method__r="two")),
    Mistake("option-range", "The rank is 0.", "method.r", _parse(method__r=0)),
    Mistake("alpha-nan", "alpha is NaN.", "method.lora_alpha", _parse(method__lora_alpha=float("nan"))),
    Mistake("task", "An unknown task.", "task", _parse(task="translation")),
    Mistake(
        "metric", "A metric that the task does not have.", "evaluation.metric", _parse(evaluation__metric="perplexity")
    ),
    Mistake(
        "pattern",
        "answer_pattern is not a regular expression.",
        "evaluation.answer_pattern",
        _parse(evaluation__answer_pattern="(\\d+"),
        "regular expression (",
    ),
    Mistake(
        "pattern-huge",
        "answer_pattern has too large a repetition.",
        "evaluation.answer_pattern",
        _parse(evaluation__answer_pattern="a{99999999999999999999}"),
        "regular expression (",
    ),
    Mistake("baseline", "An unknown baseline.", "baselines.0", _parse(baselines=["central"])),
    Mistake("dataset", "An unknown data set.", "data.dataset", _parse(data={"dataset": "sst"})),
    Mistake("dataset-shown", "`fedspan data sst`", "KEY", _unknown_dataset),
    Mistake(
        "dataset-images",
        "An image data set for a text task.",
        "task",
        _parse(task="regression", data={"dataset": "cifar10"}),
    ),
    Mistake(
        "scratch-quantized",
        "Quantization of a model from scratch.",
        "model.quantization",
        _parse(model={"name": "builtin:resnet-8", "quantization": "nf4"}),
    ),
    Mistake(
        "dataset-task", "A data set for another task.", "task", _parse(task="regression", data={"dataset": "sst2"})
    ),
    Mistake("labels-name", "A name where labels are listed.", "data.labels", _parse(data__labels="intent")),
    Mistake("labels-twice", "A label is listed twice.", "data.labels", _parse(data__labels=["a", "a"])),
    Mistake(
        "labels-and-first",
        "labels and first_labels are both set.",
        "data.first_labels",
        _parse(data__labels=["a", "b"], data__first_labels=2),
    ),
    Mistake("keep-only", "keep_only is set without labels.", "data.keep_only", _parse(data__keep_only=True)),
    Mistake(
        "same-column", "Text and label are the same column.", "data.label", _parse(data__text="a", data__label="a")
    ),
    Mistake(
        "prompt-and-messages",
        "prompt and messages are both set.",
        "data.prompt",
        _parse(data__prompt="{q}", data__messages="m", data__chat=True),
    ),
    Mistake("messages-no-chat", "messages is set without chat.", "data.chat", _parse(data__messages="m")),
    Mistake(
        "shares",
        "Validation and test parts leave nothing for training.",
        "partition.validation",
        _parse(partition={"validation": 0.5, "test": 0.5}),
    ),
    Mistake(
        "natural",
        "The natural partitioner has no column.",
        "partition.column",
        _parse(partition__partitioner="natural"),
    ),
]
DEVICES = [
    _no_device("unknown", "A device that torch does not know.", lambda world: choose_device("tpu")),
    _no_device("cuda-index", "A GPU that the machine does not have.", lambda world: choose_device("cuda:97")),
    _no_device("meta", "torch's meta device, which has no memory.", lambda world: choose_device("meta")),
    _no_device("other", "A device of a torch extension.", lambda world: choose_device("hpu")),
    _no_device("empty-device", "The device's name is empty.", lambda world: choose_device("")),
]
