"""The toys on the product's own rounds, in float32, and what an engine does around a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.method import Method
from fedspan.core.tensors import join_tensor_name
from fedspan.core.values import Job, OptimizerState, Spec, Trained
from fedspan.federation import federation as product
from fedspan.federation.progress import ClientData
from fedspan.federation.settings import RoundSettings
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
from fedspan.training.jobs import Assignment, TrainingSettings
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.scaffold import Scaffold
from helpers.toys.oracle import pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Double, Federation, adamw, close, sgd, with_extras
from helpers.toys.secure_sum import SecureSum

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
    "compressed fedadam": lambda inner: FedPAQ(inner=FedAdam(inner=inner)),
    "secure fedprox": lambda inner: SecureSum(inner=FedProx(inner=inner), cohort=IDS),
}


def _method(name: str, spec: Spec) -> Method:
    if name in WRAPPED:
        inner = WithExtras(inner=FedLoRU(spec=spec, r=2, tau=2), policy="average")
        return WRAPPED[name](inner)
    return WithExtras(inner=METHODS[name](spec), policy="average")


def _product(toy: Federation) -> product.Federation:
    """The same clients, model and engine under the product's rounds."""
    nothing = np.array([], dtype=np.int64)
    members = [
        ClientData(replace(party.client, last_round=None), toy.problem.indices[id], nothing, nothing)
        for id, party in toy.parties.items()
    ]
    engine = LoopEngine(toy.problem.adapted(), toy.problem.task, toy.training, seed=7)
    return simulate(toy.method, engine, members, toy.problem.examples, RoundSettings(rounds=ROUNDS))


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
        assert set(progress.memories[id]) == set(party.memory)
        for key, value in party.memory.items():
            assert torch.equal(progress.memories[id][key], value)
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


def _engine(problem: Problem, training: TrainingSettings) -> tuple[LoopEngine, Job]:
    method = with_extras(FedIT(spec=problem.adapted().spec, seed=1, r=2, lora_alpha=4.0))
    federation = Federation(method, problem, training)
    return federation.engine, federation.job()


def _train(engine: LoopEngine, problem: Problem, job: Job, kept: OptimizerState | None = None) -> Trained:
    indices = problem.indices["client-2"]
    return engine.train(Assignment("client-2", 0, job, indices, LR, kept), problem.examples)


def test_no_steps_give_the_gradient_and_move_nothing() -> None:
    problem = Problem()
    engine, job = _engine(problem, adamw(LR))
    rng = torch.Generator().manual_seed(0)
    moved = {name: torch.randn(value.shape, generator=rng, dtype=value.dtype) for name, value in job.tensors.items()}
    probe = _train(engine, problem, replace(job, tensors=moved, steps=0))
    pairs = {one: {s: moved[join_tensor_name(one, s)] for s in "AB"} for one in LAYERS}
    head = {name: moved[f"extras/{name}"] for name in HEAD}
    by_pair, by_head = pair_gradients(problem, "client-2", problem.to_dense(*LAYERS), head, pairs, 2.0)
    for one in LAYERS:
        for s in "AB":
            assert close(probe.gradient[join_tensor_name(one, s)], by_pair[one][s])
    for name in HEAD:
        assert close(probe.gradient[f"extras/{name}"], by_head[name])
    assert (probe.steps, probe.lr_sum) == (0, 0.0)
    for name, value in moved.items():
        assert torch.equal(probe.tensors[name], value)


def test_the_raw_gradient_holds_neither_penalty_nor_offset_nor_clipping() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR, steps=1, max_grad_norm=1e-3))
    penalized = FedProx(inner=with_extras(FedIT(spec=problem.adapted().spec, seed=1, r=2, lora_alpha=4.0)))
    pulled = penalized.start(
        penalized.sync(penalized.init(engine.adapted), None), None, {}, penalized.init(engine.adapted).round
    )
    offset = {name: torch.ones_like(job.tensors[name]) for name in job.trainable_names}
    plain = _train(engine, problem, replace(job, steps=0))
    busy = _train(engine, problem, replace(pulled, gradient_offset=offset, want_gradient=True))
    for name, value in plain.gradient.items():
        assert torch.equal(busy.gradient[name], value)
        # The offset comes after clipping: a step of lr times (almost nothing + 1).
        assert close(pulled.tensors[name] - busy.tensors[name], LR * offset[name], 2e-3)


