"""The steps that most factor-averaging methods share: initial factors, the LoRA job, the reply, the average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedspan.core.method import RegisteredMethod
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import Tensors, generator, tensor_name
from fedspan.core.values import Client, Group, Job, LayerSpec, Message, Spec, Trained

__all__ = [
    "Init",
    "a_factors",
    "b_factors",
    "initial_A",
    "kaiming",
    "lora_job",
    "names",
    "personal_pair",
    "reply",
    "require_rank",
]

Init = Literal["kaiming", "gaussian", "orthonormal"]


def kaiming(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """The default of PEFT and torch for a map from C = ``columns`` to ``rows`` features: U(-1/sqrt(C), 1/sqrt(C))."""
    bound = 1.0 / math.sqrt(columns)
    return torch.empty((rows, columns)).uniform_(-bound, bound, generator=rng)


def initial_A(layer: LayerSpec, rank: int, rng: torch.Generator, init: Init = "kaiming") -> Tensor:
    """A down-projection (R, I), float32.

    ``kaiming`` is PEFT's default, U(-1/sqrt(I), 1/sqrt(I)); ``gaussian`` PEFT's N(0, 1/r^2); ``orthonormal`` has
    orthonormal rows (QR of a Gaussian in float64, signs fixed) scaled by 1/sqrt(3), so that its rows have kaiming's
    expected length.
    """
    if init == "kaiming":
        return kaiming(rank, layer.in_features, rng)
    if init == "gaussian":
        return torch.randn((rank, layer.in_features), generator=rng) / rank
    gaussian = torch.randn((layer.in_features, rank), generator=rng, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    return (Q * torch.sign(torch.diagonal(R))).T.to(torch.float32).contiguous() / math.sqrt(3.0)


def a_factors(method: RegisteredMethod, rank: int, *key: int | str, init: Init = "kaiming") -> dict[str, Tensor]:
    """A for every target layer, drawn by (method seed, "A", layer, key): whoever has the key has the same bits."""
    return {
        tensor_name(layer.name, "A"): initial_A(layer, rank, generator(method.seed, "A", layer.name, *key), init)
        for layer in method.spec.layers
    }


def b_factors(spec: Spec, rank: int) -> dict[str, Tensor]:
    """B = 0 for every target layer, (O, R) float32."""
    return {tensor_name(layer.name, "B"): torch.zeros(layer.out_features, rank) for layer in spec.layers}


def personal_pair(method: RegisteredMethod, rank: int, client: Client | None) -> dict[str, Tensor]:
    """L = 0 (O, P) and U (P, I) drawn by (method seed, "U", layer, client): like LoRA's, a product of 0 at first."""
    id = "" if client is None else client.id
    pair: dict[str, Tensor] = {}
    for layer in method.spec.layers:
        pair[tensor_name(layer.name, "L")] = torch.zeros(layer.out_features, rank)
        pair[tensor_name(layer.name, "U")] = initial_A(layer, rank, generator(method.seed, "U", layer.name, id))
    return pair


def names(spec: Spec, *slots: str) -> tuple[str, ...]:
    """The names of the given slots over all target layers."""
    return tuple(tensor_name(layer.name, slot) for layer in spec.layers for slot in slots)


def lora_job(
    method: RegisteredMethod, tensors: Tensors, client: Client | None, train: Iterable[str], generation: int = 0
) -> Job:
    """A job in which every target layer is ``LoRA`` and the slots named in ``train`` move."""
    parametrization = LoRA(method.scaling(client))
    return Job(
        parametrization={layer.name: parametrization for layer in method.spec.layers},
        tensors=tensors,
        trainable=(Group(names(method.spec, *train)),),
        generation=generation,
    )


def reply(job: Job, trained: Trained, scalars: Mapping[str, int | float | str | bool] | None = None) -> Message:
    """A reply that carries exactly the tensors that were trained."""
    return Message({name: trained.tensors[name] for name in job.trainable_names}, scalars or {})


def require_rank(spec: Spec, rank: int) -> str | None:
    """Why a rank does not fit the model, or None: the first layer with fewer than ``rank`` rows or columns."""
    for layer in spec.layers:
        if rank > min(layer.shape):
            return f"{layer.name} is {layer.out_features} x {layer.in_features}: at most {min(layer.shape)}"
    return None
