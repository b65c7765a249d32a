"""Rounds that are watched: what every function was given and gave, and whether it wrote to its arguments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.config import RunConfig
from fedspan.core.base import BaseUpdate, Increment, materialize
from fedspan.core.lowrank import LowRank
from fedspan.core.method import Memory, Wrapper
from fedspan.core.parametrization import Parametrization, compute_dense_change
from fedspan.core.tensors import Tensors, select_slots
from fedspan.core.values import Client, Contribution, Job, LayerSpec, Message, Reduced, ServerState, Trained
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress, RoundResult
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine

from . import tiny

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "fedgalore": {"adaptive_refreshes": 2},
    "fedloru": {"tau": 2},
    "hetlora": {"gamma": 1.0},
    "lora-fair": {"server_steps": 20},
    "mfedloru": {"tau": 2},
    "pfedloru": {"tau": 2},
    "slora": {"sparse_rounds": 2, "density": 0.3},
}
"""Of methods whose claims would not show in a few rounds otherwise (a pruned rank is not the one asked for), and
fewer steps of LoRA-FAIR's server, whose 100 take most of its time and claim nothing that 20 do not."""


PERIODIC = ("fedloru", "mfedloru", "pfedloru", "slora")
"""Methods with periods of two rounds, of which a run has two; the others have three rounds."""


def method_config(folder: Path, key: str, kind: str = "bert", **changes: Mapping[str, Any]) -> RunConfig:
    """A run of a method on the tiny corpus, three of four clients a round, moments and weight decay on.

    At rank 3 the factors of three clients together are larger than some layers and smaller than others.
    """
    values = {
        "method": {"name": key, "r": 3, "lora_alpha": 6, **OPTIONS.get(key, {}), **changes.pop("method", {})},
        # clipping lets the server run the method, too, to see what an untrained client sends
        "federation": {"rounds": 4 if key in PERIODIC else 3, "clip_ratio": None, **changes.pop("federation", {})},
        "training": {"optimizer_state": "keep", "weight_decay": 0.1, **changes.pop("training", {})},
    }
    return tiny.config(folder, kind, **values, **changes)


def flat(value: object) -> dict[str, object]:
    """Tensors and plain values inside dataclasses, dicts and sequences, by where they stand."""
    found: dict[str, object] = {}
    _flatten(value, "", found)
    return found


def _flatten(value: object, path: str, found: dict[str, object]) -> None:
    """Into one dict for all depths, and leaves first: every call of every method is looked through twice."""
    if isinstance(value, Tensor | str | int | float | None):
        found[path] = value
    elif dataclasses.is_dataclass(value):
        for name in _field_names(type(value)):
            _flatten(getattr(value, name), f"{path}[{name}]", found)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _flatten(part, f"{path}[{key}]", found)
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            _flatten(part, f"{path}[{number}]", found)
    else:
        found[path] = value


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def differences(left: object, right: object) -> list[str]:
    """Where two values are not the same, types and bits of tensors included."""
    one, other = flat(left), flat(right)
    return [
        path for path in {**one, **other} if path not in one or path not in other or _differ(one[path], other[path])
    ]


