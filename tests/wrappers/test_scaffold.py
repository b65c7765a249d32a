"""SCAFFOLD against the textbook's algorithm, on dense weights and on factors; FedProx against a hand-written loop."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspan.core.method import Method
from fedspan.core.penalties import Proximal
from fedspan.core.tensors import compute_norm, join_tensor_name, select_slots
from fedspan.core.values import Job, OptimizerSpec, Spec, Trained
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.fedsa_lora import FedSALoRA
from fedspan.methods.flora import FLoRA
from fedspan.methods.la_lora import LALoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.methods.rolora import RoLoRA
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.scaffold import PREFIX, Scaffold
from helpers import refusals
from helpers.dense_rounds import factor_mean, require_state
from helpers.toys.oracle import Pairs, average, copied, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, adamw, close, sgd
from helpers.toys.two_phases import ExtrasInBothPhases

LR, STEPS = 0.3, 3
VARIATES = ("option-I", "option-II", "gradient")
ROUNDS = [((0, 1, 2, 3), ()), ((1, 2), ()), ((0, 1, 3), (1,)), ((0, 1, 2, 3), ())]
"""Members of the cohort, and of those the ones whose replies are lost."""

Weights = dict[str, Tensor]


def _spec(problem: Problem) -> Spec:
    return replace(problem.adapted().spec, clients=len(problem.client_ids))


def _federation(
    problem: Problem, method: Method, variate: str = "option-II", uniform: bool = True, steps: int = STEPS
) -> Federation:
    wrapped = Scaffold(inner=WithExtras(inner=method, policy="average"), variate=variate)
    return Federation(Double(inner=wrapped), problem, sgd(LR, steps=steps), uniform=uniform)


class Textbook:
    """Algorithm 1 on any dict of tensors; ``gradients(client, tensors)`` is all that it knows of the model."""

    def __init__(self, problem: Problem, x: Weights, variate: str, uniform: bool) -> None:
        self.problem, self.x, self.variate, self.uniform = problem, dict(x), variate, uniform
        self.c = {name: torch.zeros_like(value) for name, value in x.items()}
        self.own = {id: dict(self.c) for id in problem.client_ids}

    def gradients(self, client: str, y: Weights) -> Weights:
        return self.problem.gradients(client, y)

    def round(self, arrived: list[str]) -> None:
        shares = dict.fromkeys(arrived, 1 / len(arrived)) if self.uniform else self.problem.shares(arrived)
        ys, changes = {}, {}
        for id in arrived:
            y, seen = dict(self.x), []
            for _ in range(STEPS):
                g = self.gradients(id, y)
                seen.append(g)
                y = {name: y[name] - LR * (g[name] - self.own[id][name] + self.c[name]) for name in y}
            after = {}
            for name, start in self.x.items():
                if self.variate == "option-II":
                    after[name] = self.own[id][name] - self.c[name] + (start - y[name]) / (STEPS * LR)
                elif self.variate == "option-I":
                    after[name] = seen[0][name]  # one step sees all of a client's examples
                else:
                    after[name] = sum(g[name] for g in seen) / STEPS
            ys[id], changes[id] = y, {name: after[name] - self.own[id][name] for name in after}
            self.own[id] = after
        count = len(self.problem.client_ids)
        for name in self.x:
            self.x[name] = sum(shares[id] * ys[id][name] for id in arrived)
            self.c[name] = self.c[name] + len(arrived) / count * sum(shares[id] * changes[id][name] for id in arrived)


class OnFactors(Textbook):
    """The same on LoRA's factors and the head."""

    def gradients(self, client: str, y: Weights) -> Weights:
        pairs = {one: {s: y[join_tensor_name(one, s)] for s in "AB"} for one in LAYERS}
        head = {name: y[f"extras/{name}"] for name in HEAD}
        by_pair, by_head = pair_gradients(self.problem, client, self.problem.to_dense(*LAYERS), head, pairs, 2.0)
        flat = {join_tensor_name(one, s): by_pair[one][s] for one in LAYERS for s in "AB"}
        return {**flat, **{f"extras/{name}": by_head[name] for name in HEAD}}


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "by examples"])
@pytest.mark.parametrize("variate", VARIATES)
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedit"])
def test_matches_the_textbook(method: str, variate: str, uniform: bool) -> None:
    problem = Problem()
    if method == "fedavg":
        federation = _federation(problem, FedAvg(spec=_spec(problem)), variate, uniform)
        keys = {**{f"{one}/W": one for one in LAYERS}, **{f"extras/{name}": name for name in HEAD}}
        textbook = Textbook(problem, problem.to_dense(), variate, uniform)
    else:
        federation = _federation(problem, FedIT(spec=_spec(problem), seed=6, r=2, lora_alpha=4.0), variate, uniform)
        keys = {name: name for name in federation.state.tensors}
        begun = {name: value.double() for name, value in federation.state.tensors.items()}
        textbook = OnFactors(problem, begun, variate, uniform)
    for positions, lost in ROUNDS:
        cohort = [problem.client_ids[position] for position in positions]
        missing = {problem.client_ids[position] for position in lost}
        federation.round(cohort, lost=missing)
        textbook.round([id for id in cohort if id not in missing])
        for ours, theirs in keys.items():
            assert close(federation.state.tensors[ours], textbook.x[theirs])
            assert close(federation.state.memory[PREFIX + ours], textbook.c[theirs])
            for id, party in federation.parties.items():
                if party.memory:
                    assert close(party.memory[PREFIX + "own/" + ours], textbook.own[id][theirs])
                else:
                    assert not textbook.own[id][theirs].any()
            if uniform:  # the server's variate is the mean of the clients' (zero for those that never replied)
                held = sum(own[theirs] for own in textbook.own.values()) / len(problem.client_ids)
                assert close(federation.state.memory[PREFIX + ours], held)


