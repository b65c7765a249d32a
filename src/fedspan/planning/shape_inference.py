"""A method's rounds without values: its own functions run on tensors that have only a shape and a dtype.

Torch's meta device computes the shapes of almost every result, so a round costs milliseconds on a layer of any size.
No values means that none can decide anything: a number that a method reads from a tensor is 1, and a comparison is
false (HetLoRA, for example, prunes nothing). A method whose messages have sizes that depend on values defines
``Method.estimate_messages``.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedspan.core.method import Memory, Method, RegisteredMethod, Traffic, Wrapper
from fedspan.core.tensors import Tensors, split_extras
from fedspan.core.values import Client, Contribution, Job, Message, OptimizerState, Reduced, Spec, StackItem, Trained
from fedspan.federation.serialization import compute_payload_size
from fedspan.training.projector_refresh import build_untrained_tensors


def _infer_geqrf(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix), matrix.new_empty(min(matrix.shape))


_READS = {"item": 1.0, "__float__": 1.0, "__int__": 1, "__index__": 1, "__bool__": False}


class _Shapes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            return _READS[name]
        call = _infer_geqrf if func is torch.geqrf else func  # which the meta device lacks
        return call(*args, **(kwargs or {}))


@contextmanager
def _to_meta() -> Generator[None]:
    with torch.device("meta"), _Shapes():
        yield


class _Weights:
    """The pretrained model, without values."""

    def __init__(self, spec: Spec, extras: Tensors) -> None:
        self._shapes, self._extras = {layer.name: layer.shape for layer in spec.layers}, extras

    def get_weight(self, layer: str) -> Tensor:
        return torch.empty(self._shapes[layer])

    def get_extra(self, parameter: str) -> Tensor:
        return self._extras[parameter]


@dataclass(frozen=True)
class ClientExchange:
    """A client's half of a round."""

    down: Message
    jobs: tuple[Job, ...]
    """Jobs that the client trains, one after another."""
    up: Message
    second: tuple[Message, Message] | None = None
    """Messages to and from the client in the round's second exchange; None: the method has none."""

    @property
    def traffic(self) -> Traffic:
        """Bytes of all messages."""
        second_down, second_up = map(compute_payload_size, self.second or (Message(), Message()))
        return Traffic(compute_payload_size(self.down) + second_down, compute_payload_size(self.up) + second_up)


class ShapeInference:
    """The rounds of a method for clients that participate in all of them.

    Args:
        method: Method to run, with its wrappers. Its spec may have one target layer at most: the mode under which
            values are left out is that of a single thread.
        extras: Tensors on the meta device of the spec's extras and their buffers, by path.
    """

    def __init__(self, method: Method, ranks: Iterable[int], extras: Tensors = MappingProxyType({})) -> None:
        self._method = method
        self._memories: dict[int, Memory] = {rank: {} for rank in ranks}
        with _to_meta():
            self.state = method.init(_Weights(method.spec, extras))

    def start(self, rank: int) -> tuple[Message, Job]:
        """Return the message to a client of a rank in the current round, and its first job."""
        with _to_meta():
            client, round = self._build_client(rank), self.state.round
            message = self._method.sync(self.state, client)
            return message, self._method.start(message, client, self._memories[rank], round)

    def run_round(self, cohort: Sequence[int]) -> dict[int, ClientExchange]:
        """Run the current round.

        Args:
            cohort: Ranks of the clients that reply, on which the next state depends.

        Returns:
            The exchange with a client of every rank, whether or not one replies.
        """
        exchanges = {rank: self._exchange(rank) for rank in self._memories}
        with _to_meta():
            parts = {
                rank: self._method.contribute(exchanges[rank].up, self._build_client(rank))
                for rank in sorted(set(cohort))
            }
            reduced = self._reduce(cohort, parts)
            if self._method.declare_claims().second_exchange:
                order = self._method.build_second_order(self.state, reduced)
                exchanges = {rank: self._add_second(one, order, rank) for rank, one in exchanges.items()}
                means = self._contribute_second(exchanges, next(iter(parts)))
                reduced = replace(reduced, mean={**reduced.mean, **means})
            self.state = self._method.update(self.state, reduced)
        return exchanges

    def _add_second(self, first: ClientExchange, order: Message, rank: int) -> ClientExchange:
        tensors = split_extras(_simulate_training(first.jobs[-1]).tensors)[0]
        reply = self._method.build_second_reply(order, tensors, self._build_client(rank), self.state.round)
        return replace(first, second=(order, reply))

    def _contribute_second(self, exchanges: Mapping[int, ClientExchange], rank: int) -> Tensors:
        """Return the tensors of a client's second reply in the form in which they are averaged."""
        second = exchanges[rank].second
        assert second is not None
        return self._method.contribute(second[1], self._build_client(rank)).sum

    def _build_client(self, rank: int) -> Client:
        return Client(f"rank {rank}", rank, 1.0, 1, 1.0, self.state.round - 1 if self.state.round else None)

    def _exchange(self, rank: int) -> ClientExchange:
        (down, job), client, memory = self.start(rank), self._build_client(rank), self._memories[rank]
        jobs = [job]
        with _to_meta():
            while True:
                result, memory = self._method.finish(
                    jobs[-1], _simulate_training(jobs[-1]), client, memory, self.state.round
                )
                if isinstance(result, Message):
                    break
                jobs.append(result)
        self._memories[rank] = memory
        return ClientExchange(down, tuple(jobs), result)

    def _reduce(self, cohort: Sequence[int], parts: Mapping[int, Contribution]) -> Reduced:
        mean = {name: value for part in parts.values() for name, value in part.sum.items()}
        share = 1 / len(cohort)
        stack = tuple(
            StackItem(replace(self._build_client(rank), id=f"client {number}"), share, parts[rank].stack)
            for number, rank in enumerate(cohort)
            if parts[rank].stack
        )
        return Reduced(mean, stack, len(cohort))


