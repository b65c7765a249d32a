"""The steps that most factor-averaging methods share: initial factors, the LoRA job, the reply, the average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedspan.core.aggregation import choose_smaller_form, map_layers
from fedspan.core.base import Increment
from fedspan.core.lowrank import LowRank, balance_factors, compute_leading_svd
from fedspan.core.method import RegisteredMethod
from fedspan.core.parametrization import LoRA
from fedspan.core.tensors import Tensors, create_generator, join_tensor_name
from fedspan.core.values import Client, Group, Job, LayerSpec, Spec, Weights

Init = Literal["kaiming", "gaussian", "orthonormal"]

Singular = Literal["full", "randomized"]


def draw_kaiming(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """Draw PEFT's and torch's default for a map from C = ``columns`` to ``rows`` features: U(-1/sqrt(C), 1/sqrt(C))."""
    bound = 1.0 / math.sqrt(columns)
    return torch.empty((rows, columns)).uniform_(-bound, bound, generator=rng)


def draw_initial_A(layer: LayerSpec, rank: int, rng: torch.Generator, init: Init = "kaiming") -> Tensor:
    """Draw a down-projection (R, I), float32.

    ``kaiming`` is PEFT's default, U(-1/sqrt(I), 1/sqrt(I)); ``gaussian`` PEFT's N(0, 1/r^2); ``orthonormal`` has
    orthonormal rows (QR of a Gaussian in float64, signs fixed) scaled by 1/sqrt(3), so that its rows have kaiming's
    expected length.
    """
    if init == "kaiming":
        return draw_kaiming(rank, layer.in_features, rng)
    if init == "gaussian":
        return torch.randn((rank, layer.in_features), generator=rng) / rank
    gaussian = torch.randn((layer.in_features, rank), generator=rng, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    return (Q * torch.sign(torch.diagonal(R))).T.to(torch.float32).contiguous() / math.sqrt(3.0)


def draw_a_factors(method: RegisteredMethod, rank: int, *key: int | str, init: Init = "kaiming") -> dict[str, Tensor]:
    """Draw A for every target layer by (method seed, "A", layer, key): the same key gives the same bits."""
    return {
        join_tensor_name(layer.name, "A"): draw_initial_A(
            layer, rank, create_generator(method.seed, "A", layer.name, *key), init
        )
        for layer in method.spec.layers
    }


def create_b_factors(spec: Spec, rank: int) -> dict[str, Tensor]:
    """Create B = 0 for every target layer, (O, R) float32."""
    return {join_tensor_name(layer.name, "B"): torch.zeros(layer.out_features, rank) for layer in spec.layers}


def flatten_pairs(pairs: Mapping[str, LowRank]) -> dict[str, Tensor]:
    """Return pairs by layer as the tensors ``layer/A`` and ``layer/B``, any scale folded into B."""
    folded = {layer: pair.fold_scale() for layer, pair in pairs.items()}
    return {
        **{join_tensor_name(layer, "A"): pair.A.contiguous() for layer, pair in folded.items()},
        **{join_tensor_name(layer, "B"): pair.B.contiguous() for layer, pair in folded.items()},
    }


def resize_factors(method: RegisteredMethod, tensors: Tensors, rank: int) -> dict[str, Tensor]:
    """Resize A and B of every layer to ``rank`` components, of which the first ones are retained.

    Missing components are as at the beginning, A random and B = 0: they add nothing, but they can be trained. Without
    any tensors, all components are missing.
    """
    initial = {**draw_a_factors(method, rank), **create_b_factors(method.spec, rank)}
    for layer in method.spec.layers:
        a, b = join_tensor_name(layer.name, "A"), join_tensor_name(layer.name, "B")
        if a in tensors:
            A, B = tensors[a][:rank], tensors[b][:, :rank]
            initial[a] = torch.cat([A, initial[a][len(A) :].to(A.dtype)])
            initial[b] = torch.cat([B, initial[b][:, len(A) :].to(B.dtype)], 1)
    return initial


def compute_principal_factors(
    method: RegisteredMethod, weights: Weights, singular: Singular
) -> tuple[dict[str, Tensor], Increment]:
    """Initialize LoRA factors as the principal part of the pretrained weights, which is subtracted from the base.

    ``W0 = U S V^T``:  ``B0 = U_r (S_r / s)^(1/2)``, ``A0 = (S_r / s)^(1/2) V_r^T``, and the base moves by ``-s B0 A0``,
    so that the initial model is the pretrained one.

    Args:
        method: The method, with its rank, scaling s and seed.
        weights: The pretrained model.
        singular: ``full`` SVD of every weight, or ``randomized`` (``lowrank.compute_leading_svd``) for large layers.

    Returns:
        ``layer/A`` and ``layer/B`` in float32, and the increment of round 0.
    """
    scaling = method.get_scaling(None)

    def decompose(layer: LayerSpec) -> LowRank:
        rng = create_generator(method.seed, "principal", layer.name) if singular == "randomized" else None
        U, S, Vt = compute_leading_svd(weights.get_weight(layer.name), method.r, rng)
        return balance_factors(U, S / scaling, Vt).to(torch.float32)

    pairs = map_layers(decompose, method.spec.layers)
    deltas = {layer: choose_smaller_form(LowRank(-pair.B, pair.A, scaling)) for layer, pair in pairs.items()}
    return flatten_pairs(pairs), Increment(0, deltas)


def draw_personal_pair(method: RegisteredMethod, rank: int, client: Client | None) -> dict[str, Tensor]:
    """Create L = 0 (O, P), and draw U (P, I) by (method seed, "U", layer, client); as in LoRA, L U is 0 at first."""
    id = "" if client is None else client.id
    pair: dict[str, Tensor] = {}
    for layer in method.spec.layers:
        pair[join_tensor_name(layer.name, "L")] = torch.zeros(layer.out_features, rank)
        pair[join_tensor_name(layer.name, "U")] = draw_initial_A(
            layer, rank, create_generator(method.seed, "U", layer.name, id)
        )
    return pair


def list_tensor_names(spec: Spec, *slots: str) -> tuple[str, ...]:
    """Return the names of the given slots over all target layers."""
    return tuple(join_tensor_name(layer.name, slot) for layer in spec.layers for slot in slots)


def cut_slots(tensors: Tensors, rank: int) -> dict[str, Tensor]:
    """Truncate every pair to its first ``rank`` slots: A (rank, I), B (O, rank); copies, so that the rest is freed."""
    return {
        name: (value[:rank] if name.endswith("/A") else value[:, :rank]).clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }


def get_alternating_factor(round: int) -> str:
    """Return the factor that trains in alternation: B in round 0 (with B = 0 A's gradient vanishes), A in round 1."""
    return "B" if round % 2 == 0 else "A"


def list_alternating_factors(round: int, known_round: int | None) -> tuple[str, ...]:
    """Return the factors of state ``round`` that a client lacks if its last accepted state is of ``known_round``.

    Both sides know the initial factors from the seed. A factor that trained in round t is new in state t + 1.
    """
    changed = {"A": 0, "B": 0}
    for past in range(max(0, round - 2), round):
        changed[get_alternating_factor(past)] = past + 1
    return tuple(slot for slot, since in changed.items() if since > (known_round or 0))


def create_lora_job(
    method: RegisteredMethod, tensors: Tensors, client: Client | None, train: Iterable[str], generation: int = 0
) -> Job:
    """Create a job in which every target layer is ``LoRA`` and the slots named in ``train`` are trained."""
    parametrization = LoRA(method.get_scaling(client))
    return Job(
        parametrization={layer.name: parametrization for layer in method.spec.layers},
        tensors=tensors,
        trainable=(Group(list_tensor_names(method.spec, *train)),),
        generation=generation,
    )


def create_restarted_lora_job(method: RegisteredMethod, client: Client | None, round: int) -> Job:
    """Create a job whose pair restarts in every round: A drawn from (seed, round, client), B = 0, both trained."""
    rank = method.get_rank(client)
    initial = draw_a_factors(method, rank, round, "" if client is None else client.id)
    tensors = {**initial, **create_b_factors(method.spec, rank)}
    return create_lora_job(method, tensors, client, train=("A", "B"), generation=round)


def require_rank(spec: Spec, rank: int) -> str | None:
    """Name the first layer with fewer than ``rank`` rows or columns, or return None if the rank fits the model."""
    for layer in spec.layers:
        if rank > min(layer.shape):
            return f"{layer.name} is {layer.out_features} x {layer.in_features}: at most {min(layer.shape)}"
    return None
