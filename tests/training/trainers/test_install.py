"""A job's tensors as parameters of a model: seen while they are installed, and gone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_extra_name, join_tensor_name
from fedspan.core.values import Group, Job
from fedspan.models.adapted import AdaptedModel
from fedspan.training.trainers.install import install_job


def built(*, statistics: bool) -> tuple[nn.Sequential, AdaptedModel, Job]:
    """A wide layer with LoRA of which B trains, and a norm whose parameters train, with its statistics or not."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    extras = {name: model.get_parameter(name) for name in ("1.weight", "1.bias")}
    buffers = {name: model.get_buffer(name) for name in ("1.running_mean", "1.running_var")} if statistics else {}
    adapted = AdaptedModel(model, {"0": model[0]}, extras, buffers)
    values = {join_extra_name(path): torch.randn(3) for path in extras}
    values |= {join_extra_name(path): torch.full((3,), 2.0) for path in buffers}
    values |= {join_tensor_name("0", "A"): torch.randn(2, 5), join_tensor_name("0", "B"): torch.randn(3, 2)}
    trainable = Group((join_tensor_name("0", "B"), *(join_extra_name(path) for path in extras)))
    names = frozenset(join_extra_name(path) for path in buffers)
    return model, adapted, Job({"0": LoRA(0.5)}, values, (trainable,), buffers=names)


def test_a_walk_over_the_parameters_sees_what_trains_under_the_slots_names() -> None:
    model, adapted, job = built(statistics=False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with install_job(model, adapted, job) as live:
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {*before, "0.fedspan_A", "0.fedspan_B"}
        assert parameters["0.fedspan_B"] is live["0/B"]
        training = {name for name, value in parameters.items() if value.requires_grad}
        assert training == {"0.fedspan_B", "1.weight", "1.bias"}
        assert torch.equal(live["0/A"], job.tensors["0/A"])
        with torch.no_grad():
            live["0/B"] += 1
        x = torch.randn(4, 5)
        weight = before["0.weight"] + 0.5 * (job.tensors["0/B"] + 1) @ job.tensors["0/A"]
        assert torch.allclose(model[0](x), x @ weight.T + before["0.bias"], atol=1e-6)
    assert {name for name, _ in model.named_parameters()} == before.keys()
    assert not any(value.requires_grad for value in model.parameters())
    assert torch.allclose(model[0](x), x @ before["0.weight"].T + before["0.bias"], atol=1e-6)
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("statistics", [False, True])
def test_a_norm_measures_its_batches_only_where_its_statistics_are_the_job_s(statistics: bool) -> None:
    """Though a trainer sets the whole model to training mode before every pass."""
    model, adapted, job = built(statistics=statistics)
    with install_job(model, adapted, job) as live:
        model.train()
        before = model[1].running_mean.clone()
        model(torch.randn(4, 5))
        assert torch.equal(model[1].running_mean, before) is not statistics
        assert model[1].training is statistics
        if statistics:
            assert not torch.equal(live["extras/1.running_mean"], job.tensors["extras/1.running_mean"])


def test_an_error_of_the_trainer_leaves_nothing_behind() -> None:
    model, adapted, job = built(statistics=False)

    def fail() -> None:
        with install_job(model, adapted, job):
            raise ValueError("the trainer's own")

    with pytest.raises(ValueError, match="the trainer's own"):
        fail()
    assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