def _simulate_training(job: Job) -> Trained:
    """Return a job's tensors as training leaves them: projector refreshes are all that changes a shape."""
    tensors, steps = build_untrained_tensors(job), 1 if job.steps is None else job.steps
    trained = {name: tensors[name] for name in job.trainable_names}
    moments = OptimizerState({"exp_avg": trained, "exp_avg_sq": trained}, dict.fromkeys(trained, steps))
    return Trained(tensors, moments, steps, 1.0, trained if job.want_gradient or not steps else {})


def unwrap_method(method: Method) -> RegisteredMethod:
    """Return the method inside its wrappers."""
    while isinstance(method, Wrapper):
        method = method.inner
    assert isinstance(method, RegisteredMethod)
    return method


def rewrap_method(method: Method, bare: RegisteredMethod) -> Method:
    """Put a method's wrappers around another method."""
    return replace(method, inner=rewrap_method(method.inner, bare)) if isinstance(method, Wrapper) else bare


def count_traffic(
    method: Method, ranks: Iterable[int], cohorts: Sequence[Sequence[int]], extras: Tensors = MappingProxyType({})
) -> list[Mapping[int, Traffic]]:
    """Count the bytes that clients that participate in every round receive and send, by round and rank.

    Apart from the state, methods distinguish rounds by parity and by their own whole-number options (FedLoRU's ``tau``,
    SLoRA's ``sparse_rounds``). If all cohorts are alike, and the rounds after these numbers repeat with a period, the
    later rounds are therefore not run.

    Args:
        method: Method with its wrappers; its spec has one target layer, or only extras.
        extras: Tensors on the meta device of the spec's extras and their buffers, by path.
    """
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    cohorts = tuple(shared.setdefault(tuple(cohort), tuple(cohort)) for cohort in cohorts)
    shapes = tuple((path, value.shape, value.dtype) for path, value in extras.items())
    return list(_count_traffic(method, tuple(sorted(set(ranks))), cohorts, shapes))


@functools.lru_cache(maxsize=1024)
def _count_traffic(
    method: Method,
    ranks: tuple[int, ...],
    cohorts: tuple[tuple[int, ...], ...],
    extras: tuple[tuple[str, torch.Size, torch.dtype], ...],
) -> tuple[Mapping[int, Traffic], ...]:
    """Count the bytes; runs of one table differ in data and partition, so most of their layers are counted before."""
    layers = method.spec.layers
    if layers and method.estimate_messages(layers[0], ranks[0], 0) is not None:
        return tuple(
            {rank: traffic for rank in ranks if (traffic := _estimate_traffic(method, rank, number))}
            for number in range(len(cohorts))
        )
    bare = unwrap_method(method)
    options = [getattr(bare, option.name) for option in fields(bare) if option.name not in ("seed", "r")]
    largest = max([2, *(value for value in options if type(value) is int)])
    values = {path: torch.empty(shape, dtype=dtype, device="meta") for path, shape, dtype in extras}
    run = ShapeInference(method, ranks, values)
    rows: list[Mapping[int, Traffic]] = []
    is_equal = len({tuple(sorted(cohort)) for cohort in cohorts}) == 1
    for number, cohort in enumerate(cohorts):
        period = _find_period(rows, largest) if is_equal and number >= 2 * largest + 4 else None
        if period is not None:
            rows.append(rows[-period])
        else:
            rows.append({rank: exchange.traffic for rank, exchange in run.run_round(cohort).items()})
    return tuple(rows)


def _estimate_traffic(method: Method, rank: int, round: int) -> Traffic | None:
    """Return the bytes of the messages that a method estimates for its only layer; None if it estimates none."""
    with _to_meta():
        messages = method.estimate_messages(method.spec.layers[0], rank, round)
    return None if messages is None else Traffic(*map(compute_payload_size, messages))


def _find_period(rows: Sequence[object], largest: int) -> int | None:
    """Return the shortest period, at most ``largest``, with which the last ``largest + 2`` rows repeat earlier ones."""
    tail = range(len(rows) - largest - 2, len(rows))
    return next(
        (period for period in range(1, largest + 1) if all(rows[row] == rows[row - period] for row in tail)), None
    )
