"""Several clients in one pass against one client after another, on layers and modules whose sides differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import Dense, LoRA
from fedspan.core.tensors import Tensors, join_extra_name, join_tensor_name
from fedspan.models.adapted import AdaptedModel
from fedspan.models.operators import build_operator
from fedspan.models.stacked import (
    StackedModel,
    StackedPair,
    Unstackable,
    add_product,
    apply,
    apply_stacked_change,
    can_add,
    stack_effective,
)
from helpers.layer_kinds import MODULES, Whole, of_each_fit

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CLIENTS, RANK = 3, 2


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@of_each_fit
@pytest.mark.parametrize("factors", [True, False], ids=["factors", "matrix"])
def test_each_client_s_change_acts_on_its_rows(kind: str, factors: bool) -> None:
    torch.manual_seed(3)
    operator = build_operator(MODULES[kind][0]().double())
    x_CB = torch.stack([MODULES[kind][1]() for _ in range(CLIENTS)])
    rows, columns = operator.shape
    B_COR, A_CRI = drawn(CLIENTS, rows, RANK), drawn(CLIENTS, RANK, columns)
    stacked = StackedPair(B_COR, A_CRI, 0.7) if factors else 0.7 * B_COR @ A_CRI
    y_CB = apply_stacked_change(operator, stacked, x_CB, torch.float64)
    for client, x in enumerate(x_CB):
        pair = LowRank(B_COR[client], A_CRI[client], 0.7)
        own = operator.apply_change(pair if factors else pair.to_dense(), x, torch.float64)
        assert torch.allclose(y_CB[client], own, rtol=1e-10, atol=1e-12)


@of_each_fit
def test_each_client_s_weight_acts_on_its_rows(kind: str) -> None:
    torch.manual_seed(4)
    operator = build_operator(MODULES[kind][0]().double())
    x_CB, W_COI = torch.stack([MODULES[kind][1]() for _ in range(CLIENTS)]), drawn(CLIENTS, *operator.shape)
    y_CB = apply(operator, W_COI, x_CB)
    for client, x in enumerate(x_CB):
        assert torch.allclose(y_CB[client], operator.apply(x, W_COI[client]), rtol=1e-10, atol=1e-12)


def test_products_are_added_in_one_number_format_to_plain_layers_alone() -> None:
    torch.manual_seed(5)
    pair, x_CB = StackedPair(drawn(CLIENTS, 6, RANK), drawn(CLIENTS, RANK, 4), 0.5), drawn(CLIENTS, 2, 3, 4)
    y_CNO = drawn(CLIENTS, 6, 6)
    expected = y_CNO + 0.5 * torch.einsum("cor,cri,cni->cno", pair.B, pair.A, x_CB.flatten(1, 2))
    assert torch.allclose(add_product(y_CNO, pair, x_CB), expected, rtol=1e-12)
    linear, convolution = build_operator(nn.Linear(4, 6)), build_operator(nn.Conv2d(2, 3, 1))
    assert can_add(linear, pair, x_CB, y_CNO)
    assert not can_add(linear, pair.to(torch.float32), x_CB, y_CNO)
    assert not can_add(linear, pair, x_CB.float(), y_CNO)
    assert not can_add(linear, drawn(CLIENTS, 6, 4), x_CB, y_CNO)
    assert not can_add(convolution, pair, x_CB, y_CNO)


def test_stacked_parts_are_those_of_each_client() -> None:
    torch.manual_seed(6)
    slots = {"A": drawn(CLIENTS, RANK, 4), "B": drawn(CLIENTS, 6, RANK)}
    effective = stack_effective(LoRA(1.5), slots, CLIENTS)
    pair = effective.pair
    assert isinstance(pair, StackedPair)
    assert torch.equal(pair.A, slots["A"])
    assert torch.equal(pair.B, slots["B"])
    assert (pair.scale, effective.base, effective.weight) == (1.5, True, None)
    weights = drawn(CLIENTS, 6, 4)
    whole = stack_effective(Dense(), {"W": weights}, CLIENTS)
    assert whole.weight is not None
    assert torch.equal(whole.weight, weights)
    assert (whole.pair, whole.base) == (None, False)


class Small(nn.Module):
    """A wide target, norms of both kinds, and a target with a bias that trains."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up, self.middle, self.out = nn.Linear(4, 6), middle, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.up(x))))


