"""What a federation is compared with: local-only and centralized training, and what a report says of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.lowrank import LowRank
from fedspan.federation.progress import Progress
from fedspan.methods.registry import METHODS
from fedspan.models.export import compute_layer_updates
from fedspan.progress.listener import Listener
from fedspan.runs.baselines import build_local_only, build_pooled, train_baseline
from helpers import tiny
from helpers.families import methods_by_family


class RecordingListener(Listener):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.losses: list[float] = []

    def on_baseline_start(self, name: str, rounds: int) -> None:
        self.events.append((name, rounds))

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        self.events.append((name, round))
        self.losses.append(loss)


def run_rounds(run: Prepared) -> Progress:
    progress = run.federation.begin()
    while progress.state.round < run.federation.settings.rounds:
        progress = run.federation.run_round(progress).progress
    return progress


def test_centralized_training_has_everybody_s_examples_and_its_own_learning_rate(prepared: Prepared) -> None:
    made = build_pooled(replace(prepared, config=prepared.config.model_copy(update={"centralized_lr": 0.003})))
    (client_data,) = made.federation.clients.values()
    for part in ("train", "validation", "test"):
        wanted = np.concatenate([getattr(one, part) for one in prepared.federation.clients.values()])
        assert np.array_equal(np.sort(getattr(client_data, part)), np.sort(wanted))
    assert made.engine.settings.lr == 0.003
    assert made.engine.settings.optimizer_state == "keep"
    assert build_pooled(prepared).engine.settings.lr == prepared.config.training.lr
    assert prepared.engine.settings.optimizer_state == "reset"


def test_local_only_training_sends_nothing_and_keeps_a_model_a_client(prepared: Prepared) -> None:
    made = build_local_only(prepared)
    first = made.federation.run_round(made.federation.begin())
    assert first.cohort == tuple(sorted(tiny.SITES))  # everybody, whatever the run's cohort
    # The initial head reaches everybody once, so that all start alike; after that nothing is transmitted.
    second = made.federation.run_round(first.progress)
    assert {transfer.payload for transfer in second.transfers} == {0}
    models = list(made.evaluator.iterate_models(second.progress))
    assert [ids for ids, _ in models] == [(id,) for id in sorted(tiny.SITES)]
    updates = [compute_layer_updates(job, second.progress.state.base, made.engine.adapted) for _, job in models]
    layer = next(iter(updates[0]))
    changes = [update[layer] for update in updates]
    assert all(isinstance(change, LowRank) and change.to_dense().any() for change in changes)
    assert not np.allclose(changes[0].to_dense(), changes[1].to_dense())


def test_a_baseline_takes_the_federation_s_rounds_and_tells_of_each(prepared: Prepared, tmp_path: Path) -> None:
    told = RecordingListener()
    result = train_baseline(prepared, "local-only", told, tmp_path / "local")
    rounds = prepared.federation.settings.rounds
    assert told.events == [("local-only", rounds), *[("local-only", number) for number in range(1, rounds + 1)]]
    assert 1 <= result["best_round"] <= rounds
    assert set(result["by_client"]) == set(tiny.SITES)
    assert result["scores"]["test"]["worst"]["accuracy"] <= result["scores"]["test"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_baselines_share_hidden_states_with_the_run_to_the_bit(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, "deep-bert", model={"layers_to_transform": [1]}, engine={"name": engine})
    after, alone = prepare(parse_config(values)), prepare(parse_config(values))
    after.evaluator.evaluate_clients(run_rounds(after))
    told = {number: RecordingListener() for number in range(2)}
    for number, run in enumerate((after, alone)):
        for name in ("local-only", "centralized"):
            train_baseline(run, name, told[number], tmp_path / f"{number}-{name}")
    cache = after.engine.prefixes.get_cache(after.train)
    assert cache.computed[build_pooled(after).federation.clients["all"].train].all()
    assert build_pooled(after).engine.prefixes is after.engine.prefixes
    assert told[0].losses == told[1].losses
    assert len(told[0].losses) == 2 * values["federation"]["rounds"]


@pytest.mark.parametrize("name", [pytest.param("local-only", marks=pytest.mark.slow), "centralized"])
def test_a_stopped_baseline_continues_to_the_same_scores(name: str, prepared: Prepared, tmp_path: Path) -> None:
    class Stopping(RecordingListener):
        def on_baseline_round(self, name: str, round: int, loss: float) -> None:
            super().on_baseline_round(name, round, loss)
            if round == 1:
                raise KeyboardInterrupt

    straight = train_baseline(prepared, name, RecordingListener(), tmp_path / "straight")
    folder, rounds = tmp_path / "stopped", prepared.federation.settings.rounds
    with pytest.raises(KeyboardInterrupt):
        train_baseline(prepared, name, Stopping(), folder)
    again, afterwards = RecordingListener(), RecordingListener()
    assert train_baseline(prepared, name, again, folder) == straight
    assert again.events == [(name, rounds), *[(name, number) for number in range(2, rounds + 1)]]
    assert train_baseline(prepared, name, afterwards, folder) == straight
    assert afterwards.events == []
    assert {entry.name for entry in folder.iterdir()} == {"predictions", "report.json"}
    assert set(straight["by_client"]) == set(tiny.SITES)


@pytest.mark.parametrize("key", methods_by_family(quick=["flora", "fedsa-lora"]))
def test_peft_gives_the_accuracy_that_the_run_reports(key: str, tiny_folder: Path, tmp_path: Path) -> None:
    """For personal methods one adapter a client, whose mean the report gives."""
    values = tiny.settings(tiny_folder, method={"name": key}, federation={"clients_per_round": None, "rounds": 2})
    report = fedspan.run(values, tmp_path / "run")
    assert set(report.adapters) == (set(tiny.SITES) if METHODS[key].claims.personal else {"global"})
    clients = [None if id == "global" else id for id in report.adapters]
    measured = [fedspan.evaluate(tmp_path / "run", client)["accuracy"] for client in clients]
    assert np.mean(measured) == pytest.approx(report.scores["test"]["accuracy"])
