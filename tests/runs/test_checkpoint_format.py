"""Checkpoints as files: everything comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.lowrank import LowRank
from fedspan.core.values import OptimizerState, ServerState
from fedspan.federation.progress import ClientState
from fedspan.logs import Position
from fedspan.runs.checkpoint import load_latest, save
from fedspan.runs.checkpoint_format import Checkpoint, load
from fedspan.runs.folder import RunFolder
from fedspan.runs.selection import Best, ClientLoss, Selection
from helpers.plain_data import plain

IDS = st.text(max_size=6) | st.sampled_from(["../../etc/passwd", "a/b", "", "станция 3", "\udc80", "__metadata__"])
SLOTS = st.dictionaries(
    st.sampled_from(["l/A", "l/B", "extras/head.weight", "x"]), st.integers(-9, 9).map(torch.tensor)
)
SCALARS = st.dictionaries(IDS, st.booleans() | st.integers() | st.floats() | st.text(max_size=3), max_size=3)
BESTS = st.none() | st.builds(Best, st.floats(), st.floats(), st.integers(0, 9))
SELECTIONS = st.builds(
    Selection,
    BESTS,
    BESTS,
    st.dictionaries(IDS, st.builds(ClientLoss, st.floats(), st.floats()), max_size=3),
    st.booleans(),
)
MOMENTS = st.builds(
    OptimizerState,
    st.dictionaries(st.sampled_from(["exp_avg", "exp_avg_sq"]), SLOTS),
    st.dictionaries(st.sampled_from(["l/A", "l/B"]), st.integers(0, 99)),
)
STATES = st.builds(ClientState, SLOTS, st.dictionaries(IDS, st.tuples(MOMENTS, st.integers(0, 5)), max_size=2))
CHECKPOINTS = st.builds(
    Checkpoint,
    st.builds(ServerState, st.integers(0, 10**6), SLOTS, scalars=SCALARS),
    st.dictionaries(IDS, STATES, max_size=3),
    st.dictionaries(IDS, st.none() | st.integers(0, 9), max_size=3),
    SELECTIONS,
    st.dictionaries(
        st.sampled_from(["metrics.jsonl", "ledger.jsonl"]),
        st.builds(Position, st.integers(0, 10**12), st.text("0123456789abcdef", min_size=64, max_size=64)),
    ),
    st.dictionaries(st.sampled_from(["partition.json"]), st.text(max_size=8)),
    SCALARS,
    st.dictionaries(IDS, st.integers(0, 9), max_size=3),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHECKPOINTS)
def test_everything_comes_back(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> None:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    folder = save(run, checkpoint)
    assert plain(load(folder)) == plain(checkpoint)
    assert plain(load_latest(run)) == plain(checkpoint)


def test_dtypes_base_and_order_come_back(run: RunFolder) -> None:
    pair = LowRank(torch.randn(4, 2), torch.randn(2, 4), 0.5)
    base = BaseUpdate().add(Increment(1, {"z": pair, "a": torch.randn(4, 4)})).add(Increment(2, {"z": pair}, 0.9))
    tensors = {
        "z/A": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "a/A": torch.empty(0),
        "b": torch.tensor(True),
    }
    checkpoint = Checkpoint(ServerState(2, tensors, base, {"m": torch.tensor(7, dtype=torch.int64)}, {"c": 1.0}, 3))
    save(run, checkpoint)
    back = load_latest(run)
    assert back is not None
    assert plain(back) == plain(checkpoint)
    assert list(back.state.tensors) == ["z/A", "a/A", "b"]
    assert list(back.state.base.total) == ["z", "a"]


def test_a_tensor_that_a_client_keeps_twice_is_stored_once(run: RunFolder) -> None:
    shared = torch.ones(10_000)
    folder = save(run, Checkpoint(ServerState(1), {"7": ClientState({"l/B": shared, "l/A": shared})}))
    (file,) = run.clients.rglob("*.safetensors")
    assert file.stat().st_size < 1.2 * shared.nbytes
    assert plain(load(folder).states["7"].memory["l/A"]) == plain(shared)
