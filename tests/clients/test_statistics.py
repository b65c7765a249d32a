"""What a client leaves out of its statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedspan.clients.statistics import StatisticsLimits, compute_client_statistics
from fedspan.core.heads import HeadKind
from fedspan.errors import FedspanError
from fedspan.runs.head_setup import begin
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny
from helpers.head_starts import HEAD, start_of


@pytest.fixture(scope="module")
def prepared(tiny_folder: Path) -> Prepared:
    """A run on BERT, whose clients are of different sizes and labels."""
    federation = {"clients_per_round": None}
    return prepare(tiny.config(tiny_folder, "deep-bert", model={"head_init": "lda"}, federation=federation))


def test_limits_of_a_data_owner(prepared: Prepared) -> None:
    run = tiny.variant(prepared, prepared.config)
    host = tiny.host_of(run.federation)
    host.limits = StatisticsLimits(class_examples=8)
    assert prepared.head is not None
    small = start_of(replace(run, head=prepared.head))
    assert not torch.equal(small[HEAD[0]], start_of(prepared)[HEAD[0]])
    host.limits = StatisticsLimits(allowed=False)
    with pytest.raises(FedspanError, match=r"limits\.head_statistics"):
        begin(run.federation, prepared.head)


@pytest.mark.parametrize("kind", ["class-means", "lda", "least-squares"])
def test_every_kind_leaves_out_what_has_too_few_examples(prepared: Prepared, kind: HeadKind) -> None:
    engine, labels = prepared.engine, prepared.train.labels  # type: ignore[attr-defined]
    rare = np.flatnonzero(labels == 0)[:2]
    indices = np.sort(np.concatenate([rare, np.flatnonzero(labels == 1)[:3]])) if kind != "least-squares" else rare
    found = compute_client_statistics(engine, None, prepared.train, indices, kind, 0.0, 3)
    whole = compute_client_statistics(engine, None, prepared.train, indices, kind, 0.0, 1)
    if kind == "least-squares":
        assert all(not value.any() for value in found.values())
        assert float(whole["shares"].sum()) == 1.0
        return
    assert found["shares"].tolist() == pytest.approx([0.0, 0.6, 0.0, 0.0])
    assert not found["sums"][0].any()
    assert float(found["square"]) < float(whole["square"])  # nothing of the others' examples is in any number
