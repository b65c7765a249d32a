"""Options of the model: the pretrained weights, and which of its layers train (`ModelConfig`)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedspan.errors import FedspanError
from fedspan.models.names import get_architecture
from fedspan.section import Section


class ModelConfig(Section):
    """The pretrained model and which of its layers train; PEFT's words."""

    name: str = Field(default="builtin:all-minilm-l6-v2", min_length=1)
    """A hub id, a local folder, builtin:all-minilm-l6-v2 (needs fedspan[demo]), or builtin:resnet-8, -10 or -18."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the frozen base; trained tensors (factors, head, modules_to_save) are float32."""
    quantization: Literal["nf4", "int8"] | None = None
    """Load the frozen base in 4 or 8 bits (bitsandbytes; the extra fedspan[quantization]). It computes in dtype; the
    head and modules_to_save are not quantized."""
    device_map: Literal["auto"] | None = None
    """auto: parts of a base that do not fit on the device stay in CPU memory or on disk (accelerate) and are copied for
    every use; only with engine.name: loop. Training holds the copies until the backward pass; with
    gradient_checkpointing, those of one block."""
    max_memory: dict[Literal["device", "cpu"], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """GiB that device_map may use, by device and cpu; default: all free memory."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Attention implementation; auto: eager on a CPU (faster to train on short texts), otherwise Transformers'
    choice."""
    target_modules: list[str] | str | None = None
    """Names or suffixes, a regex, or all-linear; default: PEFT's default for the architecture."""
    exclude_modules: list[str] | str | None = None
    """Names or suffixes, or a regex, to exclude."""
    layers_to_transform: list[int] | int | None = None
    """Indices of the transformer layers to adapt."""
    layers_pattern: list[str] | str | None = None
    """Name of the list of layers, if PEFT cannot infer it."""
    modules_to_save: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Modules that train as a whole, in addition to the classification head."""
    extras: Literal["average", "local", "frozen"] | None = None
    """How the head and modules_to_save are combined: averaged, local to each client, or frozen; default: the method's
    policy."""
    extras_lr_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Learning rate of the extras, as a multiple of training.lr."""
    pooling: Literal["auto", "stock", "mean", "cls", "max", "last"] = "auto"
    """Pooling of texts before the head. stock: Transformers' own classifier. mean, max, cls, last: over an encoder's
    last hidden states, of each text of a pair alone. auto: a sentence encoder's own pooling; stock for all other models
    (text-embedding, which has no classifier: mean)."""
    pooling_normalize: bool | None = None
    """With pooling mean, max, cls or last: normalize pooled states to length 1; default: as in the encoder's
    modules.json."""
    head_init: Literal["auto", "class-means", "lda", "least-squares", "by-label", "random"] = "auto"
    """How the head starts: from all clients' statistics of the features that enter it, in one exchange before the first
    round, or random. auto: by task and model; random where the statistics do not apply. See docs/head-start.md."""
    head_rounds: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Classification: number of federation.rounds, the first ones, that train the head alone if it is new and starts at
    random. auto: a third of five or more, 5 at most, where head_init: auto starts at random, as in a deployment; none
    for head_init: random, privacy or federation.buffered, and none if model.extras is not averaged."""
    adapter: str | None = Field(default=None, min_length=1)
    """Folder of a PEFT LoRA adapter to start from."""
    max_length: int = Field(default=128, ge=2)
    """Maximum number of tokens; longer texts are truncated. causal-lm: of prompt and answer together. seq2seq: of a
    source, and of a target (task_options.max_target_length)."""
    pretrained: bool = True
    """false: use only the architecture. All weights are drawn from the seed, and all outside target_modules train as
    extras. Always false for builtin:resnet-8, -10 and -18, which are for small images."""
    image_size: int | None = Field(default=None, ge=8, le=4096)
    """image-classification: height and width to which images are resized; default: the model's."""
    gradient_checkpointing: bool = False
    """Recompute activations: less memory, more time."""

    @model_validator(mode="after")
    def _validate_combination(self) -> Self:
        if self.pooling_normalize is not None and self.pooling in ("auto", "stock"):
            problem = "it needs model.pooling: mean, max, cls or last"
            raise FedspanError("model.pooling_normalize", self.pooling_normalize, problem=problem)
        if self.max_memory and self.device_map is None:
            raise FedspanError("model.max_memory", self.max_memory, problem="it needs model.device_map: auto")
        if self.device_map is not None and self.quantization is not None:
            problem = "it cannot be combined with model.quantization, whose base is not offloaded"
            raise FedspanError("model.device_map", self.device_map, "null", problem=problem)
        if self.is_from_scratch:
            for option, reason in (
                ("quantization", "its weights are not pretrained"),
                ("device_map", "all of its weights train and have to be on the device"),
                ("adapter", "an adapter belongs to pretrained weights"),
                ("modules_to_save", "every module that is not a target trains anyway"),
            ):
                if getattr(self, option):
                    problem = f"it cannot be set for a model from scratch, because {reason}"
                    raise FedspanError(f"model.{option}", getattr(self, option), problem=problem)
        return self

    @property
    def is_from_scratch(self) -> bool:
        """Whether all weights are randomly initialized."""
        return not self.pretrained or get_architecture(self.name) is not None
