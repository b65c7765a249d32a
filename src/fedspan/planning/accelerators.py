"""Training speed of devices: GPUs by their data sheets, and the resulting duration of a run.

A GPU's rate is its peak for dense matrix products times a utilization, the share of that peak that training reaches.
``UTILIZATION`` is 0.35: Table 3 of PaLM (arXiv:2204.02311) reports 21 % (GPT-3), 33 % (Gopher), 30 % (Megatron-Turing
NLG) and 46 % (PaLM) for large models trained with care; adapters, short texts and small batches do not get closer to
the peak than those. A model with fewer than about 100 M parameters leaves a large GPU waiting for the next operation
most of the time; for such models, the figure is much too high.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.planning.compute import Compute

HERE = "here"
UTILIZATION = 0.35
_PASSES = 2  # passes over the weights in a step: forward and backward


@dataclass(frozen=True)
class Accelerator:
    """A GPU as its maker describes it."""

    float32: float
    """TFLOP/s without tensor cores, because torch leaves TF32 off by default."""
    float16: float
    """TFLOP/s of tensor cores, dense (data sheets often give the double, "with sparsity"), accumulating in float32."""
    bfloat16: float | None
    """TFLOP/s of tensor cores, likewise; None: the GPU has no bfloat16."""
    bandwidth: float
    """Memory bandwidth in GB/s."""
    memory: float
    """Memory in GB."""


ACCELERATORS: dict[str, Accelerator] = {
    # NVIDIA T4 Tensor Core GPU, data sheet
    "T4": Accelerator(8.1, 65, None, 320, 16),
    # NVIDIA V100 Tensor Core GPU, data sheet; SXM2, 32 GB
    "V100": Accelerator(15.7, 125, None, 900, 32),
    # NVIDIA Ampere GA102 GPU Architecture, whitepaper, table 9
    "RTX3090": Accelerator(35.6, 71, 71, 936, 24),
    # NVIDIA Ada GPU Architecture, whitepaper, appendix A
    "RTX4090": Accelerator(82.6, 165.2, 165.2, 1008, 24),
    # NVIDIA L4 Tensor Core GPU, data sheet, which gives 242 for tensor cores with sparsity
    "L4": Accelerator(30.3, 121, 121, 300, 24),
    # NVIDIA A10 Tensor Core GPU, data sheet
    "A10": Accelerator(31.2, 125, 125, 600, 24),
    # NVIDIA L40S GPU, data sheet
    "L40S": Accelerator(91.6, 362, 362, 864, 48),
    # NVIDIA A100 Tensor Core GPU, data sheet; SXM, 80 GB
    "A100": Accelerator(19.5, 312, 312, 2039, 80),
    # NVIDIA H100 Tensor Core GPU, data sheet, which gives 1979 for tensor cores with sparsity; SXM
    "H100": Accelerator(67, 989, 989, 3350, 80),
    # NVIDIA H200 Tensor Core GPU, data sheet, which gives 1979 for tensor cores with sparsity; SXM
    "H200": Accelerator(67, 989, 989, 4800, 141),
    # AMD Instinct MI300X Accelerator, data sheet
    "MI300X": Accelerator(163.4, 1307.4, 1307.4, 5300, 192),
}
"""GPUs by the name that a user types, in upper case and without spaces."""


@dataclass(frozen=True)
class Duration:
    """Seconds of the clients' training, without evaluations and without the server's work."""

    device: str
    step: float
    """Seconds of an optimizer step of a client that trains alone."""
    client: float | None
    """Seconds of a round of a client that trains alone, after its first round; None if its number of examples is
    unknown."""
    simulated: float | None
    """Seconds of all clients and rounds on one such device, or on one for each worker of the run's cluster; None
    likewise."""
    deployed: float | None
    """Seconds of the run if every client has its own device of this kind and takes as long as the mean client,
    including transfers if a bandwidth was given; None if the number of examples is unknown."""
    start: float
    """Additional seconds in which the batched engine measures how many clients to train at once, unless it has already
    done so for such a run on this machine; 0 if nothing is measured."""
    memory: int | None
    """Memory of the device in bytes; None: unknown."""
    workers: int = 1
    """Number of devices of ``simulated``."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Training speed of a device for a model."""

    device: str
    single: float
    """FLOP/s of a client that trains alone."""
    parallel: float | None
    """FLOP/s of a simulation of many clients; None: unknown."""
    bandwidth: float | None = None
    """Memory bandwidth in bytes a second, at which the weights are read twice a pass; None: ``single`` includes it."""
    start: float = 0.0
    """Seconds in which the engine measures how many clients to train at once."""
    memory: int | None = None
    """Memory in bytes; None: unknown."""

    def compute_duration(self, compute: Compute, base: int, config: RunConfig, transfer: float | None) -> Duration:
        """Compute how long training takes.

        Args:
            base: Bytes of the frozen model.
            transfer: Seconds of a client's messages in a round; None: no bandwidth was given.
        """
        passes, slower = config.training.gradient_accumulation_steps, 1.0
        step = compute.step / self.single
        if self.bandwidth is not None:
            slower = max(1.0, _PASSES * base * compute.above * passes / self.bandwidth / step)
        client = None if compute.client is None else compute.client / self.single * slower
        deployed = run = None
        if client is not None and compute.first is not None:
            deployed = compute.first / self.single + config.federation.rounds * (client + (transfer or 0.0))
        workers = config.active_workers
        if compute.run is not None and compute.amortized is not None and self.parallel is not None:
            run = ((compute.run - compute.amortized) * slower + compute.amortized) / (self.parallel * workers)
        return Duration(
            device=self.device,
            step=step * slower,
            client=client,
            simulated=run,
            deployed=deployed,
            start=self.start,
            memory=self.memory,
            workers=workers,
        )


def get_accelerator_speed(name: str, dtype: str, utilization: float = UTILIZATION) -> DeviceSpeed:
    """Return the speed of a GPU of the table.

    Args:
        name: Key of ``ACCELERATORS``; case, spaces and hyphens are ignored.
        dtype: Number format of the frozen base: ``float32``, ``float16`` or ``bfloat16``.
        utilization: Share of the peak that training reaches.
    """
    key = name.upper().replace(" ", "").replace("-", "")
    if key not in ACCELERATORS:
        raise FedspanError("--device", name, f"{HERE} (this machine, measured), or one of {', '.join(ACCELERATORS)}")
    if not 0 < utilization <= 1:
        raise FedspanError("--utilization", utilization, "a share of the device's peak, more than 0 and at most 1")
    accelerator = ACCELERATORS[key]
    peak: float | None = getattr(accelerator, dtype)
    if peak is None:
        raise FedspanError("--device", name, "a GPU with bfloat16 (A10, RTX3090 or newer), or model.dtype: float16")
    rate = peak * 1e12 * utilization
    return DeviceSpeed(key, rate, rate, accelerator.bandwidth * 1e9, memory=round(accelerator.memory * 1e9))
