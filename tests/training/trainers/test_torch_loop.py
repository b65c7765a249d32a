"""Plain PyTorch loops: jobs, steps, batches and optimizers of a round, and loops that do not do what was planned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspan.core.base import BaseUpdate
from fedspan.core.lowrank import LowRank
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import join_extra_name, join_tensor_name
from fedspan.core.values import Group, Job
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.trainers.install import FrozenBase, checksum_frozen, install_job
from fedspan.training.trainers.local import RoundPlan, plan_round
from fedspan.training.trainers.optimizer import JobOptimizer
from fedspan.training.trainers.torch_loop import TorchTrainer, TrainingRound
from helpers.refusals import refused
from helpers.toys.problem import Problem
from helpers.toys.rounds import sgd


class Counted:
    """An optimizer that counts."""

    def __init__(self) -> None:
        self.steps = self.examples = self._pending = self.cleared = 0

    def count_examples(self, examples: int) -> None:
        self._pending += examples

    def step(self) -> None:
        self.steps, self.examples, self._pending = self.steps + 1, self.examples + self._pending, 0

    def zero_grad(self) -> None:
        self.cleared += 1


def plan(epochs: int = 1, steps: int | None = None) -> RoundPlan:
    return RoundPlan("east", 4, "train", 0.1, epochs, steps, 5)


def begin(epochs: int = 1, steps: int | None = None) -> tuple[TrainingRound, Any]:
    optimizer: Any = Counted()
    return TrainingRound(plan(epochs, steps), optimizer, nn.Linear(2, 3)), optimizer


@pytest.mark.parametrize(("epochs", "steps", "batches"), [(1, None, 3), (2, None, 6), (1, 2, 2), (1, 7, 7)])
def test_a_round_has_the_batches_of_its_epochs_or_of_its_steps(epochs: int, steps: int | None, batches: int) -> None:
    round, optimizer = begin(epochs, steps)
    seen = []
    for batch in round.batches("abc"):
        seen.append(batch)
        round.step(torch.tensor(1.0), 2)
    assert "".join(seen) == ("abc" * 3)[:batches]
    assert (optimizer.steps, optimizer.cleared, optimizer.examples) == (batches, batches, 2 * batches)
    assert round.is_cut is False


def test_the_mean_loss_weighs_examples() -> None:
    round, _ = begin()
    assert round.mean_loss == 0.0
    round.step(torch.tensor(1.0), 1)
    round.step(torch.tensor(3.0), 3)
    assert round.mean_loss == 2.5


def test_a_loop_that_takes_no_step_for_a_thousand_batches_is_ended_with_the_reason() -> None:
    round, _ = begin(steps=5)
    with refused("trainer", r"east in round 5 took no step in 1000 batches\. Call round\.step"):
        list(round.batches(range(100)))


@pytest.mark.parametrize(
    ("epochs", "steps", "done"), [(2, None, "1 of 2 planned epochs"), (1, 9, "3 of 9 planned steps")]
)
def test_a_loader_that_is_used_up_is_named(epochs: int, steps: int | None, done: str) -> None:
    round, _ = begin(epochs, steps)

    def train() -> None:
        for _ in round.batches(iter("abc")):
            round.step(torch.tensor(1.0), 1)

    with pytest.raises(FedspanError, match=f"took {done}. Pass round.batches a loader".replace(".", r"\.")):
        train()


def trainer(train: Callable[[TrainingRound], None], **options: Any) -> TorchTrainer:
    return TorchTrainer(nn.Linear(2, 3), train, 6, **options)


def stepping(examples: int, limit: int = 10**6) -> Callable[[TrainingRound], None]:
    def train(round: TrainingRound) -> None:
        for number, _ in enumerate(round.batches([0, 1, 2])):
            if number == limit:
                return
            round.step(torch.tensor(0.5), examples)

    return train


def test_a_loop_that_does_what_was_planned_returns_its_mean_loss() -> None:
    for planned in (plan(2), plan(steps=4)):
        assert trainer(stepping(2)).train(planned, Counted()) == 0.5


@pytest.mark.parametrize(
    ("planned", "train", "why"),
    [
        (plan(steps=4), stepping(2, 3), r"took 3 of 4 planned steps"),
        (plan(2), stepping(2, 4), r"left round\.batches before the end of its 2 planned epochs"),
        (plan(1), stepping(3), r"counted 9 examples, and at most 6 were possible"),
        (plan(steps=2), stepping(7), r"counted 14 examples, and at most 12 were possible"),
    ],
)
def test_other_loops_are_refused(planned: RoundPlan, train: Callable[[TrainingRound], None], why: str) -> None:
    with pytest.raises(FedspanError, match=why) as caught:
        trainer(train).train(planned, Counted())
    assert (caught.value.field, caught.value.value) == ("trainer", "east")


def test_every_round_has_random_draws_of_its_own() -> None:
    drawn: list[float] = []

    def train(round: TrainingRound) -> None:
        drawn.append(float(torch.rand(())))

    made = trainer(train)
    for _ in range(2):
        torch.rand(3)
        made.train(plan(), Counted())
    assert drawn[0] == drawn[1]


def test_passes_are_steps_or_the_batches_of_the_epochs() -> None:
    assert trainer(stepping(1)).count_passes(2, None) == 12  # one for each example
    assert trainer(stepping(1), batches=3).count_passes(2, None) == 6
    assert trainer(stepping(1), batches=3).count_passes(2, 5) == 5


@pytest.mark.parametrize(
    ("examples", "options", "field"),
    [
        (0, {}, "examples"),
        (3, {"batches": 0}, "batches"),
        (3, {"validation_examples": 2}, "validation_examples"),
        (3, {"evaluate": dict}, "validation_examples"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(examples: int, options: dict[str, Any], field: str) -> None:
    with refused(field):
        TorchTrainer(nn.Linear(2, 3), stepping(1), examples, **options)


def test_an_evaluation_runs_in_evaluation_mode_and_knows_its_metrics() -> None:
    modes: list[tuple[bool, bool]] = []
    metrics: dict[str, Any] = {"loss": torch.tensor(0.5), "accuracy": 1}

    def evaluate() -> dict[str, Any]:
        modes.append((made.root.training, torch.is_grad_enabled()))
        return metrics

    made = trainer(stepping(1), evaluate=evaluate, validation_examples=2)
    assert made.evaluate() == {"loss": 0.5, "accuracy": 1.0}
    assert modes == [(False, False)]
    metrics["lss"] = 1.0
    with refused("evaluate", r"metrics with names of .*loss"):
        made.evaluate()
    assert trainer(stepping(1)).evaluate() == {}


def assignment(**changes: Any) -> Assignment:
    return Assignment("east", 4, Job({}, {}, (), **changes), np.arange(3), 0.25)


@pytest.mark.parametrize(
    ("settings", "job", "epochs", "steps"),
    [
        ({"local_epochs": 3}, {}, 3, None),
        ({"local_epochs": 3, "local_steps": 7}, {}, 3, 7),
        ({"local_epochs": 3, "local_steps": 7}, {"steps": 2}, 3, 2),
        ({"local_epochs": 3, "local_steps": 7}, {"epochs": 2}, 2, None),  # a job's epochs replace the run's steps
        ({"local_epochs": 3, "local_steps": 7}, {"steps": 0}, 1, None),  # a probe sees each example once
    ],
)
def test_a_job_s_own_steps_and_epochs_come_first(
    settings: dict[str, int], job: dict[str, int], epochs: int, steps: int | None
) -> None:
    plan = plan_round(TrainingSettings(**settings), 1, assignment(**job))
    assert (plan.epochs, plan.steps) == (epochs, steps)
    assert (plan.client, plan.round, plan.phase, plan.lr) == ("east", 4, "train", 0.25)


def test_every_round_client_and_phase_has_a_seed_of_its_own() -> None:
    settings, first = TrainingSettings(), assignment()
    others = [
        (1, replace(first, round=5)),
        (1, replace(first, client="west")),
        (1, assignment(phase="second")),
        (2, first),
    ]
    seeds = [plan_round(settings, seed, one).seed for seed, one in [(1, first), *others]]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert plan_round(settings, 1, replace(first, lr=9.0)).seed == seeds[0]


LR = 0.25


def build_optimizer(**changes: Any) -> tuple[JobOptimizer, dict[str, torch.Tensor]]:
    """SGD on the B of both layers; fc1's at half the learning rate."""
    torch.manual_seed(2)
    problem = Problem(clients=1)
    shapes = {"fc1/A": (2, 5), "fc1/B": (8, 2), "fc2/A": (2, 8), "fc2/B": (6, 2)}
    tensors = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    groups = (Group(("fc1/B",), lr_scale=0.5), Group(("fc2/B",)), Group(()))
    job = replace(Job({"fc1": LoRA(1.0), "fc2": LoRA(1.0)}, tensors, groups), **changes)
    engine = LoopEngine(problem.adapted(), problem.task, sgd(LR), seed=7)
    live = {name: value.clone().requires_grad_(name.endswith("B")) for name, value in tensors.items()}
    return JobOptimizer(engine, Assignment("client-0", 0, job, problem.indices["client-0"], LR), live), live


