"""The batched engine does what the loop does: every method, one job in float64, whole federations in float32."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.values import Job, OptimizerState, Trained
from fedspan.errors import FedspanError
from fedspan.federation.progress import Progress
from fedspan.tasks.task import Examples
from fedspan.training.batched import BatchedEngine
from fedspan.training.config import EngineConfig
from fedspan.training.engine import Engine
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from helpers import tiny
from helpers.families import FAMILIES, UNLIKE, methods_by_family
from helpers.watched_rounds import differences, method_config

AT_ONCE = (1, 3, 8)
ADAMW = {"fedgalore"}  # whatever the run's optimizer


class Collecting(LoopEngine):
    """Keeps all assignments."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.works: list[Assignment] = []

    def train(self, work: Assignment, examples: Examples) -> Trained:
        self.works.append(work)
        return super().train(work, examples)


def engine_of(prepared: Prepared, at_once: int | None, prefix_cache: bool = False) -> Engine:
    """The loop, or the batched engine with so many clients at once."""
    parts = (prepared.engine.adapted, prepared.task, prepared.config.build_training_settings(), prepared.config.seed)
    options = EngineConfig(clients_per_pass=at_once, workers=1, prefix_cache=prefix_cache)
    return LoopEngine(*parts) if at_once is None else BatchedEngine(LoopEngine(*parts, options))


def run_rounds(prepared: Prepared, engine: Engine) -> Progress:
    tiny.use_engine(prepared.federation, engine)
    return tiny.run_all_rounds(prepared)


def trained(engine: Engine, works: list[Assignment], examples: Examples) -> dict[str, Trained]:
    """What an engine makes of assignments, one for each client."""
    known, made = {work.client: work for work in works}, dict[str, Trained]()

    def finished(work: Assignment, result: Trained) -> None:
        made[work.client] = result

    engine.train_all(examples, {id: len(work.indices) for id, work in known.items()}, known.__getitem__, finished)
    return made


