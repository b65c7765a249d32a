"""What each method would send around for a given model, before anything is trained or downloaded but its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModel

from fedspan.core.factors import require_rank
from fedspan.core.method import RegisteredMethod
from fedspan.core.values import LayerSpec, Spec
from fedspan.errors import FedspanError
from fedspan.methods.registry import METHODS
from fedspan.models.loading import resolve
from fedspan.models.targets import find_targets, make_spec

__all__ = ["PlannedTraffic", "planned_traffic", "target_layers"]


@dataclass(frozen=True)
class PlannedTraffic:
    """Bytes of tensor data of a client that takes part in every round; target layers only, messages' headers not.

    Args:
        method: registry key.
        first_down: to the client, in the first round.
        first_up: from it, in the first round.
        later_down: to it, mean over the later rounds.
        later_up: from it, mean over the later rounds.
    """

    method: str
    first_down: int
    first_up: int
    later_down: float
    later_up: float


def target_layers(name: str, target_modules: Sequence[str] | None = None) -> tuple[LayerSpec, ...]:
    """The target layers of a model by its config alone: no weight is downloaded or held in memory.

    Args:
        name: hub id, local folder, or ``builtin:NAME``.
        target_modules: names or suffixes; None for PEFT's default of the architecture.

    Raises:
        FedspanError: a model without a config that can be read, or no such layers in it.
    """
    source = resolve(name)
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        expected = f"a hub id that can be reached, a local folder with a model, or builtin:NAME ({reason})"
        raise FedspanError("--model", name, expected) from error
    chosen = list(target_modules) if target_modules else None
    return make_spec(find_targets(model, LoraConfig(target_modules=chosen)), {}).layers


def planned_traffic(
    layers: Sequence[LayerSpec], rank: int, clients: int, rounds: int, keys: Sequence[str] = tuple(METHODS)
) -> tuple[PlannedTraffic, ...]:
    """The bytes of every method, with its own options as they are by default.

    Args:
        layers: target layers.
        rank: of all clients.
        clients: of a round's cohort.
        rounds: of the run, at least 2.
        keys: of the methods.

    Raises:
        FedspanError: for a rank that no layer has room for.
    """
    spec = Spec(tuple(layers), clients=clients)
    too_large = require_rank(spec, rank)
    if too_large:
        raise FedspanError("--rank", rank, f"larger than a target layer; {too_large}")
    return tuple(_planned(key, METHODS[key](spec=spec, r=rank), rank, clients, rounds) for key in keys)


def _planned(key: str, method: RegisteredMethod, rank: int, clients: int, rounds: int) -> PlannedTraffic:
    before = [(), *[(rank,) * clients] * (rounds - 1)]
    played = [
        [method.traffic(one, rank, cohort, round) for one in method.spec.layers] for round, cohort in enumerate(before)
    ]
    down = [4 * sum(one.down for one in layers) for layers in played]
    up = [4 * sum(one.up for one in layers) for layers in played]
    later = rounds - 1
    return PlannedTraffic(key, down[0], up[0], sum(down[1:]) / later, sum(up[1:]) / later)
