"""What compressing wrappers share, on one that sends whole quarters: changes, their prefixes, memory and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedspan.core.method import Memory
from fedspan.core.tensors import Tensors, join_tensor_name
from fedspan.core.values import Client, Job, Message, Reduced, Trained
from fedspan.errors import FedspanError
from fedspan.methods.fedit import FedIT
from fedspan.methods.flora import FLoRA
from fedspan.methods.local_only import LocalOnly
from fedspan.methods.lora_a2 import LoRAA2
from fedspan.wrappers.compression import Compression
from helpers.toys.problem import LAYERS, Problem

CLIENT = Client("client-0", 2, 2.0, 6, 6.0)
NAMES = {join_tensor_name(layer, slot) for layer in LAYERS for slot in "AB"}


@dataclass(frozen=True, kw_only=True)
class Quarters(Compression):
    """Sends numbers of quarters, flat and with two more entries, and counts the rounds in its memory."""

    key: ClassVar[str] = "quarters"

    def compress(
        self, changes: Tensors, job: Job, client: Client, memory: Memory, round: int
    ) -> tuple[Tensors, Memory]:
        sent = {name: torch.cat([(4 * value).round().flatten(), torch.zeros(2)]) for name, value in changes.items()}
        return sent, {"rounds": memory.get("rounds", torch.zeros(())) + 1}

    def decompress(self, tensors: Tensors) -> Tensors:
        return {name: value / 4 for name, value in tensors.items()}


def begin() -> tuple[Quarters, Job, Mapping[str, Tensor]]:
    """The wrapped FedIT, its first job, and the server's tensors."""
    problem = Problem(clients=1, dtype=torch.float32)
    wrapped = Quarters(inner=FedIT(spec=problem.adapted().spec, r=2))
    state = wrapped.init(problem.adapted())
    return wrapped, wrapped.start(wrapped.sync(state, CLIENT), CLIENT, {}, 0), state.tensors


def finish(wrapped: Quarters, job: Job, tensors: Tensors, memory: Memory | None = None) -> tuple[Message, Memory]:
    reply, memory = wrapped.finish(job, Trained(tensors, 6.0, 0.5), CLIENT, memory or {}, 0)
    assert isinstance(reply, Message)
    return reply, memory


def test_changes_are_compressed_and_added_to_what_the_server_has() -> None:
    """In the tensors' own shapes, without the surplus entries at the end."""
    wrapped, job, before = begin()
    reply, _ = finish(wrapped, job, {name: value + 0.3 for name, value in job.tensors.items()})
    assert reply.tensors.keys() == {f"quarters/{name}" for name in NAMES}
    for name in NAMES:
        assert reply.tensors[f"quarters/{name}"].tolist() == [1.0] * before[name].numel() + [0.0] * 2
    state = wrapped.init(Problem(clients=1, dtype=torch.float32).adapted())
    after = wrapped.update(state, Reduced(mean=wrapped.contribute(reply, CLIENT).sum, count=1))
    for name in NAMES:
        assert torch.allclose(after.tensors[name], before[name] + 0.25)


def test_the_wrapper_s_memory_is_its_own() -> None:
    wrapped, job, _ = begin()
    memory: Memory = {"theirs": torch.ones(1)}
    for number in (1.0, 2.0):
        _, memory = finish(wrapped, job, job.tensors, memory)
        assert float(memory["quarters-memory/rounds"]) == number
    assert not any(name.startswith("quarters-start/") for name in memory)


def test_a_tensor_that_was_not_sent_is_an_error_where_replies_are_values() -> None:
    wrapped, job, _ = begin()
    kept = {name: value for name, value in job.tensors.items() if name != "fc1/A"}
    with pytest.raises(FedspanError, match="the reply has a tensor that was not sent: fc1/A") as caught:
        finish(wrapped, replace(job, tensors=kept), job.tensors)
    assert (caught.value.field, caught.value.value) == ("method.wrappers", "quarters")


def test_changes_of_a_method_that_sends_them_are_compressed_whole_and_integers_not_at_all() -> None:
    """LoRA-A2 trains in two phases, between which the wrapper stores the tensors of the first one's start."""
    problem = Problem(clients=1, dtype=torch.float32)
    wrapped = Quarters(inner=LoRAA2(spec=problem.adapted().spec, r=2))
    state = wrapped.init(problem.adapted())
    job = wrapped.start(wrapped.sync(state, CLIENT), CLIENT, {}, 0)
    reply, memory, between = None, dict[str, Tensor](), list[bool]()
    while not isinstance(reply, Message):
        changed = {name: value + 0.5 for name, value in job.tensors.items()}
        reply, memory = wrapped.finish(job, Trained(changed, 6.0, 0.5), CLIENT, memory, 0)
        between.append(any(name.startswith("quarters-start/") for name in memory))
        job = reply if isinstance(reply, Job) else job
    assert between[-1] is False
    assert all(between[:-1])
    for name, value in reply.tensors.items():
        assert name.startswith("quarters/quarters-whole/") is value.is_floating_point()
    assert {value.is_floating_point() for value in reply.tensors.values()} >= {True}


def test_claims_and_refusals() -> None:
    """Rounded replies are no exact mean, and changes instead of values."""
    spec = Problem(clients=1).adapted().spec
    inner = FedIT(spec=spec, r=2)
    claims = Quarters(inner=inner).declare_claims()
    assert (claims.exact, claims.sends) == (False, "changes")
    assert Quarters(inner=LoRAA2(spec=spec)).declare_claims().sends == LoRAA2(spec=spec).declare_claims().sends
    for method, words in ((FLoRA(spec=spec), "needs single replies"), (LocalOnly(spec=spec), "replies hold nothing")):
        assert words in str(Quarters(inner=inner).explain_refusal(method.declare_claims()))
    assert Quarters(inner=inner).explain_refusal(inner.declare_claims()) is None
