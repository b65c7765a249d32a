"""FedPAQ: the quantiser against its definition, the rounds against replies reconstructed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedspan.core.tensors import generator, tensor_name
from fedspan.core.values import Message
from fedspan.engines.wire import payload_size
from fedspan.errors import FedspanError
from fedspan.methods.fedit import FedIT
from fedspan.methods.flora import FLoRA
from fedspan.methods.florg import FLoRG
from fedspan.methods.rolora import RoLoRA
from fedspan.wrappers.extras import WithExtras

from .fedpaq import NORM, FedPAQ, dequantise, quantise
from .oracle import copied, descend
from .pfedloru import PFedLoRU
from .problem import HEAD, LAYERS, Problem
from .rounds import Double, Federation, close, sgd
from .scaffold import Scaffold

LR, SCALING, STEPS, SEED = 0.3, 2.0, 2, 9


def _by_hand(value: Tensor, levels: int, draws: Tensor) -> Tensor:
    """Example 1 of the paper, entry by entry."""
    norm = math.sqrt(sum(float(x) ** 2 for x in value.flatten()))
    result = []
    for x, draw in zip(value.flatten().tolist(), draws.flatten().tolist(), strict=True):
        scaled = levels * abs(x) / norm
        level = math.floor(scaled)
        xi = (level + 1) / levels if draw < scaled - level else level / levels
        result.append(norm * math.copysign(1.0, x) * xi)
    return torch.tensor(result, dtype=value.dtype).reshape(value.shape)


def test_quantiser_is_the_papers_and_unbiased() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    levels, draws = 4, 2000
    norm = x.norm()
    total, squared = torch.zeros_like(x), 0.0
    for draw in range(draws):
        q, n = quantise(x, levels, rng)
        if draw == 0:
            assert n == norm
            assert q.dtype == torch.int8
            assert int(q.abs().max()) <= levels
        estimate = dequantise(q, n, levels)
        total += estimate
        squared += float((estimate - x).square().sum())
    # An entry's standard deviation is at most half a step, norm / s / 2: five standard errors.
    assert ((total / draws - x).abs() <= 5 * float(norm) / levels / 2 / math.sqrt(draws)).all()
    bound = min(x.numel() / levels**2, math.sqrt(x.numel()) / levels) * float(norm) ** 2
    assert squared / draws <= bound
    assert squared / draws > 0.1 * bound


def test_quantiser_of_zero_is_zero() -> None:
    q, norm = quantise(torch.zeros(3, 2), 4, torch.Generator())
    assert torch.equal(dequantise(q, norm, 4), torch.zeros(3, 2))


def _federation(problem: Problem, inner: object, levels: int = 7) -> Federation:
    method = FedPAQ(inner=WithExtras(inner=inner, policy="average"), levels=levels, seed=SEED)  # type: ignore[arg-type]
    return Federation(Double(inner=method), problem, sgd(LR, steps=STEPS))


@pytest.mark.parametrize("name", ["fedit", "rolora"])
def test_rounds_match_quantised_changes_by_hand(name: str) -> None:
    problem, levels = Problem(), 7
    cls = {"fedit": FedIT, "rolora": RoLoRA}[name]
    federation = _federation(problem, cls(spec=problem.adapted().spec, r=2, lora_alpha=4.0), levels)
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    server = {one: {s: federation.state.tensors[tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for number, members in enumerate([(0, 1, 2, 3), (1, 3), (0, 1, 2), (0, 1, 2, 3)]):
        train = "AB" if name == "fedit" else "BA"[number % 2]
        cohort = [problem.client_ids[member] for member in members]
        federation.round(cohort)
        shares = problem.shares(cohort)
        after, head_after = copied(server), dict(head)
        for id in cohort:
            mine, own_head = copied(server), dict(head)
            descend(problem, id, W, own_head, mine, SCALING, LR, STEPS, train=train)

            def estimate(key: str, change: Tensor, id: str = id, number: int = number) -> Tensor:
                rng = generator(SEED, "fedpaq", number, id, key)
                return _by_hand(change, levels, torch.rand(change.shape, generator=rng, dtype=torch.float64))

            for one in LAYERS:
                for s in train:
                    change = mine[one][s] - server[one][s]
                    after[one][s] = after[one][s] + shares[id] * estimate(tensor_name(one, s), change)
            for parameter in HEAD:
                change = own_head[parameter] - head[parameter]
                head_after[parameter] = head_after[parameter] + shares[id] * estimate(f"extras/{parameter}", change)
            expected = {tensor_name(one, s) for one in LAYERS for s in train} | {f"extras/{p}" for p in HEAD}
            assert set(federation.replies[id].tensors) == expected | {key + NORM for key in expected}
        server, head = after, head_after
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[tensor_name(one, s)], server[one][s])
        for parameter in HEAD:
            assert close(federation.state.tensors[f"extras/{parameter}"], head[parameter])


def test_a_client_that_was_absent_still_changes_the_common_reference() -> None:
    """RoLoRA sends only what a client misses; its change is of the same tensors nevertheless."""
    problem = Problem(clients=2)
    spec = problem.adapted().spec
    exact = _federation(problem, RoLoRA(spec=spec, r=2), levels=2**30)
    plain = Federation(
        Double(inner=WithExtras(inner=RoLoRA(spec=spec, r=2), policy="average")), problem, sgd(LR, steps=STEPS)
    )
    for cohort in [("client-0", "client-1"), ("client-0",), ("client-0",), ("client-0", "client-1")]:
        exact.round(cohort)
        plain.round(cohort)
    for key, value in plain.state.tensors.items():
        assert close(exact.state.tensors[key], value, 1e-7)


def test_two_phases_send_the_change_since_the_rounds_start() -> None:
    """The head trains in both of pFedLoRU's phases; its change is that of both."""
    problem = Problem(clients=2)
    method = PFedLoRU(spec=problem.adapted().spec, r=2, tau=2)
    exact = _federation(problem, method, levels=2**30)
    plain = Federation(Double(inner=WithExtras(inner=method, policy="average")), problem, sgd(LR, steps=STEPS))
    for _ in range(3):
        exact.round()
        plain.round()
    for key, value in plain.state.tensors.items():
        assert close(exact.state.tensors[key], value, 1e-7)
    memory = exact.parties["client-0"].memory
    assert set(memory) == set(plain.parties["client-0"].memory)


