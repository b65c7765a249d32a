"""FedProx against a hand-written loop."""

import pytest
import torch
from torch import Tensor

from fedspan.core.penalties import Proximal
from fedspan.core.tensors import compute_norm, join_tensor_name, select_slots
from fedspan.core.values import Job, Trained
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedit import FedIT
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedprox import FedProx
from helpers.toys.oracle import average, copied, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, adamw, close, sgd
from helpers.toys.two_phases import ExtrasInBothPhases

LR, MU, SCALING, STEPS = 0.3, 0.7, 2.0, 3


def _federation(problem: Problem, mu: float) -> Federation:
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, seed=6, r=2, lora_alpha=4.0), policy="average")
    return Federation(Double(inner=FedProx(inner=inner, mu=mu)), problem, sgd(LR, steps=STEPS))


def test_matches_the_hand_written_loop() -> None:
    problem = Problem()
    federation = _federation(problem, MU)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    server = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for _ in range(2):
        federation.round()
        shares = problem.shares(problem.client_ids)
        models = []
        for id in problem.client_ids:
            mine, own_head = copied(server), dict(head)
            for _ in range(STEPS):
                by_pair, by_head = pair_gradients(problem, id, W, own_head, mine, SCALING)
                for one in LAYERS:
                    for s in "AB":
                        pull = MU * (mine[one][s] - server[one][s])
                        mine[one][s] = mine[one][s] - LR * (by_pair[one][s] + pull)
                for name in HEAD:
                    own_head[name] = own_head[name] - LR * (by_head[name] + MU * (own_head[name] - head[name]))
            flat = {join_tensor_name(one, s): mine[one][s] for one in LAYERS for s in "AB"}
            models.append((shares[id], {**flat, **own_head}))
        mean = average(models)
        server = {one: {s: mean[join_tensor_name(one, s)] for s in "AB"} for one in LAYERS}
        head = {name: mean[name] for name in HEAD}
        for one in LAYERS:
            for s in "AB":
                assert close(federation.state.tensors[join_tensor_name(one, s)], server[one][s])
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])


def test_a_later_phase_is_held_near_the_start_of_the_round() -> None:
    """The head trains in both phases: in the second its reference is still what the server sent."""
    problem = Problem(clients=1)
    method = ExtrasInBothPhases(inner=PFedLoRU(spec=problem.adapted().spec, r=2, tau=5))
    inner = WithExtras(inner=method, policy="average")
    federation = Federation(Double(inner=FedProx(inner=inner, mu=MU)), problem, sgd(LR, steps=STEPS))
    jobs: list[Job] = []
    train = federation.engine.train

    def watched(work: Assignment, examples: Examples) -> Trained:
        jobs.append(work.job)
        return train(work, examples)

    federation.engine.train = watched
    federation.round()
    first, second = jobs
    for name in HEAD:
        key = f"extras/{name}"
        penalty = second.penalties[-1]
        assert isinstance(penalty, Proximal)
        assert torch.equal(penalty.reference[key], first.tensors[key])
        assert not torch.equal(penalty.reference[key], second.tensors[key])
    assert len(first.penalties) == len(second.penalties) == 1


@pytest.mark.parametrize("adaptive", [0, 99], ids=["seeded", "from gradients"])
def test_finished_segments_of_fedgalore_are_held_too(adaptive: int) -> None:
    """At a round's end the term is that of the layers' whole change, over all of its projectors."""
    problem = Problem(clients=1)
    spec = problem.adapted().spec
    inner = FedGaLore(spec=spec, r=2, seed=5, adaptive_refreshes=adaptive, steps=6, period=2, decay_base=False)
    method = FedProx(inner=WithExtras(inner=inner, policy="frozen"), mu=MU)
    federation = Federation(Double(inner=method), problem, adamw(LR, steps=6))
    seen: list[tuple[Job, Trained]] = []
    train = federation.engine.train

    def watched(work: Assignment, examples: Examples) -> Trained:
        seen.append((work.job, train(work, examples)))
        return seen[-1][1]

    federation.engine.train = watched
    federation.round()
    job, trained = seen[0]
    changes = {
        layer: job.parametrization[layer].compute_effective(select_slots(trained.tensors, layer)).pair
        for layer in LAYERS
    }
    whole = sum(float(pair.to_dense().square().sum()) for pair in changes.values() if pair is not None)
    last = sum(float(trained.tensors[join_tensor_name(layer, "acc")].square().sum()) for layer in LAYERS)
    term = float(job.penalties[-1].compute_value(trained.tensors))
    assert abs(term - 0.5 * MU * whole) < 1e-5 * term
    assert abs(whole - last) > 0.1 * whole
    plain = Federation(Double(inner=method.inner), problem, adamw(LR, steps=6))
    plain.round()
    assert compute_norm(changes_of(federation)) < compute_norm(changes_of(plain))


def changes_of(federation: Federation) -> dict[str, Tensor]:
    """The base's changes, dense."""
    return {
        name: delta if isinstance(delta, Tensor) else delta.to_dense()
        for name, delta in federation.state.base.total.items()
    }


def test_refused_where_nothing_is_shared() -> None:
    method = LocalOnly(spec=Problem(clients=1).adapted().spec)
    refusal = FedProx(inner=method).explain_refusal(method.declare_claims())
    assert "this method has none" in refusal
