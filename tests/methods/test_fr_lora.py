"""FR-LoRA against dense weights."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fedspan.core.lowrank import LowRank
from fedspan.methods.fr_lora import FRLoRA
from helpers.dense_rounds import Pairs, Weights, factor_mean, federation, follow, given
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import close
from helpers.watched_rounds import RunMethod


class _Oracle:
    """The base is dense; the fixed pair is on top of it at every round's start."""

    def __init__(self, W: Weights, pairs: Pairs) -> None:
        self.fixed = pairs
        self.lift = {one: 2.0 * pairs[one]["B"] @ pairs[one]["A"] for one in LAYERS}
        self.W = {one: W[one] - self.lift[one] for one in LAYERS}

    def start(self, id: str) -> tuple[Weights, Pairs]:
        return self.W, self.fixed

    def finish(self, trained: Mapping[str, Pairs], shares: Mapping[str, float]) -> None:
        means = factor_mean(trained, shares)
        self.W = {one: self.W[one] + 2.0 * means[one]["B"] @ means[one]["A"] - self.lift[one] for one in LAYERS}

    def model(self) -> Weights:
        return {one: self.W[one] + self.lift[one] for one in LAYERS}


@pytest.mark.parametrize(("train", "exact"), [("both", False), ("B", True)])
def test_rounds_match_dense_weights(train: str, exact: bool) -> None:
    problem = Problem()
    method = FRLoRA(spec=problem.adapted().spec, r=2, lora_alpha=4, train=train)
    made = federation(method)
    for one in LAYERS:
        assert close(made.get_weight(one), problem.to_dense(one)[one])  # the model begins as the pretrained one
    follow(made, _Oracle(problem.to_dense(*LAYERS), given(made)), train="AB" if train == "both" else "B")
    assert method.declare_claims().exact == exact


@pytest.mark.parametrize(("train", "rank"), [("both", 6), ("B", 3)])
def test_every_round_starts_from_the_same_factors_which_are_transmitted_once(
    train: str, rank: int, run_method: RunMethod
) -> None:
    run = run_method("fr-lora", method={"train": train})
    name = run.layers[0].name
    first = run.rounds[0].before.state.tensors
    for round in run.rounds:
        for local in round.trained:
            for slot in "AB":
                assert torch.equal(local.job.tensors[f"{name}/{slot}"], first[f"{name}/{slot}"])
        for call in round.of("sync"):
            assert (f"{name}/A" in call.result.tensors) == (call.args[1].last_round is None)
        delta = round.after.state.base.recent[-1].deltas[name]
        assert isinstance(delta, LowRank)
        assert delta.rank == rank


def test_where_only_B_trains_the_average_is_exact(run_method: RunMethod) -> None:
    run = run_method("fr-lora", method={"train": "B"})
    for round in run.rounds:
        for layer in run.layers:
            mean = run.mean_change(layer.name, round)
            assert float((run.global_change(layer.name, round.after) - mean).norm() / mean.norm()) < 1e-5
