"""Pooling of hidden states: one vector for each text. Shapes: B examples, T tokens, H hidden features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

DENSE = "3_Dense"
"""Folder of a pooled classifier's output layer in an export."""

PAIR = "pair_"
"""Prefix of a tokenizer's outputs for the second text of a pair, in a batch for a model that encodes each alone."""
PAIR_PARTS = 3
"""Number of vectors in the features of a pair."""

PoolingMode = Literal["mean", "cls", "max", "last"]


@dataclass(frozen=True)
class Pooling:
    """Reduction of a text's last hidden states to one vector."""

    mode: PoolingMode
    """``mean`` or ``max`` over the tokens of the attention mask, the first token (``cls``), or the ``last`` one."""
    normalize: bool = False
    """Whether the vector is divided by its norm."""
    pairs: bool = False
    """Whether examples are pairs: each text is encoded and pooled alone, and ``combine`` computes the features."""

    def __call__(self, hidden_BTH: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Pool hidden states, (B, T, H), to (B, H)."""
        if mask_BT is None:
            mask_BT = torch.ones(hidden_BTH.shape[:2], dtype=torch.int64, device=hidden_BTH.device)
        is_visible = mask_BT[..., None].bool()
        if self.mode == "mean":
            total = hidden_BTH.masked_fill(~is_visible, 0.0).sum(1)
            pooled = total / is_visible.sum(1).clamp(min=1).to(total.dtype)
        elif self.mode == "max":
            pooled = hidden_BTH.masked_fill(~is_visible, torch.finfo(hidden_BTH.dtype).min).amax(1)
        elif self.mode == "cls":
            pooled = hidden_BTH[:, 0]
        else:
            places = torch.arange(hidden_BTH.shape[1], device=hidden_BTH.device)
            last = (mask_BT * places).argmax(1)
            pooled = hidden_BTH[torch.arange(len(hidden_BTH), device=hidden_BTH.device), last]
        return F.normalize(pooled, dim=-1) if self.normalize else pooled

    def combine(self, u_BH: Tensor, v_BH: Tensor) -> Tensor:
        """Compute the features of pairs from the vectors of both texts: u, v and |u - v|, (B, 3 H).

        They are those of Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, arXiv:1908.10084.
        """
        return torch.cat([u_BH, v_BH, (u_BH - v_BH).abs()], -1)
