"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, arXiv:1910.06378,
algorithm 1.

    client i:  y <- y - lr (g_i(y) - c_i + c), K times from y = x
               c_i+ = grad f_i(x)  (option I)   or   c_i - c + (x - y) / (K lr)  (option II);   sends y and c_i+ - c_i
    server:    x <- sum_i p_i y_i,   c <- c + |S| / N sum_i p_i (c_i+ - c_i),   |S| replies of N clients

for every tensor that is trained and transmitted, the head included; all variates start at 0. A client is sent the
variates that changed since it last participated.

Deviations: the wrapped method updates x, which is the paper's step of size 1; a server optimizer inside gives
others. The paper averages plainly (``federation.weights: uniform``). Weighted by examples, c is the variates' weighted
mean exactly only where all clients participate, else in expectation: |S| / N stands for the cohort's share of all
examples. ``gradient``, not in the paper, takes as c_i+ the mean raw gradient of the local steps, which is option II's
for SGD without clipping and has a meaning under AdamW, too. Variates of factors that the method re-initialized restart
at 0. FedRot-LoRA and FLoRG rotate what was trained towards the global factors, so the coordinates of these last, and
with them the variates, which are gradients by the global factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedspan.core.method import Claims, Memory, Quantity
from fedspan.core.smoothing import smooth_groups
from fedspan.core.tensors import Tensors, is_extra
from fedspan.core.values import (
    Client,
    Contribution,
    Job,
    Message,
    OptimizerSpec,
    Reduced,
    Scalar,
    ServerState,
    Trained,
    Weights,
)
from fedspan.errors import FedspanError
from fedspan.wrappers.wrapper import RegisteredWrapper, add_prefix, split_prefix

PREFIX = "scaffold/"
OWN, OFFSET, DRIFT, LENGTH, GENERATION = "own/", "offset/", "drift/", "length/", "generation"
PROBE = "scaffold"


