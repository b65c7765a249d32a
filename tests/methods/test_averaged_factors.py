"""Methods that average, stack or alternate factors, and local-only training, as their papers say."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.ndimage import convolve1d
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.assembly.run import Prepared
from fedspan.core.base import to_dense
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import is_extra, join_tensor_name, split_extras
from fedspan.core.values import Job, Message
from fedspan.methods.la_lora import LALoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.training.batching import draw_training_batches
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.transports.in_process import simulate
from helpers import tiny
from helpers.dense_rounds import COHORTS, LR, STEPS, get_pairs, require_state
from helpers.round_settings import make_settings
from helpers.toys.oracle import average, copied, descend, pair_gradients
from helpers.toys.problem import HEAD, LAYERS, Problem
from helpers.toys.rounds import Federation, close, sgd, to_double, with_extras
from helpers.watched_rounds import MethodRun, Round, RunMethod, method_config


def batches(prepared: Prepared, id: str, round: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """What a client sees in a round's two steps: inputs and labels."""
    given = draw_training_batches(
        prepared.federation.clients[id].train,
        prepared.train.lengths,
        batch_size=4,
        epochs=1,
        batches=2,
        seed=prepared.config.seed,
        key=(round, id, "train"),
        group_by_length=True,
    )
    for indices in given:
        inputs = prepared.task.collate(prepared.train, indices.tolist(), torch.device("cpu"))
        labels = inputs.pop("labels")
        yield inputs, labels


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[tuple[dict[str, Tensor], Tensor]]) -> None:
    """Plain training, clipped to norm 1."""
    for inputs, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs).logits, labels).backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fedit_of_one_client_is_plain_training_of_a_peft_model(
    optimizer: str, tiny_folder: Path, prepared: Prepared
) -> None:
    """Three rounds with moments kept, against PEFT's layers and torch's optimizers on the same batches."""
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    training = {"optimizer": optimizer, "lr": 0.05, **options}
    made = tiny.variant(prepared, method_config(tiny_folder, "fedit", training=training, federation={"rounds": 3}))
    client_data = made.federation.clients["north"]
    federation = simulate(made.federation.method, made.engine, [client_data], made.train, make_settings(3))
    progress = begin = federation.begin()
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=tiny.BERT, modules_to_save=["classifier"], task_type="SEQ_CLS")
    model = get_peft_model(tiny.fresh_classifier(tiny_folder / "bert"), lora)
    ours = {peft_name(name): name for name in begin.state.tensors}
    mine = {ours[name]: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert mine.keys() == begin.state.tensors.keys()
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(begin.state.tensors[name])
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    theirs = kind(mine.values(), lr=0.05, weight_decay=0.1, **options)
    for round in range(3):
        progress = federation.run_round(progress).progress
        loop(model, theirs, batches(made, "north", round))
        for name, parameter in mine.items():
            found, moved = progress.state.tensors[name], parameter.detach()
            assert (found - moved).norm() < 1e-5 * (moved - begin.state.tensors[name]).norm()


def peft_name(name: str) -> str:
    """What PEFT calls the parameter of one of our tensors."""
    layer, _, slot = name.partition("/")
    if layer == "extras":
        module, _, parameter = slot.rpartition(".")
        return f"base_model.model.{module}.modules_to_save.default.{parameter}"
    return f"base_model.model.{layer}.lora_{slot}.default.weight"


@pytest.mark.parametrize("init_A", ["gaussian", "orthonormal"])
@pytest.mark.parametrize("key", ["fedit", "rolora"])
def test_the_first_A_has_the_distribution_of_the_option(key: str, init_A: str, run_method: RunMethod) -> None:
    """Its deviation is 1/r, or its Gram matrix the identity over 3; clients train from it without another draw."""
    run = run_method(key, method={"init_A": init_A}, federation={"rounds": 2})
    first = run.rounds[0].before.state.tensors
    A = torch.cat([first[join_tensor_name(layer.name, "A")].double() for layer in run.layers], 1)
    rank = len(A)
    if init_A == "gaussian":
        assert float(A.std()) == pytest.approx(1 / rank, rel=0.2)
    else:
        assert torch.allclose(3 * A @ A.T, len(run.layers) * torch.eye(rank, dtype=torch.float64), atol=1e-5)
    for local in run.rounds[0].trained:
        for layer in run.layers:
            name = join_tensor_name(layer.name, "A")
            assert torch.equal(local.job.tensors[name], first[name])


SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def test_fedavg_is_full_fine_tuning_of_the_target_weights(tiny_folder: Path, prepared: Prepared) -> None:
    """Against a loop over models loaded again with ``torch.optim.SGD``, averaged by examples: 1e-6."""
    made = tiny.variant(prepared, method_config(tiny_folder, "fedavg", training=SGD, federation={"rounds": 1}))
    begin = made.federation.begin()
    result = made.federation.run_round(begin)
    ours = {f"{layer.name}.weight": join_tensor_name(layer.name, "W") for layer in made.engine.adapted.spec.layers}
    ours |= {path: f"extras/{path}" for path in made.engine.adapted.extras}
    examples = {id: len(made.federation.clients[id].train) for id in result.cohort}
    means = {path: torch.zeros((), dtype=torch.float64) for path in ours}
    for id in result.cohort:
        model = tiny.fresh_classifier(tiny_folder / "bert")
        parameters = {path: value for path, value in model.named_parameters() if path in ours}
        with torch.no_grad():
            for path in made.engine.adapted.extras:
                parameters[path].copy_(made.engine.adapted.get_extra(path))
        loop(model, torch.optim.SGD(parameters.values(), lr=0.1), batches(made, id, 0))
        for path, value in parameters.items():
            means[path] = means[path] + examples[id] / sum(examples.values()) * value.detach().double()
    for path, mean in means.items():
        found, started = result.progress.state.tensors[ours[path]].double(), begin.state.tensors[ours[path]].double()
        assert float((found - mean).abs().max()) < 1e-6
        assert float((mean - started).abs().max()) > 1e-4


def slots(message: Message) -> set[str]:
    """Which slots of target layers are transmitted in a message."""
    return {name.rpartition("/")[2] for name in split_extras(message.tensors)[0]}


def sent(round: Round) -> list[tuple[str, str, Message]]:
    """(client, direction, message) of a round."""
    pairs = zip(round.result.transfers, round.messages(), strict=True)
    return [(transfer.client, transfer.direction, message) for transfer, message in pairs]


def factors(run: MethodRun, tensors: dict[str, Tensor], layer: str) -> tuple[Tensor, Tensor]:
    """A layer's B and A, in float64."""
    return tensors[join_tensor_name(layer, "B")].double(), tensors[join_tensor_name(layer, "A")].double()


@pytest.mark.parametrize("init_A", ["kaiming", "gaussian", "orthonormal"])
def test_ffa_lora_keeps_one_A_that_is_never_transmitted(init_A: str, run_method: RunMethod) -> None:
    run = run_method("ffa-lora", method={"init_A": init_A}, federation={"rounds": 3})
    first = run.rounds[0].trained[0].job.tensors
    for round in run.rounds:
        assert all(slots(message) == {"B"} for _, _, message in sent(round))
        for local in round.trained:
            for layer in run.layers:
                A = join_tensor_name(layer.name, "A")
                assert torch.equal(local.trained.tensors[A], first[A])
    A = first[join_tensor_name(run.layers[0].name, "A")].double()
    gram = 3 * A @ A.T
    assert torch.allclose(gram, torch.eye(3, dtype=torch.float64), atol=1e-6) == (init_A == "orthonormal")


def test_rolora_alternates_beginning_with_B_and_one_factor_is_transmitted(run_method: RunMethod) -> None:
    run = run_method("rolora", federation={"clients_per_round": 4})
    for number, round in enumerate(run.rounds):
        active, other = ("B", "A") if number % 2 == 0 else ("A", "B")
        before, after = round.before.state.tensors, round.after.state.tensors
        for layer in run.layers:
            frozen, moving = join_tensor_name(layer.name, other), join_tensor_name(layer.name, active)
            assert torch.equal(before[frozen], after[frozen])
            assert not torch.equal(before[moving], after[moving])
        for _, direction, message in sent(round):
            expected = {active} if direction == "up" else {other} if number else set()
            assert slots(message) == expected


def test_flora_adds_the_dense_sum_of_what_the_clients_sent(run_method: RunMethod) -> None:
    """sum_i p_i s_i B_i A_i, formed densely in float64; factors where they are smaller than the layer."""
    run = run_method("flora", method={"r": 2}, federation={"rounds": 2})
    kinds = set[type]()
    for round in run.rounds:
        assert round.after.state.tensors.keys() == split_extras(round.after.state.tensors)[1].keys()
        increment, shares = round.after.state.base.recent[-1], run.weights(round.result.cohort)
        for layer in run.layers:
            expected = torch.zeros(layer.shape, dtype=torch.float64)
            for id, direction, message in sent(round):
                if direction == "up":
                    B, A = factors(run, message.tensors, layer.name)
                    expected += shares[id] * run.federation.clients[id].client.scaling * B @ A
            delta = increment.deltas[layer.name]
            assert (to_dense(delta).double() - expected).norm() < 1e-6 * expected.norm()
            kinds |= {type(delta), type(round.after.state.base.total[layer.name])}
    assert kinds == {LowRank, Tensor}


def test_flora_starts_every_round_with_fresh_factors_of_the_client_s_own(run_method: RunMethod) -> None:
    seen = set[tuple[float, ...]]()
    run = run_method("flora")
    for round in run.rounds:
        for local in round.trained:
            B, A = factors(run, local.job.tensors, run.layers[0].name)
            assert not B.any()
            seen.add(tuple(A.flatten().tolist()))
    assert len(seen) == sum(len(round.trained) for round in run.rounds)


def federation(problem: Problem, clients: int) -> Federation:
    method = LocalOnly(spec=problem.adapted().spec, seed=4, r=2)
    return Federation(with_extras(method, "local"), problem, sgd(LR, steps=STEPS), ranks={"client-1": clients})


def test_a_client_s_model_is_lora_from_where_it_left_off() -> None:
    """Whoever else takes part; the oracle trains it by plain gradient descent on dense weights."""
    problem = Problem(clients=3)
    made = federation(problem, 3)
    W, rank = problem.to_dense(*LAYERS), 3
    job = made.job("client-1")
    mine = {one: {s: job.tensors[join_tensor_name(one, s)].double() for s in "AB"} for one in LAYERS}
    assert {one: slots["A"].shape[0] for one, slots in mine.items()} == dict.fromkeys(LAYERS, rank)
    head = problem.to_dense(*HEAD)
    for cohort in (["client-0", "client-1", "client-2"], ["client-1"], ["client-0", "client-2"], ["client-1"]):
        made.round(cohort)
        if "client-1" in cohort:
            mine = copied(mine)
            descend(problem, "client-1", W, head, mine, 4.0 / rank, LR, STEPS)
        for one in LAYERS:
            expected = W[one] + 4.0 / rank * mine[one]["B"] @ mine[one]["A"]
            assert close(made.get_weight(one, "client-1"), expected, 1e-8)


def test_nothing_is_sent_or_stored_on_the_server() -> None:
    problem = Problem(clients=2)
    made = federation(problem, 2)
    made.round()
    assert made.replies == {"client-0": Message(), "client-1": Message()}
    assert made.elements == {"client-0": (0, 0), "client-1": (0, 0)}
    assert made.state.round == 1
    assert all(is_extra(name) for name in made.state.tensors)  # the pretrained head, from which all start
    assert (made.state.memory, made.state.scalars, made.state.base.moved) == ({}, {}, False)
    assert not torch.equal(made.get_weight("fc1", "client-0"), made.get_weight("fc1", "client-1"))


def test_a_client_that_has_not_trained_has_the_pretrained_model() -> None:
    problem = Problem(clients=2)
    made = federation(problem, 2)
    for one in LAYERS:
        assert close(made.get_weight(one, "client-0"), problem.to_dense(one)[one])


KERNEL = np.array([1, 4, 6, 4, 1]) / 16


def _smoothed(gradient: Tensor, slot: str) -> Tensor:
    return torch.from_numpy(convolve1d(gradient.numpy(), KERNEL, axis=1 if slot == "A" else 0, mode="reflect"))


def _federation(steps: int, **options: Any) -> Federation:
    method = LALoRA(spec=Problem().adapted().spec, r=2, lora_alpha=4, **options)
    made = Federation(with_extras(method), Problem(), sgd(LR, steps=steps), lora_alpha=4.0)
    made.state = made.state.__class__(tensors=to_double(made.state.tensors))
    return made


@pytest.mark.parametrize("smoothing", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_rounds_match_alternating_steps_by_hand(steps: int, smoothing: bool) -> None:
    problem, scale = Problem(), 3.0
    made = _federation(steps, smoothing=smoothing, b_lr_scale=scale)
    W, pairs, head = problem.to_dense(*LAYERS), get_pairs(made), problem.to_dense(*HEAD)
    for positions in COHORTS:
        ids = [problem.client_ids[position] for position in positions]
        made.round(ids)
        shares, own, heads = problem.shares(ids), {}, {}
        for id in ids:
            own[id], heads[id] = {one: dict(pair) for one, pair in pairs.items()}, dict(head)
            for step in range(steps):
                slot = "BA"[step % 2]
                by_pair, by_head = pair_gradients(problem, id, W, heads[id], own[id], 2.0)
                for one in LAYERS:
                    gradient = by_pair[one][slot]
                    gradient = _smoothed(gradient, slot) if smoothing else gradient
                    own[id][one][slot] = own[id][one][slot] - LR * (scale if slot == "B" else 1.0) * gradient
                for name in HEAD:
                    heads[id][name] = heads[id][name] - LR * by_head[name]
        pairs = {one: average((shares[id], own[id][one]) for id in ids) for one in LAYERS}
        head = average((shares[id], heads[id]) for id in ids)
        for one in LAYERS:
            assert close(made.get_weight(one), W[one] + 2.0 * pairs[one]["B"] @ pairs[one]["A"])
        require_state(made, head, pairs)
    first = _federation(steps).state.tensors
    moved = not close(made.state.tensors["fc1/A"], first["fc1/A"], 1e-6)
    assert moved == (steps > 1)  # a single step trains B


def _job(prepared: Prepared) -> Job:
    federation = prepared.federation
    client = next(iter(federation.clients.values())).client
    state = federation.begin().state
    message: Message = federation.method.sync(state, client)
    return federation.method.start(message, client, {}, 0)


def test_a_private_step_releases_and_clips_only_the_factor_that_trains(
    prepared: Prepared, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    from fedspan.training import noisy_sum

    added: list[tuple[str, ...]] = []
    genuine = noisy_sum.NoisySum.pop_mean

    def watched(self: Any, step: int, expected: int) -> dict[str, Tensor]:
        mean = genuine(self, step, expected)
        added.append(tuple(sorted({name.rpartition("/")[2] for name in mean if not name.startswith("extras/")})))
        return mean

    monkeypatch.setattr(noisy_sum.NoisySum, "pop_mean", watched)
    privacy = {"mechanism": "dp-sgd", "noise": 0.5, "clip": 0.5}
    run = tiny.variant(
        prepared, method_config(tiny_folder, "la-lora", privacy=privacy, training={"local_steps": 3}), engine=LoopEngine
    )
    id, data = next(iter(run.federation.clients.items()))
    job = _job(run)
    trained = run.engine.train(Assignment(id, 0, job, data.train, 0.1, noise=0.5), run.train)
    assert added == [("B",), ("A",), ("B",)]
    assert trained.steps == 3
    moved = {name for name, value in trained.tensors.items() if not torch.equal(value, job.tensors[name])}
    assert moved == set(job.trainable_names)
    steps = {name: trained.optimizer_state.steps[name] for name in job.trainable_names if "extras" not in name}
    assert {name: count for name, count in steps.items() if count != (2 if name.endswith("/B") else 1)} == {}
