"""What every wrapper of the registry keeps, how a config names it, and that none is inert around any method."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import Tensors, is_extra, join_extra_name, select_slots, split_extras
from fedspan.core.values import Spec
from fedspan.data.partition import Partition
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.progress import Progress
from fedspan.federation.serialization import decode_state, encode, encode_state
from fedspan.methods.registry import METHODS
from fedspan.transports.in_process import simulate
from fedspan.wrappers.extras import WithExtras
from fedspan.wrappers.fedadam import FedAdam
from fedspan.wrappers.fedpaq import FedPAQ
from fedspan.wrappers.fedprox import FedProx
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.claim_measures import count_layers
from helpers.families import methods_by_family
from helpers.valid_config import SPEC, VALID
from helpers.watched_rounds import differences
from helpers.wrapped_configs import RunWrapped, wrapped_config

INNER = ("fedit", "ffa-lora", "fedavg")
UNLIKE = ("fedadam", "fedpaq", "fedprox", "scaffold")
"""An optimizer of the server, another format, another loss, and variates."""
each = pytest.mark.parametrize(
    ("wrapper", "key"),
    [
        pytest.param(wrapper, key, marks=() if key == "fedit" and wrapper in UNLIKE else pytest.mark.slow)
        for wrapper in WRAPPERS
        for key in INNER
    ],
)
"""One wrapper of each kind around FedIT; the others, and the other methods, are slow."""
STACKED: list[list[Any]] = [
    ["fedprox", {"name": "fedadam", "lr": 0.02}, {"name": "fedpaq", "bits": 5}],
    [{"name": "fedavgm", "lr": 0.5}, {"name": "scaffold", "variate": "option-I"}, "fedprox"],
]
RAW = {"max_grad_norm": 0.0}


@each
def test_nobody_writes_to_what_it_is_given(wrapper: str, key: str, run_wrapped: RunWrapped) -> None:
    assert run_wrapped(key, [wrapper]).written == ()


@each
def test_the_order_of_replies_does_not_matter(wrapper: str, key: str, run_wrapped: RunWrapped) -> None:
    run = run_wrapped(key, [wrapper])
    for round in run.rounds[:3]:
        replies = [(call.args[1], call.result) for call in round.of("contribute")]
        for order in itertools.permutations(replies):
            reducer = Reducer([client for client, _ in order])
            for client, contribution in order:
                reducer.add(client.id, contribution)
            after = run.federation.method.update(round.before.state, reducer.compute_result())
            assert differences(after, round.after.state) == []


@each
def test_bytes_counted_are_bytes_declared(wrapper: str, key: str, run_wrapped: RunWrapped) -> None:
    """With a frozen head, which is sent once; SCAFFOLD doubles a reply, and bfloat16 halves a message."""
    run = run_wrapped(key, [wrapper], model={"extras": "frozen"}, federation={"clients_per_round": 4})
    method, head = run.federation.method, sum(math.prod(shape) for shape in run.federation.method.spec.extras.values())
    counted = count_layers(method, [3], [[3] * 4] * len(run.rounds))
    for number, round in enumerate(run.rounds):
        for transfer, message in zip(round.result.transfers, round.messages(), strict=True):
            assert transfer.bytes == len(encode(message))
            entry = 2 if wrapper == "low-precision" else 4
            once = entry * head if transfer.direction == "down" and number == 0 else 0
            assert transfer.payload == getattr(counted[number][3], transfer.direction) + once
            if transfer.direction == "up" and wrapper in ("scaffold", "fedprox"):
                trained = next(local for local in round.trained if local.client == transfer.client)
                elements = sum(trained.trained.tensors[name].numel() for name in trained.job.trainable_names)
                assert transfer.payload == 4 * elements * (2 if wrapper == "scaffold" else 1)


@each
def test_the_head_is_subject_to_the_wrapper_too(wrapper: str, key: str, run_wrapped: RunWrapped) -> None:
    """Every function of the wrapper treats the head as it does the factors; without the wrapper it ends elsewhere."""
    training = {"training": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}}
    run, plain = run_wrapped(key, [wrapper], **training), run_wrapped(key, [], **training)
    ended, otherwise = run.rounds[-1].after.state.tensors, plain.rounds[-1].after.state.tensors
    assert ended.keys() == otherwise.keys()
    for path in run.federation.method.spec.extras:
        assert not torch.equal(ended[join_extra_name(path)], otherwise[join_extra_name(path)])


@each
@pytest.mark.parametrize("policy", ["local", pytest.param("frozen", marks=pytest.mark.slow)])
def test_a_head_that_is_not_transmitted_stays_out_of_it(
    wrapper: str, key: str, policy: str, run_wrapped: RunWrapped
) -> None:
    """No message but the first carries anything of it, and the server's stays as it was."""
    run = run_wrapped(key, [wrapper], model={"extras": policy}, federation={"rounds": 3})
    begun = run.rounds[0].before.state
    for round in run.rounds:
        assert all(
            torch.equal(round.after.state.tensors[name], value)
            for name, value in split_extras(begun.tensors)[1].items()
        )
        assert not any("extras/" in name for name in round.after.state.memory)
        for transfer, message in zip(round.result.transfers, round.messages(), strict=True):
            first = transfer.direction == "down" and transfer.client not in round.before.last_rounds
            assert any("extras/" in name for name in message.tensors) == first
        for local in round.trained:
            moved = {
                name
                for name, value in local.job.tensors.items()
                if is_extra(name) and not torch.equal(value, local.trained.tensors[name])
            }
            assert bool(moved) == (policy == "local")


