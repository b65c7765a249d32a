"""A two-layer perceptron with a head, and a few clients whose inputs and labels are not identically distributed.

``fc1`` is 8 x 5 (tall: GaLore projects its right side) and ``fc2`` 6 x 8 (wide: the left side); the head (3 x 6) is the
extras. Weights are drawn in float32 and only then converted, so that the float64 model loses nothing on a way through
``AdaptedModel.weight``.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.models.adapted import AdaptedModel

LAYERS = ("fc1", "fc2")
HEAD = ("head.weight", "head.bias")
CLASSES = 3


@dataclass(frozen=True)
class ToyExamples:
    """Inputs (examples, 5) and labels (examples,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def lengths(self) -> np.ndarray:
        return np.ones(len(self), dtype=np.int64)


class ToyTask:
    """Cross-entropy in the model's own dtype."""

    def collate(self, examples: ToyExamples, indices: Sequence[int], device: torch.device) -> Mapping[str, Tensor]:
        chosen = list(indices)
        return {"x": examples.x[chosen].to(device), "y": examples.y[chosen].to(device)}

    def compute_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor], *, generate: bool = False) -> Tensor:
        return model(batch["x"])

    def compute_metrics(self, predictions: Tensor, examples: ToyExamples, indices: Sequence[int]) -> dict[str, float]:
        labels = examples.y[list(indices)]
        return {
            "loss": float(F.cross_entropy(predictions, labels)),
            "accuracy": float((predictions.argmax(1) == labels).double().mean()),
        }


class Problem:
    """The data of every client, the pretrained weights, and the loss as a plain function of dense weights.

    Args:
        clients: Number of clients; client k has 6 + 2 k examples, so that weights in the average differ.
        dtype: Number format of the model and its inputs.
        seed: Seed of weights and data.
    """

    def __init__(self, clients: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        shapes = {"fc1.weight": (8, 5), "fc1.bias": (8,), "fc2.weight": (6, 8), "fc2.bias": (6,)}
        shapes |= {"head.weight": (CLASSES, 6), "head.bias": (CLASSES,)}
        self.dtype = dtype
        self.parameters = {name: 0.5 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
        self.client_ids = tuple(f"client-{k}" for k in range(clients))
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        self.indices: dict[str, np.ndarray] = {}
        start = 0
        for k, client in enumerate(self.client_ids):
            count = 6 + 2 * k
            xs.append(torch.randn((count, 5), generator=rng) + torch.randn(5, generator=rng))
            favorite = torch.rand(count, generator=rng) < 0.6  # 60 % of a client's labels are one class
            labels = torch.randint(CLASSES, (count,), generator=rng)
            ys.append(torch.where(favorite, torch.full_like(labels, k % CLASSES), labels))
            self.indices[client] = np.arange(start, start + count)
            start += count
        self.examples = ToyExamples(torch.cat(xs).to(dtype), torch.cat(ys))
        self.task = ToyTask()

    def model(self) -> nn.Module:
        """A fresh copy of the pretrained model."""
        modules = OrderedDict(
            fc1=nn.Linear(5, 8), act1=nn.Tanh(), fc2=nn.Linear(8, 6), act2=nn.Tanh(), head=nn.Linear(6, CLASSES)
        )
        model = nn.Sequential(modules)
        model.load_state_dict(self.parameters)
        return model.to(self.dtype)

    def adapted(self) -> AdaptedModel:
        """The model with ``fc1`` and ``fc2`` as target layers and the head as extras."""
        model = self.model()
        parameters = dict(model.named_parameters())
        targets = {name: model.get_submodule(name) for name in LAYERS}
        return AdaptedModel(model, targets, {name: parameters[name] for name in HEAD})

    # What follows is for oracles: nothing of fedspan stands behind it.

    def to_dense(self, *names: str) -> dict[str, Tensor]:
        """Pretrained tensors in float64: the target layers' weights (``fc1``, ``fc2``) and the head by default."""
        keys = {"fc1": "fc1.weight", "fc2": "fc2.weight"}
        return {name: self.parameters[keys.get(name, name)].double() for name in names or (*LAYERS, *HEAD)}

    def loss(self, client: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy over all of a client's examples under dense weights, in float64."""
        x, y = self.examples.x[self.indices[client]].double(), self.examples.y[self.indices[client]]
        biases = {name: self.parameters[f"{name}.bias"].double() for name in LAYERS}
        hidden = torch.tanh(x @ weights["fc1"].T + biases["fc1"])
        hidden = torch.tanh(hidden @ weights["fc2"].T + biases["fc2"])
        logits = hidden @ weights["head.weight"].T + weights["head.bias"]
        return (torch.logsumexp(logits, 1) - logits[torch.arange(len(y)), y]).mean()

    def gradients(self, client: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The loss's gradient by every dense weight given."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        gradients = torch.autograd.grad(self.loss(client, leaves), list(leaves.values()))
        return dict(zip(leaves, gradients, strict=True))

    def shares(self, clients: Sequence[str]) -> dict[str, float]:
        """Weights in the average: examples over the cohort's examples."""
        total = sum(len(self.indices[client]) for client in clients)
        return {client: len(self.indices[client]) / total for client in clients}
