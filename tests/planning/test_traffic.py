"""Planned traffic is that of the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedspan.methods.registry import METHODS
from fedspan.planning.plan import PlannedModel, plan_run
from fedspan.runs.ledger import Ledger, Totals
from fedspan.runs.setup import Prepared
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family

ROUNDS, RANK = 4, 3


def count_run(prepared: Prepared, path: Path) -> Totals:
    """The ledger of a federation of a few rounds."""
    federation = prepared.federation
    progress = federation.begin()
    with Ledger(path) as ledger:
        for number in range(1, federation.settings.rounds + 1):
            result = federation.run_round(progress)
            progress = result.progress
            for one in result.transfers:
                ledger.record(number, one.client, one.direction, one.bytes, one.payload)
        ledger.commit()
        return ledger.totals


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_bytes_are_the_ledger_s(
    key: str, prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    """Every method with the head as it likes it, every client in every round."""
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    never_prunes = {"gamma": 1.0} if key == "hetlora" else {}
    config = tiny.config(tiny_folder, method={"name": key, "r": RANK, "lora_alpha": 6, **never_prunes}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    if METHODS[key].claims.adaptive_rank:  # the largest rank is planned
        assert not plan.exact
        assert plan.first_down * plan.clients == totals.count_round("down", 1).payload
        assert totals.count_round("down", 1).payload < totals.run("down").payload <= plan.bytes_down
    else:
        assert plan.exact
        assert plan.bytes_down == totals.run("down").payload
    assert plan.bytes_up == totals.run("up").payload
    assert plan.first_up * plan.clients == totals.count_round("up", 1).payload
    assert plan.first_down * plan.clients == totals.count_round("down", 1).payload


@pytest.mark.parametrize(
    "wrapper",
    [
        "scaffold",
        {"name": "fedpaq", "bits": 5},
        pytest.param("fedprox", marks=pytest.mark.slow),
        pytest.param("fedadam", marks=pytest.mark.slow),
    ],
)
def test_wrappers_are_planned_too(
    wrapper: Any, prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    changes["training"] = {"optimizer": "sgd", "max_grad_norm": 0.0}
    config = tiny.config(tiny_folder, method={"name": "fedit", "r": RANK, "wrappers": [wrapper]}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    assert (plan.bytes_down, plan.bytes_up) == (totals.run("down").payload, totals.run("up").payload)


def test_ranks_that_clients_prune_are_planned_as_they_were(
    prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    changes = {"federation": {"rounds": ROUNDS, "clients_per_round": None}}
    config = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK, "lora_alpha": 6}, **changes)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    plan = plan_run(config, planned, clients=len(tiny.SITES))
    assert not plan.exact
    assert totals.run("up").payload < plan.bytes_up
    assert totals.run("down").payload <= plan.bytes_down


def test_ranks_and_sampled_cohorts(
    prepared: Prepared, planned: PlannedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    """A method whose messages do not depend on who was away is planned to the byte for cohorts too."""
    federation = {"rounds": ROUNDS, "clients_per_round": 2, "ranks": {"east": 1, "west": 2}}
    config = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK}, federation=federation)
    totals = count_run(tiny.variant(prepared, config), tmp_path / "ledger.jsonl")
    by_position = {**federation, "ranks": {"client-00": 1, "client-03": 2}}
    ordered = tiny.config(tiny_folder, method={"name": "hetlora", "r": RANK}, federation=by_position)
    plan = plan_run(ordered, planned, clients=len(tiny.SITES))
    assert not plan.exact
    assert plan.bytes_up == totals.run("up").payload
    assert plan.cohort == 2