@each
def test_around_the_factors_only_it_leaves_the_head_alone(
    wrapper: str, key: str, prepared: Prepared, tiny_folder: Path
) -> None:
    """Inside of the extras: they are averaged as without it, and all that the wrapper sends is of target layers."""
    made = tiny.variant(prepared, wrapped_config(tiny_folder, key, [wrapper], federation={"rounds": 2}))
    outer = made.federation.method
    assert isinstance(outer, WRAPPERS[wrapper])
    assert isinstance(outer.inner, WithExtras)
    inside = WithExtras(inner=replace(outer, inner=outer.inner.inner), policy="average")
    federation = simulate(
        inside, made.engine, list(made.federation.clients.values()), made.train, made.federation.settings
    )
    progress = federation.run_round(federation.begin()).progress
    progress = federation.run_round(progress).progress
    assert not any("extras/" in name for name in progress.state.memory)
    assert not any("extras/" in name for own in progress.states.values() for name in own.memory)
    assert all(value.isfinite().all() for value in progress.state.tensors.values())


def resumed(config_text: str, partition: str, stopped: Progress) -> Progress:
    """One more round by another process: method, model and data again, the state through its bytes."""
    federation = prepare(parse_config(yaml.safe_load(config_text)), Partition.from_json(partition)).federation
    state = decode_state(encode_state(stopped.state))
    return federation.run_round(Progress(state, stopped.states, stopped.last_rounds)).progress


@pytest.mark.parametrize(
    ("wrappers", "key"),
    [
        *(pytest.param([wrapper], "fedit", marks=pytest.mark.slow) for wrapper in WRAPPERS),
        *((wrappers, "ffa-lora") for wrappers in STACKED),  # with all of UNLIKE
    ],
    ids=str,
)
def test_a_resumed_run_continues_as_one_that_never_stopped(
    wrappers: list[Any], key: str, tiny_folder: Path, prepared: Prepared
) -> None:
    config = wrapped_config(tiny_folder, key, wrappers, training=RAW, federation={"rounds": 3})
    federation = tiny.variant(prepared, config).federation
    steps = [federation.begin()]
    while len(steps) < 4:
        steps.append(federation.run_round(steps[-1]).progress)
    text = yaml.safe_dump(config.model_dump(mode="json"))
    found = resumed(text, prepared.partition.to_json(), steps[2])
    assert differences(found, steps[3]) == []
    assert differences(federation.run_round(steps[1]).progress, steps[2]) == []  # a round run twice counts once


