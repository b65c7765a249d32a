"""No wrapper is inert: around every method of the registry it is refused, or it changes what the federation learns."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import Tensors, select_slots, split_extras
from fedspan.core.values import Spec
from fedspan.federation.progress import Progress
from fedspan.methods.registry import METHODS
from fedspan.wrappers.registry import WRAPPERS
from helpers import tiny
from helpers.families import methods_by_family
from helpers.wrapped_configs import wrapped_config

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
