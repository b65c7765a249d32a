"""Small residual networks for small images, trained from scratch (``names.ARCHITECTURES``).

He et al., "Deep residual learning for image recognition", CVPR 2016, arXiv:1512.03385, with the usual stem for 32 x 32
pixels (one 3 x 3 convolution, no pooling). Layers are named as in torchvision: ``layer1.0.conv1``. Importing this
module lets Transformers' auto classes load them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput


class SmallResNetConfig(PreTrainedConfig):
    """Shape of a network.

    Args:
        widths: Channels of each stage; every stage after the first halves the image.
        depths: Number of residual blocks of each stage.
        image_size: Rows and columns of its images.
    """

    model_type = "fedspan-resnet"

    def __init__(
        self,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (1, 1, 1, 1),
        image_size: int = 32,
        **rest: Any,
    ) -> None:
        self.widths = list(widths)
        self.depths = list(depths)
        self.image_size = image_size
        super().__init__(**rest)


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = (
            nn.Identity()
            if stride == 1 and before == width
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.downsample(x))


class ResNetForSmallImages(PreTrainedModel):
    """The network with its classifier, ``fc``.

    Args:
        config: Shape of the network and ``num_labels``.
    """

    config_class = SmallResNetConfig
    base_model_prefix = "resnet"
    main_input_name = "pixel_values"

    def __init__(self, config: SmallResNetConfig) -> None:
        super().__init__(config)
        before: int = config.widths[0]
        self.conv1 = nn.Conv2d(3, before, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(before)
        self.stages = [f"layer{stage}" for stage in range(1, len(config.widths) + 1)]
        for name, width, depth in zip(self.stages, config.widths, config.depths, strict=True):
            first = _Block(before, width, 1 if name == "layer1" else 2)
            setattr(self, name, nn.Sequential(first, *(_Block(width, width, 1) for _ in range(depth - 1))))
            before = width
        self.fc = nn.Linear(before, len(config.id2label or ()))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()

    def forward(self, pixel_values: Tensor, **_: object) -> ImageClassifierOutput:
        """Compute the logits of images, (N, 3, H, W) -> (N, labels)."""
        h = F.relu(self.bn1(self.conv1(pixel_values)))
        for name in self.stages:
            h = getattr(self, name)(h)
        return ImageClassifierOutput(logits=self.fc(h.mean((2, 3))))  # pyright: ignore[reportArgumentType]


AutoConfig.register(SmallResNetConfig.model_type, SmallResNetConfig, exist_ok=True)
AutoModelForImageClassification.register(SmallResNetConfig, ResNetForSmallImages, exist_ok=True)