@pytest.mark.parametrize("wrappers", STACKED, ids=str)
def test_wrappers_around_wrappers(wrappers: list[Any], run_wrapped: RunWrapped) -> None:
    run = run_wrapped("fedit", wrappers, training=RAW)
    assert run.written == ()
    assert all(value.isfinite().all() for value in run.rounds[-1].after.state.tensors.values())
    method, kinds = run.federation.method, []
    while hasattr(method, "inner"):
        method = method.inner
        kinds.append(type(method))
    names = [wrapper if isinstance(wrapper, str) else wrapper["name"] for wrapper in wrappers]
    assert kinds[: len(names) + 2] == [*(WRAPPERS[name] for name in reversed(names)), WithExtras, METHODS["fedit"]]


def test_variates_of_a_tensor_are_transmitted_as_often_as_it_changes(run_wrapped: RunWrapped) -> None:
    """RoLoRA's factors move in turn: a client that is there in every round is sent the variates of one of them."""
    run = run_wrapped("rolora", ["scaffold"], federation={"clients_per_round": 4}, model={"extras": "frozen"})
    head = sum(math.prod(shape) for shape in run.federation.method.spec.extras.values())
    counted = count_layers(run.federation.method, [3], [[3] * 4] * len(run.rounds))
    for number, round in enumerate(run.rounds):
        for transfer in round.result.transfers:
            once = head if transfer.direction == "down" and number == 0 else 0
            assert transfer.payload == getattr(counted[number][3], transfer.direction) + 4 * once


def test_wrappers_are_written_as_keys_or_with_their_options() -> None:
    wrappers = ["fedprox", {"name": "fedadam", "lr": 0.1, "beta1": 0.5}, {"name": "fedpaq", "bits": 4}]
    config = parse_config({**VALID, "method": {"name": "fedit", "r": 4, "wrappers": wrappers}})
    assert config.method.options == {"r": 4}
    assert config.method.title == "fedit+fedprox+fedadam+fedpaq"
    method = config.wrap_method(config.build_method(SPEC))
    assert isinstance(method, FedPAQ)
    assert isinstance(method.inner, FedAdam)
    assert isinstance(method.inner.inner, FedProx)
    assert isinstance(method.inner.inner.inner, WithExtras)
    assert (method.bits, method.seed) == (4, 3)
    assert (method.inner.lr, method.inner.beta1, method.inner.tau) == (0.1, 0.5, 1e-3)
    assert parse_config(config.model_dump(mode="json")) == config


OPTIONS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 1.0},
    "fedavgm": {"lr": 0.5},
    "fedpaq": {"bits": 4},
    "low-precision": {"uplink": "int8", "error_feedback": True},
}
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.0, "local_steps": 3}
PREFIXES = ("FedAdagrad/", "FedAdam/", "FedAvgM/", "FedYogi/", "low-precision-memory/", "scaffold/")
"""Prefixes of the names under which wrappers remember something from round to round."""
LAYERS = {"extras": "frozen", "target_modules": ["intermediate.dense"]}
"""One layer in each block, 24 x 16, shows what a wrapper does, and hundreds of federations are run."""
ROUNDS = 3

Run = Callable[..., Tensor]


def _accepts(wrapper: str, key: str) -> bool:
    inner = METHODS[key](spec=Spec(layers=()))
    return WRAPPERS[wrapper](inner=inner, **OPTIONS.get(wrapper, {})).explain_refusal(METHODS[key].claims) is None


