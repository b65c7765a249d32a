"""The toys on the product's own rounds, in float32."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspan.core.method import Method
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import OptimizerState, Spec, Trained
from fedspan.federation import federation as product
from fedspan.federation.progress import ClientData
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.fedgalore import FedGaLore
from fedspan.methods.fedhm import FedHM
from fedspan.methods.fedit import FedIT
from fedspan.methods.fedloru import FedLoRU
from fedspan.methods.fedsa_lora import FedSALoRA
from fedspan.methods.flora import FLoRA
from fedspan.methods.florg import FLoRG
from fedspan.methods.hetlora import HetLoRA
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.methods.mfedloru import MFedLoRU
from fedspan.methods.pfedlora import PFedLoRA
from fedspan.methods.pfedloru import PFedLoRU
from fedspan.methods.rolora import RoLoRA
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.scaffold import Scaffold
from helpers.round_settings import make_settings
from helpers.toys.problem import LAYERS, Problem
from helpers.toys.rounds import Double, Federation, adamw, close, sgd, with_extras

IDS = ("client-0", "client-1", "client-2")
LR, ROUNDS = 0.1, 3

METHODS: dict[str, Callable[[Spec], Method]] = {
    "fedit": lambda spec: FedIT(spec=spec, r=2),
    "rolora": lambda spec: RoLoRA(spec=spec, r=2),
    "fedloru": lambda spec: FedLoRU(spec=spec, r=2, tau=2),
    "fedsa-lora": lambda spec: FedSALoRA(spec=spec, r=2),
    "flora": lambda spec: FLoRA(spec=spec, r=2),
    "fedloru from scratch": lambda spec: FedLoRU(spec=spec, r=2, tau=2, from_scratch=True),
    "mfedloru": lambda spec: MFedLoRU(spec=spec, r=3, tau=2),
    "pfedloru": lambda spec: PFedLoRU(spec=spec, r=2, tau=2),
    "pfedlora": lambda spec: PFedLoRA(spec=spec),
    "fedgalore": lambda spec: FedGaLore(spec=spec, r=2),
    "florg": lambda spec: FLoRG(spec=spec, r=2),
    "fedhm": lambda spec: FedHM(spec=spec),
    "scaffold": lambda spec: Scaffold(inner=FedAvg(spec=replace(spec, clients=len(IDS)))),
    "lora-a2": lambda spec: LoRAA2(spec=spec, r=3),
    "hetlora": lambda spec: HetLoRA(spec=spec, r=2),
    "fedprox": lambda spec: FedProx(inner=FedIT(spec=spec, r=2)),
    "fedadam": lambda spec: FedAdam(inner=FedLoRU(spec=spec, r=2, tau=2)),
}
WRAPPED: dict[str, Callable[[Method], Method]] = {
    "compressed fedadam": lambda inner: FedPAQ(inner=FedAdam(inner=inner))
}


def _method(name: str, spec: Spec) -> Method:
    if name in WRAPPED:
        inner = WithExtras(inner=FedLoRU(spec=spec, r=2, tau=2), policy="average")
        return WRAPPED[name](inner)
    return WithExtras(inner=METHODS[name](spec), policy="average")


def _product(toy: Federation) -> product.Federation:
    """The same clients, model and engine under the product's rounds."""
    nothing = np.array([], dtype=np.int64)
    all_clients = [
        ClientData(replace(party.client, last_round=None), toy.problem.indices[id], nothing, nothing)
        for id, party in toy.parties.items()
    ]
    engine = LoopEngine(toy.problem.adapted(), toy.problem.task, toy.training, seed=7)
    return simulate(toy.method, engine, all_clients, toy.problem.examples, make_settings(ROUNDS))


@pytest.mark.parametrize("name", [*METHODS, *WRAPPED])
def test_the_products_rounds_give_the_toys_bits(name: str) -> None:
    """Also the proof that patches do: toy clients hold a base of their own, the product's engine has the server's."""
    problem = Problem(clients=3, dtype=torch.float32)
    toy = Federation(_method(name, problem.adapted().spec), problem, sgd(LR, steps=2))
    rounds = _product(toy)
    progress = rounds.begin()
    for _ in range(ROUNDS):
        toy.round()
        progress = rounds.run_round(progress).progress
    state = progress.state
    assert state.round == toy.state.round == ROUNDS
    for ours, theirs in ((state.tensors, toy.state.tensors), (state.memory, toy.state.memory)):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key
            assert value.isfinite().all()
    for id, party in toy.parties.items():
        assert set(progress.states[id].memory) == set(party.memory)
        for key, value in party.memory.items():
            assert torch.equal(progress.states[id].memory[key], value)
    assert state.base.round == toy.state.base.round


@pytest.mark.parametrize(
    "name",
    ["fedit", "fedloru", "fedloru from scratch", "mfedloru", "pfedloru", "florg", "fedhm", "scaffold", "hetlora"],
)
def test_float32_follows_float64(name: str) -> None:
    weights = {}
    for dtype in (torch.float32, torch.float64):
        problem = Problem(clients=3, dtype=dtype)
        inner = METHODS[name](problem.adapted().spec)
        method = with_extras(inner) if dtype == torch.float64 else WithExtras(inner=inner, policy="average")
        federation = Federation(method, problem, sgd(LR, steps=2))
        for _ in range(ROUNDS):
            federation.round()
        weights[dtype] = {layer: federation.get_weight(layer, "client-1") for layer in LAYERS}
    for layer in LAYERS:
        assert close(weights[torch.float32][layer], weights[torch.float64][layer], 1e-5)


def test_a_probes_moments_do_not_leak_into_training(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(clients=1)
    method = with_extras(LoRAA2(spec=problem.adapted().spec, r=3), "frozen")
    rounds = _product(Federation(method, problem, adamw(LR, optimizer_state="keep", steps=2)))
    given: dict[tuple[int, str], OptimizerState | None] = {}
    train = rounds.engine.train

    def watched(work: Assignment, examples: Examples) -> Trained:
        given[work.round, work.job.phase] = work.moments
        return train(work, examples)

    monkeypatch.setattr(rounds.engine, "train", watched)
    progress = rounds.begin()
    for _ in range(3):
        progress = rounds.run_round(progress).progress
    assert given[0, "train"] is None  # nothing but the probe has trained
    later = given[2, "train"]
    assert later.steps[join_tensor_name("fc1", "B")] == 2


def test_double_is_only_a_conversion() -> None:
    problem = Problem(clients=1)
    inner = WithExtras(inner=FLoRA(spec=problem.adapted().spec, r=2), policy="average")
    single = inner.start(inner.sync(inner.init(problem.adapted()), None), None, {}, 0)
    double = Double(inner=inner).start(inner.sync(inner.init(problem.adapted()), None), None, {}, 0)
    assert {name: value.shape for name, value in single.tensors.items()} == {
        name: value.shape for name, value in double.tensors.items()
    }
    assert all(value.dtype == torch.float64 for value in double.tensors.values())
    assert Double(inner=inner).declare_claims() == inner.declare_claims()
