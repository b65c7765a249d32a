"""FedGaLore against GaLore-AdamW on dense weights and AJIVE on dense views, all in float64 and written by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.core import alignment
from fedspan.core.method import Memory
from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.core.values import Client, Job, Message, Reduced, Spec, StackItem, Trained
from fedspan.federation.validation import build_untrained_reply
from fedspan.methods.fedgalore import FedGaLore
from fedspan.planning.shape_inference import count_traffic
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from helpers.dense_rounds import require_state
from helpers.refusals import refused
from helpers.toys.oracle import Adam, average
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, adamw, close, with_extras
from helpers.watched_rounds import RunMethod, differences

LR, RANK = 0.02, 2


def tall(layer: str, x: Tensor) -> Tensor:
    """fc1 is 8 x 5, fc2 is 6 x 8: transposed, so that everything below projects the right side."""
    return x if layer == "fc1" else x.T


def made(problem: Problem, **options: Any) -> FedGaLore:
    return FedGaLore(spec=problem.adapted().spec, r=RANK, seed=5, **options)


def seeded(method: FedGaLore, round: int, segment: int) -> dict[str, Tensor]:
    return {layer.name: method.draw_seeded_projector(layer, round, segment).double() for layer in method.spec.layers}


def carried(moment: Tensor, old: Tensor, new: Tensor, rule: str, second: bool) -> Tensor:
    """A moment in new coordinates, by way of the dense matrix that it stands for, or entry by entry."""
    if rule == "keep":
        return moment
    if rule == "squared" and second:
        T = old @ new.T
        rows = [[sum(float(T[k, j] ** 2 * row[k]) for k in range(len(row))) for j in range(len(new))] for row in moment]
        return torch.tensor(rows, dtype=torch.float64)
    moved = (moment @ old) @ new.T
    return moved.clamp_min(0.0) if second else moved


class DenseGaLore:
    """GaLore-AdamW of one client on dense weights (appendix A.1), in the tall orientation.

    ``begin`` is what the client is sent: (vbar, its basis) by layer, and the steps that vbar has seen.
    """

    def __init__(self, problem: Problem, client: str, W: dict, head: dict, begin: dict, seen: int, **how: Any) -> None:
        self.problem, self.client, self.how = problem, client, how
        self.W, self.head = dict(W), dict(head)
        self.m = {layer: torch.zeros_like(begin[layer][0]) for layer in LAYERS}
        self.v = {layer: begin[layer][0] for layer in LAYERS}
        self.P = {layer: begin[layer][1] for layer in LAYERS}
        correct = how.get("correct", False)
        self.heads = {name: Adam(LR, correct=(correct, correct)) for name in HEAD}
        self.seen, self.t = seen, 0

    def gradients(self) -> dict[str, Tensor]:
        return self.problem.gradients(self.client, {**self.W, **self.head})

    def step(self, renewed: dict[str, Tensor] | None) -> None:
        if renewed is not None:
            for layer in LAYERS:
                old, new, rule = self.P[layer], renewed[layer], self.how["moments"]
                self.m[layer] = carried(self.m[layer], old, new, rule, second=False)
                self.v[layer] = carried(self.v[layer], old, new, rule, second=True)
            self.P = dict(renewed)
        dense, decay, self.t = self.gradients(), LR * self.how.get("decay", 0.0), self.t + 1
        for layer in LAYERS:
            g = tall(layer, dense[layer]) @ self.P[layer].T
            self.m[layer] = 0.9 * self.m[layer] + 0.1 * g
            self.v[layer] = 0.999 * self.v[layer] + 0.001 * g**2
            m, v = self.m[layer], self.v[layer]
            if self.how.get("correct"):
                m, v = m / (1 - 0.9**self.t), v / (1 - 0.999 ** (self.t + self.seen))
            u = m / (v.sqrt() + 1e-8)
            change = tall(layer, self.how.get("scale", 1.0) * u @ self.P[layer])
            self.W[layer] = (1 - decay) * self.W[layer] - LR * change
        for name in HEAD:
            self.head[name] = (1 - decay) * self.head[name] - self.heads[name].direction(dense[name])


def joint_parts(views: Sequence[Tensor], view_rank: int, joint_rank: int) -> list[Tensor]:
    """AJIVE with given ranks on dense views: J_i + column means."""
    bases = [torch.linalg.svd(view - view.mean(0))[0][:, :view_rank] for view in views]
    U = torch.linalg.svd(torch.cat(bases, 1))[0][:, :joint_rank]
    return [U @ U.T @ (view - view.mean(0)) + view.mean(0) for view in views]


def joined(
    clients: Sequence[DenseGaLore], shares: Sequence[float], layer: str, method: FedGaLore, shared: bool
) -> tuple[Tensor, Tensor]:
    """vbar and its basis, from dense m x n views."""
    joint, sync = method.joint_rank or RANK, method.synchronization
    vs, Ps = [one.v[layer] for one in clients], [one.P[layer] for one in clients]
    basis = torch.linalg.qr(Ps[0].T)[0].T  # orthonormal in float64, for any view that has one basis for all
    views = [v @ (basis if shared else P) for v, P in zip(vs, Ps, strict=True)]
    parts = joint_parts(views, RANK, joint) if sync == "ajive" else views

    def total(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)

    def cut(matrix: Tensor, rank: int) -> Tensor:
        U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
        return (U[:, :rank] * S[:rank]) @ Vt[:rank]

    rank = joint if sync == "average-svd" else RANK
    if shared:
        return (cut(total(parts), rank) @ basis.T).clamp_min(0.0), Ps[0]
    if method.moments == "linear":
        whole = cut(total(parts), rank)
        right = torch.linalg.svd(total(parts))[2][:RANK]
        return whole @ right.T, right
    cover = torch.linalg.eigh(total([P.T @ P for P in Ps]))[1][:, -RANK:].flip(1).T
    own = [(part @ P.T).clamp_min(0.0) for part, P in zip(parts, Ps, strict=True)]
    mapped = [carried(v, P, cover, "squared", second=True) for v, P in zip(own, Ps, strict=True)]
    return cut(total(mapped), rank).clamp_min(0.0), cover


CASES: dict[str, dict[str, Any]] = {
    "seeded, one projector": {"adaptive_refreshes": 0, "steps": 4},
    "seeded, renewed": {"adaptive_refreshes": 0, "steps": 5, "period": 2},
    "seeded, renewed, linear": {"adaptive_refreshes": 0, "steps": 5, "period": 2, "moments": "linear"},
    "seeded, renewed, keep": {"adaptive_refreshes": 0, "steps": 5, "period": 2, "moments": "keep"},
    "one seed for two rounds": {"adaptive_refreshes": 0, "steps": 2, "rounds_per_seed": 2},
    "gradients, then seeds": {"adaptive_refreshes": 3, "steps": 4, "period": 2},
    "gradients, then seeds, linear": {"adaptive_refreshes": 4, "steps": 3, "period": 2, "moments": "linear"},
    "gradients throughout, keep": {"adaptive_refreshes": 99, "steps": 3, "period": 2, "moments": "keep"},
    "gradients in every round": {"adaptive_refreshes": 1, "adaptive_in": "round", "steps": 4, "period": 2},
    "gradients, exact svd": {"adaptive_refreshes": 99, "steps": 2, "projectors": "svd"},
    "gradients, one joint direction": {"adaptive_refreshes": 99, "steps": 2, "joint_rank": 1, "moments": "linear"},
    "one joint direction": {"adaptive_refreshes": 0, "steps": 3, "joint_rank": 1},
    "average": {"adaptive_refreshes": 1, "steps": 3, "synchronization": "average"},
    "average and svd": {"adaptive_refreshes": 0, "steps": 3, "synchronization": "average-svd", "joint_rank": 1},
    "gradients, average and svd": {
        "adaptive_refreshes": 9,
        "steps": 3,
        "synchronization": "average-svd",
        "joint_rank": 1,
    },
    "no synchronization": {"adaptive_refreshes": 1, "steps": 3, "synchronization": "none"},
    "bias correction": {"adaptive_refreshes": 0, "steps": 3, "bias_correction": True, "rounds_per_seed": 9},
    "scale": {"adaptive_refreshes": 1, "steps": 3, "scale": 0.25},
}
QUICK = (
    "seeded, renewed",
    "gradients, then seeds",
    "gradients throughout, keep",
    "one joint direction",
    "average and svd",
)
DECAYING = ("average", "no synchronization", "bias correction", "scale")
"""Cases that are run without and with weight decay; the others are slow."""


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        pytest.param(options, decay, id=f"{name}{end}", marks=() if name in quick else pytest.mark.slow)
        for decay, end, quick in ((0.0, "", QUICK), (0.1, "-decay", DECAYING))
        for name, options in CASES.items()
    ],
)
def test_rounds_match_dense_galore_and_dense_ajive(options: dict[str, Any], decay: float) -> None:
    problem = Problem(clients=3)
    method = made(problem, **options)
    training = adamw(LR)
    training = training.model_copy(update={"weight_decay": decay})
    federation = Federation(with_extras(method), problem, training)
    W, head, seen = problem.to_dense(*LAYERS), problem.to_dense(*HEAD), 0
    how = {"moments": method.moments, "scale": method.scale, "correct": method.bias_correction, "decay": decay}
    nothing = {layer: (torch.zeros(8, RANK, dtype=torch.float64), P) for layer, P in seeded(method, 0, 0).items()}
    begin = nothing
    period, T = options.get("period", options["steps"]), options["steps"]

    # Steps of clamped moments are so large (see below) that rounding errors do not stay small for more rounds.
    for number in range(2 if method.moments == "linear" and period < T else 4):
        cohort = problem.client_ids if number != 1 else problem.client_ids[1:]
        federation.round(cohort)
        shares, own = problem.shares(cohort), method.count_adaptive(number)
        clients: dict[str, DenseGaLore] = {}
        for id in cohort:
            client = DenseGaLore(problem, id, W, head, begin, seen, **how)
            for step in range(T):
                segment, renewed = step // period, None
                if step % period == 0 and segment >= own:
                    renewed = seeded(method, number, segment)
                elif step % period == 0:
                    rows = slice(RANK * segment, RANK * (segment + 1))
                    renewed = {layer: federation.replies[id].tensors[f"{layer}/P"][rows] for layer in LAYERS}
                    for layer, gradient in client.gradients().items():
                        if layer in LAYERS:  # what the client used spans the gradient's top directions
                            top = torch.linalg.svd(tall(layer, gradient))[2][:RANK]
                            assert close(renewed[layer].T @ renewed[layer], top.T @ top, 1e-3)
                client.step(renewed)
            clients[id] = client
        W = average((shares[id], one.W) for id, one in clients.items())
        head = average((shares[id], one.head) for id, one in clients.items())
        for layer in LAYERS:
            assert close(federation.get_weight(layer), W[layer])
        require_state(federation, head)
        if method.synchronization == "none":
            assert not federation.state.memory
            continue
        seen, begin = seen + T, {}
        shared = own < method.segments or method.moments == "keep"
        for layer in LAYERS:
            ordered = list(clients.values())
            begin[layer] = joined(ordered, [shares[id] for id in clients], layer, method, shared)
            v, P = begin[layer]
            found = federation.state.memory[join_tensor_name(layer, "v")]
            assert (join_tensor_name(layer, "P") in federation.state.memory) == (not shared)
            if shared:
                assert close(found, v, 1e-6)  # seeded projectors are orthonormal to float32
            elif method.moments == "linear":
                assert close(found @ federation.state.memory[join_tensor_name(layer, "P")], v @ P, 1e-6)
            else:
                assert close(found, v, 1e-6)
            if shared or method.moments == "squared":
                assert (found >= 0).all()


def train(federation: Federation, job: Job, client: str) -> Trained:
    indices = federation.problem.indices[client]
    return federation.engine.train(Assignment(client, 0, job, indices, LR), federation.problem.examples)


def test_clients_of_different_numbers_of_steps_decay_the_base_by_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is 2 to 3 steps: W <- sum_i p_i W_i all the same, and rho <- rho sum_i p_i rho_i."""
    problem = Problem()
    method = made(problem)
    training = adamw(LR, batch_size=4)
    federation = Federation(with_extras(method), problem, training.model_copy(update={"weight_decay": 0.5}))
    W, rho, trained = problem.to_dense(*LAYERS), 1.0, dict[str, Trained]()
    original = federation.engine.train

    def watched(work: Assignment, examples: Any) -> Trained:
        trained[work.client] = original(work, examples)
        return trained[work.client]

    monkeypatch.setattr(federation.engine, "train", watched)
    for _ in range(2):
        federation.round()
        shares = problem.shares(problem.client_ids)
        assert len({one.steps for one in trained.values()}) > 1
        rho *= sum(shares[id] * one.decay for id, one in trained.items())
        assert federation.state.base.rho == pytest.approx(rho)
        for layer in LAYERS:
            mean = torch.zeros_like(W[layer])
            for id, one in trained.items():
                slots = {slot: value.double() for slot, value in select_slots(one.tensors, layer).items()}
                pair = federation.job().parametrization[layer].compute_effective(slots).pair
                mean += shares[id] * (one.decay * W[layer] + pair.to_dense())
            W[layer] = mean
            assert close(federation.get_weight(layer), mean)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_client_that_claims_to_have_decayed_the_whole_base_shrinks_it_little(
    weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit on norms sees this number, with which one client of n takes an n-th of the base a round."""
    problem = Problem(clients=4)
    training = adamw(LR, batch_size=4)
    training = training.model_copy(update={"weight_decay": weight_decay})
    finish, honest, attacker = FedGaLore.finish, dict[str, float](), problem.client_ids[0]

    def lying(self: FedGaLore, job: Job, trained: Trained, client: Client, *rest: Any) -> tuple[Message, Memory]:
        message, memory = finish(self, job, trained, client, *rest)
        honest[client.id] = trained.decay
        if client.id == attacker:
            message = replace(message, scalars={**message.scalars, "decay": 0.0})
        return message, memory

    monkeypatch.setattr(FedGaLore, "finish", lying)
    federation = Federation(with_extras(made(problem)), problem, training)
    federation.round()
    assert federation.state.base.rho >= min(honest.values()) ** 4
    assert federation.state.base.rho <= max(honest.values())


def test_a_projector_that_lengthens_a_change_is_refused() -> None:
    """Equal rows of norm 1 make acc P as long as r^0.5 times acc, which is all that a limit on norms sees."""
    problem = Problem(clients=2)
    method, client = made(problem, steps=4, period=2), Client("a", RANK, 1.0, 9, 1.0)
    start = method.sync(method.init(problem.adapted()), client)
    reply = build_untrained_reply(method, start, client, 0)
    method.contribute(reply, client)
    name = "fc1/P"
    rows, columns = reply.tensors[name].shape
    assert rows == 2 * RANK  # of two segments, whose projectors may be equal
    orthonormal = torch.eye(RANK, columns).repeat(2, 1)
    equal_rows = torch.eye(1, columns).repeat(rows, 1)
    for projector, is_honest in ((orthonormal, True), (equal_rows, False), (1.1 * orthonormal, False)):
        message = replace(reply, tensors={**reply.tensors, name: projector.to(reply.tensors[name])})
        if is_honest:
            method.contribute(message, client)
        else:
            with pytest.raises(ValueError, match="longer than 1 or not orthogonal"):
                method.contribute(message, client)


HONEST = {"decay": 0.5, "steps": 2}


def reply_with(method: FedGaLore, problem: Problem, client: Client, **scalars: float) -> Message:
    start = method.sync(method.init(problem.adapted()), client)
    return replace(build_untrained_reply(method, start, client, 0), scalars={**HONEST, **scalars})


@pytest.mark.parametrize(
    "scalars", [{"decay": -0.01}, {"decay": 1.01}, {"decay": float("nan")}, {"steps": -1}, {"steps": 5}]
)
def test_a_decay_or_number_of_steps_that_no_training_has_is_refused(scalars: dict[str, float]) -> None:
    problem, client = Problem(clients=2), Client("a", RANK, 1.0, 9, 1.0)
    method = made(problem, steps=4, period=2)
    for honest in ({}, {"decay": 0.0}, {"decay": 1.0}, {"steps": 0}, {"steps": 4}):
        method.contribute(reply_with(method, problem, client, **honest), client)
    with pytest.raises(ValueError, match=r"a decay of .* after .* steps"):
        method.contribute(reply_with(method, problem, client, **scalars), client)


def test_without_any_step_no_claimed_decay_changes_the_base() -> None:
    problem, client = Problem(clients=2), Client("a", RANK, 1.0, 9, 1.0)
    method = made(problem, steps=4, period=2)
    for steps, rho in ((2, 0.5), (0, 1.0)):
        stack = method.contribute(reply_with(method, problem, client, steps=steps), client).stack
        reduced = Reduced(stack=(StackItem(client, 1.0, stack),))
        assert method.update(method.init(problem.adapted()), reduced).base.rho == rho


def test_what_does_not_decay_keeps_the_base() -> None:
    problem = Problem(clients=2)
    training = adamw(LR, steps=2)
    training = training.model_copy(update={"weight_decay": 0.5})
    weights: list[Tensor] = []
    for decay in (0.0, 0.5):
        settings = training.model_copy(update={"weight_decay": decay})
        federation = Federation(with_extras(made(problem, decay_base=False), "frozen"), problem, settings)
        federation.round()
        assert federation.state.base.rho == 1.0
        weights.append(federation.get_weight("fc1"))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "options",
    [
        {"adaptive_refreshes": 0},
        pytest.param({"adaptive_refreshes": 2}, marks=pytest.mark.slow),
        pytest.param({"adaptive_refreshes": 9, "moments": "keep"}, marks=pytest.mark.slow),
        pytest.param({"adaptive_refreshes": 3, "steps": 4, "period": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"adaptive_refreshes": 1, "adaptive_in": "round", "steps": 5, "period": 2}, marks=pytest.mark.slow
        ),
        {"synchronization": "none"},
    ],
)
def test_traffic_is_what_is_transmitted(options: dict[str, Any]) -> None:
    problem = Problem()
    method = made(problem, **options)
    federation = Federation(with_extras(method), problem, adamw(LR))
    for number in range(4):
        federation.round()
        for id in problem.client_ids:
            assert federation.elements[id] == federation.declare_claims(id, number)
        synced = {name.partition("/")[2] for name in federation.state.memory}
        assert synced == (
            set() if method.synchronization == "none" else {"v", "P"} if method.is_basis_fitted(number) else {"v"}
        )


def test_under_seeded_projectors_the_uplink_is_an_accumulator_and_a_moment() -> None:
    """2 m r for either layer, whose longer side is 8; nothing at all goes down in the first round."""
    method = made(Problem(), adaptive_refreshes=0)
    for layer in method.spec.layers:
        rounds = count_traffic(replace(method, spec=Spec((layer,))), [RANK], [[RANK] * 4] * 4)
        assert rounds[3][RANK].up == 4 * 2 * 8 * RANK
        assert rounds[0][RANK].down == 0


def test_seeds_of_rounds_and_segments() -> None:
    problem = Problem()
    method = made(problem, rounds_per_seed=2, steps=4, period=2)
    layer = method.spec.layers[0]
    drawn = [[method.draw_seeded_projector(layer, round, segment) for segment in range(2)] for round in range(4)]
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[2][1], drawn[3][1])
    different = [
        drawn[0][0],
        drawn[0][1],
        drawn[2][0],
        drawn[2][1],
        replace(method, seed=6).draw_seeded_projector(layer, 0, 0),
    ]
    for number, one in enumerate(different):
        assert all(not torch.equal(one, other) for other in different[:number])
    seeds = sorted(method.draw_projector_seed(2 * number) for number in range(100))
    assert all(other - one > 10**6 for one, other in pairwise(seeds))  # no round has another's projectors


@pytest.mark.parametrize("moments", ["squared", "linear"])
def test_steps_stay_bounded_under_new_projectors_unless_moments_are_mapped_linearly(moments: str) -> None:
    """The paper's map makes second moments negative; clamped at 0 they let a step of 0.02 move weights by more than 1.

    Under squared entries the step grows by sqrt(r) at a refresh, from at most 1 / sqrt(0.001) (no bias correction).
    """
    problem = Problem(clients=3)
    method = made(problem, adaptive_refreshes=0, steps=6, period=1, moments=moments)
    federation = Federation(with_extras(method), problem, adamw(LR))
    largest = 0.0
    for _ in range(4):
        before = {layer: federation.get_weight(layer) for layer in LAYERS}
        federation.round()
        largest = max(largest, *(float((federation.get_weight(one) - before[one]).abs().max()) for one in LAYERS))
    assert (largest > 50 * LR) == (moments == "linear")


def test_estimated_joint_ranks_and_the_check_of_identifiability_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(clients=3)
    seen: list[tuple[object, ...]] = []
    original = alignment.compute_ajive

    def watched(views: Any, joint: int | None, view_rank: int, **options: Any) -> alignment.Ajive:
        seen.append((joint, view_rank, options["identifiable"]))
        return original(views, joint, view_rank, **options)

    monkeypatch.setattr("fedspan.core.second_moments.compute_ajive", watched)
    for options in ({}, {"estimate_joint_rank": True, "identifiable": True}, {"joint_rank": 1, "view_rank": 1}):
        federation = Federation(with_extras(made(problem, **options)), problem, adamw(LR))
        federation.round()
        assert all(value.isfinite().all() for value in federation.state.memory.values())
    assert seen == [(2, 2, False)] * 2 + [(None, 1, True)] * 2 + [(1, 1, False)] * 2


def test_ranks_beyond_a_layer_s_are_the_layer_s() -> None:
    problem = Problem(clients=2)
    method = replace(made(problem), r=7)  # fc1 has 5 columns, fc2 6 rows
    federation = Federation(with_extras(method), problem, adamw(LR), ranks=dict.fromkeys(problem.client_ids, 7))
    for number in range(2):
        federation.round()
        assert federation.elements["client-0"] == federation.declare_claims("client-0", number)
    assert federation.replies["client-0"].tensors["fc1/acc"].shape == (8, 5)
    assert federation.replies["client-0"].tensors["fc2/acc"].shape == (8, 6)


def test_a_period_needs_a_number_of_steps() -> None:
    with refused("method.period"):
        made(Problem(), period=2)


def test_nothing_of_the_base_or_the_moments_reaches_the_first_round(run_method: RunMethod) -> None:
    """On a real transformer: seeds make the first message empty, and v is sent once it is there."""
    run = run_method("fedgalore")
    down = [
        (number == 0, message)
        for number, round in enumerate(run.rounds)
        for message in round.messages()
        if "decay" not in message.scalars  # which replies have
    ]
    assert {first for first, _ in down} == {True, False}
    for first, message in down:
        assert first == (message.base is None) == (not any(name.endswith("/v") for name in message.tensors))


@pytest.mark.parametrize(("key", "acts"), [("fedgalore", False), ("fedit", True)])
def test_dropout_of_adapters_does_not_act_on_a_projected_change(key: str, acts: bool, run_method: RunMethod) -> None:
    """GaLore's step is by the gradient of the weight; with its input dropped beside the base's it would be another."""
    ends = [
        run_method(key, federation={"rounds": 2}, training={"lora_dropout": rate}).rounds[-1].after.state
        for rate in (0.0, 0.5)
    ]
    assert bool(differences(*ends)) == acts


def test_a_warm_second_moment_comes_with_its_steps() -> None:
    """v / (1 - beta2) at a counter restarted at 1 would be 1000 times too large, and the steps 30 times too small.

    Under bias correction a client's step of the third round is of the size of one of the first.
    """
    problem = Problem(clients=3)
    method = made(problem, adaptive_refreshes=0, steps=3, bias_correction=True, rounds_per_seed=9)
    federation, moved = Federation(with_extras(method), problem, adamw(LR)), list[float]()
    for number in range(3):
        state = federation.job("client-0").optimizer_state
        assert (state is None) == (number == 0)
        if state is not None:
            assert set(state.steps.values()) == {3 * number}
        before = federation.get_weight("fc1")
        federation.round()
        moved.append(float((federation.get_weight("fc1") - before).norm()))
    assert min(moved) > max(moved) / 5


def test_clipping_bounds_the_projected_gradient() -> None:
    """Its norm is the limit after one step; were the whole gradient clipped, the projection would be shorter."""
    problem, limit = Problem(clients=1), 1e-3
    settings = adamw(LR, steps=1, max_grad_norm=limit)
    federation = Federation(with_extras(made(problem, adaptive_refreshes=0), "frozen"), problem, settings)
    ends: list[Trained] = []
    train = federation.engine.train

    def watched(work: Assignment, examples: Examples) -> Trained:
        ends.append(train(work, examples))
        return ends[-1]

    federation.engine.train = watched
    federation.round()
    (end,) = ends
    squares = sum(float(value.sum()) for value in end.optimizer_state.moments["exp_avg_sq"].values())
    assert squares / (1 - settings.betas[1]) == pytest.approx(limit**2, rel=1e-5)
