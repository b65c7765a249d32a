"""Targets: linear layers, convolutions and embeddings, alone and stacked, against plain modules."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedspan.core import parametrization as forms
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank, concatenate
from fedspan.core.tensors import Tensors, join_extra_name, join_tensor_name
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.operators import Convolution, Linear, Lookup, build_operator, explain_unfit
from fedspan.models.stacked import (
    StackedModel,
    StackedPair,
    Unstackable,
    add_product,
    apply,
    apply_stacked_change,
    can_add,
)
from fedspan.models.targets import find_targets
from helpers.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
RANK = 2


def images(*shape: int) -> Callable[[], Tensor]:
    """What draws inputs of this shape."""
    return lambda: torch.randn(*shape, dtype=torch.float64)


def words(*shape: int) -> Callable[[], Tensor]:
    """What draws ids of words, in a tensor of this shape."""
    return lambda: torch.randint(0, 7, shape)


MODULES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 3), images(2, 4, 5)),
    "linear without bias": (lambda: nn.Linear(3, 6, bias=False), images(4, 3)),
    "conv1d": (lambda: Conv1D(6, 4), images(2, 3, 4)),
    "conv": (lambda: nn.Conv2d(3, 5, 3, padding=1), images(2, 3, 6, 4)),
    "conv 1x1": (lambda: nn.Conv2d(4, 3, 1, bias=False), images(2, 4, 3, 5)),
    "conv strided": (lambda: nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0)), images(3, 2, 7, 5)),
    "conv dilated": (lambda: nn.Conv2d(3, 4, (2, 3), dilation=(2, 1), bias=False), images(2, 3, 6, 7)),
    "conv same": (lambda: nn.Conv2d(3, 4, (2, 5), padding="same"), images(2, 3, 6, 9)),
    "conv same dilated": (lambda: nn.Conv2d(3, 4, (3, 4), padding="same", dilation=(2, 1)), images(2, 3, 6, 9)),
    "conv valid": (lambda: nn.Conv2d(3, 4, (1, 3), padding="valid", bias=False), images(2, 3, 4, 5)),
    "embedding": (lambda: nn.Embedding(7, 4), words(3, 5)),
    "embedding padded": (lambda: nn.Embedding(7, 4, padding_idx=2), lambda: torch.tensor([[2, 2, 0], [6, 2, 6]])),
}
"""By kind: what makes a layer, and what draws an input for it."""
of_each_fit = pytest.mark.parametrize("kind", [kind for kind in MODULES if "dilated" not in kind])


class Whole(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


SLOTS: Mapping[str, tuple[forms.Parametrization, Callable[[int, int], dict[str, tuple[int, int]]]]] = {
    "LoRA": (forms.LoRA(0.7), lambda m, n: {"A": (RANK, n), "B": (m, RANK)}),
    "PairSum": (forms.PairSum(0.7, 1.3), lambda m, n: {"A": (RANK, n), "B": (m, RANK), "L": (m, 1), "U": (1, n)}),
    "Gram": (forms.Gram(0.5), lambda m, n: {"A": (RANK, min(m, n)), "L": (m, min(m, n)), "R": (min(m, n), n)}),
    "Projected right": (
        forms.Projected("right"),
        lambda m, n: {"acc": (m, RANK), "P": (RANK, n), "done_A": (1, n), "done_B": (m, 1)},
    ),
    "Projected left": (forms.Projected("left"), lambda m, n: {"acc": (RANK, n), "P": (m, RANK)}),
    "Factorized": (forms.Factorized(), lambda m, n: {"U": (m, RANK), "V": (RANK, n)}),
    "Dense": (forms.Dense(), lambda m, n: {"W": (m, n)}),
    "DenseLoRA": (forms.DenseLoRA(1.3), lambda m, n: {"W": (m, n), "L": (m, 1), "U": (1, n)}),
}
of_each_module = pytest.mark.parametrize("kind", MODULES)


def made(kind: str, dtype: torch.dtype = torch.float64) -> tuple[AdaptedModel, nn.Module, Tensor]:
    """A model of one adapted layer, the same module as it was, and an input."""
    torch.manual_seed(sum(map(ord, kind)))
    module, x = MODULES[kind][0]().to(dtype), MODULES[kind][1]()
    plain = MODULES[kind][0]().to(dtype)
    plain.load_state_dict(module.state_dict())
    model = Whole(module)
    return AdaptedModel(model, {"layer": module}, {}), plain, x.to(dtype) if x.is_floating_point() else x


def drawn(adapted: AdaptedModel, name: str) -> dict[str, Tensor]:
    shapes = SLOTS[name][1](*adapted.layers["layer"].operator.shape)
    return {join_tensor_name("layer", slot): torch.randn(shape, dtype=torch.float64) for slot, shape in shapes.items()}


def by_slot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("layer/"): value for name, value in tensors.items()}


def close(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> bool:
    return float((one - other).detach().abs().max()) <= tolerance * (1 + float(other.detach().abs().max()))


def with_weight(plain: nn.Module, adapted: AdaptedModel, W_OI: Tensor) -> nn.Module:
    weight = plain.get_parameter("weight")
    weight.data = adapted.layers["layer"].operator.to_stored(W_OI.detach()).to(weight.dtype).clone()
    return plain


@of_each_module
@pytest.mark.parametrize("name", SLOTS)
def test_every_parametrization_is_the_module_with_that_weight(kind: str, name: str) -> None:
    """Output and the gradient of every slot, in float64; the chain rule goes through the dense weight."""
    adapted, plain, x = made(kind)
    parametrization, tensors = SLOTS[name][0], drawn(adapted, name)
    live = adapted.install({"layer": parametrization}, tensors, frozenset(tensors))
    out = adapted.model(x)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()

    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}
    original = adapted.layers["layer"].get_original()
    W_OI = original + forms.compute_dense_change(parametrization.compute_effective(by_slot(leaves)), original)
    expected = with_weight(plain, adapted, W_OI)(x)
    assert close(out.detach(), expected.detach())
    (expected * direction).sum().backward()
    gradient = plain.get_parameter("weight").grad
    W_OI.backward(adapted.layers["layer"].operator.to_matrix(gradient))
    for name, leaf in leaves.items():
        found, wanted = live[name].grad, leaf.grad
        assert close(found, wanted), name
        assert float(wanted.abs().max()) > 0.001, name


@of_each_module
def test_captured_gradients_are_autograd_s(kind: str) -> None:
    """Each backward pass has its own, and they add up. They are float32 factors."""
    adapted, plain, x = made(kind)
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": forms.LoRA(0.7)}, tensors, frozenset(tensors))
    found: list[LowRank] = []
    original = adapted.layers["layer"].get_original()
    change = forms.compute_dense_change(forms.LoRA(0.7).compute_effective(by_slot(tensors)), original)
    plain = with_weight(plain, adapted, original + change)
    for _ in range(2):
        direction = torch.randn_like(plain(x))
        with adapted.capture_gradients(lambda name, gradient: found.append(gradient)):
            (adapted.model(x) * direction).sum().backward()
        (plain(x) * direction).sum().backward()
    expected = plain.get_parameter("weight").grad
    assert {factor.dtype for gradient in found for factor in (gradient.A, gradient.B)} == {torch.float32}
    assert close(concatenate(found).to_dense().double(), adapted.layers["layer"].operator.to_matrix(expected), 1e-5)


@of_each_module
@pytest.mark.parametrize("form", ["pair", "dense"])
def test_a_base_update_moves_the_weight_and_leaves_w0(kind: str, form: str) -> None:
    adapted, plain, x = made(kind, torch.float32)
    layer = adapted.layers["layer"]
    m, n = layer.operator.shape
    stored, W_OI = layer.stored_weight.detach().clone(), layer.get_original().clone()
    delta = LowRank(torch.randn(m, 1), torch.randn(1, n), 0.5) if form == "pair" else torch.randn(m, n)
    dense = delta.to_dense() if isinstance(delta, LowRank) else delta
    base = BaseUpdate().add(Increment(0, {"layer": delta}, decay=0.5))
    tensors = {name: value.float() for name, value in drawn(adapted, "LoRA").items()}
    pair = forms.LoRA(0.7).compute_effective(by_slot(tensors)).pair
    adapted.set_base(base)
    adapted.install({"layer": forms.LoRA(0.7)}, tensors, frozenset())
    expected = with_weight(plain, adapted, 0.5 * W_OI + dense + pair.to_dense())(x)
    assert close(adapted.model(x), expected, 1e-5)
    assert torch.equal(layer.get_original(), W_OI)
    assert torch.equal(adapted.get_weight("layer"), W_OI)
    adapted.set_base(BaseUpdate())
    adapted.install({}, {}, frozenset())
    assert torch.equal(layer.stored_weight, stored)


@of_each_module
@pytest.mark.parametrize("form", ["pair", "dense"])
def test_in_bfloat16_the_update_stays_beside_the_weight(kind: str, form: str) -> None:
    """A change far below bfloat16's resolution of the weight is not lost in it."""
    adapted, plain, x = made(kind, torch.bfloat16)
    layer = adapted.layers["layer"]
    m, n = layer.operator.shape
    stored = layer.stored_weight.detach().clone()
    delta = LowRank(torch.randn(m, 1), torch.randn(1, n)) if form == "pair" else torch.randn(m, n)
    adapted.set_base(BaseUpdate().add(Increment(0, {"layer": delta})))
    tensors = {name: torch.zeros_like(value).float() for name, value in drawn(adapted, "LoRA").items()}
    adapted.install({"layer": forms.LoRA(1.0)}, tensors, frozenset())
    out = adapted.model(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(layer.stored_weight, stored)
    dense = delta.to_dense() if isinstance(delta, LowRank) else delta
    wide = with_weight(plain.double(), adapted, layer.get_original().double() + dense.double())
    expected = wide(x.double() if x.is_floating_point() else x)
    assert close(out.double(), expected, 2e-2)
    with refused("model.dtype"):
        adapted.set_base(BaseUpdate().add(Increment(0, {}, decay=0.5)))


@of_each_module
def test_decay_within_a_job_shrinks_the_base_and_not_the_bias(kind: str) -> None:
    adapted, plain, x = made(kind)
    layer = adapted.layers["layer"]
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": forms.LoRA(0.7)}, tensors, frozenset())
    layer.shrink = 0.25
    pair = forms.LoRA(0.7).compute_effective(by_slot(tensors)).pair
    expected = with_weight(plain, adapted, 0.25 * layer.get_original() + pair.to_dense())(x)
    assert close(adapted.model(x), expected)


@of_each_fit
def test_peft_computes_the_same_from_the_same_factors(kind: str) -> None:
    """PEFT's own layers, with the factors as they are exported; and they come back as they went."""
    adapted, plain, x = made(kind, torch.float32)
    operator = adapted.layers["layer"].operator
    m, n = operator.shape
    tensors = {
        join_tensor_name("layer", "A"): torch.randn(RANK, n),
        join_tensor_name("layer", "B"): torch.randn(m, RANK),
    }
    adapted.install({"layer": forms.LoRA(1.5)}, tensors, frozenset())
    config = LoraConfig(r=RANK, lora_alpha=3, target_modules=["layer"], fan_in_fan_out=isinstance(plain, Conv1D))
    theirs = get_peft_model(Whole(plain), config).eval()
    A, B = tensors["layer/A"], tensors["layer/B"]
    stored = operator.to_peft(B, A)
    state = theirs.state_dict()
    for name, value in stored.items():
        first, _, last = name.partition(".")
        full = ".".join(filter(None, ["base_model.model.layer", first, "default", last]))
        assert state[full].shape == value.shape, full
        state[full] = value
    theirs.load_state_dict(state)
    assert close(adapted.model(x), theirs(x), 1e-5)
    back = operator.from_peft(*(stored[name] for name in sorted(stored, reverse=True)))
    assert all(torch.equal(one, other) for one, other in zip(back, (B, A), strict=True))


@pytest.mark.parametrize("kind", ["linear", "conv strided", "conv1d"])
def test_dropout_is_on_the_input_of_the_pair_alone(kind: str) -> None:
    adapted, plain, x = made(kind)
    tensors = drawn(adapted, "LoRA")
    adapted.install({"layer": forms.LoRA(0.7)}, tensors, frozenset())
    adapted.set_dropout(lambda x, layer: torch.zeros_like(x))
    assert close(adapted.model(x), plain(x))


def test_words_are_not_dropped() -> None:
    adapted, _, x = made("embedding")
    adapted.install({"layer": forms.LoRA(0.7)}, drawn(adapted, "LoRA"), frozenset())
    before = adapted.model(x)
    adapted.set_dropout(lambda x, layer: x * 0)
    assert torch.equal(adapted.model(x), before)


def test_shapes_and_kernels() -> None:
    """As in PEFT, a convolution is its unfolded weight and an embedding (dimension, vocabulary)."""
    conv, table = nn.Conv2d(3, 5, (2, 4)), nn.Embedding(7, 4)
    found = [
        (type(one), one.shape, one.kernel) for one in map(build_operator, (nn.Linear(5, 3), Conv1D(6, 4), conv, table))
    ]
    assert found == [
        (Linear, (3, 5), (1, 1)),
        (Linear, (6, 4), (1, 1)),
        (Convolution, (5, 24), (2, 4)),
        (Lookup, (4, 7), (1, 1)),
    ]
    adapted = AdaptedModel(Whole(conv), {"layer": conv}, {})
    (layer,) = adapted.spec.layers
    assert (layer.shape, layer.kernel) == ((5, 24), (2, 4))
    assert torch.equal(adapted.get_weight("layer")[:, 8:16], conv.weight[:, 1].flatten(1))


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


UNFIT: Mapping[str, tuple[nn.Module, str]] = {
    "groups": (nn.Conv2d(4, 6, 3, groups=2), "a convolution in 2 groups"),
    "dilated": (
        nn.Conv2d(2, 3, (1, 3), dilation=(1, 2)),
        "is a dilated convolution, for which PEFT cannot express an adapter",
    ),
    "padding": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), "pads with reflect"),
    "standardized": (Standardized(2, 3, 3), "is a Standardized, which does more than convolve"),
    "max_norm": (nn.Embedding(5, 3, max_norm=1.0), "scales what it looks up"),
    "frequency": (nn.Embedding(5, 3, scale_grad_by_freq=True), "scales what it looks up"),
    "subclass": (Scaled(5, 3), "scales what it looks up"),
    "attention": (nn.MultiheadAttention(6, 2).out_proj, "is the output projection of an nn.MultiheadAttention"),
    "other": (
        nn.Conv3d(2, 3, 1),
        "is a Conv3d, which cannot be a target. Targets are nn.Linear, Conv1D, nn.Conv2d and nn.Embedding",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_layers_that_compute_something_else_are_refused(kind: str) -> None:
    module, words = UNFIT[kind]
    assert words in (explain_unfit(module) or "")
    with pytest.raises(FedspanError) as caught:
        find_targets(Whole(module), LoraConfig(target_modules=["layer"]))
    assert (caught.value.field, caught.value.value) == ("model.target_modules", "layer")
    assert words in str(caught.value)


@of_each_fit
def test_these_are_fit(kind: str) -> None:
    assert explain_unfit(MODULES[kind][0]()) is None


@pytest.mark.parametrize("target", ["embedding", "head"])
def test_a_shared_weight_is_no_target(target: str) -> None:
    """An update of one of the two would part them, and a merged model could not hold both."""
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    other = {"embedding": "head", "head": "embedding"}[target]
    with pytest.raises(FedspanError, match=f"shares its weight with {other}") as caught:
        find_targets(model, LoraConfig(target_modules=[target]))
    assert (caught.value.field, caught.value.value) == ("model.target_modules", target)
    model["head"].weight = nn.Parameter(torch.zeros(7, 4))
    assert list(find_targets(model, LoraConfig(target_modules=[target]))) == [target]


CLIENTS = 3


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@of_each_fit
@pytest.mark.parametrize("factors", [True, False], ids=["factors", "matrix"])
def test_each_client_s_change_acts_on_its_rows(kind: str, factors: bool) -> None:
    torch.manual_seed(3)
    operator = build_operator(MODULES[kind][0]().double())
    x_CB = torch.stack([MODULES[kind][1]() for _ in range(CLIENTS)])
    rows, columns = operator.shape
    B_COR, A_CRI = draw(CLIENTS, rows, RANK), draw(CLIENTS, RANK, columns)
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
    x_CB, W_COI = torch.stack([MODULES[kind][1]() for _ in range(CLIENTS)]), draw(CLIENTS, *operator.shape)
    y_CB = apply(operator, W_COI, x_CB)
    for client, x in enumerate(x_CB):
        assert torch.allclose(y_CB[client], operator.apply(x, W_COI[client]), rtol=1e-10, atol=1e-12)


def test_products_are_added_in_one_number_format_to_plain_layers_alone() -> None:
    torch.manual_seed(5)
    pair, x_CB = StackedPair(draw(CLIENTS, 6, RANK), draw(CLIENTS, RANK, 4), 0.5), draw(CLIENTS, 2, 3, 4)
    y_CNO = draw(CLIENTS, 6, 6)
    expected = y_CNO + 0.5 * torch.einsum("cor,cri,cni->cno", pair.B, pair.A, x_CB.flatten(1, 2))
    assert torch.allclose(add_product(y_CNO, pair, x_CB), expected, rtol=1e-12)
    linear, convolution = build_operator(nn.Linear(4, 6)), build_operator(nn.Conv2d(2, 3, 1))
    assert can_add(linear, pair, x_CB, y_CNO)
    assert not can_add(linear, pair.to(torch.float32), x_CB, y_CNO)
    assert not can_add(linear, pair, x_CB.float(), y_CNO)
    assert not can_add(linear, draw(CLIENTS, 6, 4), x_CB, y_CNO)
    assert not can_add(convolution, pair, x_CB, y_CNO)


class Small(nn.Module):
    """A wide target, norms of both kinds, and a target with a bias that trains."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up, self.middle, self.out = nn.Linear(4, 6), middle, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.up(x))))


def adapt_small(middle: nn.Module) -> AdaptedModel:
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
    tensors = {join_tensor_name(*key): draw(*shape) for key, shape in shapes.items()}
    for path in model.extras:
        tensors[join_extra_name(path)] = draw(*model.extras[path].shape)
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
    model = adapt_small(middle(6))
    model.model.train(training)
    stacked, x = StackedModel(model), draw(CLIENTS * 4, 4)
    clients = [tensors_of(client, model) for client in range(CLIENTS)]
    together = {name: torch.stack([tensors[name] for tensors in clients]) for name in clients[0]}
    parametrization = {"up": forms.LoRA(0.5), "out": forms.LoRA(0.5)}
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
    model = adapt_small(nn.LayerNorm(6))
    stacked = StackedModel(model)
    clients = [tensors_of(client, model) for client in range(CLIENTS)]
    together = {name: torch.stack([tensors[name] for tensors in clients]) for name in clients[0]}
    parametrization = {"up": forms.LoRA(0.5), "out": forms.LoRA(0.5)}
    with stacked.hold_tensors(parametrization, together, CLIENTS, 12):
        with pytest.raises(Unstackable, match=r"up is given an input of \(7, 4\) for 12 examples"):
            model.model(draw(7, 4))
        with pytest.raises(Unstackable, match="up is given one input for all examples of a batch"):
            model.model(draw(1, 4))
        with pytest.raises(Unstackable, match=r"middle is given an input of \(7, 6\) for 12 examples"):
            model.model.middle(draw(7, 6))
        with pytest.raises(Unstackable, match="middle takes more than one input"):
            model.model.middle(draw(12, 6), draw(12, 6))
    assert model.model(draw(7, 4)).shape == (7, 3)


def test_parameters_that_train_beside_modules_of_their_own_are_an_obstacle() -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3))
            self.scale = nn.Parameter(torch.ones(3))

    model = Whole(Scaled())
    built = AdaptedModel(model, {"layer.0": model.get_submodule("layer.0")}, {"layer.scale": model.layer.scale})
    refusal = StackedModel(built).explain_refusal()
    assert refusal == "layer holds parameters that train beside modules of its own"
    assert StackedModel(adapt_small(nn.LayerNorm(6))).explain_refusal() is None