QUICK = [("fedprox", "flora"), ("fedadagrad", "fedsa-lora"), ("scaffold", "fedsa-lora"), ("fedprox", "fedgalore")]
PAIRS = [
    pytest.param(wrapper, key, marks=() if key == "fedit" or (wrapper, key) in QUICK else pytest.mark.slow)
    for wrapper in WRAPPERS
    for key in METHODS
    if _accepts(wrapper, key)
]
"""Wrappers around FedIT, and a few around the methods that differ most; around the others they are slow."""


def _forget(progress: Progress) -> Progress:
    """Drop what a wrapper remembers, on the server and on the clients."""

    def without(tensors: Tensors) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if not name.startswith(PREFIXES)}

    scalars = {name: value for name, value in progress.state.scalars.items() if not name.startswith(PREFIXES)}
    state = replace(progress.state, memory=without(progress.state.memory), scalars=scalars)
    states = {id: replace(own, memory=without(own.memory)) for id, own in progress.states.items()}
    return replace(progress, state=state, states=states)


def _values(made: Prepared, progress: Progress) -> Iterator[Tensor]:
    """Yield the global tensors and the layers' dense changes."""
    yield from split_extras(progress.state.tensors)[0].values()
    job = made.evaluator.build_job(progress, None)
    for layer in made.engine.adapted.spec.layers:
        yield compute_dense_change(
            job.parametrization[layer.name].compute_effective(select_slots(job.tensors, layer.name)),
            made.engine.adapted.get_weight(layer.name),
        )
        if (delta := progress.state.base.total.get(layer.name)) is not None:
            yield delta if isinstance(delta, Tensor) else delta.to_dense()


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> Prepared:
    """The model with these layers, for all runs."""
    return prepare(wrapped_config(tiny_folder, "fedit", [], training=SGD, model=LAYERS))


@pytest.fixture(scope="module")
def end(tiny_folder: Path, loaded: Prepared) -> Run:
    """``end(key, wrappers, forgetful=False)``: the values after three rounds, as one vector."""
    known: dict[tuple[str, str, bool], Tensor] = {}

    def run(key: str, wrapper: str | None = None, *, forgetful: bool = False) -> Tensor:
        name = key, wrapper or "", forgetful
        if name in known:
            return known[name]
        wrappers = [] if wrapper is None else [{"name": wrapper, **OPTIONS.get(wrapper, {})}]
        config = wrapped_config(tiny_folder, key, wrappers, training=SGD, model=LAYERS)
        made = tiny.variant(loaded, config)
        progress = made.federation.begin()
        for _ in range(ROUNDS):
            progress = made.federation.run_round(_forget(progress) if forgetful else progress).progress
        known[name] = torch.cat([value.double().flatten() for value in _values(made, progress)])
        return known[name]

    return run


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("wrapper", "key"), PAIRS)
def test_a_wrapper_changes_the_result(wrapper: str, key: str, end: Run) -> None:
    assert _apart(end(key, wrapper), end(key)) > 1e-4


@pytest.mark.parametrize(("wrapper", "key"), [pair for pair in PAIRS if pair.values[0] not in ("fedpaq", "fedprox")])
def test_what_a_wrapper_remembers_changes_the_result(wrapper: str, key: str, end: Run) -> None:
    """Not so where moments or variates were dropped in every round: those of one round alone give the same result."""
    assert _apart(end(key, wrapper), end(key, wrapper, forgetful=True)) > 1e-4


@pytest.mark.parametrize("key", methods_by_family())
def test_only_methods_that_claim_it_give_their_tensors_new_coordinates_in_every_round(
    key: str, tiny_folder: Path, loaded: Prepared
) -> None:
    federation = tiny.variant(loaded, wrapped_config(tiny_folder, key, [], training=SGD, model=LAYERS)).federation
    progresses = [federation.begin()]
    while len(progresses) <= ROUNDS:
        progresses.append(federation.run_round(progresses[-1]).progress)
    generations = [progress.state.generation for progress in progresses]
    assert METHODS[key].claims.reinitializes == (generations == list(range(ROUNDS + 1)))
