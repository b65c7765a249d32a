"""Limits on the weights of clients that declare more examples than the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.federation.weights import compute_weight_limit, limit_weights
from fedspan.runs.setup import prepare
from helpers import tiny


@pytest.mark.parametrize(
    ("weights", "ratio", "limit"),
    [
        ((100, 90, 2**53 - 1, 110, 80), 4.0, 400),
        ((100, 2**53 - 1), 4.0, 400),
        ((100, 100, 2**53 - 1, 2**53 - 1), 4.0, 400),
        ((100, 90, 5000), None, None),
        ((0, 0, 7), 4.0, None),
        ((), 4.0, None),
    ],
)
def test_a_limit_is_a_multiple_of_the_median(
    weights: tuple[int, ...], ratio: float | None, limit: float | None
) -> None:
    assert compute_weight_limit(weights, ratio) == limit


def test_a_client_that_declares_2_to_the_53_examples_weighs_as_much_as_the_limit(tiny_folder: Path) -> None:
    def state(weight: float, ratio: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float], str | None]:
        config = tiny.config(tiny_folder, federation={"clients_per_round": None, "max_weight_ratio": ratio})
        federation = prepare(config).federation
        tiny.reweight(federation, {id: weight if id == "west" else 1.0 for id in federation.clients})
        result = federation.run_round(federation.begin())
        return dict(result.progress.state.tensors), dict(result.lowered), federation.get_note()

    limited, lowered, note = state(2.0**53 - 1, 4.0)
    expected, unchanged, silent = state(4.0, None)
    assert all(torch.equal(value, expected[name]) for name, value in limited.items())
    assert lowered == {"west": 4.0 / (2.0**53 - 1)}
    assert note.startswith("west declared so many examples")
    assert (unchanged, silent) == ({}, None)


@pytest.mark.parametrize("liars", [("west",), ("south", "west")])
def test_liars_that_are_half_of_all_clients_weigh_no_more_than_the_limit(
    liars: tuple[str, ...], tiny_folder: Path
) -> None:
    """One of two, or two of four, whose lie would raise the mean of the middle two numbers."""
    federation = prepare(tiny.config(tiny_folder, federation={"clients_per_round": None})).federation
    ids = ("north", "west") if len(liars) == 1 else tuple(federation.clients)
    tiny.use_clients(federation, {id: federation.clients[id] for id in ids})
    tiny.reweight(federation, {id: 2.0**53 - 1 if id in liars else 100.0 for id in ids})
    result = federation.run_round(federation.begin())
    assert result.lowered == dict.fromkeys(liars, 400 / (2.0**53 - 1))
    weights = limit_weights(federation.clients, 4.0)
    assert sum(weights[id] for id in liars) / sum(weights.values()) == pytest.approx(0.8)


def test_a_client_that_declares_more_than_it_was_admitted_with_weighs_as_much_as_that(tiny_folder: Path) -> None:
    def state(weight: float, most: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float], str | None]:
        config = tiny.config(tiny_folder, federation={"clients_per_round": None, "max_weight_ratio": None})
        federation = prepare(config).federation
        tiny.reweight(federation, {id: weight if id == "west" else 1.0 for id in federation.clients})
        west = replace(federation.clients["west"], max_weight=most)
        tiny.use_clients(federation, {**federation.clients, "west": west})
        result = federation.run_round(federation.begin())
        return dict(result.progress.state.tensors), dict(result.lowered), federation.get_note()

    limited, lowered, note = state(2.0**53 - 1, 2.0)
    expected, unchanged, silent = state(2.0, 2.0)
    assert all(torch.equal(value, expected[name]) for name, value in limited.items())
    assert lowered == {"west": 2.0 / (2.0**53 - 1)}
    assert note.endswith("the weight is lowered. Limits: 2 for west (as it was admitted)")
    assert (unchanged, silent) == ({}, None)


def test_the_common_limit_is_for_declared_numbers(tiny_folder: Path) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    tiny.reweight(federation, {"east": 9.0, "north": 1.0, "south": 1.0, "west": 9.0})
    no_data = np.zeros(0, np.int64)
    declared = {id: replace(data, train=no_data) for id, data in federation.clients.items()}
    own = {**declared, "east": replace(declared["east"], max_weight=1.0)}
    # the median of 1, 1, 1 and 9 is 1; with what east declares it would be 5
    assert limit_weights(own, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 2.0}
    admitted = {**own, "west": replace(declared["west"], max_weight=7.0)}
    assert limit_weights(admitted, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 7.0}
    assigned = {**own, "west": replace(declared["west"], train=np.arange(9))}
    assert limit_weights(assigned, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 9.0}
    more = {**own, "west": replace(declared["west"], train=np.arange(8))}  # it declares more than it was assigned
    assert limit_weights(more, 2.0) == {"east": 1.0, "north": 1.0, "south": 1.0, "west": 2.0}


def test_a_client_that_declares_2_to_the_53_examples_weighs_as_much_as_all_agreed_in_a_secure_sum(
    tiny_folder: Path,
) -> None:
    """The mean is that of plain aggregation with the same limit, up to the rounding of masked integers."""
    pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
    pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")

    def run(weight: float, **federation: Any) -> tuple[dict[str, torch.Tensor], Mapping[str, float], str]:
        settings = {"clients_per_round": None, "clip_ratio": None, **federation}
        made = prepare(tiny.config(tiny_folder, federation=settings)).federation
        tiny.reweight(made, {id: weight if id == "west" else 1.0 for id in made.clients})
        result = made.run_round(made.begin())
        return dict(result.progress.state.tensors), result.lowered, made.get_note() or ""

    secure, lowered, note = run(2.0**53 - 1, secure={"bits": 64})
    plain, same, _ = run(2.0**53 - 1)
    assert lowered == same == {"west": pytest.approx(4 / (2.0**53 - 1))}
    for name, value in plain.items():
        torch.testing.assert_close(secure[name], value, rtol=0, atol=1e-6)
    assert "west declared more examples than federation.max_weight_ratio allows" in note
    assert "agreed that 4 count" in note
    _, unchanged, silent = run(3.0, secure={})
    assert not unchanged
    assert "declared" not in silent
