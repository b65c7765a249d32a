"""Rounds that are stopped, retried or resumed end with the same bits as rounds that are not, for every method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from fedspan.config import RunConfig, parse_config
from fedspan.data.partition import Partition
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.runs import checkpoint
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.folder import RunFolder
from fedspan.runs.integrity import format_config
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny
from helpers.families import UNLIKE, methods_by_family
from helpers.watched_rounds import RunMethod, differences, flat, method_config, snapshot


def interrupted_config(folder: Path, key: str) -> RunConfig:
    """Two passes a step, so that gradients are under way at most moments; heads stay on the clients."""
    training = {"gradient_accumulation_steps": 2, "local_steps": 1, "lora_dropout": 0.1}
    return method_config(folder, key, training=training, federation={"rounds": 3}, model={"extras": "local"})


def uninterrupted(federation: Federation) -> list[Progress]:
    """The progress before the first round and after each."""
    steps = [federation.begin()]
    while steps[-1].state.round < federation.settings.rounds:
        steps.append(federation.run_round(steps[-1]).progress)
    return steps


ReferenceRounds = Callable[[str], tuple[Federation, tuple[Progress, ...]]]


@pytest.fixture(scope="module")
def reference_rounds(tiny_folder: Path, prepared: Prepared) -> ReferenceRounds:
    """A method's federation, and what came of its rounds; run once for both tests that compare with it."""

    @functools.cache
    def get(key: str) -> tuple[Federation, tuple[Progress, ...]]:
        federation = tiny.variant(prepared, interrupted_config(tiny_folder, key)).federation
        return federation, tuple(uninterrupted(federation))

    return get


def one_round_in_a_new_process(folder: Path) -> None:
    """Everything is rebuilt from the folder, one round, and back into the folder."""
    run = RunFolder(folder)
    kept = checkpoint.load_latest(run)
    given = Partition.from_json(run.partition.read_text())
    federation = prepare(parse_config(yaml.safe_load(run.config.read_text())), given).federation
    progress = federation.begin()
    if kept is not None:
        held = {id: round for id, round in kept.last_rounds.items() if round is not None}
        progress = Progress(kept.state, kept.states, held)
    after = federation.run_round(progress).progress
    checkpoint.save(run, Checkpoint(after.state, after.states, after.last_rounds))


@pytest.mark.parametrize("key", methods_by_family(quick=["fedgalore", "fedsa-lora"]))
def test_a_resumed_run_ends_as_one_that_never_stopped(
    key: str,
    reference_rounds: ReferenceRounds,
    tiny_folder: Path,
    prepared: Prepared,
    tmp_path: Path,
) -> None:
    config = interrupted_config(tiny_folder, key)
    run = RunFolder(tmp_path)
    run.config.write_text(format_config(config))
    run.partition.write_text(prepared.partition.to_json())
    for expected in reference_rounds(key)[1][1:]:
        one_round_in_a_new_process(tmp_path)
        kept = checkpoint.load_latest(run)
        assert kept is not None
        resumed = Progress(kept.state, kept.states, kept.last_rounds)  # type: ignore[arg-type]
        assert differences(resumed, expected) == []


class _Unplugged(Exception):
    """The machine is gone."""


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_round_that_fails_midway_leaves_nothing_behind(
    key: str, reference_rounds: ReferenceRounds, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the progress nor in the model: the same round, rerun in the same process, has the same bits."""
    federation, (progress, *rest) = reference_rounds(key)
    loss, calls = prepared.task.compute_loss, 0

    def failing(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:  # the third client's second pass
            raise _Unplugged
        return loss(model, batch)

    for expected in rest:
        before, calls = snapshot(progress), 0
        with monkeypatch.context() as patch:
            patch.setattr(prepared.task, "compute_loss", failing)
            with pytest.raises(_Unplugged):
                federation.run_round(progress)
        assert differences(before, flat(progress)) == []
        progress = federation.run_round(progress).progress
        assert differences(progress, expected) == []


@pytest.mark.parametrize("key", methods_by_family(quick=UNLIKE))
def test_a_round_run_twice_counts_once(key: str, run_method: RunMethod) -> None:
    """Memories, moments and what clients hold advance from the progress that is given, not from the last call."""
    run = run_method(key)
    for round in run.rounds[-2:]:
        again = run.federation.run_round(round.before)
        assert differences(again.progress, round.after) == []
        assert again.transfers == round.result.transfers
        assert again.loss == round.result.loss


def test_a_failed_round_leaves_no_dropout_in_the_model(
    tiny_folder: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.variant(prepared, tiny.config(tiny_folder, training={"lora_dropout": 0.5}))
    progress = made.federation.run_round(made.federation.begin()).progress
    indices = made.federation.clients["west"].train

    def predictions() -> Tensor:
        return made.engine.predict(made.evaluator.build_job(progress, None), made.train, indices, 8)

    def failing(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        raise _Unplugged

    before = predictions()
    with monkeypatch.context() as patch:
        patch.setattr(made.task, "compute_loss", failing)
        with pytest.raises(_Unplugged):
            made.federation.run_round(progress)
    assert torch.equal(predictions(), before)
