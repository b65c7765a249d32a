"""The kinds of layers that can be targets, each as the matrix that a parametrization changes.

Shapes: O output features, I input features of the matrix, R rank; of a convolution C channels and a kernel (k1, k2), I
= C k1 k2 as in PEFT; of an embedding V words, I = V.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.base import Delta
from fedspan.core.lowrank import LowRank
from fedspan.core.tensors import sum_rows


class Operator(ABC):
    """A module as a matrix (O, I) that is applied to an input."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(O, I)."""

    @property
    def kernel(self) -> tuple[int, int]:
        """Kernel size (k1, k2) of a convolution."""
        return 1, 1

    @abstractmethod
    def to_matrix(self, stored: Tensor) -> Tensor:
        """Convert the stored weight to a matrix (O, I); a view."""

    @abstractmethod
    def to_stored(self, matrix: Tensor) -> Tensor:
        """Convert a matrix (O, I) to the weight as the module stores it; a view."""

    @abstractmethod
    def apply(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer's output with another matrix in place of its weight."""

    @abstractmethod
    def apply_up(self, h: Tensor, up: Tensor) -> Tensor:
        """Apply (O, R) to the output of ``apply`` with an (R, I): its R features become O."""

    def apply_change(self, delta: Delta, x: Tensor, like: torch.dtype) -> Tensor:
        """Apply a change of weight to an input, through its factors if it has any.

        The product is computed in the delta's number format, but in bfloat16 if the result is (as under autocast): on
        the processors that a bfloat16 base is chosen for, float32 products of this size cost as much as the base's own.
        In float16 small gradients would vanish.

        Args:
            delta: Change of weight, (O, I).
            x: Input of the layer.
            like: Number format of the result.
        """
        if like == torch.bfloat16:
            delta = delta.to(like)
        if isinstance(delta, LowRank):
            h_R = self.apply(self._cast(x, delta.A.dtype), delta.A)
            return (self.apply_up(h_R, delta.B) * delta.scale).to(like)
        return self.apply(self._cast(x, delta.dtype), delta).to(like)

    def reshape_bias(self, bias: Tensor) -> Tensor:
        """Reshape a bias so that it adds to an output."""
        return bias

    @abstractmethod
    def compute_gradient(self, dy: Tensor, x: Tensor) -> LowRank:
        """Return the loss gradient by the matrix, (O, I), as float32 factors: gradients by the output, and inputs."""

    def to_peft(self, B_OR: Tensor, A_RI: Tensor) -> dict[str, Tensor]:
        """Convert factors to PEFT's form, by the last part of their names."""
        return {"lora_A.weight": A_RI, "lora_B.weight": B_OR}

    def from_peft(self, B: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        """Convert factors in PEFT's form to ``(B_OR, A_RI)``."""
        return B, A

    @staticmethod
    def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


class Linear(Operator):
    """``nn.Linear`` (including 4- and 8-bit ones) and GPT-2's ``Conv1D``, which stores (I, O)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._transposed = isinstance(module, _get_conv1d())

    @property
    def shape(self) -> tuple[int, int]:
        module = self.module
        if isinstance(module, nn.Linear):  # 4-bit weights are packed
            return module.out_features, module.in_features
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.shape[1], weight.shape[0]

    def to_matrix(self, stored: Tensor) -> Tensor:
        return stored.T if self._transposed else stored

    def to_stored(self, matrix: Tensor) -> Tensor:
        return matrix.T if self._transposed else matrix

    def apply(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, matrix, bias)

    def apply_up(self, h: Tensor, up: Tensor) -> Tensor:
        return F.linear(h, up)

    def compute_gradient(self, dy: Tensor, x: Tensor) -> LowRank:
        return LowRank(dy.flatten(0, -2).T.float(), x.flatten(0, -2).float())


class Convolution(Operator):
    """``nn.Conv2d`` with one group: (O, C k1 k2), its weight unfolded; rank R: one to R features, then a 1 x 1."""

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._conv = module

    @property
    def shape(self) -> tuple[int, int]:
        k1, k2 = self.kernel
        return self._conv.out_channels, self._conv.in_channels * k1 * k2

    @property
    def kernel(self) -> tuple[int, int]:
        k1, k2 = self._conv.kernel_size
        return k1, k2

    def to_matrix(self, stored: Tensor) -> Tensor:
        return stored.flatten(1)

    def to_stored(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(-1, self._conv.in_channels, *self.kernel)

    def apply(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        conv = self._conv
        return F.conv2d(x, self.to_stored(matrix), bias, conv.stride, conv.padding, conv.dilation)

    def apply_up(self, h: Tensor, up: Tensor) -> Tensor:
        return F.conv2d(h, up[:, :, None, None])

    def reshape_bias(self, bias: Tensor) -> Tensor:
        return bias[:, None, None]

    def to_peft(self, B_OR: Tensor, A_RI: Tensor) -> dict[str, Tensor]:
        return super().to_peft(B_OR[:, :, None, None], self.to_stored(A_RI))

    def from_peft(self, B: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
        return B.flatten(1), A.flatten(1)

    def compute_gradient(self, dy: Tensor, x: Tensor) -> LowRank:
        conv = self._conv
        # Input patch at each place of the output; padded beforehand, since "same" may pad unevenly.
        padded = F.pad(x.float(), self._compute_margins())
        columns = F.unfold(padded, conv.kernel_size, conv.dilation, 0, conv.stride)
        return LowRank(dy.float().transpose(0, 1).flatten(1), columns.transpose(1, 2).flatten(0, 1))

    def _compute_margins(self) -> tuple[int, int, int, int]:
        """Return the numbers of zeros to the left, to the right, above and below an image."""
        conv = self._conv
        if isinstance(conv.padding, str):
            reach = [
                d * (k - 1) if conv.padding == "same" else 0 for k, d in zip(self.kernel, conv.dilation, strict=True)
            ]
            (above, left), (below, right) = [n // 2 for n in reach], [n - n // 2 for n in reach]
            return left, right, above, below
        above, left = conv.padding
        return left, left, above, above


class Lookup(Operator):
    """``nn.Embedding``: (O, V), its weight (V, O) transposed, applied to one-hot words.

    The word at ``padding_idx`` has no gradient, as in the module itself.
    """

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self._embedding = module

    @property
    def shape(self) -> tuple[int, int]:
        return self._embedding.embedding_dim, self._embedding.num_embeddings

    def to_matrix(self, stored: Tensor) -> Tensor:
        return stored.T

    def to_stored(self, matrix: Tensor) -> Tensor:
        return matrix.T

    def apply(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.embedding(x, matrix.T, self._embedding.padding_idx)

    def apply_up(self, h: Tensor, up: Tensor) -> Tensor:
        return F.linear(h, up)

    def apply_change(self, delta: Delta, x: Tensor, like: torch.dtype) -> Tensor:
        result = super().apply_change(delta, x, like)
        padding = self._embedding.padding_idx
        # For a pair, `apply` blocks the gradient at the padding for A only.
        return result if padding is None else torch.where((x == padding)[..., None], result.detach(), result)

    def to_peft(self, B_OR: Tensor, A_RI: Tensor) -> dict[str, Tensor]:
        return {"lora_embedding_A": A_RI, "lora_embedding_B": B_OR}

    def compute_gradient(self, dy: Tensor, x: Tensor) -> LowRank:
        words, inverse = x.flatten().unique(return_inverse=True)
        sums = sum_rows(dy.flatten(0, -2).float(), inverse, len(words))
        if self._embedding.padding_idx is not None:
            sums[words == self._embedding.padding_idx] = 0
        return LowRank(sums.T, F.one_hot(words, self.shape[1]).float())

    @staticmethod
    def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x  # words


def _get_conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D  # imports Transformers, which a report does not need

    return Conv1D


def explain_unfit(module: nn.Module) -> str | None:
    """Return the reason why a module can't be a target layer; None if it can."""
    if isinstance(module, nn.Conv2d):
        if module.groups != 1:
            return f"is a convolution in {module.groups} groups, and only convolutions in one group can be targets"
        if module.padding_mode != "zeros":
            return f"pads with {module.padding_mode}, and only convolutions that pad with zeros can be targets"
        if max(module.dilation) > 1:  # huggingface/peft issue 3697
            return "is a dilated convolution, for which PEFT cannot express an adapter"
        if type(module).forward is not nn.Conv2d.forward:
            return f"is a {type(module).__name__}, which does more than convolve. Only plain nn.Conv2d can be a target"
    elif isinstance(module, nn.Embedding):
        if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
            return "is an embedding that scales what it looks up. Only plain nn.Embedding can be a target"
    elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return (
            "is the output projection of an nn.MultiheadAttention, which uses its weight without a call, so that an "
            "adapter would have no effect"
        )
    elif not isinstance(module, (nn.Linear, _get_conv1d())):
        return (
            f"is a {type(module).__name__}, which cannot be a target. Targets are nn.Linear, Conv1D, nn.Conv2d "
            "and nn.Embedding layers"
        )
    return None


def build_operator(module: nn.Module) -> Operator:
    """Return the operator of a module that `explain_unfit` accepts."""
    if isinstance(module, nn.Conv2d):
        return Convolution(module)
    return Lookup(module) if isinstance(module, nn.Embedding) else Linear(module)