def adapted(middle: nn.Module) -> AdaptedModel:
    model = Small(middle).double()
    parameters = dict(model.named_parameters())
    extras = {name: parameters[name] for name in ("middle.weight", "middle.bias", "out.bias")}
    buffers = {name: value for name, value in model.named_buffers() if name.startswith("middle.running")}
    built = AdaptedModel(model, {"up": model.up, "out": model.out}, extras, buffers)
    model.double()  # extras train in float32 otherwise
    return built


def tensors_of(client: int, model: AdaptedModel) -> dict[str, Tensor]:
    torch.manual_seed(10 + client)
    shapes = {("up", "A"): (RANK, 4), ("up", "B"): (6, RANK), ("out", "A"): (RANK, 6), ("out", "B"): (3, RANK)}
    tensors = {join_tensor_name(*key): drawn(*shape) for key, shape in shapes.items()}
    for path in model.extras:
        tensors[join_extra_name(path)] = drawn(*model.extras[path].shape)
    for path in model.buffers:
        tensors[join_extra_name(path)] = model.model.get_buffer(path).detach().double().clone() + client
    return tensors


def alone(model: AdaptedModel, tensors: Tensors, x: Tensor) -> Tensor:
    """The model of one client, with its weights written out."""
    weights = {name: value for name, value in model.model.state_dict().items()}
    for layer in ("up", "out"):
        A, B = tensors[join_tensor_name(layer, "A")], tensors[join_tensor_name(layer, "B")]
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 0.5 * B @ A
    for path in (*model.extras, *model.buffers):
        weights[path] = tensors[join_extra_name(path)]
    plain = Small(type(model.model.middle)(6)).double()
    plain.load_state_dict(weights)
    plain.train(model.model.training)
    return plain(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("middle", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_pass_of_all_clients_gives_each_the_outputs_of_its_own_model(middle: type[nn.Module], training: bool) -> None:
    """A norm over the batch measures one client's rows."""
    model = adapted(middle(6))
    model.model.train(training)
    stacked, x = StackedModel(model), drawn(CLIENTS * 4, 4)
    clients = [tensors_of(client, model) for client in range(CLIENTS)]
    together = {name: torch.stack([tensors[name] for tensors in clients]) for name in clients[0]}
    parametrization = {"up": LoRA(0.5), "out": LoRA(0.5)}
    with torch.no_grad():
        expected = torch.cat([alone(model, clients[client], x[4 * client :][:4]) for client in range(CLIENTS)])
        untouched = model.model(x)
        with stacked.hold_tensors(parametrization, together, CLIENTS, len(x)):
            found = model.model(x)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10)
        if middle is nn.LayerNorm:
            assert torch.equal(model.model(x), untouched)
    assert not torch.allclose(found, untouched)


def test_rows_that_are_no_multiple_of_the_examples_are_refused() -> None:
    model = adapted(nn.LayerNorm(6))
    stacked = StackedModel(model)
    clients = [tensors_of(client, model) for client in range(CLIENTS)]
    together = {name: torch.stack([tensors[name] for tensors in clients]) for name in clients[0]}
    parametrization = {"up": LoRA(0.5), "out": LoRA(0.5)}
    with stacked.hold_tensors(parametrization, together, CLIENTS, 12):
        with pytest.raises(Unstackable, match=r"up is given an input of \(7, 4\) for 12 examples"):
            model.model(drawn(7, 4))
        with pytest.raises(Unstackable, match="up is given one input for all examples of a batch"):
            model.model(drawn(1, 4))
        with pytest.raises(Unstackable, match=r"middle is given an input of \(7, 6\) for 12 examples"):
            model.model.middle(drawn(7, 6))
        with pytest.raises(Unstackable, match="middle takes more than one input"):
            model.model.middle(drawn(12, 6), drawn(12, 6))
    assert model.model(drawn(7, 4)).shape == (7, 3)


def test_parameters_that_train_beside_modules_of_their_own_are_an_obstacle() -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.scale = nn.Parameter(torch.ones(3))

    model = Whole(Scaled())
    built = AdaptedModel(model, {"layer.0": model.get_submodule("layer.0")}, {"layer.scale": model.layer.scale})
    refusal = StackedModel(built).explain_refusal()
    assert refusal == "layer holds parameters that train beside modules of its own"
    assert StackedModel(adapted(nn.LayerNorm(6))).explain_refusal() is None
