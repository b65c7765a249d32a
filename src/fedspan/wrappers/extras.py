"""Extras: the parameters that train beside the target layers (head, norms, ``modules_to_save``), for every method.

``average``: the extras are transmitted both ways each round and averaged with the replies' weights.
``local``: every client trains its own extras; it receives the server's initial values once.
``frozen``: the extras do not train; every client receives the server's initial values once, so that a random head is
the same on all clients.

Buffers (running statistics of norms) follow their modules and are averaged, local or frozen with them; of integer
buffers, which count batches, the largest value is used. The changes of running means and of variances are limited
separately from the adapter's (``Claims.quantities``), and averaged variances are not negative. Unless they are frozen,
norms are in training mode in every phase of a job, also in one in which the extras rest (``Job.extras``): then their
parameters do not train, but they normalize by the batch and their statistics move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

import torch

from fedspan.core.method import Claims, Memory, Quantity, Wrapper
from fedspan.core.tensors import Tensors, is_extra, join_extra_name, split_extras
from fedspan.core.values import Client, Contribution, Group, Job, Message, Reduced, ServerState, Trained, Weights

ExtrasPolicy = Literal["average", "local", "frozen"]


@final
@dataclass(frozen=True, kw_only=True)
class WithExtras(Wrapper):
    """Adds the extras of ``spec.extras`` to a method.

    Args:
        policy: Policy ``average``, ``local`` or ``frozen``.
        lr_scale: Multiplier on the learning rate of the extras.
    """

    policy: ExtrasPolicy
    lr_scale: float = 1.0

    def declare_claims(self) -> Claims:
        claims = self.inner.declare_claims()
        if self.policy == "local" and self.spec.extras:
            return replace(claims, personal=True)  # a client with its own head has its own model
        if self.policy == "average":
            quantities = (
                Quantity(name, names=frozenset(map(join_extra_name, paths)))
                for name, paths in (
                    ("running means", self.spec.buffers - self.spec.variances),
                    ("running variances", self.spec.variances),
                )
                if paths
            )
            return replace(claims, quantities=(*claims.quantities, *quantities))
        return claims

    def init(self, weights: Weights) -> ServerState:
        state = self.inner.init(weights)
        extras = {join_extra_name(parameter): weights.get_extra(parameter) for parameter in self.spec.extras}
        return replace(state, tensors={**state.tensors, **extras})

    def sync(self, state: ServerState, client: Client | None) -> Message:
        inner, extras = split_extras(state.tensors)
        message = self.inner.sync(replace(state, tensors=inner), client)
        first = client is None or client.last_round is None
        if self.policy != "average" and not first:
            return message
        return replace(message, tensors={**message.tensors, **extras})

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        inner, extras = split_extras(message.tensors)
        inner_memory, stored_extras = split_extras(memory)
        job = self.inner.start(replace(message, tensors=inner), client, inner_memory, round)
        if self.policy == "average":
            return self._add_extras(job, extras)
        # Where extras stay on the client, its own values take precedence over the server's initial ones, and stand in
        # the same order whether the message has any: the order decides how the norm of the gradients is rounded.
        missing = {name: value for name, value in extras.items() if name not in stored_extras}
        return self._add_extras(job, {**stored_extras, **missing})

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        inner_tensors, extras = split_extras(trained.tensors)
        inner_memory, _ = split_extras(memory)
        inner_job = replace(
            job,
            tensors=split_extras(job.tensors)[0],
            trainable=_drop_extras(job.trainable),
            masks=split_extras(job.masks)[0],
        )
        result, inner_memory = self.inner.finish(
            inner_job, replace(trained, tensors=inner_tensors), client, inner_memory, round
        )
        stored_extras = {} if self.policy == "average" else extras
        if isinstance(result, Job):
            return self._add_extras(result, extras), {**inner_memory, **split_extras(memory)[1]}
        if self.policy == "average":
            result = replace(result, tensors={**result.tensors, **extras})
        return result, {**inner_memory, **stored_extras}

    def contribute(self, message: Message, client: Client) -> Contribution:
        inner, extras = split_extras(message.tensors)
        contribution = self.inner.contribute(replace(message, tensors=inner), client)
        counts = {name: value for name, value in extras.items() if not value.is_floating_point()}
        values = {name: value for name, value in extras.items() if name not in counts}
        return replace(contribution, sum={**contribution.sum, **values}, stack={**contribution.stack, **counts})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        inner_tensors, extras = split_extras(state.tensors)
        inner_mean, extras_mean = split_extras(reduced.mean)
        counts = [split_extras(item.tensors)[1] for item in reduced.stack]
        largest = {
            name: torch.stack([client_counts[name] for client_counts in counts]).amax(0) for name in (counts or [{}])[0]
        }
        items = [replace(item, tensors=split_extras(item.tensors)[0]) for item in reduced.stack]
        inner_reduced = replace(reduced, mean=inner_mean, stack=tuple(item for item in items if item.tensors))
        for name in map(join_extra_name, self.spec.variances):
            if name in extras_mean:  # a step of a server optimizer, or a decompressed or late change, may overshoot
                extras_mean[name] = extras_mean[name].clamp(min=0)
        after = self.inner.update(replace(state, tensors=inner_tensors), inner_reduced)
        return replace(after, tensors={**after.tensors, **extras, **extras_mean, **largest})

    def _add_extras(self, job: Job, extras: Tensors) -> Job:
        if not extras:
            return job
        job = replace(job, tensors={**job.tensors, **extras})
        if self.policy == "frozen":
            return job
        job = replace(job, buffers=frozenset(join_extra_name(path) for path in self.spec.buffers))
        if not job.extras:
            return job
        names = tuple(name for name in extras if name not in job.buffers)
        return replace(job, trainable=(*job.trainable, Group(names, lr_scale=self.lr_scale)))


def _drop_extras(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    stripped = [replace(group, names=tuple(name for name in group.names if not is_extra(name))) for group in groups]
    return tuple(group for group in stripped if group.names)
