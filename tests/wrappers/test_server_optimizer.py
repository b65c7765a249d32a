"""Server optimizers against their papers' formulas, on hand-written rounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import join_tensor_name
from fedspan.errors import FedspanError
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.flora import FLoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.registry import METHODS
from fedspan.methods.rolora import RoLoRA
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadagrad import FedAdagrad
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedavgm import FedAvgM
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedyogi import FedYogi
from fedspan.wrappers.server_optimizer import Adaptive, ServerOptimizer
from helpers.toys.oracle import copied, descend
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, close, sgd

LR, SCALING, STEPS, TAU = 0.3, 2.0, 2, 2
SERVER_LR, BETAS, ADAPTIVITY = 0.05, (0.8, 0.9), 1e-2
ADAPTIVE: dict[str, Any] = {"lr": SERVER_LR, "beta1": BETAS[0], "tau": ADAPTIVITY}


def adam_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return BETAS[1] * v + (1 - BETAS[1]) * delta * delta


def yogi_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    square = delta * delta
    sign = torch.where(v > square, 1.0, torch.where(v < square, -1.0, 0.0))
    return v - (1 - BETAS[1]) * square * sign


def adagrad_v(v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return v + delta * delta


class AdaptiveOracle:
    """Algorithm 2 for one tensor; ``rule`` is the line in which the three differ."""

    def __init__(self, rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.rule = rule
        self.m = torch.zeros(())
        self.v = torch.tensor(ADAPTIVITY**2, dtype=torch.float64)

    def step(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        delta = mean - x
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * delta
        self.v = self.rule(self.v, delta)
        return x + SERVER_LR * self.m / (torch.sqrt(self.v) + ADAPTIVITY)


class Momentum:
    """FedAvgM for one tensor: ``v <- 0.8 v + D;  x <- x + 0.05 v``."""

    def __init__(self) -> None:
        self.v = torch.zeros(())

    def step(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        self.v = 0.8 * self.v + (mean - x)
        return x + 0.05 * self.v


OPTIMIZERS: dict[str, tuple[type[ServerOptimizer], dict[str, Any], Callable[[], Any]]] = {
    "fedadam": (FedAdam, {**ADAPTIVE, "beta2": BETAS[1]}, lambda: AdaptiveOracle(adam_v)),
    "fedyogi": (FedYogi, {**ADAPTIVE, "beta2": BETAS[1]}, lambda: AdaptiveOracle(yogi_v)),
    "fedadagrad": (FedAdagrad, ADAPTIVE, lambda: AdaptiveOracle(adagrad_v)),
    "fedavgm": (FedAvgM, {"lr": 0.05, "momentum": 0.8}, Momentum),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fedloru_under_it_matches_the_oracle_and_forgets_at_accumulations(name: str) -> None:
    problem = Problem()
    cls, options, oracle = OPTIMIZERS[name]
    inner = FedLoRU(spec=problem.adapted().spec, seed=4, r=2, lora_alpha=4.0, tau=TAU)
    wrapped = cls(inner=WithExtras(inner=inner, policy="average"), **options)
    federation = Federation(Double(inner=wrapped), problem, sgd(LR, steps=STEPS))
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)

    def fresh(generation: int) -> dict:
        tensors = inner.create_factors(generation)
        return {one: {s: tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}

    server = fresh(0)
    servers = {key: oracle() for key in [(one, s) for one in LAYERS for s in "AB"] + list(HEAD)}
    for number, positions in enumerate([(0, 1, 2, 3), (0, 2), (1, 2, 3), (0, 1, 2, 3), (1, 3)]):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares = problem.shares(cohort)
        mean = {one: {s: torch.zeros_like(server[one][s]) for s in "AB"} for one in LAYERS}
        head_mean = {name: torch.zeros_like(head[name]) for name in HEAD}
        for id in cohort:
            mine, own_head = copied(server), dict(head)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS)
            for one in LAYERS:
                for s in "AB":
                    mean[one][s] += shares[id] * mine[one][s]
            for name in HEAD:
                head_mean[name] += shares[id] * own_head[name]
        for one in LAYERS:
            for s in "AB":
                server[one][s] = servers[one, s].step(server[one][s], mean[one][s])
        for name in HEAD:
            head[name] = servers[name].step(head[name], head_mean[name])
        if (number + 1) % TAU == 0:
            for one in LAYERS:
                W[one] = W[one] + SCALING * server[one]["B"] @ server[one]["A"]
                for s in "AB":
                    servers[one, s] = oracle()
            server = fresh((number + 1) // TAU)
            kept = {key.partition("/")[2].partition("/")[2] for key in federation.state.memory}
            assert kept == {f"extras/{key}" for key in HEAD}  # the head was not re-initialized
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[join_tensor_name(one, s)].double(), server[one][s])
            assert close(federation.get_weight(one), W[one] + SCALING * server[one]["B"] @ server[one]["A"])
        for key in HEAD:
            assert close(federation.state.tensors[f"extras/{key}"], head[key])


def test_only_what_was_transmitted_gathers_moments() -> None:
    problem = Problem(clients=2)
    wrapped = FedAdam(inner=RoLoRA(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=wrapped), problem, sgd(LR))
    federation.round()
    assert {name for name in federation.state.memory if "/m/" in name} == {
        "FedAdam/m/" + join_tensor_name(one, "B") for one in LAYERS
    }
    frozen = {one: federation.state.tensors[join_tensor_name(one, "B")] for one in LAYERS}
    federation.round()
    for one in LAYERS:  # the frozen factor does not move by its stale moments
        assert torch.equal(federation.state.tensors[join_tensor_name(one, "B")], frozen[one])


def test_refused_where_a_mean_change_has_no_meaning() -> None:
    spec = Problem(clients=2).adapted().spec
    cases = {
        "stack": FLoRA(spec=spec),
        "re-initializes": FedLoRU(spec=spec, tau=1),
        "hold changes already": FedPAQ(inner=FedIT(spec=spec)),
        "hold nothing": LocalOnly(spec=spec),
    }
    for words, method in cases.items():
        refusal = FedAdam(inner=method).explain_refusal(method.declare_claims())
        assert words in refusal
    residual = replace(METHODS["fedit"].claims, moves_base=True)
    assert "moves the base" in str(FedAdam(inner=FedIT(spec=spec)).explain_refusal(residual))
    assert FedAdam(inner=FedIT(spec=spec)).explain_refusal(FedLoRU(spec=spec, tau=2).declare_claims()) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_along_the_mean_is_not_the_mean(name: str) -> None:
    cls, options, _ = OPTIMIZERS[name]
    inner = RoLoRA(spec=Problem(clients=2).adapted().spec)
    assert inner.declare_claims().exact
    assert not cls(inner=inner, **options).declare_claims().exact


def test_a_reply_that_is_not_what_was_claimed_is_an_error() -> None:
    """LoRA-A2's replies are changes, whatever its claims say."""
    problem = Problem(clients=2)
    method = FedAdam(inner=LoRAA2(spec=problem.adapted().spec, r=2))
    federation = Federation(Double(inner=method), problem, sgd(LR))
    with pytest.raises(FedspanError, match="clients do not start from the tensor fc1/dB"):
        federation.round()