@final
@dataclass(frozen=True, kw_only=True)
class Scaffold(RegisteredWrapper):
    """Corrects local gradients by control variates.

    Args:
        variate: A client's new variate: option-I (the gradient at the start, one more pass over its examples),
            option-II (its change over the learning rates; SGD without momentum only) or gradient (the mean raw gradient
            of its steps).
    """

    paper: ClassVar[str] = (
        "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (ICML 2020, arXiv:1910.06378)"
    )
    kind: ClassVar[str] = "control variates"

    variate: Literal["option-I", "option-II", "gradient"] = "option-II"

    def declare_claims(self) -> Claims:
        claims = self.inner.declare_claims()
        return replace(claims, sends="other", quantities=(*claims.quantities, Quantity("control variates", PREFIX)))

    def explain_refusal(self, claims: Claims) -> str | None:
        if claims.reinitializes:
            return "remembers gradients of tensors, and this method's tensors are re-initialized in every round"
        if claims.heterogeneous_ranks:
            return "needs one shape of every tensor for all clients, and this method's ranks may differ"
        if claims.sends != "values":
            other = claims.describe_other_replies()
            return f"corrects tensors from which all clients start alike, and this method's {other}"
        return None

    def explain_training_refusal(self, optimizer: OptimizerSpec, max_grad_norm: float) -> str | None:
        if self.variate == "option-II" and (optimizer.name != "sgd" or optimizer.momentum):
            return (
                "option-II derives the mean gradient from the client's change, which needs training.optimizer: sgd and "
                "training.momentum: 0. Otherwise set variate: gradient and training.max_grad_norm: 0"
            )
        if self.variate != "option-II" and max_grad_norm:
            return f"{self.variate} needs gradients that are not clipped. Set training.max_grad_norm: 0"
        return None

    def init(self, weights: Weights) -> ServerState:
        if not self.spec.clients:
            raise FedspanError("method.wrappers", "scaffold", problem="scaffold needs the number of clients")
        return self.inner.init(weights)

    def sync(self, state: ServerState, client: Client | None) -> Message:
        state, variates, changed = _split(state)
        message = self.inner.sync(state, client)
        known_round = -1 if client is None or client.last_round is None else client.last_round
        missed = {name: value for name, value in variates.items() if changed[name] > known_round}
        return replace(
            message,
            tensors={**message.tensors, **add_prefix(PREFIX, missed)},
            scalars={**message.scalars, PREFIX + GENERATION: state.generation},
        )

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        variates, inner_tensors = split_prefix(PREFIX, message.tensors)
        scalars, generation = _split_scalars(message.scalars)
        stored, inner_memory = split_prefix(PREFIX, memory)
        job = self.inner.start(replace(message, tensors=inner_tensors, scalars=scalars), client, inner_memory, round)
        if job.gradient_offset:
            raise FedspanError("method.wrappers", "scaffold", problem="this method already corrects the gradient")
        client_variates = _select_valid(stored, OWN, generation)
        offsets = _select_valid(stored, OFFSET, generation)
        for name, variate in variates.items():
            offsets[name] = variate - client_variates[name] if name in client_variates else variate
        return self._build_next_phase(job, offsets, {}, generation)

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        stored, inner_memory = split_prefix(PREFIX, memory)
        scalars, generation = _split_scalars(job.scalars)
        offsets, stored = job.gradient_offset, dict(stored)
        if job.phase == PROBE:
            stored = {
                **add_prefix(DRIFT, smooth_groups(job.trainable, trained.gradient)),
                **stored,
            }  # tensors of an earlier phase retain its gradient
            return self._build_next_phase(_restore_phase(job), offsets, stored, generation), {
                **inner_memory,
                **add_prefix(PREFIX, stored),
            }
        inner_job = replace(job, gradient_offset={}, scalars=scalars)
        result, inner_memory = self.inner.finish(inner_job, trained, client, inner_memory, round)
        if self.variate != "option-I":
            self._follow(stored, job, trained)
        if isinstance(result, Job):
            return self._build_next_phase(result, offsets, stored, generation), {
                **inner_memory,
                **add_prefix(PREFIX, stored),
            }
        variates, changes = _select_valid(stored, OWN, generation), dict[str, Tensor]()
        for name, drift in split_prefix(DRIFT, stored)[0].items():
            if name not in result.tensors:
                continue  # it stays on the client, so it has no drift
            if LENGTH + name in stored and not stored[LENGTH + name]:
                changes[name] = torch.zeros_like(drift)  # its turn did not come, so the variate stays
                continue
            after = drift / stored[LENGTH + name].to(drift) if LENGTH + name in stored else drift
            if self.variate == "option-II":
                after = after - offsets[name] if name in offsets else after
            changes[name] = after - variates[name] if name in variates else after
            variates[name] = after
        pending = {name: value for name, value in offsets.items() if name not in changes}
        own_memory = {
            **add_prefix(OWN, variates),
            **add_prefix(OFFSET, pending),
            GENERATION: torch.tensor(generation),
        }
        reply = replace(result, tensors={**result.tensors, **add_prefix(PREFIX, changes)})
        return reply, {**inner_memory, **add_prefix(PREFIX, own_memory)}

    def list_added_epochs(self) -> tuple[int, ...]:
        added = self.inner.list_added_epochs()
        return (*added, *(1 for _ in (*added, "the run's"))) if self.variate == "option-I" else added

    def _build_next_phase(self, job: Job, offsets: Tensors, stored: Mapping[str, Tensor], generation: int) -> Job:
        """Add the correction to a phase; under option I, insert a phase that takes the gradient of its new tensors."""
        job = replace(job, scalars={**job.scalars, PREFIX + GENERATION: generation})
        lacks_gradient = any(DRIFT + name not in stored for name in job.trainable_names)
        want_gradient = job.want_gradient or self.variate == "gradient"
        corrected = replace(job, gradient_offset=offsets, want_gradient=want_gradient)
        if self.variate != "option-I" or not lacks_gradient:
            return corrected
        steps = -1 if job.steps is None else job.steps
        remembered = {PROBE + " phase": job.phase, PROBE + " steps": steps}
        return replace(corrected, steps=0, phase=PROBE, scalars={**job.scalars, **remembered})

    def _follow(self, stored: dict[str, Tensor], job: Job, trained: Trained) -> None:
        """Add a phase to the drift of every tensor and to the length by which the drift is divided."""
        gradients = smooth_groups(job.trainable, trained.gradient)
        for group in job.trainable:
            for name in group.names:
                if self.variate == "gradient":
                    drift, length = gradients[name] * trained.steps, float(trained.steps)
                else:
                    drift = job.tensors[name] - trained.tensors[name]
                    share = group.count_steps(trained.steps) / max(1, trained.steps)
                    length = trained.lr_sum * group.lr_scale * share
                before = stored.get(LENGTH + name, torch.zeros((), dtype=torch.float64))
                stored[DRIFT + name] = stored[DRIFT + name] + drift if DRIFT + name in stored else drift
                stored[LENGTH + name] = before + length

    def contribute(self, message: Message, client: Client) -> Contribution:
        changes, inner_tensors = split_prefix(PREFIX, message.tensors)
        contribution = self.inner.contribute(replace(message, tensors=inner_tensors), client)
        return replace(contribution, sum={**contribution.sum, **add_prefix(PREFIX, changes)})

    def update(self, state: ServerState, reduced: Reduced) -> ServerState:
        state, variates, changed = _split(state)
        changes, means = split_prefix(PREFIX, reduced.mean)
        after = self.inner.update(state, replace(reduced, mean=means))
        updated = {**variates}
        for name, change in changes.items():
            step = change * (reduced.count / self.spec.clients)
            updated[name] = updated[name] + step if name in updated else step
        moved_names = set(changes)
        if after.generation != state.generation:
            zeros = {name: torch.zeros_like(value) for name, value in updated.items() if not is_extra(name)}
            updated, moved_names = {**updated, **zeros}, moved_names | set(zeros)
        rounds = {**changed, **dict.fromkeys(moved_names, after.round)}
        return replace(
            after,
            memory={**after.memory, **add_prefix(PREFIX, updated)},
            scalars={**after.scalars, **{PREFIX + name: round for name, round in rounds.items()}},
        )


