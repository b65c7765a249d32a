"""The rounds, as plainly as they can be written; what the toys run on.

Everything that crosses the network goes through bytes (``federation.serialization``), the server's state goes through
bytes after every round, clients hold their own base and memory, and a reply that is lost advances neither.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedspan.core.base import BaseUpdate, apply_patch, materialize
from fedspan.core.method import Memory, Method, Wrapper, compute_scaling
from fedspan.core.parametrization import compute_dense_change
from fedspan.core.tensors import Tensors, count, select_slots, split_extras
from fedspan.core.values import Client, Job, LayerSpec, Message, Reduced, ServerState, Spec, Trained
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.serialization import decode, decode_state, encode, encode_state
from fedspan.planning.shape_inference import ClientExchange, ShapeInference, rewrap_method, unwrap_method
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.wrappers.extras import ExtrasPolicy, WithExtras

from ..toys.problem import Problem

WHOLE = 1000
"""A batch size that no client's data reach: one step is one pass over all of them."""


def to_double(tensors: Tensors) -> dict[str, Tensor]:
    """Floating tensors in float64, others as they are."""
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Double(Wrapper):
    """Trains in float64 what the inner method draws in float32: its jobs' tensors are converted."""

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self._converted(self.inner.start(message, client, memory, round))

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        result, memory = self.inner.finish(job, trained, client, memory, round)
        return (self._converted(result) if isinstance(result, Job) else result), memory

    def _converted(self, job: Job) -> Job:
        state = job.optimizer_state
        if state is not None:
            state = replace(state, moments={kind: to_double(values) for kind, values in state.moments.items()})
        return replace(job, tensors=to_double(job.tensors), optimizer_state=state)


def with_extras(method: Method, policy: ExtrasPolicy = "average") -> Method:
    """A method as the toys run it: extras around it, float64 around both."""
    return Double(inner=WithExtras(inner=method, policy=policy))


def sgd(lr: float = 0.5, **changes: object) -> TrainingSettings:
    """Plain SGD on whole data sets without clipping, one step a round unless told."""
    return _set_up("sgd", lr, **changes)


def adamw(lr: float = 0.05, **changes: object) -> TrainingSettings:
    """AdamW likewise."""
    return _set_up("adamw", lr, **changes)


def _set_up(optimizer: str, lr: float, **changes: object) -> TrainingSettings:
    """Settings for toys: the batch is a client's whole data set."""
    plain = {"optimizer": optimizer, "batch_size": WHOLE, "max_grad_norm": 0.0, "group_by_length": False}
    local = {f"local_{name}" if name in ("steps", "epochs") else name: value for name, value in changes.items()}
    return TrainingSettings().model_copy(update={"lr": lr, **plain, **local})


@dataclass
class Party:
    """A client's side: what the server knows of it, and what stays with it."""

    client: Client
    memory: Memory = field(default_factory=dict)
    base: BaseUpdate = BaseUpdate()


