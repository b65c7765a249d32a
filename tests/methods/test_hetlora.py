"""Clients of several ranks: HetLoRA against a loop with its penalty, FedHM against dense weights and convolutions."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.core.method import compute_scaling
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.penalties import SlotProduct
from fedspan.core.tensors import join_tensor_name, select_slots
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.methods.fedhm import FedHM
from fedspan.methods.hetlora import HetLoRA
from helpers import tiny
from helpers.dense_rounds import require_state
from helpers.round_settings import with_rules
from helpers.toys.oracle import Pairs, average, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, with_extras
from helpers.watched_rounds import method_config

LR, ALPHA, R, PENALTY, STEPS = 0.2, 4.0, 2, 0.3, 3
COHORTS = [None, ("client-0", "client-1"), None, ("client-1", "client-3"), None]


def _penalty_gradients(pair: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """d/dB of lambda ||B[:, g:]|| ||A[g:]|| is lambda ||A[g:]|| B[:, g:] / ||B[:, g:]||, and the like for A."""
    tail_B, tail_A = pair["B"][:, first:], pair["A"][first:]
    norm_B, norm_A = tail_B.square().sum().sqrt(), tail_A.square().sum().sqrt()
    gradients = {"B": torch.zeros_like(pair["B"]), "A": torch.zeros_like(pair["A"])}
    if norm_B > 0:  # else the subgradient 0
        gradients["B"][:, first:] = PENALTY * norm_A * tail_B / norm_B
        gradients["A"][first:] = PENALTY * norm_B * tail_A / norm_A
    return gradients


def _product(pairs: Pairs, first: int) -> float:
    return sum(float(pair["B"][:, first:].norm() * pair["A"][first:].norm()) for pair in pairs.values())


@pytest.mark.parametrize("weighting", ["norm", "examples"])
def test_pruning_padding_and_weights_match_the_oracle(weighting: str) -> None:
    """Ranks above and below ``r``, cohorts without the clients of highest rank, heads by examples."""
    problem = Problem()
    asked = {"client-0": 1, "client-1": 2, "client-2": 4, "client-3": 4}
    spec = problem.adapted().spec
    method = HetLoRA(spec=spec, seed=1, r=R, lora_alpha=ALPHA, penalty=PENALTY, gamma=0.5, weighting=weighting)
    federation = Federation(with_extras(method), problem, sgd(LR, steps=STEPS), ranks=asked, lora_alpha=ALPHA)
    W, head = problem.to_dense(*LAYERS), problem.to_dense(*HEAD)
    top = federation.job("client-3").tensors  # slots beyond r, as whoever has them draws them
    # The server's B carries the scaling: W + B A.
    server = {
        one: {"A": top[join_tensor_name(one, "A")].double(), "B": torch.zeros(spec.layers[k].out_features, 4).double()}
        for k, one in enumerate(LAYERS)
    }
    ranks, pruned = dict(asked), 0
    for cohort in COHORTS:
        federation.round(cohort)
        ids = cohort or problem.client_ids
        updates: dict[str, Pairs] = {}
        heads, sizes = {}, problem.shares(ids)
        for id in ids:
            rank, first, scaling = ranks[id], ranks[id] // 2, ALPHA / asked[id]
            mine = {one: {"A": server[one]["A"][:rank], "B": server[one]["B"][:, :rank] / scaling} for one in LAYERS}
            before, own_head = _product(mine, first), dict(head)
            for _ in range(STEPS):
                gradients, by_head = pair_gradients(problem, id, W, own_head, mine, scaling)
                for one in LAYERS:
                    extra = _penalty_gradients(mine[one], first) if first else {"A": 0.0, "B": 0.0}
                    mine[one] = {s: mine[one][s] - LR * (gradients[one][s] + extra[s]) for s in "AB"}
                own_head = {name: own_head[name] - LR * by_head[name] for name in HEAD}
            if first and _product(mine, first) < before:
                ranks[id], pruned = first, pruned + 1
                mine = {one: {"A": mine[one]["A"][:first], "B": mine[one]["B"][:, :first]} for one in LAYERS}
            updates[id] = {one: {"A": mine[one]["A"], "B": scaling * mine[one]["B"]} for one in LAYERS}
            heads[id] = own_head
        shares = dict(sizes)
        if weighting == "norm":
            sizes = {
                id: math.sqrt(sum(float((pair["B"] @ pair["A"]).square().sum()) for pair in update.values()))
                for id, update in updates.items()
            }
        for one in LAYERS:
            highest = max(ranks[id] for id in ids)
            A, B = server[one]["A"].clone(), server[one]["B"].clone()
            A[:highest], B[:, :highest] = 0.0, 0.0
            for id in ids:
                A[: ranks[id]] += sizes[id] / sum(sizes.values()) * updates[id][one]["A"]
                B[:, : ranks[id]] += sizes[id] / sum(sizes.values()) * updates[id][one]["B"]
            server[one] = {"A": A, "B": B}
        head = {name: sum(shares[id] * heads[id][name] for id in ids) for name in HEAD}
        for id, rank in ranks.items():
            assert federation.job(id).tensors[join_tensor_name("fc1", "A")].shape == (rank, 5)
            cut = server["fc1"]["B"][:, :rank] @ server["fc1"]["A"][:rank]
            assert close(federation.get_weight("fc1", id), W["fc1"] + cut)
        assert close(federation.get_weight("fc2"), W["fc2"] + server["fc2"]["B"][:, :R] @ server["fc2"]["A"][:R])
    assert pruned >= 2


def test_a_lost_reply_prunes_nobody() -> None:
    problem = Problem()
    method = HetLoRA(spec=problem.adapted().spec, r=4, lora_alpha=ALPHA, penalty=3.0, gamma=0.5)
    ranks = dict.fromkeys(problem.client_ids, 4)
    federation = Federation(with_extras(method), problem, sgd(0.3, steps=STEPS), ranks=ranks, lora_alpha=ALPHA)
    name = join_tensor_name("fc1", "A")
    federation.round()
    federation.round(lost={"client-1"})
    found = {id: len(federation.job(id).tensors[name]) for id in problem.client_ids}
    assert found == {"client-0": 2, "client-1": 4, "client-2": 2, "client-3": 2}


@pytest.mark.parametrize(("gamma", "rank", "first"), [(1.0, 4, None), (0.99, 4, 3), (0.5, 3, 1), (0.5, 1, None)])
def test_which_slots_may_go(gamma: float, rank: int, first: int | None) -> None:
    """floor(gamma r) stay; none go where that is all of them, or nothing."""
    problem = Problem()
    method = HetLoRA(spec=problem.adapted().spec, r=rank, gamma=gamma)
    penalties = method.start(method.sync(method.init(problem.adapted()), None), None, {}, 0).penalties
    assert penalties == (() if first is None else (SlotProduct(1e-3, first, LAYERS),))


def _reply(rng: torch.Generator, rank: int, zero: bool = False) -> dict[str, Tensor]:
    B = torch.randn((6, rank), generator=rng)
    return {"layer/A": torch.randn((rank, 4), generator=rng), "layer/B": B * 0 if zero else B}


def _reduced(method: HetLoRA, replies: list[tuple[Client, dict[str, Tensor]]]) -> Reduced:
    total = sum(client.weight for client, _ in replies)
    return Reduced(stack=tuple(StackItem(client, client.weight / total, tensors) for client, tensors in replies))


def _method(**options: object) -> tuple[HetLoRA, ServerState]:
    method = HetLoRA(spec=Spec((LayerSpec("layer", 6, 4),)), r=3, lora_alpha=6.0, **options)
    rng = torch.Generator().manual_seed(5)
    return method, ServerState(round=1, tensors=_reply(rng, 3))


def _client(id: int, rank: int, weight: float) -> Client:
    return Client(str(id), rank, compute_scaling(6.0, rank), 1, weight)


cohorts = st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 9.0), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(cohorts)
def test_any_cohort_gives_the_dense_weights_average_slot_by_slot(cohort: list[tuple[int, float, bool]]) -> None:
    """Any ranks and weights, replies that are 0 among them: norms of dense products, outer products by slot."""
    method, state = _method()
    rng = torch.Generator().manual_seed(len(cohort))
    replies = [(_client(k, rank, weight), _reply(rng, rank, zero)) for k, (rank, weight, zero) in enumerate(cohort)]
    after = method.update(state, _reduced(method, replies)).tensors
    scaled = [(client.scaling * one["layer/B"].double(), one["layer/A"].double()) for client, one in replies]
    sizes = [float((B @ A).norm()) for B, A in scaled]
    if sum(sizes) == 0:
        sizes = [client.weight for client, _ in replies]
    highest = max(client.rank for client, _ in replies)
    assert len(after["layer/A"]) == after["layer/B"].shape[1] == max(3, highest)
    for slot in range(highest):
        have = [k for k, (client, _) in enumerate(replies) if client.rank > slot]
        A = sum((sizes[k] * scaled[k][1][slot] for k in have), torch.zeros(4).double()) / sum(sizes)
        B = sum((sizes[k] * scaled[k][0][:, slot] for k in have), torch.zeros(6).double()) / sum(sizes)
        assert torch.allclose(after["layer/A"][slot].double(), A, rtol=1e-6, atol=1e-6)
        assert torch.allclose(2.0 * after["layer/B"][:, slot].double(), B, rtol=1e-6, atol=1e-6)
    for slot in range(highest, 3):  # nobody had these
        assert torch.equal(after["layer/A"][slot], state.tensors["layer/A"][slot])
        assert torch.equal(after["layer/B"][:, slot], state.tensors["layer/B"][:, slot])


def test_honest_replies_of_pruned_clients_are_accepted(tiny_folder: Path, prepared: Prepared) -> None:
    """Validation compares with what the client itself was sent, and takes one that prunes once more."""
    method = {"gamma": 0.5, "penalty": 100.0, "r": 8}
    federation = tiny.variant(prepared, method_config(tiny_folder, "hetlora", method=method)).federation
    federation.settings = with_rules(federation.settings, retries=0)
    progress = federation.begin()
    for _ in range(4):
        result = federation.run_round(progress)
        assert result.failures == ()
        progress = result.progress
    assert min(int(value) for name, value in progress.state.scalars.items() if name.startswith("rank/")) < 4


@pytest.mark.parametrize("size", [0.1, 0.5])
def test_a_norm_of_one_layer_gives_a_client_little_weight(size: float) -> None:
    """Norms are of products, which an update in one layer and one direction makes far larger than one of equal length
    that is spread, as honest ones are. A limit on the update's norm does not see it."""
    layers, width, rank = 16, 48, 4
    method = HetLoRA(spec=Spec(tuple(LayerSpec(f"l{k}", width, width) for k in range(layers))), r=rank)
    state, rng = method.init(Problem().adapted()), torch.Generator().manual_seed(1)
    replies: list[tuple[Client, dict[str, Tensor]]] = []
    for k in range(9):
        changes = {name: torch.randn(value.shape, generator=rng) for name, value in state.tensors.items()}
        tensors = {name: value + size * changes[name] / changes[name].norm() for name, value in state.tensors.items()}
        replies.append((Client(f"c{k}", rank, method.get_scaling(None), 9, 9.0), tensors))
    left, right = torch.linalg.svd(state.tensors["l0/A"])[0][:, :1], torch.linalg.svd(state.tensors["l0/A"])[2][:1]
    half = 1.5 * size * math.sqrt(2 * layers) / math.sqrt(2)
    hostile = dict(state.tensors)
    hostile["l0/A"] = hostile["l0/A"] + half * left @ right
    hostile["l0/B"] = hostile["l0/B"] + half * torch.ones(width, 1) / math.sqrt(width) @ left.T
    replies.append((Client("c9", rank, method.get_scaling(None), 9, 9.0), hostile))
    reduced = _reduced(method, replies)
    limited, unlimited = (method._compute_norms(replace(reduced, max_weight_ratio=ratio)) for ratio in (4.0, None))
    assert limited[:9] == unlimited[:9]
    assert unlimited[9] > 3 * max(unlimited[:9])
    assert limited[9] <= 1.1 * max(limited[:9])  # four times one layer's share of sixteen


