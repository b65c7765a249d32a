"""The papers' presets, their cells and dry runs: every file fits the schema, and mistakes in one are named."""

from typing import Any

import pytest

from fedspan import FedspanError
from fedspan.config import parse_config
from fedspan.models.names import ARCHITECTURES, BUILTIN_MODELS, resolve_model
from fedspan.planning import plan
from fedspan.planning.compute import Compute, LocalTraining
from fedspan.reproduction.cells import list_cells, name_row_folders, tabulate_settings
from fedspan.reproduction.presets import SCALES, list_presets, load_preset, merge, read_architectures, read_preset
from fedspan.reproduction.rehearsal import dry_run
from helpers.refusals import refused


def changed(**changes: Any) -> dict[str, Any]:
    """Values of a small preset, with these in place of its own."""
    values = {
        "id": "x",
        "paper": "p",
        "item": "Table 1",
        "title": "t",
        "config": {},
        "axes": {"task": {"one": {}}},
        "methods": {"LoRA": {"key": "fedit"}},
        "seeds": [0],
        "claims": [{"statement": "s", "better": "LoRA", "worse": ["LoRA"]}],
        "small": {},
        "notes": ["n"],
    }
    return {**values, **changes}


def test_the_architecture_of_minilm_is_its_package_s() -> None:
    from transformers import AutoConfig

    name = "builtin:all-minilm-l6-v2"
    assert name.removeprefix("builtin:") in BUILTIN_MODELS
    try:
        published = AutoConfig.from_pretrained(resolve_model(name)).to_dict()
    except FedspanError:
        pytest.skip("its package is not installed")
    assert {key: published[key] for key in read_architectures()[name]} == read_architectures()[name]


def test_merging_goes_into_sections() -> None:
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "c": 5}) == {"a": {"x": 1, "y": 4}, "b": 3, "c": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nots": ["n"]}, r"`x\.nots`: there is no such field. Did you mean 'notes'"),
        ({"methods": {"LoRA": {"key": "fedit-lora"}}}, "methods.LoRA.key 'fedit-lora' is not a method. Did you mean"),
        ({"claims": [{"statement": "s", "better": "LoRA", "worse": ["FFA"]}]}, "claims: 'FFA' is not one of LoRA"),
        (
            {"claims": [{"statement": "s", "better": "LoRA", "worse": ["LoRA"], "cells": {"task": ["two"]}}]},
            "'two' is not one",
        ),
        ({"small": {"axes": {"clients": {}}}}, "small.axes: 'clients' is not one of task"),
        ({"small": {"skip": [{"task": ["two"]}]}}, "small.skip.task: 'two' is not one of one"),
        (
            {"small": {"skip": [{}]}},
            r"`x\.small\.skip\.0`: {} is not accepted. Expected a dictionary with at least 1 item",
        ),
        (
            {"sweep": {"training.lr": [0.1]}, "small": {"matched": {"training.momentum": 0.9}}},
            r"small\.matched has training\.momentum, the sweep training\.lr",
        ),
        ({"seeds": []}, r"`x\.seeds`: \[\] is not accepted. Expected a list with at least 1 item"),
    ],
)
def test_mistakes_in_a_preset_are_named(changes: dict[str, Any], message: str) -> None:
    assert read_preset(changed(), "x").id == "x"
    with pytest.raises(FedspanError, match=message):
        read_preset(changed(**changes), "x")


def test_an_unknown_preset() -> None:
    with refused("ID"):
        load_preset("rolora-table99")


IDS = [preset.id for preset in list_presets()]


@pytest.mark.parametrize("id", IDS)
def test_every_cell_is_a_valid_config_on_a_model_of_known_shape(id: str) -> None:
    preset = load_preset(id)
    for scale in SCALES:
        for cell in list_cells(preset, scale):
            for label, values in cell.configs.items():
                config = parse_config(values)
                assert config.method.name == preset.methods[label].key
                assert (config.federation.clip_ratio, config.federation.max_weight_ratio) == (None, None)
                known = {*read_architectures(), *(f"builtin:{name}" for name in ARCHITECTURES)}
                assert config.model.name in known
        rows = name_row_folders(preset.get_labels(scale))
        assert len({*rows.values()}) == len(preset.get_labels(scale))
        small_rounds = max(
            parse_config(each).federation.rounds
            for cell in list_cells(preset, "small")
            for each in cell.configs.values()
        )
        assert small_rounds <= {"fedgalore-intents": 50}.get(id, 30)