@pytest.mark.parametrize("variate", VARIATES)
def test_factors_that_restart_start_without_variates(variate: str) -> None:
    """FedLoRU accumulates after round 2: the factors' variates are 0 on both sides then, the head's live on."""
    problem = Problem()
    federation = _federation(problem, FedLoRU(spec=_spec(problem), r=2, tau=2), variate)
    federation.round()
    federation.round()
    for key, value in federation.state.memory.items():
        assert value.any() == ("extras/" in key)
    job = federation.job("client-1")
    assert all(job.gradient_offset[join_tensor_name(one, s)].count_nonzero() == 0 for one in LAYERS for s in "AB")
    assert all(job.gradient_offset[f"extras/{name}"].any() for name in HEAD)
    before = federation.parties["client-1"].memory
    federation.round(["client-0"])
    federation.round(["client-0"])  # accumulates again while client-1 is away, with what it kept of round 2
    assert before == federation.parties["client-1"].memory
    again = federation.job("client-1")
    assert all(again.gradient_offset[join_tensor_name(one, s)].count_nonzero() == 0 for one in LAYERS for s in "AB")


def test_a_client_that_was_away_corrects_as_one_that_was_there() -> None:
    """RoLoRA's factors move in turn: c - c_i of each must outlive the round of the other."""
    problem = Problem(clients=3)
    federation = _federation(problem, RoLoRA(spec=_spec(problem), r=2))
    for cohort in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0, 1, 2], [1], [0, 2]):
        federation.round([f"client-{k}" for k in cohort])
        for id, party in federation.parties.items():
            offsets = federation.job(id).gradient_offset
            for key, variate in federation.state.memory.items():
                name = key.removeprefix(PREFIX)
                own = party.memory.get(PREFIX + "own/" + name, torch.zeros_like(variate))
                assert torch.equal(offsets[name], variate - own)