@pytest.mark.parametrize("ratio", [4.0, None])
def test_the_limit_on_weights_reaches_the_norms(
    ratio: float | None, tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, ratios = HetLoRA.update, list[float | None]()

    def noted(self: HetLoRA, state: ServerState, reduced: Reduced) -> ServerState:
        ratios.append(reduced.max_weight_ratio)
        return update(self, state, reduced)

    monkeypatch.setattr(HetLoRA, "update", noted)
    config = method_config(tiny_folder, "hetlora", federation={"max_weight_ratio": ratio})
    federation = tiny.variant(prepared, config).federation
    federation.run_round(federation.begin())
    assert ratios == [ratio]


RANKS = {"client-0": 1, "client-1": 2, "client-2": 4, "client-3": 6}  # more than fc1's 5 singular values


def _split(W: Tensor) -> tuple[Tensor, Tensor]:
    U, S, Vt = torch.linalg.svd(W.double(), full_matrices=False)
    return U * S.sqrt(), S.sqrt()[:, None] * Vt


@pytest.mark.parametrize("keep_global", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matches_a_dense_oracle(decay: float, keep_global: bool) -> None:
    """Four rounds of gradient descent on the factors; the old weight joins where asked and nobody is of full rank."""
    problem = Problem()
    method = FedHM(spec=problem.adapted().spec, frobenius_decay=decay, keep_global=keep_global)
    training = sgd(LR, steps=STEPS)
    training = training.model_copy(update={"weight_decay": 0.3 if decay else 0.0})
    federation = Federation(with_extras(method), problem, training, ranks=RANKS)
    W, head = {one: federation.get_weight(one) for one in LAYERS}, problem.to_dense(*HEAD)
    factors = {one: tuple(federation.state.tensors[f"{one}/{slot}"].double() for slot in "UV") for one in LAYERS}
    for one in LAYERS:
        for ours, theirs in zip(factors[one], _split(problem.to_dense(one)[one]), strict=True):
            assert close(ours.abs(), theirs.abs(), 1e-5)  # the server begins in float32; signs are free
    for number, positions in enumerate([(0, 1, 2, 3), (0, 2), (0, 1), (0, 1)]):
        cohort = [problem.client_ids[position] for position in positions]
        federation.round(cohort)
        shares, products, heads = problem.shares(cohort), {}, {}
        for id in cohort:
            rank = RANKS[id]
            U = {one: factors[one][0][:, :rank] for one in LAYERS}
            V = {one: factors[one][1][:rank] for one in LAYERS}
            own_head = dict(head)
            for _ in range(STEPS):
                dense = problem.gradients(id, {**{one: U[one] @ V[one] for one in LAYERS}, **own_head})
                for one in LAYERS:
                    G = dense[one] + decay * U[one] @ V[one]  # of decay / 2 ||U V||^2
                    U[one], V[one] = U[one] - LR * G @ V[one].T, V[one] - LR * U[one].T @ G
                for name in HEAD:
                    own_head[name] = own_head[name] - LR * (dense[name] + (0.3 if decay else 0.0) * own_head[name])
            products[id], heads[id] = {one: U[one] @ V[one] for one in LAYERS}, own_head
            assert federation.elements[id] == federation.declare_claims(id, number)
        mean = average((shares[id], own) for id, own in products.items())
        for one, side in (("fc1", 5), ("fc2", 6)):
            if keep_global and max(RANKS[id] for id in cohort) < side:
                mean[one] = (len(cohort) * mean[one] + W[one]) / (len(cohort) + 1)
        W, head = mean, average((shares[id], own) for id, own in heads.items())
        factors = {one: _split(W[one]) for one in LAYERS}
        for one in LAYERS:
            assert close(federation.get_weight(one), W[one])  # the global model is the whole mean
            U, S, Vt = torch.linalg.svd(W[one], full_matrices=False)
            for id, rank in RANKS.items():
                kept = U[:, :rank] * S[:rank] @ Vt[:rank]  # Eckart-Young: the best of that rank
                assert close(federation.get_weight(one, id), kept)
        require_state(federation, head)


def test_the_pretrained_weight_takes_no_part() -> None:
    """No frozen base: whatever the module's weight holds, only the factors count."""
    problem = Problem()
    federation = Federation(with_extras(FedHM(spec=problem.adapted().spec)), problem, sgd(LR), ranks=RANKS)
    before = federation.loss("client-1")
    with torch.no_grad():
        for layer in federation.adapted.layers.values():
            layer.stored_weight.fill_(1e6)
    assert federation.loss("client-1") == before


def test_a_rank_that_the_weight_has_lost_can_be_trained_again() -> None:
    """After a round of rank 1 alone W has rank 1; two zero factors would keep a client of rank 4 there for ever."""
    problem = Problem()
    federation = Federation(with_extras(FedHM(spec=problem.adapted().spec)), problem, sgd(LR, steps=2), ranks=RANKS)
    federation.round(["client-0"])
    for one in LAYERS:
        assert torch.linalg.matrix_rank(federation.get_weight(one)) == 1
        assert close(federation.get_weight(one, "client-2"), federation.get_weight(one))
    federation.round(["client-2"])
    assert federation.elements["client-2"] == federation.declare_claims("client-2", 1)
    for one in LAYERS:
        assert torch.linalg.matrix_rank(federation.get_weight(one)) > 1


def test_all_zeros_are_no_dead_end() -> None:
    layer = LayerSpec("one", 6, 4)
    method = FedHM(spec=Spec((layer,)))
    state = method.init(_Random((layer,), 0))
    client = Client("c", 2, 1.0, 1, 1.0)
    zeros = {"one/U": torch.zeros(6, 2), "one/V": torch.zeros(2, 4)}
    after = method.update(state, Reduced(stack=(StackItem(client, 1.0, zeros),), count=1))
    job = method.start(method.sync(after, client), client, {}, after.round)
    assert not job.tensors["one/U"].any()
    assert all(row.norm() > 0.5 for row in job.tensors["one/V"])


class _Random:
    """Pretrained weights of any layers."""

    def __init__(self, layers: tuple[LayerSpec, ...], seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.weights = {layer.name: torch.randn(layer.shape, generator=rng) for layer in layers}

    def get_weight(self, layer: str) -> Tensor:
        return self.weights[layer].clone()

    def get_extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)


CONVOLUTIONS = (
    LayerSpec("linear", 7, 5),
    LayerSpec("square", 4, 3 * 9, (3, 3)),
    LayerSpec("tall", 6, 2 * 3, (3, 1)),
    LayerSpec("wide", 3, 5 * 2, (1, 2)),
)


def _rectangle(weight: Tensor, layer: LayerSpec) -> Tensor:
    """Entry by entry: (o k1 + a, c k2 + b) of the matrix is (o, c, a, b) of the convolution."""
    k1, k2 = layer.kernel
    channels = layer.in_features // (k1 * k2)
    matrix = torch.zeros(layer.out_features * k1, channels * k2, dtype=torch.float64)
    four = weight.double().view(layer.out_features, channels, k1, k2)
    for o in range(layer.out_features):
        for c in range(channels):
            for a in range(k1):
                for b in range(k2):
                    matrix[o * k1 + a, c * k2 + b] = four[o, c, a, b]
    return matrix


def _weight(method: FedHM, state: ServerState, layer: LayerSpec, client: Client | None) -> Tensor:
    """What a layer computes with: (O, channels * k1 * k2)."""
    job = method.start(method.sync(state, client), client, {}, state.round)
    slots = {slot: value.double() for slot, value in select_slots(job.tensors, layer.name).items()}
    return compute_dense_change(
        job.parametrization[layer.name].compute_effective(slots), torch.zeros(layer.shape).double()
    )


@given(
    rounds=st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=3), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_convolutions_of_any_ranks(rounds: list[list[int]], weights: list[float], seed: int) -> None:
    """Random replies: the mean is that of the clients' weights, and each is sent the best of its rank, k1 and k2 apart.

    Of a single client of rank 1 to one of rank 14, which is more than any layer here has.
    """
    method = FedHM(spec=Spec(CONVOLUTIONS), seed=seed)
    start = _Random(CONVOLUTIONS, seed)
    state, rng = method.init(start), torch.Generator().manual_seed(seed + 1)
    for layer in CONVOLUTIONS:
        assert close(_weight(method, state, layer, None), start.get_weight(layer.name), 1e-6)
    for ranks in rounds:
        total, items = sum(weights[: len(ranks)]), list[StackItem]()
        expected = {layer.name: torch.zeros(layer.shape, dtype=torch.float64) for layer in CONVOLUTIONS}
        for index, rank in enumerate(ranks):
            client, share = Client(f"c{index}", rank, 1.0, 1, weights[index]), weights[index] / total
            job = method.start(method.sync(state, client), client, {}, state.round)
            trained = {n: v + 0.3 * torch.randn(v.shape, generator=rng) for n, v in job.tensors.items()}
            items.append(StackItem(client, share, trained))
            for layer in CONVOLUTIONS:
                slots = {slot: value.double() for slot, value in select_slots(trained, layer.name).items()}
                effective = job.parametrization[layer.name].compute_effective(slots)
                expected[layer.name] += share * compute_dense_change(effective, torch.zeros(layer.shape).double())
                sent = sum(trained[join_tensor_name(layer.name, slot)].numel() for slot in "UV")
                assert sent == min(rank, *layer.rectangle) * sum(layer.rectangle)
        state = method.update(state, Reduced(stack=tuple(items), count=len(items)))
        for layer in CONVOLUTIONS:
            assert close(_weight(method, state, layer, None), expected[layer.name], 1e-5)
            matrix = _rectangle(expected[layer.name], layer)
            S = torch.linalg.svdvals(matrix)
            for rank in (1, 2, 5, 14):
                cut = _rectangle(_weight(method, state, layer, Client("any", rank, 1.0, 1, 1.0)), layer)
                assert torch.linalg.matrix_rank(cut, rtol=1e-5) <= rank
                assert abs(float((cut - matrix).norm() - S[rank:].norm())) < 1e-5 * float(S.norm())