def _split(state: ServerState) -> tuple[ServerState, Tensors, dict[str, int]]:
    """Split a state into ``(wrapped method's state, variates, round of the first state with each current variate)``."""
    variates, memory = split_prefix(PREFIX, state.memory)
    changed = {
        name[len(PREFIX) :]: int(round_number)
        for name, round_number in state.scalars.items()
        if name.startswith(PREFIX)
    }
    scalars = {name: value for name, value in state.scalars.items() if not name.startswith(PREFIX)}
    return replace(state, memory=memory, scalars=scalars), variates, changed


def _split_scalars(scalars: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], int]:
    """Split the scalars of a message or job into ``(wrapped method's scalars, generation of the server's tensors)``."""
    inner = dict(scalars)
    return inner, int(inner.pop(PREFIX + GENERATION))


def _select_valid(stored: Tensors, prefix: str, generation: int) -> dict[str, Tensor]:
    """Return a client's stored tensors with a prefix, without factors that have been re-initialized since."""
    values = split_prefix(prefix, stored)[0]
    is_current = GENERATION in stored and int(stored[GENERATION]) == generation
    return {name: value for name, value in values.items() if is_current or is_extra(name)}


def _restore_phase(job: Job) -> Job:
    """Restore the phase that a probe precedes."""
    steps = int(job.scalars[PROBE + " steps"])
    scalars = {name: value for name, value in job.scalars.items() if not name.startswith(PROBE + " ")}
    return replace(job, steps=None if steps < 0 else steps, phase=str(job.scalars[PROBE + " phase"]), scalars=scalars)
