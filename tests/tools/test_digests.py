"""tests/tools/digests.py: its cases cover what is registered, and records differ where what a run leaves differs."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import digest_cases
import digests
import pytest
import torch
from torch import Tensor

from fedspan.config import parse_config
from fedspan.core import parametrization
from fedspan.core.values import Client, LayerSpec, Reduced, Spec, StackItem
from fedspan.federation.validation import build_untrained_jobs
from fedspan.runs.client_ranks import compute_client_ranks
from fedspan.tasks.registry import BUILT_IN
from fedspan.tasks.trainer import TRAINER

CLIENT = Client(id="north", rank=2, scaling=2.0, examples=8, weight=8.0, last_round=None)


class RandomWeights:
    """A pretrained model of random weights."""

    def __init__(self, spec: Spec) -> None:
        self._shapes = {layer.name: layer.shape for layer in spec.layers}

    def get_weight(self, layer: str) -> Tensor:
        return torch.randn(self._shapes[layer], generator=torch.Generator().manual_seed(1))

    def get_extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)


@pytest.mark.parametrize("host", ["loop", "batched"])
def test_every_task_has_a_case(host: str, tmp_path: Path) -> None:
    configs = digest_cases.build_configs(tmp_path, host).values()
    tasks = {values.get("task", "sequence-classification") for values in configs}
    assert tasks == {task.name for task in BUILT_IN} - ({TRAINER.name} if host != "loop" else set())


def test_a_deployment_has_every_case_of_the_loop_engine(tmp_path: Path) -> None:
    loop, deployed = (digest_cases.build_configs(tmp_path, host) for host in ("loop", "deployment"))
    assert deployed.keys() == loop.keys()
    for values in deployed.values():
        sent, own = digest_cases.get_sent_data(values), digest_cases.get_node_data(values, "north")
        assert {**sent, **own}.keys() - {"labels"} == values["data"].keys() - {"labels", "test_fraction"}
        assert not sent.keys() & own.keys()


def test_every_parametrization_has_a_case(tmp_path: Path) -> None:
    spec = Spec((LayerSpec("linear", 12, 8), LayerSpec("convolution", 8, 36, (3, 3))), clients=3)
    trained = set[type]()
    for name, values in digest_cases.build_configs(tmp_path, "batched").items():
        if name.startswith("method-"):
            config = parse_config(values)
            layers = spec.layers if config.task_definition.has_image_inputs else spec.layers[:1]
            method = config.build_method(Spec(layers, clients=3))
            client = replace(CLIENT, rank=compute_client_ranks(config, method, list(digest_cases.SITES))[CLIENT.id])
            state = method.init(RandomWeights(spec))
            for round in range(2):
                jobs, reply = build_untrained_jobs(method, method.sync(state, client), client, round)
                trained |= {type(one) for job in jobs for one in job.parametrization.values()}
                if method.declare_claims().second_exchange:  # its update needs more than these replies
                    break
                sent = method.contribute(reply, client)
                state = method.update(state, Reduced(sent.sum, (StackItem(client, 1.0, sent.stack),), 1))
    own = {
        value
        for value in vars(parametrization).values()
        if inspect.isclass(value) and hasattr(value, "slots") and value.__module__ == parametrization.__name__
    }
    assert trained == own - {parametrization.Parametrization}


def test_a_record_of_lists_of_words_is_equal_to_itself_and_to_no_other(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{}, {}]
    for number, record in enumerate(records):
        folder = tmp_path / str(number)
        (folder / "inputs").mkdir(parents=True)
        digests.save_inputs(folder / "inputs")
        digests.record_host("loop", folder, "^token-classification$", record.update)
    first, second = ({"loop": record} for record in records)
    assert "refused" not in records[0]["token-classification"]
    assert not list(digests.compare(first, second))
    (name,) = (name for name in records[1]["token-classification"] if name.startswith("adapter/"))
    records[1]["token-classification"][name]["tensors"].popitem()
    assert len(list(digests.compare(first, second))) == 1


def build_record(*, lost: int = 0, times: int = 1) -> dict[str, Any]:
    """Build the record of a case of two rounds, whose messages to clients lost some bytes."""
    sizes = [600 - times * lost, 600 - lost, 700 - lost]
    sent = [("train", 1), ("train", 2), ("evaluate", 2)]
    rows = [
        {"round": round, "purpose": purpose, "direction": "down", "bytes": size}
        for (purpose, round), size in zip(sent, sizes, strict=True)
    ]
    rows.append({"round": 1, "purpose": "train", "direction": "up", "bytes": 600})
    totals = [{"down": sizes[0], "up": 600}, {"down": sum(sizes[:2]), "up": 600}]
    metrics = [{"round": round, "bytes": total} for round, total in enumerate(totals, 1)]
    report = {"bytes": {**totals[-1]}, "other_bytes": {"evaluate": {"down": sizes[2], "up": 0}}}
    return {"loop": {"method-x": {"ledger.jsonl": rows, "metrics.jsonl": metrics, "report.json": report}}}


LISTED = {"fields": [{"name": "round", "bytes": -8, "messages": {"direction": "down"}, "cases": ["method-x"]}]}


def test_bytes_that_are_listed_as_lost_are_no_difference() -> None:
    assert not list(digests.compare(build_record(), build_record(lost=8), [LISTED]))


def test_bytes_that_are_not_listed_are_a_difference_in_messages_and_totals() -> None:
    found = list(digests.compare(build_record(), build_record(lost=8)))
    assert [line.split()[2] for line in found] == [
        *(f"/ledger.jsonl[{number}]/bytes:" for number in range(3)),
        *(f"/metrics.jsonl[{number}]/bytes/down:" for number in range(2)),
        "/report.json/bytes/down:",
        "/report.json/other_bytes/evaluate/down:",
    ]


@pytest.mark.parametrize(("lost", "times"), [(16, 1), (8, 2), (7, 1), (0, 1)])
def test_other_bytes_than_those_listed_are_a_difference(lost: int, times: int) -> None:
    found = list(digests.compare(build_record(), build_record(lost=lost, times=times), [LISTED]))
    assert found[0].startswith("loop method-x /ledger.jsonl[0]/bytes: 592 -> ")


def test_bytes_lost_in_messages_of_other_cases_or_rows_are_a_difference() -> None:
    (field,) = LISTED["fields"]
    for other in ({"cases": ["method-y"]}, {"messages": {"direction": "down", "bytes": [600]}}):
        assert list(digests.compare(build_record(), build_record(lost=8), [{"fields": [{**field, **other}]}]))


def test_a_total_that_its_messages_do_not_explain_is_a_difference() -> None:
    after = build_record(lost=8)
    after["loop"]["method-x"]["metrics.jsonl"][1]["bytes"]["down"] -= 8
    (line,) = digests.compare(build_record(), after, [LISTED])
    assert line == "loop method-x /metrics.jsonl[1]/bytes/down: 1184 -> 1176"


def test_new_added_and_renamed_places_are_those_that_are_listed() -> None:
    step = {"new": [{"hosts": "^loop$", "cases": "^method-x$"}]}
    before, after = build_record(), build_record()
    for earlier in ({}, {"loop": {"method-x": {"refused": "here one process sees all"}}}):
        assert list(digests.compare(earlier, after))
        assert not list(digests.compare(earlier, after, [step]))
        assert digests.count_compared(earlier, after) == 0
    assert list(digests.compare(after, {"loop": {"method-x": {"refused": "no"}}}, [step]))
    assert digests.count_compared(after, after) == 1
    after["loop"]["method-x"]["report.json"]["warnings"] = ["diverged"]
    step = {"added": ["^/report.json/warnings$"]}
    assert not list(digests.compare(before, after, [step]))
    before["loop"]["method-x"]["report.json"]["warnings"] = ["slow"]
    assert list(digests.compare(before, after, [step]))
    renamed = [{"renamed": {"old": "new"}}]
    assert not list(digests.compare({"loop": {"x": {"old": 1}}}, {"loop": {"x": {"new": 1}}}, renamed))
    assert list(digests.compare({"loop": {"x": {"old": 1}}}, {"loop": {"x": {"new": 2}}}, renamed))


def test_every_listed_case_is_a_case_and_changes_say_where(tmp_path: Path) -> None:
    names = digest_cases.build_configs(tmp_path, "loop").keys()
    for step in digests.read_steps(["redesign", "later"]):
        for field in step["fields"]:
            assert set(field["cases"]) <= names
        for one in [*step["new"], *step.get("changed", ())]:
            assert any(re.search(one["cases"], name) for name in names)
        for one in step.get("changed", ()):
            assert all(where.startswith("^/") for where in one["where"])


def test_the_bytes_of_a_listed_scalar_are_those_of_its_text() -> None:
    for step in digests.read_steps(["redesign", "later"]):
        for field in step["fields"]:
            if not {"secure", "secure-central"} & set(field["cases"]):  # no safetensors, and several fields at once
                # Its JSON is a text inside JSON; a comma stands beside it unless it is the only scalar.
                text = len(json.dumps(json.dumps({field["name"]: 0}, separators=(",", ":")))[2:-2])
                assert abs(field["bytes"]) in {size // 8 * 8 + more for size in (text, text + 1) for more in (0, 8)}
