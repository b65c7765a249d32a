"""Mistakes in a configuration."""

from collections.abc import Callable
from typing import Any

from fedspan.assembly.engine import choose_device
from fedspan.config import load_config, override, parse_config

from ..mistakes.world import Mistake, World


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


def _unknown_method(world: World) -> None:
    from fedspan.cli.methods import methods

    methods("fedsa")


def _unknown_dataset(world: World) -> None:
    from fedspan.cli.data import data

    data("sst")


def _no_device(what: str, provoke: Callable[[World], object]) -> Mistake:
    """A device that the machine does not have."""
    return Mistake(what, "device", provoke, "has no device ")


FILES = [
    Mistake("The file does not exist.", "config", lambda world: load_config("my.yaml")),
    Mistake("The file is in Latin-1.", "config", _yaml("# Schlüssel".encode("latin-1")), "a YAML file ("),
    Mistake("The path is a folder.", "config", lambda world: load_config(world.folder)),
    Mistake("The path contains a null byte.", "config", lambda world: load_config("a\0b")),
    Mistake("A bracket is not closed.", "config", _yaml("data: {train: x.csv\n"), "valid YAML ("),
    Mistake("A line is indented with a tab.", "config", _yaml("data:\n\ttrain: x.csv\n"), "valid YAML ("),
    Mistake("A date has the month 13.", "config", _yaml("data: 2026-13-01"), "valid YAML ("),
    Mistake("Brackets are nested a thousand levels deep.", "config", _yaml("data: " + "[" * 1100), "valid YAML ("),
    Mistake("The file holds a list.", "config", _yaml("- data\n")),
    Mistake("The file is empty.", "config", _yaml("")),
    Mistake("A section contains itself through a YAML anchor.", "config", _yaml("data: &a {train: *a}\n")),
    Mistake("`--set method.r`", "--set", _set("method.r")),
    Mistake("`--set =3`", "--set", _set("=3")),
    Mistake("`--set seed.value=3`", "--set", _set("seed.value=3")),
    Mistake(
        "`--set data.labels.2=c` with two labels.",
        "--set",
        lambda world: override({"data": {"labels": ["a", "b"]}}, ["data.labels.2=c"]),
    ),
    Mistake("`--set seed=[`", "--set", _set("seed=[")),
]
FIELDS = [
    Mistake("A section is misspelt.", "methd", _parse(methd={"name": "fedit"})),
    Mistake("A field is misnamed.", "training.learning_rate", _parse(training__learning_rate=1)),
    Mistake("There is no data section.", "data", lambda world: parse_config({"seed": 1})),
    Mistake("No training data are named.", "data.train", _parse(data={})),
    Mistake("A word instead of a number.", "federation.rounds", _parse(federation__rounds="many")),
    Mistake("A section is a list.", "training", _parse(training=[1])),
    Mistake("The number of rounds is 0.", "federation.rounds", _parse(federation__rounds=0)),
    Mistake("The seed has thousands of digits.", "seed", _parse(seed=16**5000)),
    Mistake("The number of threads is far too large.", "threads", _parse(threads=10**9)),
    Mistake("The learning rate is infinite.", "training.lr", _parse(training__lr=float("inf"))),
    Mistake("Both betas of AdamW are 1.", "training.betas.0", _parse(training__betas=[1, 1])),
    Mistake("An unknown optimizer.", "training.optimizer", _parse(training__optimizer="adam")),
    Mistake("An unknown number format.", "model.dtype", _parse(model__dtype="fp16")),
    Mistake("The model's name is empty.", "model.name", _parse(model__name="")),
    Mistake("An unknown method.", "method.name", _parse(method__name="fedot")),
    Mistake("`fedspan methods fedsa`", "METHOD", _unknown_method),
    Mistake("A wrapper instead of a method.", "method.name", _parse(method__name="fedprox")),
    Mistake("An unknown wrapper.", "method.wrappers.0", _parse(method__wrappers=["fedprocks"])),
    Mistake("A method as a wrapper.", "method.wrappers.0", _parse(method__wrappers=["rolora"])),
    Mistake("A number instead of a wrapper.", "method.wrappers.0", _parse(method__wrappers=[0.1])),
    Mistake(
        "An option that the wrapper does not have.",
        "method.wrappers.0.lr",
        _parse(method__wrappers=[{"name": "fedprox", "lr": 0.1}]),
    ),
    Mistake(
        "beta1 of FedAdam is 1.",
        "method.wrappers.1.beta1",
        _parse(method__wrappers=["fedprox", {"name": "fedadam", "beta1": 1}]),
    ),
    Mistake("Two server optimizers.", "method.wrappers.1", _parse(method__wrappers=["fedadam", "fedavgm"])),
    Mistake(
        "A server optimizer around FLoRA.",
        "method.wrappers.0",
        _parse(method={"name": "flora", "wrappers": ["fedadam"]}),
    ),
    Mistake(
        "A server optimizer for factors that are re-initialized every round.",
        "method.wrappers.0",
        _parse(method={"name": "fedloru", "tau": 1, "wrappers": ["fedyogi"]}),
    ),
    Mistake(
        "FedPAQ inside a server optimizer instead of outside.",
        "method.wrappers.1",
        _parse(method__wrappers=["fedpaq", "fedadam"]),
    ),
    Mistake("SCAFFOLD's option II under AdamW.", "method.wrappers.0", _parse(method__wrappers=["scaffold"])),
    Mistake(
        "SCAFFOLD with raw gradients while training clips them.",
        "method.wrappers.0",
        _parse(method__wrappers=[{"name": "scaffold", "variate": "gradient"}]),
    ),
    Mistake(
        "FedProx around local-only training.",
        "method.wrappers.0",
        _parse(method={"name": "local-only", "wrappers": ["fedprox"]}),
    ),
    Mistake(
        "The threshold for opening masks is half of the clients.",
        "federation.secure.threshold",
        _parse(federation__secure={"threshold": 0.5}),
    ),
    Mistake(
        "Diagnostics of client updates on a cluster.",
        "evaluation.diagnostics",
        _parse(cluster={"workers": 2}, evaluation__diagnostics=1),
    ),
    Mistake("A GPU on a cluster whose workers have none.", "device", _parse(cluster={"workers": 2}, device="cuda")),
    Mistake(
        "Baselines on a cluster whose workers use the GPUs.",
        "baselines",
        _parse(cluster={"workers": 2, "gpus_per_worker": 1}, baselines=["local-only"]),
    ),
    Mistake("An option of another method.", "method.tau", _parse(method={"name": "fedit", "tau": 3})),
    Mistake("The rank is 0.", "method.r", _parse(method__r=0)),
    Mistake("An unknown task.", "task", _parse(task="translation")),
    Mistake("A metric that the task does not have.", "evaluation.metric", _parse(evaluation__metric="perplexity")),
    Mistake("An unknown baseline.", "baselines.0", _parse(baselines=["central"])),
    Mistake("An unknown data set.", "data.dataset", _parse(data={"dataset": "sst"})),
    Mistake("`fedspan data sst`", "KEY", _unknown_dataset),
    Mistake("A data set for another task.", "task", _parse(task="regression", data={"dataset": "sst2"})),
    Mistake("A name where labels are listed.", "data.labels", _parse(data__labels="intent")),
    Mistake("A label is listed twice.", "data.labels", _parse(data__labels=["a", "a"])),
    Mistake(
        "labels and first_labels are both set.",
        "data.first_labels",
        _parse(data__labels=["a", "b"], data__first_labels=2),
    ),
    Mistake("keep_only is set without labels.", "data.keep_only", _parse(data__keep_only=True)),
    Mistake("Text and label are the same column.", "data.label", _parse(data__text="a", data__label="a")),
    Mistake(
        "prompt and messages are both set.",
        "data.prompt",
        _parse(data__prompt="{q}", data__messages="m", data__chat=True),
    ),
    Mistake("messages is set without chat.", "data.chat", _parse(data__messages="m")),
    Mistake(
        "Validation and test parts leave nothing for training.",
        "partition.validation",
        _parse(partition={"validation": 0.5, "test": 0.5}),
    ),
    Mistake("The natural partitioner has no column.", "partition.column", _parse(partition__partitioner="natural")),
]
DEVICES = [
    _no_device("A device that torch does not know.", lambda world: choose_device("tpu")),
    _no_device("A GPU that the machine does not have.", lambda world: choose_device("cuda:97")),
    _no_device("torch's meta device, which has no memory.", lambda world: choose_device("meta")),
    _no_device("A device of a torch extension.", lambda world: choose_device("hpu")),
    _no_device("The device's name is empty.", lambda world: choose_device("")),
]
