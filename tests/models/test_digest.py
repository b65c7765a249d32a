"""The digest of frozen weights: what changes it, and what does not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedspan.models.digest import hash_frozen


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def digest(module: nn.Module, extras: tuple[str, ...] = ("2.weight", "2.bias")) -> str:
    return hash_frozen(module, {name: module.get_parameter(name) for name in extras}).hexdigest()


def test_weights_and_stored_buffers_count_to_the_last_bit() -> None:
    whole = digest(model())
    assert digest(copy.deepcopy(model())) == whole
    for name in ("0.weight", "0.bias", "1.running_var"):
        changed = model()
        value = changed.state_dict()[name].flatten()
        value[0] = torch.nextafter(value[0], torch.tensor(torch.inf))
        assert digest(changed) != whole, name


def test_extras_do_not_count_under_their_own_name_or_another() -> None:
    whole, changed = digest(model()), model()
    with torch.no_grad():
        changed[2].weight.add_(1)
    assert digest(changed) == whole
    assert digest(model(), ()) != whole
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    before = digest(tied, ("0.weight",))
    with torch.no_grad():
        tied[1].weight.add_(1)
    assert digest(tied, ("0.weight",)) == before


def test_names_formats_and_shapes_count() -> None:
    """The same bytes under another name, in another format or shape are another model."""
    zeros = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 3))})
    others = (
        nn.ParameterDict({"b": nn.Parameter(torch.zeros(2, 3))}),
        nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, 2))}),
        nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)}),
    )
    found = {hash_frozen(one, {}).hexdigest() for one in (zeros, *others)}
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_formats_without_numpy_have_a_digest(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([0, 1, 1]).to(dtype))
    other = copy.deepcopy(module)
    other.get_buffer("mask")[0] = 1
    assert hash_frozen(module, {}).hexdigest() != hash_frozen(other, {}).hexdigest()