def test_a_probe_sees_every_example_once() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR, epochs=3))
    assert _train(engine, problem, replace(job, steps=0)).metrics["examples"] == len(problem.indices["client-2"])


def test_a_probe_in_batches_is_the_gradient_of_the_whole_data() -> None:
    problem = Problem()
    engine, job = _engine(problem, sgd(LR))
    whole = _train(engine, problem, replace(job, steps=0)).gradient
    engine.settings = sgd(LR, batch_size=4)  # 10 examples: 4, 4 and 2
    parts = _train(engine, problem, replace(job, steps=0)).gradient
    for name, value in whole.items():
        assert close(parts[name], value)


def test_a_jobs_moments_and_kept_ones_live_side_by_side() -> None:
    problem = Problem()
    engine, job = _engine(problem, adamw(LR))
    first = _train(engine, problem, job)
    name = join_tensor_name("fc1", "A")
    own = OptimizerState({"exp_avg_sq": {name: torch.ones_like(job.tensors[name])}})
    second = _train(engine, problem, replace(job, optimizer_state=own), kept=first.optimizer_state)
    assert second.optimizer_state.steps["extras/head.bias"] == 2


def test_a_probes_moments_do_not_leak_into_training(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(clients=1)
    method = with_extras(LoRAA2(spec=problem.adapted().spec, r=3), "frozen")
    rounds = _product(Federation(method, problem, adamw(LR, keep_optimizer=True, steps=2)))
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
    assert later is not None
    assert later.steps[join_tensor_name("fc1", "B")] == 2


def test_a_model_takes_the_base_of_another_run() -> None:
    problem = Problem(clients=2)
    federations = [
        Federation(with_extras(FedLoRU(spec=problem.adapted().spec, r=2, tau=1, seed=seed)), problem, sgd(LR))
        for seed in (0, 1)
    ]
    for one in federations:
        one.round()
    expected = federations[1].loss("client-0")
    federations[1].adapted = federations[1].engine.adapted = federations[0].adapted
    federations[0].loss("client-0")  # puts the first run's base of round 1 into the model
    assert federations[1].loss("client-0") == expected


def test_a_float64_base_may_shrink() -> None:
    problem = Problem(clients=1)
    engine, job = _engine(problem, sgd(LR))
    indices = problem.indices["client-0"]
    engine.adapted.set_base(BaseUpdate().add(Increment(1, {}, decay=0.5)))
    predictions = engine.predict(job, problem.examples, indices, batch_size=4)
    weights = problem.to_dense()
    expected = problem.loss("client-0", {**weights, **{layer: 0.5 * weights[layer] for layer in LAYERS}})
    loss = problem.task.compute_metrics(predictions, problem.examples, indices.tolist())["loss"]
    assert abs(loss - float(expected)) < 1e-6


def test_double_is_only_a_conversion() -> None:
    """The toys' float64 wrapper changes no name, shape or claim."""
    problem = Problem(clients=1)
    inner = WithExtras(inner=FLoRA(spec=problem.adapted().spec, r=2), policy="average")
    single = inner.start(inner.sync(inner.init(problem.adapted()), None), None, {}, 0)
    double = Double(inner=inner).start(inner.sync(inner.init(problem.adapted()), None), None, {}, 0)
    assert {name: value.shape for name, value in single.tensors.items()} == {
        name: value.shape for name, value in double.tensors.items()
    }
    assert all(value.dtype == torch.float64 for value in double.tensors.values())
    assert Double(inner=inner).declare_claims() == inner.declare_claims()