def test_rows_whose_labels_differ_by_a_sign_have_folders_of_their_own() -> None:
    names = name_row_folders(["FedGaLore-", "FedGaLore", "tau 2", "tau", "tau-"])
    assert list(names.values()) == ["fedgalore", "fedgalore-2", "tau-2", "tau", "tau-3"]


def test_what_stands_for_a_paper_s_cell_is_said() -> None:
    shown = tabulate_settings(list_cells(load_preset("fedgalore-table4"), "small", "/data"))
    assert [row[:4] for row in shown.rows] == [
        ("iid-fashion-mnist", "fashion-mnist, at most 3,000", "IID", "10, 5 a round"),
        ("non-iid-fashion-mnist", "fashion-mnist, at most 3,000", "Dirichlet 0.5", "10, 5 a round"),
    ]
    shown = tabulate_settings(list_cells(load_preset("fedgalore-pacs"), "small", "/data", "/model"))
    assert [row[2:4] for row in shown.rows] == [
        ("by domain", "one for each value of a column"),
        ("Dirichlet 0.5 within each domain", "12"),
    ]
    ranks = tabulate_settings(list_cells(load_preset("fedloru-table1"), "small", "/data")).rows[0][6]
    assert ranks == "16 (FedLoRA, FedLoRU); 24 (FedHM)"
    for id in ("rolora-figure4", "rolora-table2"):  # cells that differ by layers, by files
        rows = tabulate_settings(list_cells(load_preset(id), "small", "/data", "/model")).rows
        assert len({row[1:] for row in rows}) == len(rows)


def test_a_combination_that_small_skips_is_no_cell_there() -> None:
    axes = {"task": {"one": {}, "two": {}}, "clients": {"3": {}, "20": {}, "50": {}}}
    preset = read_preset(changed(axes=axes, small={"skip": [{"task": ["two"], "clients": ["20", "50"]}]}), "x")
    assert [cell.name for cell in list_cells(preset, "small")] == ["one-3", "one-20", "one-50", "two-3"]
    assert len(list_cells(preset, "full")) == 6


SHORT = {"fedgalore-figure4", "fedloru-figure3", "florg-bytes", "rolora-table6"}
"""One of each paper whose dry run takes less than a second when small."""
SIZES = [
    pytest.param(id, scale, marks=() if scale == "small" and id in SHORT else pytest.mark.slow)
    for id in IDS
    for scale in SCALES
]
"""At full size some take half a minute."""


@pytest.fixture
def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without the FLOPs and memory of passes, which take seconds a model and are tested in tests/planning."""
    nothing = LocalTraining(Compute(None, 0, 0, 0, None, None, None, None), 0, 0)
    monkeypatch.setattr(plan, "compute_training_cost", lambda *_: nothing)


@pytest.mark.usefixtures("without_passes")
@pytest.mark.parametrize(("id", "scale"), SIZES)
def test_a_dry_run_needs_neither_weights_nor_data(id: str, scale: Any) -> None:
    found = dry_run(id, scale=scale)
    preset = load_preset(id)
    assert {each.method for each in found} == set(preset.get_labels(scale))
    for each in found:
        assert each.plan.trainable > 0
        assert each.plan.client.total > 0
        assert each.plan.all_steps is None or each.plan.all_steps > 0


@pytest.mark.usefixtures("without_passes")
def test_the_papers_own_numbers_come_out() -> None:
    """RoLoRA's figure 5: budgets of 187.5 and 250 KB a round (of LoRA, in bytes of 2^10 and its both ways)."""
    rows = dry_run("rolora-figure5", scale="full")
    sent = {(each.cell.partition("-")[2], each.method): each.plan.later_up for each in rows}
    for budget, kilobytes in (("187.5-kb", 187.5), ("250-kb", 250)):
        each = {method: count for (cell, method), count in sent.items() if cell.endswith(budget)}
        assert len(set(each.values())) == 1, "all methods send the same"
        assert each["LoRA"] == pytest.approx(1024 * kilobytes, rel=0.05)