def test_steps_are_those_of_gradient_descent_with_each_group_s_rate() -> None:
    optimizer, live = build_optimizer()
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 2, LR]
    expected = {name: value.detach().clone() for name, value in live.items()}
    for number in range(3):
        (live["fc1/B"].square().sum() + number * live["fc2/B"].sum()).backward()
        optimizer.count_examples(4)
        optimizer.step()
        expected["fc1/B"] -= LR / 2 * 2 * expected["fc1/B"]
        expected["fc2/B"] -= LR * number
        assert all(value.grad is None for value in live.values())
    for name, value in live.items():
        assert torch.allclose(value, expected[name], rtol=1e-12)
    assert (optimizer.steps, optimizer.examples, optimizer.decay) == (3, 12, 1.0)
    assert optimizer.compute_mean_gradient() == {}


def test_a_step_without_any_gradient_or_with_a_closure_is_refused() -> None:
    optimizer, live = build_optimizer()
    with refused("trainer", "no gradient reached the tensors that train in this round"):
        optimizer.step()
    with refused("trainer", "the optimizer of a round takes no closure"):
        optimizer.step(lambda: 1.0)
    live["fc1/B"].sum().backward()
    before = live["fc2/B"].detach().clone()
    optimizer.step()  # one layer's gradient is enough, and the other's is zero
    assert torch.equal(live["fc2/B"], before)
    assert optimizer.steps == 1