def _differ(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype != other.dtype or not torch.equal(one, other)
    return type(one) is not type(other) or one != other


def snapshot(value: object) -> dict[str, object]:
    """A deep copy, for ``differences``."""
    return {path: leaf.clone() if isinstance(leaf, Tensor) else leaf for path, leaf in flat(value).items()}


@dataclass(frozen=True)
class Call:
    """One call of one of a method's functions."""

    function: str
    args: tuple[Any, ...]
    result: Any


@dataclass(frozen=True, kw_only=True)
class Watched(Wrapper):
    """A method whose calls are kept, and compared with their arguments' values of before."""

    calls: list[Call] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def _call(self, name: str, *args: object) -> Any:
        before = snapshot(args)
        result = getattr(self.inner, name)(*args)
        self.written.extend(f"{name}{path}" for path in differences(before, flat(args)))
        self.calls.append(Call(name, args, result))
        return result

    def sync(self, state: ServerState, client: Client | None) -> Message:
        return self._call("sync", state, client)

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self._call("start", message, client, memory, round)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        return self._call("finish", job, trained, client, memory, round)

    def contribute(self, message: Message, client: Client) -> Contribution:
        return self._call("contribute", message, client)

    def build_second_order(self, state: ServerState, reduced: Reduced) -> Message:
        return self._call("build_second_order", state, reduced)

    def build_second_reply(self, order: Message, tensors: Tensors, client: Client, round: int) -> Message:
        return self._call("build_second_reply", order, tensors, client, round)

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        return self._call("update", state, reduced)


@dataclass(frozen=True)
class LocalTraining:
    """One job that a client trained."""

    client: str
    job: Job
    trained: Trained


class WatchedEngine(LoopEngine):
    """Keeps what was trained; compares jobs with their values of before."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.trained: list[LocalTraining] = []
        self.written: list[str] = []

    def train(self, work: Assignment, examples: Examples) -> Trained:
        before = snapshot((work.job, work.moments))
        trained = super().train(work, examples)
        self.written += [f"train{path}" for path in differences(before, flat((work.job, work.moments)))]
        self.trained.append(LocalTraining(work.client, work.job, trained))
        return trained


@dataclass(frozen=True)
class Round:
    """One round: the progress before it, what it gave, and all that happened in it."""

    before: Progress
    result: RoundResult
    calls: tuple[Call, ...]
    trained: tuple[LocalTraining, ...]

    @property
    def after(self) -> Progress:
        return self.result.progress

    def of(self, function: str) -> list[Call]:
        return [call for call in self.calls if call.function == function]

    def messages(self) -> list[Message]:
        """What was transmitted, in the order of ``result.transfers``."""
        sent = [message for call in self.calls for message in _list_transmitted(call)]
        assert len(sent) == len(self.result.transfers)
        # both sorts are stable, so that a client's messages of one direction stay in the order of the exchanges
        return [message for _, _, message in sorted(sent, key=lambda one: one[:2])]


def _list_transmitted(call: Call) -> list[tuple[str, str, Message]]:
    """The messages that a call stands for, by client and direction."""
    match call.function:
        case "sync":
            return [(call.args[1].id, "down", call.result)]
        case "finish" if isinstance(call.result[0], Message):
            return [(call.args[2].id, "up", call.result[0])]
        case "build_second_reply":
            return [(call.args[2].id, "down", call.args[0]), (call.args[2].id, "up", call.result)]
        case _:
            return []


@dataclass(frozen=True)
class MethodRun:
    """A federation that was run; ``written`` are inputs that a method wrote to, and there should be none."""

    prepared: Prepared
    rounds: tuple[Round, ...]
    written: tuple[str, ...]

    @property
    def federation(self) -> Federation:
        return self.prepared.federation

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.prepared.engine.adapted.spec.layers

    def weights(self, ids: tuple[str, ...]) -> dict[str, float]:
        """Normalized weights of a cohort in the average."""
        total = sum(self.federation.clients[id].client.weight for id in ids)
        return {id: self.federation.clients[id].client.weight / total for id in ids}

    def change(self, layer: str, base: BaseUpdate, parametrization: Parametrization, tensors: Tensors) -> Tensor:
        """A layer's effective weight minus W0, (O, I), computed densely in float64 from the float32 tensors."""
        weight = self.prepared.engine.adapted.get_weight(layer).double()
        exact = BaseUpdate(base.round, base.rho, {name: _double(delta) for name, delta in base.total.items()})
        moved = materialize(weight, exact, layer)
        slots = {
            slot: value.double() if value.is_floating_point() else value  # positions stay whole numbers
            for slot, value in select_slots(tensors, layer).items()
        }
        return compute_dense_change(parametrization.compute_effective(slots), moved) + moved - weight

    def global_change(self, layer: str, progress: Progress) -> Tensor:
        """A layer's change in the model that a progress stands for."""
        job = self.prepared.evaluator.build_job(progress, None)
        return self.change(layer, progress.state.base, job.parametrization[layer], job.tensors)

    def mean_change(self, layer: str, round: Round) -> Tensor:
        """The weighted mean of a layer's change over the models that the clients trained."""
        shares, mean = self.weights(round.result.cohort), torch.zeros((), dtype=torch.float64)
        for id, local in {local.client: local for local in round.trained}.items():  # a client's last phase
            parametrization, base = local.job.parametrization[layer], round.before.state.base
            if local.trained.decay != 1.0:
                base = base.add(Increment(base.round + 1, {}, local.trained.decay))
            mean = mean + shares[id] * self.change(layer, base, parametrization, local.trained.tensors)
        return mean


def _double(delta: LowRank | Tensor) -> LowRank | Tensor:
    return delta.to(torch.float64)


def run_watched(prepared: Prepared, config: RunConfig) -> MethodRun:
    """All rounds of a config, and an evaluation, on a model and data that are loaded already."""
    watched: list[Watched] = []

    def watch(method: Any) -> Watched:
        watched.append(Watched(inner=method))
        return watched[0]

    made = tiny.variant(prepared, config, watch=watch, engine=WatchedEngine)
    method, engine, written = watched[0], made.engine, list[str]()
    rounds: list[Round] = []
    progress = made.federation.begin()
    while progress.state.round < made.federation.settings.rounds:
        method.calls.clear()
        engine.trained.clear()
        before = snapshot(progress)
        result = made.federation.run_round(progress)
        rounds.append(Round(progress, result, tuple(method.calls), tuple(engine.trained)))
        written += [f"play{path}" for path in differences(before, flat(progress))]
        progress = result.progress
    after = snapshot(progress)
    made.evaluator.evaluate_clients(progress)
    written += [f"evaluate{path}" for path in differences(after, flat(progress))]
    return MethodRun(made, tuple(rounds), (*written, *method.written, *engine.written))


RunMethod = Callable[..., MethodRun]
