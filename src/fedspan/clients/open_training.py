"""A client's training for one order, while its jobs run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedspan.core.method import Memory
from fedspan.core.values import Client, Job, Message, OptimizerState
from fedspan.federation.progress import ClientData, ClientState
from fedspan.federation.protocol import Order, Part
from fedspan.training.jobs import Assignment


@dataclass
class OpenTraining:
    """A client's training for one order.

    Args:
        noise: Noise multiplier of DP-SGD: standard deviation over the clipping norm.
        origin: Digest of the order and the stored state, for the samples of DP-SGD with a secret key.
        moments: Optimizer states by phase: the stored ones, replaced by those of this order.
    """

    order: Order
    client: Client
    data: ClientData
    stored: ClientState
    job: Job
    noise: float
    origin: str
    memory: Memory
    moments: dict[str, tuple[OptimizerState, int]]
    parts: list[Part] = field(default_factory=list)

    def make_assignment(self, job: Job, use_moments: bool) -> Assignment:
        """Return a job as an engine's assignment."""
        moments, generation = self.moments.get(job.phase, (None, None))
        if not use_moments or generation != job.generation:  # moments of an older generation have other coordinates
            moments = None
        order = self.order
        return Assignment(
            order.to,
            order.round,
            job,
            self.data.train,
            order.lr,
            moments,
            self.noise,
            origin=self.origin,
            ignored=self.data.ignored,
        )


def normalize(reply: Message) -> Message:
    """Return a reply as the server decodes it: in the order of the names, contiguous and on the CPU.

    The norm to which changes are clipped depends on that order in the last bit.
    """
    return replace(
        reply, tensors={name: value.detach().cpu().contiguous() for name, value in sorted(reply.tensors.items())}
    )
