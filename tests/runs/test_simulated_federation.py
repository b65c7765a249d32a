"""Federations whose clients are all in this process: their labels, presence, ranks and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny

IDS = tuple(sorted(tiny.SITES))
PRESENT = {"north": [2, None], "south": [1, 2], "west": [2, 3]}
"""East is there all the time."""


def build(folder: Path, **changes: Mapping[str, Any]) -> Prepared:
    changes["federation"] = {"clients_per_round": None, "rounds": 4, **changes.get("federation", {})}
    return prepare(tiny.config(folder, **{"training": {"local_steps": 1}, **changes}))


def test_labels_are_flipped_for_training_alone(tiny_folder: Path) -> None:
    plain = build(tiny_folder)
    prepared = build(tiny_folder, simulation={"faults": {"share": 0.5, "kind": "label-flip"}})
    bad = prepared.config.simulation.build_conditions(prepared.config.seed).draw_faulty(IDS)  # pyright: ignore
    flipped: Any = prepared.federation.examples
    honest: Any = plain.train
    last = len(prepared.labels) - 1
    for id, client_data in prepared.federation.clients.items():
        own = client_data.train
        wanted = last - honest.labels[own] if id in bad else honest.labels[own]
        assert (flipped.labels[own] == wanted).all()
        for part in (client_data.validation, client_data.test):
            assert (flipped.labels[part] == honest.labels[part]).all()
    one, other = (run.federation.run_round(run.federation.begin()).progress.state.tensors for run in (prepared, plain))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"simulation": {"present": {"nort": [1, 2]}}}, r"simulation\.present\.nort.*Did you mean 'north'"),
        ({"simulation": {"present": {id: [1, 3] for id in IDS}}}, "0 of 4 clients are present in round 4"),
        ({"federation": {"min_replies": 3}}, r"2 of 4 clients are present in round 1.*at least 3 \(federation"),
        (
            {"federation": {"secure": {"bits": 64}, "weights": "uniform"}},
            r"2 of 4 clients are present in round 1.*at least 3 \(federation\.secure",
        ),
        (
            {"method": {"wrappers": ["scaffold"]}, "training": {"optimizer": "sgd", "momentum": 0.0}},
            "scaffold averages its control variates over a fixed number",
        ),
        ({"simulation": {"present": {"north": [3, 2]}}}, "a last round that is not before the first one"),
        (
            {"privacy": {"mechanism": "central", "noise": 1.0}, "federation": {"weights": "uniform"}},
            "central privacy counts on the same number of clients in every round",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], why: str, tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=why):
        build(tiny_folder, **{"simulation": {"present": PRESENT}, **changes})


def test_a_cohort_of_more_clients_than_there_are_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(FedspanError, match=r"federation\.clients_per_round.*at most 4, the number of clients"):
        build(tiny_folder, federation={"clients_per_round": 5})


def test_clients_have_the_examples_of_their_parts_and_the_ranks_weights_and_scaling_of_the_config(
    tiny_folder: Path,
) -> None:
    ranks = {"east": 1, "north": 2, "south": 3, "west": 4}
    changes: dict[str, Any] = {"method": {"name": "flexlora", "r": 4, "lora_alpha": 8}}
    for weights in ("examples", "uniform"):
        prepared = build(tiny_folder, **changes, federation={"ranks": ranks, "weights": weights})
        assert prepared.partition is not None
        for part in prepared.partition.clients:
            client_data = prepared.federation.clients[part.id]
            assert client_data.train.tolist() == part.train.tolist()
            assert (client_data.validation.tolist(), client_data.test.tolist()) == (
                part.validation.tolist(),
                part.test.tolist(),
            )
            assert client_data.client.rank == ranks[part.id]
            assert client_data.client.scaling == 8 / ranks[part.id]
            assert client_data.client.examples == len(part.train)
            assert client_data.client.weight == (len(part.train) if weights == "examples" else 1.0)
        assert prepared.federation.examples is prepared.train