def test_a_factor_whose_turn_does_not_come_keeps_its_variate() -> None:
    """A single step trains LA-LoRA's B alone, so nothing is known of A's drift."""
    problem = Problem(clients=2)
    federation = _federation(problem, LALoRA(spec=_spec(problem), r=2), steps=1)
    for _ in range(2):
        federation.round()
        variates = {key.removeprefix(PREFIX): value for key, value in federation.state.memory.items()}
        for one in LAYERS:
            assert not variates[join_tensor_name(one, "A")].any()
            assert variates[join_tensor_name(one, "B")].abs().sum() > 0
    assert all(value.isfinite().all() for value in federation.state.tensors.values())


def test_what_stays_on_a_client_has_no_variate() -> None:
    problem = Problem(clients=2)
    federation = _federation(problem, FedSALoRA(spec=_spec(problem), r=2))
    for _ in range(2):
        federation.round()
    assert {key.rpartition("/")[2] for key in federation.state.memory} == {"A", "head.weight", "head.bias"}
    assert set(federation.job("client-0").gradient_offset) == {
        *(join_tensor_name(one, "A") for one in LAYERS),
        *(f"extras/{name}" for name in HEAD),
    }


@pytest.mark.parametrize("variate", VARIATES)
def test_two_phases_make_one_variate(variate: str) -> None:
    """pFedLoRU: A and B train in the second phase only, the head in both, with a learning rate of its own."""
    problem = Problem(clients=1)
    inner = ExtrasInBothPhases(inner=PFedLoRU(spec=_spec(problem), r=2, tau=9))
    wrapped = Scaffold(inner=WithExtras(inner=inner, policy="average", lr_scale=0.5), variate=variate)
    federation = Federation(Double(inner=wrapped), problem, sgd(LR))
    seen: list[tuple[str, Weights, int]] = []
    train = federation.engine.train

    def watched(work: Assignment, examples: Examples) -> Trained:
        trained = train(replace(work, job=replace(work.job, want_gradient=True)), examples)
        seen.append((work.job.phase, trained.gradient, trained.steps))
        return trained

    federation.engine.train = watched
    federation.round()
    own = federation.parties["client-0"].memory
    phases = [phase for phase, _, _ in seen]
    assert phases == (["scaffold", "personal", "scaffold", "train"] if variate == "option-I" else ["personal", "train"])
    chosen = [one for one in seen if (one[0] == "scaffold") == (variate == "option-I")]
    (_, first, taken), (_, second, more) = chosen
    pair, head = join_tensor_name("fc1", "B"), "extras/head.bias"
    assert close(own[PREFIX + "own/" + pair], second[pair])
    # Option I takes the gradient where the head stands when it first trains; the others the mean over all steps.
    expected = first[head]
    if variate != "option-I":
        expected = (taken * first[head] + more * second[head]) / (taken + more)
    assert not torch.equal(first[head], second[head])
    assert close(own[PREFIX + "own/" + head], expected)
    assert PREFIX + "own/" + join_tensor_name("fc1", "L") not in own
    assert not any("drift" in key or "length" in key for key in own)


@pytest.mark.parametrize("outside", [True, False])
def test_it_goes_together_with_fedprox(outside: bool) -> None:
    """In either order the same rounds: both only add to the gradient."""
    problem = Problem(clients=3)
    inner: Method = WithExtras(inner=FedIT(spec=_spec(problem), r=2), policy="average")
    method = FedProx(inner=Scaffold(inner=inner), mu=0.3) if outside else Scaffold(inner=FedProx(inner=inner, mu=0.3))
    federation = Federation(Double(inner=method), problem, sgd(LR, steps=STEPS))
    other = Federation(Double(inner=Scaffold(inner=FedProx(inner=inner, mu=0.3))), problem, sgd(LR, steps=STEPS))
    for _ in range(3):
        federation.round()
        other.round()
    for name, value in other.state.tensors.items():
        assert torch.equal(federation.state.tensors[name], value)


