"""Options of local training: the optimizer, privacy, and the engines and workers that train the clients."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from fedspan.core.noise import derive_seed_key
from fedspan.core.values import OptimizerSpec
from fedspan.section import Section
from fedspan.training.accounting import Accounting

_Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingSettings(Section):
    """Local training of one client in one round: the config section ``training``."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD uses training.momentum."""
    lr: float | Literal["auto"] = 2e-3
    """Peak learning rate. auto: selected before the first round by a range test, which trains a few steps with each of
    several rates and selects the lowest loss on the clients' validation parts. Only for clients in this process,
    without privacy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate across rounds."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds of linear warm-up."""
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Final learning rate of a schedule; at most lr."""
    cycle_rounds: int | None = Field(default=None, ge=1)
    """Rounds after which a schedule restarts."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Epsilon of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay: decoupled for AdamW, L2 for SGD."""
    batch_size: int = Field(default=16, ge=1)
    """Examples per forward and backward pass."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Passes per optimizer step."""
    local_epochs: int = Field(default=1, ge=1)
    """Epochs over a client's examples per round."""
    local_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps per round, instead of local_epochs."""
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Norm to which gradients are clipped; 0: no clipping."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """reset: re-initialize a client's moments every round. keep: store them on the client."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input."""
    logit_adjustment: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """For clients with different classes: add this multiple of the logarithm of a class's share of the client's
    examples to its logit in local training, so that a client does not unlearn classes that it lacks (logit calibration;
    usually 1). 0: off."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a target that is spread over all classes (language models: over the vocabulary) in training, as in
    torch.nn.CrossEntropyLoss. With several labels each is spread over its two answers. For tasks whose targets are
    labels, tags or tokens."""
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = "none"
    """Classification and tags: weights of classes in the loss, as in torch.nn.CrossEntropyLoss. balanced: by the counts
    of the client's own examples (tags: words), as in scikit-learn, so that no client learns those of others. Or weights
    by label, the same for all clients; other labels have weight 1. With several labels: of the examples that have the
    label (pos_weight of torch.nn.BCEWithLogitsLoss); balanced: examples without it over those with it."""
    checkpoint_steps: int | None = Field(default=None, ge=1)
    """Nodes of a deployment: optimizer steps after which a node stores the progress of its training. A node that is
    killed within a round, and is back before the server has given up its order, then continues after the last
    checkpoint with the same bits. Not with privacy.mechanism: dp-sgd, and not on nodes with trainers of their own. A
    simulation continues after its last round."""
    checkpoint_minutes: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """As checkpoint_steps, after a number of minutes; with both, whichever comes first."""
    group_by_length: bool = True
    """Put texts of similar length into a batch, which reduces padding."""

    @field_validator("lr", mode="before")
    @classmethod
    def _parse_lr(cls, value: object) -> object:
        try:
            positive = value == "auto" or (not isinstance(value, bool) and 0 < float(value) < math.inf)  # pyright: ignore
        except (TypeError, ValueError):
            positive = False
        if not positive:
            raise ValueError("a number above 0, or auto")
        return value if value == "auto" else float(value)  # pyright: ignore

    @field_validator("min_lr")
    @classmethod
    def _validate_min_lr(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("lr") != "auto" and value > info.data.get("lr", value):
            raise ValueError(f"at most training.lr, {info.data['lr']:g}")
        return value

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """Algorithm and hyperparameters; ``lr``, a number by now, is the peak of the schedule."""
        return OptimizerSpec(self.optimizer, float(self.lr), self.momentum, self.betas, self.eps, self.weight_decay)

    def compute_workload(self, count: int, added_epochs: int = 0) -> int:
        """Return how many examples a client trains on in a round, counting repeated uses.

        Args:
            added_epochs: Epochs that the method adds (the sum of ``Method.list_added_epochs``).
        """
        if self.local_steps is None:
            return (self.local_epochs + added_epochs) * count
        return self.local_steps * min(count, self.batch_size * self.gradient_accumulation_steps) + added_epochs * count

    def compute_lr(self, round: int, rounds: int) -> float:
        """Compute the learning rate of a round (counted from 0) of ``rounds``."""
        peak = float(self.lr)
        if round < self.warmup_rounds:
            return peak * (round + 1) / (self.warmup_rounds + 1)
        position, length = round - self.warmup_rounds, max(1, rounds - self.warmup_rounds)
        if self.cycle_rounds is not None:
            position, length = position % self.cycle_rounds, self.cycle_rounds
        progress = position / length
        if self.schedule == "linear":
            return self.min_lr + (peak - self.min_lr) * (1 - progress)
        if self.schedule == "cosine":
            return self.min_lr + (peak - self.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        return peak


class PrivacyConfig(Section):
    """Clipping, noise and the privacy budget; needs fedspan[privacy]."""

    mechanism: Literal["central", "local", "dp-sgd"]
    """central: the server clips every client's change and adds noise to the sum; protects a client from anyone who sees
    the models, except the server. local: every client clips its change and adds noise to it; also protects from the
    server, with much more noise. dp-sgd: every client clips the gradient of each example and adds noise to the sum;
    protects an example from everyone except its data owner."""
    clip: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Maximum L2 norm of a client's change (central, local) or of an example's gradient (dp-sgd)."""
    noise: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Standard deviation of the noise divided by clip, from 1e-9 to 1e9: accountants do not finish where its square
    under- or overflows. Default: the smallest that epsilon allows for all rounds."""
    epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Privacy budget: the run ends before a round that would exceed it; default: no budget."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability with which the guarantee may fail: well below 1 over the number of clients or examples."""
    accountant: Accounting = "rdp"
    """Accountant of Opacus. rdp: fast and slightly loose. prv: tight, and slow if clients differ;
    rdp where prv would take minutes, as in long runs or at sampling rates near 0.5."""
    randomness: Literal["seed", "secret"] | None = None
    """Source of the noise. seed: the run's seed; reproducible, without protection from anyone who knows the seed.
    secret: a random key that never leaves its machine. Default: seed in simulations; secret in deployments, where seed
    is refused."""

    @model_validator(mode="after")
    def _require_noise(self) -> Self:
        if self.noise is None and self.epsilon is None:
            raise ValueError("noise, or an epsilon from which the noise follows")
        return self


class Privacy(PrivacyConfig):
    """Differential privacy of a run: its section, and what else its noise depends on."""

    model_config = ConfigDict(hide_input_in_errors=True)

    rounds: int = 1
    key: bytes = Field(default=derive_seed_key(0), repr=False, exclude=True)
    """Key of the noise, 32 bytes, which no dump or error shows."""
    secret: bool = False
    """Whether the key is secret; if so, noise also depends on what it is added to, so that it is never reused."""


class EngineConfig(Section):
    """The simulator. These settings do not change results, up to rounding."""

    name: Literal["batched", "loop"] = "batched"
    """batched: several clients in each forward and backward pass over the frozen base. loop: one client after another,
    the reference."""
    clients_per_pass: int | None = Field(default=None, ge=1, le=1024)
    """Clients per pass of batched; default: measured at the start, 1 if more would be slower."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """batched: threads that train clients in parallel on one base and share torch's own threads; default: measured."""
    padding_free: bool = True
    """Concatenate the tokens of a batch between the first block and the last, with attention in bins of whole texts;
    batched only, for models with Transformers' eager or sdpa attention."""
    prefix_cache: bool = True
    """Compute the hidden states that enter the first trainable layer once per example, if layers_to_transform excludes
    the first layers."""
    prefix_memory: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """GiB of memory for these hidden states."""
    prefix_folder: str | None = Field(default=None, min_length=1)
    """Folder on a local disk for hidden states beyond prefix_memory, in a memory-mapped file that is removed with the
    process; default: compute them every time."""


_SMALLEST_SHARE = 0.0001  # Ray's
_ADDRESS = re.compile(r"(ray://)?[^\s/:]+:\d{1,5}")


class ClusterConfig(Section):
    """Workers that train the clients, each in a process of its own with the engine of ``engine``."""

    address: str = "local"
    """local: a temporary Ray on this machine, which no other machine can reach. auto: the cluster that this machine
    belongs to (RAY_ADDRESS, or ray start). HOST:PORT or ray://HOST:PORT: another cluster. Anyone who can reach a
    cluster can run code on it: see docs/security.md."""
    workers: int = Field(ge=1, le=4096)
    """Number of workers. Clients are distributed among them by tokens; with engine.name: loop the results do not depend
    on the number, with batched they agree to rounding."""
    threads_per_worker: int = Field(default=1, ge=1, le=1024)
    """CPU threads per worker, instead of threads."""
    gpus_per_worker: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Share of a GPU per worker; 0.5: two workers share one. 0: workers train on the CPU."""
    start_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds that workers may take to start, or to restart after all have failed."""

    @field_validator("gpus_per_worker")
    @classmethod
    def _validate_share(cls, value: float) -> float:
        if 0 < value < _SMALLEST_SHARE:
            raise ValueError(f"0, or a share from {_SMALLEST_SHARE} to 1")
        return value

    @field_validator("address")
    @classmethod
    def _validate_address(cls, value: str) -> str:
        if value not in ("local", "auto") and not _ADDRESS.fullmatch(value):
            raise ValueError("local, auto, HOST:PORT or ray://HOST:PORT")
        return value
