"""The cases of ``digests.py``: what each changes in one base config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digest_inputs import LABELS, SITES, TAGS

TRAINERS = "trainer"
"""The case, and the task, whose clients train with their owners' own trainers (``digest_trainer``)."""
_SENT = ("labels", "prompt")
"""Fields of ``data`` that a deployment's server names; a node's file names the others."""
_TARGETS = ["query", "value", "intermediate.dense", "output.dense"]
_IMAGE_LABELS = ["blue", "green", "red"]
_START = {"head_init": "random", "pooling": "stock"}


def _build_base(folder: Path) -> dict[str, Any]:
    return {
        "seed": 3,
        "device": "cpu",
        "threads": 1,
        "model": {"name": str(folder / "deep-bert"), "target_modules": _TARGETS, "max_length": 16, **_START},
        "data": {"train": str(folder / "corpus" / "all.csv"), "test_fraction": 0.0, "labels": list(LABELS)},
        "partition": {"partitioner": "natural", "column": "site", "validation": 0.1, "test": 0.1},
        "method": {"name": "fedit", "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 3, "clients_per_round": 2},
        "training": {"lr": 0.02, "local_steps": 3, "batch_size": 4},
        "evaluation": {"batch_size": 32, "metric": "loss"},  # no two rounds are equal by it
    }


def build_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Build the changes to the base config, section by section, by case; None stands for a field that is left out.

    Methods and wrappers are those that this checkout registers.

    Args:
        folder: Folder of ``digest_inputs.save_inputs``.
    """
    from fedspan.methods.registry import METHODS
    from fedspan.wrappers.registry import WRAPPERS

    made: dict[str, dict[str, Any]] = {f"method-{name}": {"method": {"name": name}} for name in METHODS}
    sgd = {"training": {"optimizer": "sgd"}}
    for name in WRAPPERS:
        made[f"wrapper-{name}"] = {"method": {"name": "fedit", "wrappers": [{"name": name}]}, **sgd}
    made |= {
        "method-slora-stages": {"method": {"name": "slora", "sparse_rounds": 1}},
        "method-fedloru-accumulation": {"method": {"name": "fedloru", "tau": 2}},
        "method-mfedloru-nested": {"method": {"name": "mfedloru"}, "federation": {"ranks": {"north": 1, "west": 1}}},
        "method-florg-dense": {"method": {"name": "florg", "bases": "dense"}},
        "method-fedhm-convolutions": {"method": {"name": "fedhm"}, **_build_images(folder)},
        "moments-stored": {"training": {"optimizer_state": "keep"}},
        "reduction-median": {"federation": {"reduction": "median"}},
        "reduction-trimmed-mean": {"federation": {"reduction": "trimmed-mean"}},
        "reduction-multi-krum": {"federation": {"reduction": "multi-krum"}},
        "reduction-geometric-median": {"federation": {"reduction": "geometric-median"}},
        "reduction-flame": {"federation": {"reduction": "flame"}},
        "clip-fixed-norm": {"federation": {"max_norm": 0.05}},
        "full-cohort": {"federation": {"clients_per_round": None}},
        "frozen-layers": {
            "model": {"layers_to_transform": [1], "head_init": "auto", "target_modules": ["query", "value"]},
            "data": {"test_fraction": 0.2},
        },
        "dropout": {"training": {"lora_dropout": 0.1}},
        "accumulation": {"training": {"gradient_accumulation_steps": 2}},
        **_build_tasks(folder),
        "privacy-central": {
            "privacy": {"mechanism": "central", "clip": 1.0, "noise": 0.5, "randomness": "seed"},
            "federation": {"weights": "uniform"},
        },
        "privacy-local": {"privacy": {"mechanism": "local", "clip": 1.0, "noise": 0.5, "randomness": "seed"}},
        "privacy-dp-sgd": {"privacy": {"mechanism": "dp-sgd", "clip": 1.0, "noise": 0.5, "randomness": "seed"}},
        "secure": {"federation": {"secure": {}, "clients_per_round": None}},
        "secure-central": {
            "privacy": {"mechanism": "central", "clip": 1.0, "noise": 0.5, "randomness": "seed"},
            "federation": {"secure": {}, "clients_per_round": None, "weights": "uniform"},
        },
        "personal-and-moments": {"method": {"name": "fedsa-lora"}, "training": {"optimizer_state": "keep"}},
        "personal-heldout": {"method": {"name": "fedsa-lora"}, "data": {"test_fraction": 0.2}},
        "phases-and-moments": {"method": {"name": "pfedlora"}, "training": {"optimizer_state": "keep"}},
    }
    return made


def _build_tasks(folder: Path) -> dict[str, dict[str, Any]]:
    """Build a case for each task but that of the base config; its name is the task's."""

    def data(file: str, **columns: Any) -> dict[str, Any]:
        return {"train": str(folder / file), "labels": None, **columns}

    decoder = {"name": str(folder / "gpt2-lm"), "target_modules": ["c_attn", "c_proj"]}
    made: dict[str, dict[str, Any]] = {
        "regression": {"data": data("scored/all.csv", text="a", label="score")},
        "causal-lm": {"model": decoder, "data": data("questions/all.jsonl", prompt="Q: {question} A:")},
        "image-classification": _build_images(folder),
        "token-classification": {"data": data("sentences/all.jsonl", labels=list(TAGS))},
        "multi-label-classification": {"data": data("topics/all.jsonl", labels=list(LABELS[:3]))},
        "masked-lm": {"model": {"name": str(folder / "masked-bert")}, "data": data("texts/all.jsonl")},
        "text-embedding": {
            "model": {"pooling": "mean"},
            "data": data("pairs/all.csv", text="query", text_pair="found"),
        },
        "seq2seq": {
            "model": {"name": str(folder / "t5"), "target_modules": ["q", "v", "wo"]},
            "data": data("translations/all.csv", text="de", answer="en"),
        },
        "preference": {"model": decoder, "data": data("preferences/all.jsonl")},
        TRAINERS: {
            **dict.fromkeys(("device", "threads", "data", "partition", "evaluation")),
            "model": dict.fromkeys(("name", "max_length", *_START)),
            "training": {"batch_size": None},
        },
    }
    return {name: {"task": name, **changes} for name, changes in made.items()}


def _build_images(folder: Path) -> dict[str, Any]:
    return {
        "task": "image-classification",
        "data": {"train": str(folder / "pictures"), "labels": None},
        "model": {"name": "builtin:resnet-8", "pretrained": False, "image_size": 9, "target_modules": "all-linear"},
        "partition": {"partitioner": "iid", "column": None, "clients": len(SITES)},
    }


def build_configs(folder: Path, host: str) -> dict[str, dict[str, Any]]:
    """Build the whole configs by case, for one host.

    Owners' own trainers train in place of an engine and in one process, so their case is recorded with those of the
    loop engine, and in a deployment, whose server has the base config.

    Args:
        folder: Folder of ``digest_inputs.save_inputs``.
        host: Name of the host.
    """
    engine = {"batched": {"name": "batched", "clients_per_pass": 2, "workers": 1}}
    made: dict[str, dict[str, Any]] = {}
    for name, changes in build_cases(folder).items():
        if name == TRAINERS and host not in ("loop", "deployment"):
            continue
        if name == TRAINERS and host == "deployment":
            changes = {}
        values = _build_base(folder)
        for section, change in changes.items():
            values[section] = {**values.get(section, {}), **change} if isinstance(change, Mapping) else change
            if isinstance(change, Mapping):
                values[section] = {key: value for key, value in values[section].items() if value is not None}
        values = {section: value for section, value in values.items() if value is not None}
        values |= {} if name == TRAINERS else {"engine": engine.get(host, {"name": "loop"})}
        values |= {"cluster": {"workers": 2}} if host == "ray" else {}
        made[name] = values
    return made


def get_node_data(values: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return the data of a node's file for a case: the site's own part, except of images, which all sites share."""
    train = Path(values["data"]["train"])
    own = train.with_name(f"{site}{train.suffix}") if train.suffix else train
    columns = {name: value for name, value in values["data"].items() if name not in ("train", "test_fraction", *_SENT)}
    return {"train": str(own), **columns}


def get_sent_data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``data`` of a case in a deployment, whose server names the labels."""
    sent = {name: value for name, value in values["data"].items() if name in _SENT}
    return {**sent, "labels": _IMAGE_LABELS} if values.get("task") == "image-classification" else sent