def test_refused_where_a_variate_has_no_meaning() -> None:
    spec = _spec(Problem(clients=2))
    cases = {
        "are re-initialized": FLoRA(spec=spec),
        "re-initialized ": FedLoRU(spec=spec, tau=1),
        "hold other values, too": Scaffold(inner=FedIT(spec=spec)),
    }
    for words, method in cases.items():
        refusal = Scaffold(inner=method).explain_refusal(method.declare_claims())
        assert words.strip() in refusal
    plain = FedIT(spec=spec)
    ranks = replace(plain.claims, heterogeneous_ranks=True)
    assert "ranks may differ" in str(Scaffold(inner=plain).explain_refusal(ranks))
    assert Scaffold(inner=plain).explain_refusal(plain.claims) is None
    plain_sgd, momentum = OptimizerSpec(name="sgd"), OptimizerSpec(name="sgd", momentum=0.9)
    for variate, optimizer, clip, refused in [
        ("option-II", plain_sgd, 1.0, False),
        ("option-II", momentum, 0.0, True),
        ("option-II", OptimizerSpec(), 0.0, True),
        ("gradient", OptimizerSpec(), 0.0, False),
        ("gradient", OptimizerSpec(), 1.0, True),
        ("option-I", momentum, 0.0, False),
        ("option-I", plain_sgd, 1.0, True),
    ]:
        wrapper = Scaffold(inner=plain, variate=variate)
        assert (wrapper.explain_training_refusal(optimizer, clip) is not None) == refused


def test_a_federation_of_unknown_size_is_refused() -> None:
    problem = Problem(clients=2)
    with refusals.refused("method.wrappers"):
        Federation(Double(inner=Scaffold(inner=FedIT(spec=problem.adapted().spec))), problem, sgd(LR))


def test_adamw_under_the_gradients_variates() -> None:
    """The correction goes into Adam's gradient: with all variates at the client's own, nothing is corrected."""
    problem = Problem(clients=1)
    inner = WithExtras(inner=FedIT(spec=_spec(problem), r=2), policy="average")
    corrected = Federation(Double(inner=Scaffold(inner=inner, variate="gradient")), problem, adamw(0.05, steps=2))
    plain = Federation(Double(inner=inner), problem, adamw(0.05, steps=2))
    for _ in range(3):  # one client: c = c_i always
        corrected.round()
        plain.round()
    for name, value in plain.state.tensors.items():
        assert close(corrected.state.tensors[name], value)
    assert any(value.any() for value in corrected.state.memory.values())


MU, SCALING = 0.7, 2.0


def _prox_federation(problem: Problem, mu: float) -> Federation:
    inner = WithExtras(inner=FedIT(spec=problem.adapted().spec, seed=6, r=2, lora_alpha=4.0), policy="average")
    return Federation(Double(inner=FedProx(inner=inner, mu=mu)), problem, sgd(LR, steps=STEPS))


def test_matches_the_hand_written_loop() -> None:
    problem = Problem()
    federation = _prox_federation(problem, MU)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    server = {one: {s: federation.state.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    for _ in range(2):
        federation.round()
        shares = problem.shares(problem.client_ids)
        trained, heads = dict[str, Pairs](), dict[str, dict[str, Tensor]]()
        for id in problem.client_ids:
            trained[id] = mine = copied(server)
            own_head = dict(head)
            for _ in range(STEPS):
                by_pair, by_head = pair_gradients(problem, id, W, own_head, mine, SCALING)
                for one in LAYERS:
                    for s in "AB":
                        pull = MU * (mine[one][s] - server[one][s])
                        mine[one][s] = mine[one][s] - LR * (by_pair[one][s] + pull)
                for name in HEAD:
                    own_head[name] = own_head[name] - LR * (by_head[name] + MU * (own_head[name] - head[name]))
            heads[id] = own_head
        server, head = factor_mean(trained, shares), average((shares[id], heads[id]) for id in heads)
        require_state(federation, head, server)


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
