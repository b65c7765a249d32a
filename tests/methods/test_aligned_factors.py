"""FedRot-LoRA and LoRA-FAIR against rotations and objectives found by brute force."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedspan.core.tensors import create_generator, join_tensor_name
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.methods.fedrot_lora import FedRotLoRA
from fedspan.methods.lora_fair import LoRAFAIR, descend_to_cosine
from helpers.dense_rounds import PairOracle, Pairs, factor_mean, federation, follow, product_mean
from helpers.families import others_slow
from helpers.toys.problem import Problem
from helpers.toys.rounds import Federation


def rotation(angle: Tensor) -> Tensor:
    """Rank 2: SO(2) is an angle."""
    return torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])


def best_angle(target: Tensor, source: Tensor) -> Tensor:
    """The angle of the rotation of ``source`` (2, N) that is nearest to ``target``: a root of the derivative."""
    cross = target @ source.T
    return torch.atan2(cross[1, 0] - cross[0, 1], cross[0, 0] + cross[1, 1])


class RotationOracle(PairOracle):
    """Rank 2. The nearest rotation to (1 - lambda) I + lambda R(angle) is by an angle again."""

    def __init__(self, made: Federation, strength: float) -> None:
        super().__init__(made)
        self.strength, self.round = strength, 0

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        turned: dict[str, Pairs] = {id: {} for id in trained}
        for id, pairs in trained.items():
            for one, pair in pairs.items():
                if self.round % 2:
                    angle = best_angle(self.pairs[one]["A"], pair["A"])
                else:
                    angle = best_angle(self.pairs[one]["B"].T, pair["B"].T)
                sine, cosine = self.strength * angle.sin(), 1 - self.strength + self.strength * angle.cos()
                R = rotation(torch.atan2(sine, cosine) if self.round else torch.zeros((), dtype=torch.float64))
                turned[id][one] = {"A": R @ pair["A"], "B": pair["B"] @ R.T}
        self.pairs, self.round = factor_mean(turned, shares), self.round + 1


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_rounds_match_rotations_by_an_angle(strength: float) -> None:
    problem = Problem()
    method = FedRotLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, strength=strength)
    made = federation(method)
    follow(made, RotationOracle(made, strength))


def objective(B: Tensor, mean: Tensor, A: Tensor, D: Tensor, lam: float, exponent: int) -> Tensor:
    """On O x I matrices."""
    product = B @ A
    cosine = (D * product).sum() / (D.norm() * product.norm())
    away = (B - mean).square().sum()
    return 1 - cosine + lam * (away if exponent == 2 else (away + 1e-300).sqrt())


def descended(mean: Tensor, A: Tensor, D: Tensor, method: LoRAFAIR) -> Tensor:
    """Gradient descent with halving, gradients by autograd."""
    exponent = 1 if method.penalty == "norm" else 2
    B, rate = mean.clone(), method.server_lr * mean.norm() ** 2
    for _ in range(method.server_steps):
        leaf = B.clone().requires_grad_()
        value = objective(leaf, mean, A, D, method.lam, exponent)
        (gradient,) = torch.autograd.grad(value, leaf)
        while objective(B - rate * gradient, mean, A, D, method.lam, exponent) > value:
            rate = rate / 2
        B = B - rate * gradient
    return B


class FairOracle(PairOracle):
    def __init__(self, made: Federation, method: LoRAFAIR) -> None:
        super().__init__(made)
        self.method = method

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        self.pairs = factor_mean(trained, shares)
        for one, D in product_mean(trained, shares, None).items():
            mean, A = self.pairs[one]["B"], self.pairs[one]["A"]
            if self.method.objective == "cosine":
                self.pairs[one]["B"] = descended(mean, A, D / 2.0, self.method)
                continue
            # least squares for every row of dB: [A^T; sqrt(lambda) I] dB^T = [(D - B A)^T; 0]
            left = torch.cat([A.T, self.method.lam**0.5 * torch.eye(2, dtype=A.dtype)])
            right = torch.cat([(D / 2.0 - mean @ A).T, torch.zeros(2, len(mean), dtype=A.dtype)])
            self.pairs[one]["B"] = mean + torch.linalg.lstsq(left, right).solution.T


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "frobenius", "lam": 0.01},
        {"objective": "frobenius", "lam": 3.0},
        {"penalty": "norm", "server_steps": 8},
        {"penalty": "squared", "server_steps": 8, "lam": 0.5},
    ],
    ids=str,
)
def test_rounds_match_the_dense_objective(options: dict[str, object]) -> None:
    problem = Problem()
    method = LoRAFAIR(spec=problem.adapted().spec, r=2, lora_alpha=4, **options)
    made = federation(method)
    follow(made, FairOracle(made, method), tolerance=1e-8)


def replies(seed: int, zero: bool = False) -> tuple[Reduced, Tensor]:
    """Three replies that differ by as much as they agree, and their exact average without the scaling.

    No reply changes the first output.
    """
    rng = create_generator(seed, "test")
    common = torch.randn((9, 2), generator=rng, dtype=torch.float64), torch.randn((2, 5), generator=rng).double()
    items, D = [], torch.zeros(9, 5, dtype=torch.float64)
    for k, weight in enumerate((0.2, 0.3, 0.5)):
        B = common[0] + torch.randn((9, 2), generator=rng) * 0.7
        A = common[1] + torch.randn((2, 5), generator=rng) * 0.7
        B[: len(B) if zero else 1] = 0.0
        items.append(StackItem(Client(f"c{k}", 2, 2.0, 1, 1.0), weight, {"one/A": A, "one/B": B}))
        D += weight * B @ A
    return Reduced(stack=tuple(items), count=3), D


@pytest.mark.parametrize("seed", others_slow(range(5), [0]))
@pytest.mark.parametrize("penalty", ["norm", "squared"])
def test_the_correction_turns_the_product_towards_the_exact_average(penalty: str, seed: int) -> None:
    """The cosine rises, whatever the first step's length; without the penalty it reaches the best there is."""
    reduced, D = replies(seed)
    spec = Spec((LayerSpec("one", 9, 5),))

    def cosine(**options: object) -> float:
        after = LoRAFAIR(spec=spec, r=2, lora_alpha=4, penalty=penalty, **options).update(ServerState(), reduced)
        product = after.tensors["one/B"] @ after.tensors["one/A"]
        return float((product * D).sum() / product.norm() / D.norm())

    plain = cosine(lam=1e9)  # leaves B where the average put it
    assert cosine() > plain + 1e-4
    assert cosine(server_lr=100.0) > plain
    assert cosine(lam=1e-9, server_steps=2000) == pytest.approx(best_cosine(reduced, D), abs=1e-6)


def best_cosine(reduced: Reduced, D: Tensor) -> float:
    """What any B reaches with the averaged A: the share of D in A's row space."""
    A = torch.stack([one.weight * one.tensors["one/A"] for one in reduced.stack]).sum(0)
    return float((D @ torch.linalg.pinv(A) @ A).norm() / D.norm())


def test_a_start_that_no_step_improves_costs_one_step() -> None:
    """Its objective, a gradient of zeros, and the objective again: three products with G."""
    B = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        found = descend_to_cosine(B, B, torch.eye(2, dtype=torch.float64), 5.0, 0.1, 2, steps=8, lr=0.5)
    assert torch.equal(found, B)
    assert counter.get_total_flops() == 3 * (2 * 3 * 2 * 2)


@pytest.mark.parametrize("objective", ["cosine", "frobenius"])
def test_replies_of_zeros_need_no_correction(objective: str) -> None:
    reduced, _ = replies(0, zero=True)
    method = LoRAFAIR(spec=Spec((LayerSpec("one", 9, 5),)), r=2, lora_alpha=4, objective=objective)
    assert not method.update(ServerState(), reduced).tensors[join_tensor_name("one", "B")].any()
