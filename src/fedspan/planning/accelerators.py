"""How fast a device trains: GPUs by their data sheets, and what follows for a run.

A GPU's rate is its peak of dense products of matrices times a utilisation, what a training reaches of that peak.
``UTILISATION`` is 0.35: Table 3 of PaLM (arXiv:2204.02311) has 21 % (GPT-3), 33 % (Gopher), 30 % (Megatron-Turing NLG)
and 46 % (PaLM) of large models trained with care; adapters, short texts and small batches do not get nearer to the peak
than those. A model with less than some 100 M parameters keeps a large GPU waiting for the next operation most of the
time: there, the figure is much too high.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.planning.compute import Compute

__all__ = ["ACCELERATORS", "HERE", "UTILISATION", "Accelerator", "Duration", "Speed", "accelerator_speed"]

HERE = "here"
UTILISATION = 0.35
_PASSES = 2  # over the weights of a step: forward and backward


@dataclass(frozen=True)
class Accelerator:
    """A GPU as its maker describes it.

    Args:
        float32: TFLOP/s without tensor cores: torch leaves TF32 off unless it is told otherwise.
        float16: TFLOP/s of tensor cores, dense (data sheets like to give the double, "with sparsity"), summing in
            float32.
        bfloat16: likewise; None: it has none.
        bandwidth: of its memory, GB/s.
        memory: GB.
    """

    float32: float
    float16: float
    bfloat16: float | None
    bandwidth: float
    memory: float


ACCELERATORS: dict[str, Accelerator] = {
    # NVIDIA T4 Tensor Core GPU, data sheet
    "T4": Accelerator(8.1, 65, None, 320, 16),
    # NVIDIA V100 Tensor Core GPU, data sheet; SXM2, 32 GB
    "V100": Accelerator(15.7, 125, None, 900, 32),
    # NVIDIA Ampere GA102 GPU Architecture, whitepaper, table 9
    "RTX3090": Accelerator(35.6, 71, 71, 936, 24),
    # NVIDIA Ada GPU Architecture, whitepaper, appendix A
    "RTX4090": Accelerator(82.6, 165.2, 165.2, 1008, 24),
    # NVIDIA L4 Tensor Core GPU, data sheet; tensor cores there with sparsity: 242
    "L4": Accelerator(30.3, 121, 121, 300, 24),
    # NVIDIA A10 Tensor Core GPU, data sheet
    "A10": Accelerator(31.2, 125, 125, 600, 24),
    # NVIDIA L40S GPU, data sheet
    "L40S": Accelerator(91.6, 362, 362, 864, 48),
    # NVIDIA A100 Tensor Core GPU, data sheet; SXM, 80 GB
    "A100": Accelerator(19.5, 312, 312, 2039, 80),
    # NVIDIA H100 Tensor Core GPU, data sheet; SXM; tensor cores there with sparsity: 1979
    "H100": Accelerator(67, 989, 989, 3350, 80),
    # NVIDIA H200 Tensor Core GPU, data sheet; SXM; tensor cores there with sparsity: 1979
    "H200": Accelerator(67, 989, 989, 4800, 141),
    # AMD Instinct MI300X Accelerator, data sheet
    "MI300X": Accelerator(163.4, 1307.4, 1307.4, 5300, 192),
}
"""By the name that a user types, in upper case and without spaces."""


@dataclass(frozen=True)
class Duration:
    """Seconds of the clients' training, without evaluations, and without what the server does.

    Args:
        device: on which.
        step: an optimizer step of a client that trains alone.
        client: a client's round alone, after its first; None where nobody says how many examples it has.
        simulated: all clients of all rounds on one such device; None likewise, and of Flower's simulation here.
        deployed: the run where every client has such a device of its own and all clients of a round take the mean
            client's time, their transfers among it if a bandwidth was given; None likewise.
        start: beside that, what the batched engine takes to find out how many clients train best at once, if it has
            not done so for such a run on this machine before; 0 where nothing is measured.
        memory: bytes of the device; None: not known.
    """

    device: str
    step: float
    client: float | None
    simulated: float | None
    deployed: float | None
    start: float
    memory: int | None


@dataclass(frozen=True)
class Speed:
    """How fast a device trains a model.

    Args:
        device: its name.
        alone: FLOP/s of a client that trains alone.
        together: FLOP/s of a simulation of many clients; None: not known.
        bandwidth: bytes a second of its memory, over which the weights go twice a pass; None: it is in ``alone``.
        start: seconds in which the engine finds out how many clients train best at once.
        memory: bytes; None: not known.
    """

    device: str
    alone: float
    together: float | None
    bandwidth: float | None = None
    start: float = 0.0
    memory: int | None = None

    def duration(self, compute: Compute, base: int, config: RunConfig, transfer: float | None) -> Duration:
        """What training takes.

        Args:
            compute: FLOPs of it.
            base: bytes of the frozen model.
            config: the run's.
            transfer: seconds of a client's messages of a round; None: no bandwidth was given.
        """
        passes, slower = config.training.gradient_accumulation_steps, 1.0
        step = compute.step / self.alone
        if self.bandwidth is not None:
            slower = max(1.0, _PASSES * base * compute.above * passes / self.bandwidth / step)
        client = None if compute.client is None else compute.client / self.alone * slower
        deployed = run = None
        if client is not None and compute.first is not None:
            deployed = compute.first / self.alone + config.federation.rounds * (client + (transfer or 0.0))
        if compute.run is not None and compute.kept is not None and self.together is not None:
            run = ((compute.run - compute.kept) * slower + compute.kept) / self.together
        return Duration(
            device=self.device,
            step=step * slower,
            client=client,
            simulated=run,
            deployed=deployed,
            start=self.start,
            memory=self.memory,
        )


def accelerator_speed(name: str, dtype: str, utilisation: float = UTILISATION) -> Speed:
    """The speed of a GPU of the table.

    Args:
        name: a key of ``ACCELERATORS``; capitals, spaces and hyphens do not matter.
        dtype: of the frozen base: ``float32``, ``float16`` or ``bfloat16``.
        utilisation: share of the peak that training reaches.

    Raises:
        FedspanError: no such GPU, one without this number format, or a share that is none.
    """
    key = name.upper().replace(" ", "").replace("-", "")
    if key not in ACCELERATORS:
        raise FedspanError("--device", name, f"{HERE} (this machine, measured), or one of {', '.join(ACCELERATORS)}")
    if not 0 < utilisation <= 1:
        raise FedspanError("--utilisation", utilisation, "a share of the device's peak, more than 0 and at most 1")
    found = ACCELERATORS[key]
    peak: float | None = getattr(found, dtype)
    if peak is None:
        raise FedspanError("--device", name, "a GPU with bfloat16 (from A10 and RTX3090 on), or model.dtype: float16")
    rate = peak * 1e12 * utilisation
    return Speed(key, rate, rate, found.bandwidth * 1e9, memory=round(found.memory * 1e9))
