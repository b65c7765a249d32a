"""FedProx around a method: ``mu / 2 ||x - x_t||^2`` in every client's loss.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv:1812.06127.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from fedspan.core.method import Memory
from fedspan.core.penalties import Proximal
from fedspan.core.tensors import Tensors
from fedspan.core.values import Client, Job, Message, Trained
from fedspan.wrappers.wrapper import Wrapper


@final
@dataclass(frozen=True, kw_only=True)
class FedProx(Wrapper):
    """Pulls what trains towards where the round started.

    Args:
        mu: strength.
    """

    mu: float = 0.1

    def start(self, message: Message, client: Client | None, memory: Memory) -> Job:
        return self._pulled(self.inner.start(message, client, memory), {})

    def finish(self, job: Job, trained: Trained, client: Client, memory: Memory) -> tuple[Job | Message, Memory]:
        # The penalty stands last and carries the start of the round for what trained so far.
        known = {**job.tensors, **_proximal(job).reference}
        inner_job = replace(job, penalties=job.penalties[:-1])
        result, memory = self.inner.finish(inner_job, trained, client, memory)
        return (self._pulled(result, known) if isinstance(result, Job) else result), memory

    def _pulled(self, job: Job, known: Tensors) -> Job:
        reference = {name: known.get(name, job.tensors[name]) for name in job.trainable_names}
        return replace(job, penalties=(*job.penalties, Proximal(self.mu, reference)))


def _proximal(job: Job) -> Proximal:
    penalty = job.penalties[-1]
    assert isinstance(penalty, Proximal)
    return penalty
