"""Masked sums against plain ones."""

from __future__ import annotations

import pytest
import torch

from fedspan.core.method import Method
from fedspan.errors import FedspanError
from fedspan.methods.fedit import FedIT
from fedspan.methods.flora import FLoRA
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.wrappers.extras import WithExtras
from helpers.toys.problem import Problem
from helpers.toys.rounds import Double, Federation, sgd
from helpers.toys.secure_sum import MODULUS, WEIGHT, SecureSum

BITS = 16


def _pair(problem: Problem, inner: Method) -> tuple[Federation, Federation]:
    with_head = WithExtras(inner=inner, policy="average")
    secure = SecureSum(inner=with_head, cohort=problem.client_ids, fraction_bits=BITS)
    training = sgd(0.3, steps=2)
    return Federation(Double(inner=secure), problem, training), Federation(Double(inner=with_head), problem, training)


@pytest.mark.parametrize("two_phases", [False, True])
def test_masks_cancel_up_to_fixed_point_rounding(two_phases: bool) -> None:
    problem = Problem()
    spec = problem.adapted().spec
    secure, plain = _pair(problem, PFedLoRU(spec=spec, r=2, tau=5) if two_phases else FedIT(spec=spec, r=2))
    secure.round()
    plain.round()
    # Each of the clients rounds w_i x_i to 2^-f; the weights are integers.
    total = sum(party.client.weight for party in plain.parties.values())
    bound = len(problem.client_ids) * 0.5 / 2**BITS / total
    for name, value in plain.state.tensors.items():
        error = (secure.state.tensors[name] - value).abs().max()
        assert 0 < error <= bound + 1e-12
    for _ in range(2):
        secure.round()
        plain.round()
    for name, value in plain.state.tensors.items():
        assert torch.allclose(secure.state.tensors[name], value, atol=1e-3)


def test_a_single_reply_is_uniform_noise() -> None:
    problem = Problem()
    secure, plain = _pair(problem, FedIT(spec=problem.adapted().spec, r=2))
    secure.round()
    plain.round()
    masked = torch.cat([value.flatten() for value in secure.replies["client-0"].tensors.values()]).double() / MODULUS
    # 75 draws from U(0, 1): mean 1/2, standard error 1/sqrt(12 n); values spread over the whole range.
    assert abs(float(masked.mean()) - 0.5) < 4 / (12 * len(masked)) ** 0.5
    assert masked.min() < 0.1
    assert masked.max() > 0.9
    assert set(secure.replies["client-0"].tensors) == {*plain.replies["client-0"].tensors, WEIGHT}
    first = dict(secure.replies["client-0"].tensors)
    secure.round()
    # Other masks in every round, or two replies would give away their difference.
    for name, value in secure.replies["client-0"].tensors.items():
        difference = (value - first[name]) % MODULUS / MODULUS
        assert ((difference > 1e-3) & (difference < 1 - 1e-3)).double().mean() > 0.9


def test_refused_where_replies_stack() -> None:
    with pytest.raises(FedspanError, match="secure_aggregation"):
        SecureSum(inner=FLoRA(spec=Problem(clients=1).adapted().spec), cohort=("client-0",))
