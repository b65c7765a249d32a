"""HetLoRA against a hand-written loop with the penalty's gradient written out."""

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
from fedspan.core.penalties import SlotProduct
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Client, LayerSpec, Reduced, ServerState, Spec, StackItem
from fedspan.federation.validation import ReplyRules
from fedspan.methods.hetlora import HetLoRA
from helpers import tiny
from helpers.toys.oracle import Pairs, pair_gradients
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
    assert len(after["layer/A"]) == max(3, highest)
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
    federation.rules = ReplyRules(retries=0)
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
