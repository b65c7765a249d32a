"""The summary by which a node's operator decides shows every setting on which depends what leaves the node."""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel

from fedspan.config import RunConfig
from fedspan.deployment.approval import SHOWN, SILENT, JobRequest
from fedspan.deployment.handshake import build_node_values
from helpers.node_service import node, values

ALL = [field for fields in SHOWN.values() for field in fields]


def list_fields() -> Iterator[str]:
    """The fields of a run's config, those of a section with the section's name."""
    for name, field in RunConfig.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else (field.annotation,)
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not sections or name in SILENT:
            yield name
        for section in sections:
            yield from (f"{name}.{inner}" for inner in section.model_fields if name not in SILENT)


def is_listed(field: str, listed: Any) -> bool:
    return field in listed or f"{field.partition('.')[0]}.*" in listed


def test_every_setting_is_shown_or_does_not_matter() -> None:
    fields = list(list_fields())
    assert [field for field in fields if not is_listed(field, ALL) and not is_listed(field, SILENT)] == []
    known = {*fields, *(f"{field.partition('.')[0]}.*" for field in fields)}
    assert {*ALL, *SILENT} - known == set(), "these are no settings any more"


def test_every_setting_that_a_node_takes_from_the_server_s_data_is_shown() -> None:
    shared = dict.fromkeys(("labels", "label_separator", "chat", "system", "packing", "long_answers", "prompt"), "x")
    own = {"data": {}, "validation": 0.1, "test": 0.1, "split_seed": 0}
    taken = set(build_node_values({"data": {**dict.fromkeys(RunConfig.model_fields, "x"), **shared}}, own)["data"])
    assert {f"data.{name}" for name in taken - {"test_fraction"}} <= set(ALL)


def test_the_summary_names_what_a_hostile_config_hides(tiny_folder: Path, tmp_path: Path) -> None:
    config = values(
        tiny_folder,
        training={"batch_size": 3, "local_steps": 2, "gradient_accumulation_steps": 5},
        federation={"secure": {"clip": 7.0}, "clients_per_round": 1},
        evaluation={"every": 4},
    )
    config["model"] |= {
        "head_init": "lda",
        "modules_to_save": ["pooler"],
        "target_modules": ["query"],
    }
    config["data"] |= {"labels": ["a" * 500, "b"]}
    request = JobRequest("0" * 64, "run\x1b[2J", config, "now")
    summary = request.summarize(node(tiny_folder, tmp_path))
    assert "batch_size 3" in summary["training"]
    assert "local_steps 2" in summary["training"]
    assert "gradient_accumulation_steps 5" in summary["training"]
    assert 'modules_to_save ["pooler"]' in summary["trained in full"]
    assert 'target_modules ["query"]' in summary["adapted layers"]
    assert summary["input"] == "max_length 16"
    assert '"clip": 7.0' in summary["secure aggregation"]
    assert "clients_per_round 1" in summary["federation"]
    assert "every 4" in summary["evaluation"]
    assert summary["head"] == "head_init lda, head_rounds auto"
    assert summary["privacy"] == "none: updates are sent without noise"
    assert "(--settings shows all)" in summary["problem"]
    assert "\x1b" not in "".join(summary.values())


def test_the_summary_shows_the_defaults_of_what_a_server_leaves_out(tiny_folder: Path, tmp_path: Path) -> None:
    config = {"data": {"labels": ["a", "b"]}, "model": {"pretrained": False}}
    summary = JobRequest("0" * 64, "run", config, "now").summarize(node(tiny_folder, tmp_path))
    defaults = RunConfig.model_validate({"data": {"train": "nodes"}})
    assert f"max_length {defaults.model.max_length}" in summary["input"]
    assert "pretrained false" in summary["model"]
    assert f"batch_size {defaults.training.batch_size}" in summary["training"]
