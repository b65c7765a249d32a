"""FedProx: a proximal term keeps every client near the initial values of the round.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv:1812.06127.

    client i:  minimizes f_i(x) + mu / 2 ||x - x_t||^2 from x = x_t
    server:    as the wrapped method's

x is everything that trains, the head included; mu = 0 is the wrapped method.

Deviations: only the proximal term; how much a client trains is the run's choice, not a bound on inexactness (gamma).
Around a low-rank method the term is on the factors, not on their product; around FedGaLore it is on the sum of a
round's segments, those of earlier projectors included. Tensors that stay on a client (FedSA-LoRA's B, a local head) are
held near the client's own values at the start of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from fedspan.core.method import Claims, Memory, declare_bounded
from fedspan.core.parametrization import Projected
from fedspan.core.penalties import Penalty, Proximal
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Job, Message, Trained
from fedspan.wrappers.wrapper import RegisteredWrapper


@final
@dataclass(frozen=True, kw_only=True)
class FedProx(RegisteredWrapper):
    """Pulls trained tensors towards their values at the start of the round.

    Args:
        mu: Proximal strength; 0 disables the term.
    """

    paper: ClassVar[str] = "Federated Optimization in Heterogeneous Networks (MLSys 2020, arXiv:1812.06127)"
    kind: ClassVar[str] = "proximal term"

    mu: float = declare_bounded(0.01, 0.0)

    def explain_refusal(self, claims: Claims) -> str | None:
        if claims.sends == "nothing":
            return "keeps clients near their common model, and this method has none"
        return None

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return self._add_penalty(self.inner.start(message, client, memory, round), {})

    def finish(
        self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
    ) -> tuple[Job | Message, Memory]:
        *inner, penalty = job.penalties  # ours is last; it stores the round's initial values of what has trained so far
        assert isinstance(penalty, Proximal)
        unchanged: tuple[Penalty, ...] = tuple(inner)
        result, memory = self.inner.finish(replace(job, penalties=unchanged), trained, client, memory, round)
        if isinstance(result, Job):
            return self._add_penalty(result, penalty.reference), memory
        return result, memory

    def _add_penalty(self, job: Job, initial: Tensors) -> Job:
        """Add the penalty on the job's trained tensors; ``initial`` has the initial values of earlier phases."""
        reference = {name: initial.get(name, job.tensors[name]) for name in job.trainable_names}
        projected = {
            layer: parametrization
            for layer, parametrization in job.parametrization.items()
            if isinstance(parametrization, Projected)
        }
        return replace(job, penalties=(*job.penalties, Proximal(self.mu, {**initial, **reference}, projected)))
