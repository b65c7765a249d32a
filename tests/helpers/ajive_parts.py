"""Parts of an AJIVE decomposition that only tests need."""

import torch
from torch import Tensor

from fedspan.core.alignment import Ajive, View


def lift(view: View, left: Tensor) -> Tensor:
    """The matrix whose coordinates ``left`` holds, (N, D)."""
    return left if view.right is None else left @ view.right


def compute_individual(found: Ajive, number: int) -> Tensor:
    """I_i: X_i - mean - J_i, cut to singular values above tau_i, in coordinates of the view's ``left``."""
    remainder = found.views[number].left - found.means[number] - found.compute_joint(number)
    U, S, Vt = torch.linalg.svd(remainder, full_matrices=False)
    return (U * torch.where(found.thresholds[number] < S, S, 0.0)) @ Vt