def test_a_probe_averages_gradients_over_examples_and_moves_nothing() -> None:
    optimizer, live = build_optimizer(steps=0, want_gradient=True)
    assert optimizer.is_probe
    before = live["fc1/B"].detach().clone()
    for factor, examples in ((1.0, 1), (5.0, 3)):
        (factor * live["fc1/B"].sum()).backward()
        optimizer.count_examples(examples)
        optimizer.step()
    assert torch.equal(live["fc1/B"], before)
    found = optimizer.compute_mean_gradient()
    assert torch.equal(found["fc1/B"], torch.full((8, 2), (1.0 + 3 * 5.0) / 4, dtype=torch.float64))


def test_a_job_that_wants_gradients_gets_their_mean_over_steps() -> None:
    optimizer, live = build_optimizer(want_gradient=True)
    for factor, examples in ((1.0, 1), (5.0, 3)):
        (factor * live["fc1/B"].sum()).backward()
        optimizer.count_examples(examples)
        optimizer.step()
    assert torch.equal(optimizer.compute_mean_gradient()["fc1/B"], torch.full((8, 2), 3.0, dtype=torch.float64))


def build_job(*, statistics: bool) -> tuple[nn.Sequential, AdaptedModel, Job]:
    """A wide layer with LoRA of which B trains, and a norm whose parameters train, with its statistics or not."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    extras = {name: model.get_parameter(name) for name in ("1.weight", "1.bias")}
    buffers = {name: model.get_buffer(name) for name in ("1.running_mean", "1.running_var")} if statistics else {}
    adapted = AdaptedModel(model, {"0": model[0]}, extras, buffers)
    values = {join_extra_name(path): torch.randn(3) for path in extras}
    values |= {join_extra_name(path): torch.full((3,), 2.0) for path in buffers}
    values |= {join_tensor_name("0", "A"): torch.randn(2, 5), join_tensor_name("0", "B"): torch.randn(3, 2)}
    trainable = Group((join_tensor_name("0", "B"), *(join_extra_name(path) for path in extras)))
    names = frozenset(join_extra_name(path) for path in buffers)
    return model, adapted, Job({"0": LoRA(0.5)}, values, (trainable,), buffers=names)


def test_a_walk_over_the_parameters_sees_what_trains_under_the_slots_names() -> None:
    model, adapted, job = build_job(statistics=False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with install_job(model, adapted, job) as live:
        parameters = dict(model.named_parameters())
        assert parameters.keys() == {*before, "0.fedspan_A", "0.fedspan_B"}
        assert parameters["0.fedspan_B"] is live["0/B"]
        training = {name for name, value in parameters.items() if value.requires_grad}
        assert training == {"0.fedspan_B", "1.weight", "1.bias"}
        assert torch.equal(live["0/A"], job.tensors["0/A"])
        with torch.no_grad():
            live["0/B"] += 1
        x = torch.randn(4, 5)
        weight = before["0.weight"] + 0.5 * (job.tensors["0/B"] + 1) @ job.tensors["0/A"]
        assert torch.allclose(model[0](x), x @ weight.T + before["0.bias"], atol=1e-6)
    assert {name for name, _ in model.named_parameters()} == before.keys()
    assert not any(value.requires_grad for value in model.parameters())
    assert torch.allclose(model[0](x), x @ before["0.weight"].T + before["0.bias"], atol=1e-6)
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("statistics", [False, True])
def test_a_norm_measures_its_batches_only_where_its_statistics_are_the_job_s(statistics: bool) -> None:
    """Though a trainer sets the whole model to training mode before every pass."""
    model, adapted, job = build_job(statistics=statistics)
    with install_job(model, adapted, job) as live:
        model.train()
        before = model[1].running_mean.clone()
        model(torch.randn(4, 5))
        assert torch.equal(model[1].running_mean, before) is not statistics
        assert model[1].training is statistics
        if statistics:
            assert not torch.equal(live["extras/1.running_mean"], job.tensors["extras/1.running_mean"])


def test_an_error_of_the_trainer_leaves_nothing_behind() -> None:
    model, adapted, job = build_job(statistics=False)

    def fail() -> None:
        with install_job(model, adapted, job):
            raise ValueError("the trainer's own")

    with pytest.raises(ValueError, match="the trainer's own"):
        fail()
    assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def model() -> tuple[nn.Sequential, AdaptedModel]:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return root, AdaptedModel(root, {"0": root[0]}, {})


def moved(seed: int) -> BaseUpdate:
    generator = torch.Generator().manual_seed(seed)
    pair = LowRank(torch.randn(3, 1, generator=generator), torch.randn(1, 4, generator=generator))
    return BaseUpdate(total={"0": pair})


def test_the_order_of_values_counts_also_across_chunks() -> None:
    first = nn.ParameterDict({"weight": nn.Parameter(torch.arange(6.0))})
    other = nn.ParameterDict({"weight": nn.Parameter(torch.arange(6.0).flip(0))})
    assert checksum_frozen(first, {}) != checksum_frozen(other, {})
    value = torch.arange(2**21 + 8, dtype=torch.int32)
    found = checksum_frozen(nn.ParameterDict({"a": nn.Parameter(value, requires_grad=False)}), {})
    swapped = torch.cat([value[2**20 : 2**21], value[: 2**20], value[2**21 :]])
    assert found != checksum_frozen(nn.ParameterDict({"a": nn.Parameter(swapped, requires_grad=False)}), {})


def test_a_new_base_is_no_change_and_a_change_under_it_is() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    for base in (moved(1), moved(2), BaseUpdate()):
        adapted.set_base(base)
        assert frozen.list_changed(checksum_frozen(root, {})) == []
    adapted.set_base(moved(3))
    assert frozen.list_changed(checksum_frozen(root, {})) == []
    with torch.no_grad():
        root[0].weight[0, 0] += 1
    assert frozen.list_changed(checksum_frozen(root, {})) == ["0.weight"]


def test_a_change_outside_of_the_target_layers_is_found_under_every_base() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    with torch.no_grad():
        root[1].bias[0] += 1
    adapted.set_base(moved(1))
    assert frozen.list_changed(checksum_frozen(root, {})) == ["1.bias"]


def test_a_target_layer_that_changed_before_the_first_base_is_found() -> None:
    root, adapted = model()
    frozen = FrozenBase(root, adapted)
    with torch.no_grad():
        root[0].weight[0, 0] += 1
    adapted.set_base(moved(1))
    assert "0.weight" in frozen.list_changed(checksum_frozen(root, {}))
