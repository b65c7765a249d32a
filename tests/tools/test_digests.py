"""tests/tools/digests.py: its cases cover what is registered, and records differ where what a run leaves differs."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import digest_cases
import digests
import pytest
import torch
from torch import Tensor

from fedspan.assembly.federation import compute_client_ranks
from fedspan.config import parse_config
from fedspan.core import parametrization
from fedspan.core.values import Client, LayerSpec, Reduced, Spec, StackItem
from fedspan.federation.validation import build_untrained_jobs
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
    assert digests.count_compared(first, second) == 1
    (name,) = (name for name in records[1]["token-classification"] if name.startswith("adapter/"))
    records[1]["token-classification"][name]["tensors"].popitem()
    assert len(list(digests.compare(first, second))) == 1
