"""FedIT as its paper says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fedspan.core.tensors import join_tensor_name
from fedspan.federation.settings import RoundSettings
from fedspan.runs.setup import Prepared
from fedspan.transports.in_process import simulate
from helpers import tiny
from helpers.plain_training import batches, loop
from helpers.watched_rounds import RunMethod, method_config


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fedit_of_one_client_is_plain_training_of_a_peft_model(
    optimizer: str, tiny_folder: Path, prepared: Prepared
) -> None:
    """Three rounds with moments kept, against PEFT's layers and torch's optimizers on the same batches."""
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    training = {"optimizer": optimizer, "lr": 0.05, **options}
    made = tiny.variant(prepared, method_config(tiny_folder, "fedit", training=training, federation={"rounds": 3}))
    client_data = made.federation.clients["north"]
    federation = simulate(made.federation.method, made.engine, [client_data], made.train, RoundSettings(3))
    progress = begin = federation.begin()
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=tiny.BERT, modules_to_save=["classifier"], task_type="SEQ_CLS")
    model = get_peft_model(tiny.fresh_classifier(tiny_folder / "bert"), lora)
    ours = {peft_name(name): name for name in begin.state.tensors}
    mine = {ours[name]: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert mine.keys() == begin.state.tensors.keys()
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(begin.state.tensors[name])
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    theirs = kind(mine.values(), lr=0.05, weight_decay=0.1, **options)
    for round in range(3):
        progress = federation.run_round(progress).progress
        loop(model, theirs, batches(made, "north", round))
        for name, parameter in mine.items():
            found, moved = progress.state.tensors[name], parameter.detach()
            assert (found - moved).norm() < 1e-5 * (moved - begin.state.tensors[name]).norm()


def peft_name(name: str) -> str:
    """What PEFT calls the parameter of one of our tensors."""
    layer, _, slot = name.partition("/")
    if layer == "extras":
        module, _, parameter = slot.rpartition(".")
        return f"base_model.model.{module}.modules_to_save.default.{parameter}"
    return f"base_model.model.{layer}.lora_{slot}.default.weight"


@pytest.mark.parametrize("init_A", ["gaussian", "orthonormal"])
@pytest.mark.parametrize("key", ["fedit", "rolora"])
def test_the_first_A_has_the_distribution_of_the_option(key: str, init_A: str, run_method: RunMethod) -> None:
    """Its deviation is 1/r, or its Gram matrix the identity over 3; clients train from it without another draw."""
    run = run_method(key, method={"init_A": init_A}, federation={"rounds": 2})
    first = run.rounds[0].before.state.tensors
    A = torch.cat([first[join_tensor_name(layer.name, "A")].double() for layer in run.layers], 1)
    rank = len(A)
    if init_A == "gaussian":
        assert float(A.std()) == pytest.approx(1 / rank, rel=0.2)
    else:
        assert torch.allclose(3 * A @ A.T, len(run.layers) * torch.eye(rank, dtype=torch.float64), atol=1e-5)
    for local in run.rounds[0].trained:
        for layer in run.layers:
            name = join_tensor_name(layer.name, "A")
            assert torch.equal(local.job.tensors[name], first[name])