ROWS, COLUMNS = 3, 2
RULES: dict[type[ServerOptimizer], Callable[[float, float], float]] = {
    FedAdam: lambda v, square: 0.75 * v + 0.25 * square,
    FedYogi: lambda v, square: v + (0.25 * square if v < square else -0.25 * square),
    FedAdagrad: lambda v, square: v + square,
}


@pytest.mark.parametrize("cls", RULES)
def test_adaptive_steps_are_those_of_a_loop_over_entries(cls: type[Adaptive]) -> None:
    """From v = tau^2 and without bias correction; FedAdagrad has no momentum unless the user asks for it."""
    beta1, options = (0.0, {}) if cls is FedAdagrad else (0.6, {"beta1": 0.6, "beta2": 0.75})
    optimizer = cls(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=0.5, tau=0.1, **options)
    changes = torch.randn(5, ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moments = {
        kind: torch.full((ROWS, COLUMNS), optimizer.get_initial(kind), dtype=torch.float64)
        for kind in optimizer.moments
    }
    first, second = ([[start] * COLUMNS for _ in range(ROWS)] for start in (0.0, 0.1**2))
    for change in changes:
        step, moments = optimizer.step(change, moments)
        for row, values in enumerate(change.tolist()):
            for column, value in enumerate(values):
                first[row][column] = beta1 * first[row][column] + (1 - beta1) * value
                second[row][column] = RULES[cls](second[row][column], value**2)
                expected = 0.5 * first[row][column] / (math.sqrt(second[row][column]) + 0.1)
                assert float(step[row, column]) == pytest.approx(expected, rel=1e-12)


def test_momentum_of_fedadagrad_may_be_requested() -> None:
    optimizer = FedAdagrad(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=2.0, beta1=0.5, tau=1.0)
    step, moments = optimizer.step(torch.tensor([4.0]), {"m": torch.tensor([2.0]), "v": torch.tensor([9.0])})
    assert moments["m"].tolist() == [3.0]  # 0.5 * 2 + 0.5 * 4
    assert moments["v"].tolist() == [25.0]  # 9 + 4^2
    assert step.tolist() == [1.0]  # 2 * 3 / (5 + 1)


@dataclass(frozen=True, kw_only=True)
class Recorded(Adaptive):
    """A second moment that shows what it is given: ``v + 3 D^2``."""

    def compute_second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + 3 * squared


def test_a_step_divides_the_first_moment_by_the_root_of_the_new_second_one() -> None:
    """The second moment is updated first, and tau is added to its root, not under it."""
    optimizer = Recorded(inner=FedIT(spec=Problem(clients=2).adapted().spec), lr=6.0, beta1=0.75, tau=1.0)
    change = torch.tensor([[1.0, -2.0]])
    before = {"m": torch.tensor([[1.0, 2.0]]), "v": torch.tensor([[1.0, 4.0]])}
    step, after = optimizer.step(change, before)
    assert after["m"].tolist() == [[1.0, 1.0]]  # 0.75 m + 0.25 D
    assert after["v"].tolist() == [[4.0, 16.0]]
    assert step.tolist() == [[2.0, pytest.approx(1.2)]]  # 6 m / (sqrt(v) + 1)
    assert before["v"].tolist() == [[1.0, 4.0]]