class Federation:
    """A server and its clients.

    Args:
        ranks: Ranks of the clients, by id; all 2 by default.
        lora_alpha: Numerator of the clients' scaling.
        uniform: Whether clients have equal weights instead of their numbers of examples.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        training: TrainingSettings,
        *,
        ranks: Mapping[str, int] | None = None,
        lora_alpha: float = 4.0,
        uniform: bool = False,
    ) -> None:
        self.method, self.problem, self.training = method, problem, training
        self.adapted = problem.adapted()
        self.engine = LoopEngine(self.adapted, problem.task, training, seed=7)
        self.state: ServerState = method.init(self.adapted)
        self.parties: dict[str, Party] = {}
        for id, indices in problem.indices.items():
            rank, examples = (ranks or {}).get(id, 2), len(indices)
            scaling = compute_scaling(lora_alpha, rank)
            weight = 1.0 if uniform else float(examples)
            self.parties[id] = Party(Client(id, rank, scaling, examples, weight))
        self.elements: dict[str, tuple[int, int]] = {}
        self.replies: dict[str, Message] = {}
        self.trained: dict[str, Tensors] = {}
        self.reduced = Reduced()
        self._inferred: dict[str, tuple[ShapeInference, list[Mapping[int, ClientExchange]]]] = {}

    def round(self, cohort: Sequence[str] | None = None, *, lost: Collection[str] = ()) -> None:
        """One round; replies of the clients in ``lost`` never arrive."""
        before = encode_state(self.state)
        asked = [self.parties[id] for id in cohort or self.parties]
        reducer = Reducer([party.client for party in asked])
        self.elements, self.replies = {}, {}
        for party in asked:
            client = party.client
            message = decode(encode(self.method.sync(self.state, client)))
            base = apply_patch(party.base, message.base)
            reply, memory, trained = self._client(party, message, base)
            assert encode_state(self.state) == before, "a client wrote to the server's state"
            if client.id in lost:
                reducer.add(client.id, None)
                continue
            reducer.add(client.id, self.method.contribute(reply, client))
            self.elements[client.id] = _elements(message), _elements(reply)
            self.replies[client.id] = reply
            self.parties[client.id] = Party(replace(client, last_round=self.state.round), memory, base)
            self.trained[client.id] = trained
        self.reduced = reducer.compute_result()
        if self.method.declare_claims().second_exchange:
            self._second([party.client for party in asked if party.client.id in self.replies])
        after = self.method.update(self.state, self.reduced)
        assert encode_state(self.state) == before, "update wrote to the state that it was given"
        assert after.round == self.state.round + 1
        self.state = decode_state(encode_state(after))

    def _second(self, clients: Sequence[Client]) -> None:
        """The second exchange of a round."""
        order, reducer = self.method.build_second_order(self.state, self.reduced), Reducer(clients)
        for client in clients:
            message, tensors = decode(encode(order)), split_extras(self.trained[client.id])[0]
            reply = decode(encode(self.method.build_second_reply(message, tensors, client, self.state.round)))
            reducer.add(client.id, self.method.contribute(reply, client))
            down, up = self.elements[client.id]
            self.elements[client.id] = down + _elements(message), up + _elements(reply)
        self.reduced = replace(self.reduced, mean={**self.reduced.mean, **reducer.compute_result().mean})

    def _client(self, party: Party, message: Message, base: BaseUpdate) -> tuple[Message, Memory, Tensors]:
        client, memory = party.client, party.memory
        self.adapted.set_base(base)
        job = self.method.start(message, client, memory, self.state.round)
        for _ in range(5):
            trained = self.engine.train(
                Assignment(
                    client.id, self.state.round, job, self.problem.indices[client.id], self.training.optimizer_spec.lr
                ),
                self.problem.examples,
            )
            result, memory = self.method.finish(job, trained, client, memory, self.state.round)
            if isinstance(result, Message):
                return decode(encode(result)), memory, trained.tensors
            job = result
        raise AssertionError("a client's round does not end")

    def job(self, client: str | None = None) -> Job:
        """The model to evaluate, as a job: a client's, or the global one."""
        party = None if client is None else self.parties[client]
        known, memory = (None, {}) if party is None else (party.client, party.memory)
        return self.method.start(self.method.sync(self.state, known), known, memory, self.state.round)

    def get_weight(self, layer: str, client: str | None = None) -> Tensor:
        """What a layer computes with in the model to evaluate: one dense matrix, (O, I), float64."""
        job = self.job(client)
        base = materialize(self.problem.to_dense(layer)[layer], self.state.base, layer)
        effective = job.parametrization[layer].compute_effective(to_double(select_slots(job.tensors, layer)))
        return base + compute_dense_change(effective, base)

    def loss(self, client: str) -> float:
        """A client's loss under the model that it would evaluate, by the engine's own prediction."""
        self.adapted.set_base(self.state.base)
        indices = self.problem.indices[client]
        predictions = self.engine.predict(self.job(client), self.problem.examples, indices, batch_size=4)
        return self.problem.task.compute_metrics(predictions, self.problem.examples, indices.tolist())["loss"]

    def declare_claims(self, client: str, round: int) -> tuple[int, int]:
        """Elements down and up that a plan counts for a client over all target layers.

        The method's own estimate, of 4 bytes an element, or else what its functions give on shapes.
        """
        rank, bare = self.parties[client].client.rank, unwrap_method(self.method)
        down = up = 0
        for layer in bare.spec.layers:
            if (estimate := self.method.estimate_messages(layer, rank, round)) is not None:
                down, up = (total + _elements(one) for total, one in zip((down, up), estimate, strict=True))
                continue
            exchange = self._infer_exchanges(bare, layer, round)[rank]
            for sent, received in ((exchange.down, exchange.up), exchange.second or (Message(), Message())):
                down, up = down + _elements(sent), up + _elements(received)
        return down, up

    def _infer_exchanges(self, bare: Method, layer: LayerSpec, round: int) -> Mapping[int, ClientExchange]:
        """Messages by rank in a round in which everybody participates; rounds are inferred once."""
        cohort = [party.client.rank for party in self.parties.values()]
        if layer.name not in self._inferred:
            single = rewrap_method(self.method, replace(bare, spec=Spec((layer,), clients=bare.spec.clients)))
            self._inferred[layer.name] = ShapeInference(single, cohort), []
        inference, rounds = self._inferred[layer.name]
        while len(rounds) <= round:
            rounds.append(inference.run_round(cohort))
        return rounds[round]


def _elements(message: Message) -> int:
    """Elements that a message carries for target layers."""
    return count(split_extras(message.tensors)[0]) + (0 if message.base is None else message.base.numel())


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Whether two tensors differ by at most ``tolerance`` in relative Frobenius norm."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return actual.shape == expected.shape and bool(
        torch.linalg.norm(actual - expected) <= tolerance * max(1e-12, float(torch.linalg.norm(expected)))
    )