def apart(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest relative distance between tensors of one name."""
    assert set(left) == set(right)
    gaps = [0.0]
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        if not value.is_floating_point():
            assert torch.equal(value, right[name])
        elif value.any() or right[name].any():
            gaps.append(float((value.double() - right[name].double()).norm() / value.double().norm()))
    return max(gaps)


def doubled(work: Assignment) -> Assignment:
    """The same in float64."""

    def wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}

    def state(one: OptimizerState | None) -> OptimizerState | None:
        return one and OptimizerState({kind: wide(values) for kind, values in one.moments.items()}, one.steps)

    job = work.job
    changes = {name: wide(getattr(job, name)) for name in ("tensors", "masks", "gradient_offset")}
    wider: Job = replace(job, **changes, optimizer_state=state(job.optimizer_state), want_moments=True)
    return replace(work, job=wider, moments=state(work.moments))


def gaps(one: Trained, other: Trained) -> Iterator[float]:
    yield apart(one.tensors, other.tensors)
    yield apart(one.gradient, other.gradient)
    assert one.optimizer_state.steps == other.optimizer_state.steps
    assert set(one.optimizer_state.moments) == set(other.optimizer_state.moments)
    for kind, values in one.optimizer_state.moments.items():
        yield apart(values, other.optimizer_state.moments[kind])
    assert (one.steps, one.lr_sum, one.decay) == (other.steps, pytest.approx(other.lr_sum), other.decay)
    assert one.metrics["examples"] == other.metrics["examples"]
    yield abs(one.metrics["loss"] - other.metrics["loss"])


@pytest.fixture(scope="module")
def wide(tiny_folder: Path) -> Prepared:
    """The tiny BERT in float64."""
    prepared = prepare(tiny.config(tiny_folder))
    prepared.engine.adapted.model.double()
    return prepared


Collect = Callable[..., list[Assignment]]


@pytest.fixture(scope="module")
def collected(tiny_folder: Path, prepared: Prepared) -> Collect:
    """All assignments of a method's first two rounds, of one step to four by a client's texts; AdamW with decay."""

    def collect(key: str, **changes: Any) -> list[Assignment]:
        training = {"local_steps": None, "batch_size": 12, "optimizer_state": "keep", **changes.pop("training", {})}
        rounds = {"rounds": 2, "clients_per_round": None, **changes.pop("federation", {})}
        config = method_config(tiny_folder, key, training=training, federation=rounds, **changes)
        made = tiny.variant(prepared, config, engine=Collecting)
        engine = made.engine
        run_rounds(made, engine)
        return engine.works

    return collect


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_one_job_of_every_method_gives_the_same_in_float64(
    key: str, collected: Collect, wide: Prepared, passes: list[int]
) -> None:
    works = [doubled(work) for work in collected(key)]
    kinds = {(work.round, work.job.phase) for work in works}
    for kind in sorted(kinds):
        own = [work for work in works if (work.round, work.job.phase) == kind]
        expected = trained(engine_of(wide, None), own, wide.train)
        found = trained(engine_of(wide, 3), own, wide.train)
        for id, one in expected.items():
            assert max(gaps(one, found[id])) < 1e-9
    assert max(passes, default=1) > 1 or key == "fedgalore"  # whose weight decay shrinks the base by client


@pytest.fixture(scope="module", params=[None, [1]], ids=["all layers", "prefix cache"])
def loaded(request: pytest.FixtureRequest, tiny_folder: Path, prepared: Prepared) -> tuple[list[int] | None, Prepared]:
    """The layers with adapters, and the model with them, loaded once for all methods."""
    layers = request.param
    config = tiny.config(tiny_folder, "deep-bert", model={} if layers is None else {"layers_to_transform": layers})
    return layers, prepare(config, prepared.partition)


@pytest.mark.parametrize("key", methods_by_family(quick=["flora", "fedsa-lora"]))
def test_a_federation_of_every_method_is_the_same_with_several_clients_at_once(
    key: str, loaded: tuple[list[int] | None, Prepared], tiny_folder: Path
) -> None:
    """float32, two rounds, clients of one step to four (11 to 58 texts): SGD 1e-5, AdamW 1e-3."""
    layers, whole = loaded
    config = tiny.config(
        tiny_folder,
        "deep-bert",
        model={} if layers is None else {"layers_to_transform": layers},
        method={"name": key, "r": 2},
        training={"optimizer": "sgd", "lr": 0.005, "local_steps": None, "batch_size": 12},
        federation={"clients_per_round": None, "rounds": 2},
    )
    prepared = tiny.variant(whole, config)
    expected = run_rounds(prepared, engine_of(prepared, None)).state.tensors
    for at_once in AT_ONCE if layers is None else (3,):
        engine = engine_of(prepared, at_once, layers is not None)
        found = run_rounds(prepared, engine).state.tensors
        assert apart(expected, found) < (1e-3 if key in ADAMW else 1e-5)
        assert (engine._workers[0].loop.prefixes.get_cache(prepared.train) is not None) == (layers is not None)


STACKS = "its server needs the single replies of a round"
OTHER = "its clients also send something other than new values"
REINITIALIZED = "its factors are re-initialized in every round"
LATER = "it re-initializes its factors after round 2"
ALTERNATES = "a client trains something else in round 2 than in round 1"
REASONS: dict[str, str | None] = {
    "fed-sb": OTHER,
    "fedask": "its rounds have a second exchange",
    "fedavg": None,
    "federa": None,
    "fedex-lora": STACKS,
    "fedgalore": STACKS,
    "fedhm": STACKS,
    "fedit": None,
    "fedloru": LATER,
    "fedmomentum": STACKS,
    "fedrot-lora": ALTERNATES,
    "fedsa-lora": None,
    "fedsvd": REINITIALIZED,
    "ffa-lora": None,
    "flexlora": STACKS,
    "flora": STACKS,
    "florist": STACKS,
    "florg": STACKS,
    "fr-lora": REINITIALIZED,
    "hetlora": STACKS,
    "la-lora": None,
    "local-only": "its clients send nothing",
    "lora-a2": OTHER,
    "lora-fair": STACKS,
    "mfedloru": STACKS,
    "pfedlora": None,
    "pfedloru": LATER,
    "ravan": None,
    "rolora": ALTERNATES,
    "slora": LATER,
}
"""Reasons of refusals, None for methods that run."""
WRAPPERS: dict[str, str | None] = {
    "fedadagrad": None,
    "fedadam": None,
    "fedavgm": None,
    "fedpaq": None,
    "fedprox": None,
    "fedyogi": None,
    "low-precision": None,
    "scaffold": OTHER,
}
OPTIONS = {"scaffold": {"variate": "gradient"}}


def federation_of(clients: int) -> dict[str, Any]:
    return {"clients_per_round": clients, "rounds": 4, "buffered": {"concurrency": 4}}


@pytest.mark.parametrize(
    "key",
    methods_by_family(quick=[key for key in FAMILIES if key not in ("fedit", "pfedlora")]),  # these take seconds
)
def test_a_method_is_refused_with_the_reason_or_runs(key: str, tiny_folder: Path) -> None:
    """If all clients reply in every round, their rounds are synchronous; otherwise replies are of several rounds."""
    simulation = {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}
    settings = federation_of(4)
    try:
        method_config(tiny_folder, key, federation=settings, simulation=simulation)
    except FedspanError as error:
        refused: FedspanError | None = error
    else:
        refused = None
    expected_reason = REASONS[key]
    if refused is not None:
        assert refused.field == "federation.buffered"
        assert expected_reason in str(refused)
        return
    assert expected_reason is None
    run, waiting, partial = (
        prepare(method_config(tiny_folder, key, federation=federation, simulation=simulation)).federation
        for federation in (settings, {**settings, "buffered": None}, federation_of(2))
    )
    progress, expected, mixed, stale = run.begin(), waiting.begin(), partial.begin(), 0
    for _ in range(4):
        progress, expected = run.run_round(progress).progress, waiting.run_round(expected).progress
        for part in ("state", "states", "last_rounds"):
            assert differences(getattr(progress, part), getattr(expected, part)) == []
        result = partial.run_round(mixed)
        assert not result.failures
        stale += sum(age > 0 for _, age in result.arrivals or ())
        mixed = result.progress
    assert stale
    assert all(bool(value.isfinite().all()) for value in mixed.state.tensors.values())


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_wrappers_are_refused_with_the_reason_or_fit(wrapper: str) -> None:
    values = {
        "data": {"train": "x.csv"},
        "method": {"name": "fedit", "wrappers": [{"name": wrapper, **OPTIONS.get(wrapper, {})}]},
        "training": {"max_grad_norm": 0.0},
        "federation": federation_of(2),
        "simulation": {"speed": {}},
    }
    if (reason := WRAPPERS[wrapper]) is None:
        parse_config(values)
        return
    with pytest.raises(FedspanError, match=reason):
        parse_config(values)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"federation": {"buffered": {"concurrency": 3}}}, "federation.buffered", "needs federation.clients_per_round"),
        ({"privacy": {"mechanism": "central", "noise": 1}}, "privacy", "count the clients of synchronous rounds"),
        ({"cluster": {"workers": 2}}, "cluster", "cannot be combined with federation.buffered"),
        (
            {"simulation": {"speed": {}, "present": {"client-00": (2, None)}}},
            "simulation.present",
            "cannot be combined with federation.buffered",
        ),
        ({"evaluation": {"diagnostics": 2}}, "evaluation.diagnostics", "updates that start from one state"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str, problem: str) -> None:
    values = {"data": {"train": "x.csv"}, "federation": federation_of(2), "simulation": {"speed": {}}, **changes}
    if values["federation"].get("clients_per_round") and "privacy" in changes:
        values["federation"] = {**values["federation"], "weights": "uniform"}
    with pytest.raises(FedspanError, match=problem) as refused:
        parse_config(values)
    assert refused.value.field == field