def test_stacked_replies_are_restored_one_by_one() -> None:
    problem = Problem(clients=3)
    method = FLoRG(spec=problem.adapted().spec, r=2)
    exact = _federation(problem, method, levels=2**30)
    plain = Federation(Double(inner=WithExtras(inner=method, policy="average")), problem, sgd(LR, steps=STEPS))
    for _ in range(2):
        exact.round()
        plain.round()
    for key, value in plain.state.tensors.items():
        assert close(exact.state.tensors[key], value, 1e-6)


def test_bytes_are_a_quarter_of_float32() -> None:
    problem = Problem(clients=1, dtype=torch.float32)
    inner = FedIT(spec=problem.adapted().spec, r=2)
    federation = Federation(FedPAQ(inner=inner, levels=127), problem, sgd(LR))
    federation.round()
    tensors = federation.replies["client-0"].tensors
    plain = sum(value.numel() for name, value in tensors.items() if not name.endswith(NORM)) * 4
    norms = sum(name.endswith(NORM) for name in tensors) * 4
    assert payload_size(Message(tensors)) == plain // 4 + norms


def test_refused_where_replies_have_no_reference() -> None:
    spec = Problem(clients=1).adapted().spec
    with pytest.raises(FedspanError, match="fedpaq"):
        FedPAQ(inner=FLoRA(spec=spec))
    problem = Problem(clients=1)
    federation = Federation(FedPAQ(inner=Double(inner=Scaffold(spec=spec))), problem, sgd(LR))
    with pytest.raises(FedspanError, match="fc1/c is no tensor that was sent"):
        federation.round()
