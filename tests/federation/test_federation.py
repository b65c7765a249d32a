"""The rounds: who is asked, in what order things are transmitted, whose weight counts, what is kept; and evaluation."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedspan.assembly.run import Prepared
from fedspan.core.method import Memory, Wrapper
from fedspan.core.values import Client, Job, Message, ServerState, Trained
from fedspan.federation import serialization
from fedspan.federation.federation import Federation
from fedspan.federation.progress import Progress
from fedspan.federation.settings import RoundSettings
from fedspan.transports.in_process import simulate
from helpers import tiny


def with_rounds(prepared: Prepared, rounds: int, cohort: int | None, seed: int = 0) -> Federation:
    """The prepared federation with other round settings; nothing is trained by making it."""
    old = prepared.federation
    settings = RoundSettings(rounds, cohort, seed)
    return simulate(old.method, old.engine, list(old.clients.values()), old.examples, settings)


def around(prepared: Prepared, wrapper: type[Wrapper]) -> Federation:
    """The prepared federation with a wrapper around its method, which the clients alone run."""
    old = prepared.federation
    settings = replace(old.settings, clip_ratio=None)  # the server runs it, too, to see what an untrained client sends
    return simulate(wrapper(inner=old.method), old.engine, list(old.clients.values()), old.examples, settings)


def same(left: Progress, right: Progress) -> bool:
    return serialization.encode_state(left.state) == serialization.encode_state(right.state)


def test_cohorts_follow_seed_and_round_alone(prepared: Prepared) -> None:
    """Sorted, of the size asked for, the same again in any order, each client about equally often."""
    federation = with_rounds(prepared, 400, 3)
    drawn = [federation.draw_cohort(round) for round in range(400)]
    assert [with_rounds(prepared, 2, 3).draw_cohort(round) for round in reversed(range(400))] == drawn[::-1]
    assert all(list(cohort) == sorted(set(cohort)) and len(cohort) == 3 for cohort in drawn)
    counts = Counter(id for cohort in drawn for id in cohort)
    assert all(abs(count - 300) < 45 for count in counts.values())  # five standard deviations
    assert [with_rounds(prepared, 2, 3, seed=1).draw_cohort(round) for round in range(400)] != drawn
    for size in (None, 4, 9):
        assert with_rounds(prepared, 2, size).draw_cohort(1) == tuple(sorted(tiny.SITES))


def test_the_order_of_clients_does_not_matter(prepared: Prepared) -> None:
    old = prepared.federation
    backwards = list(old.clients.values())[::-1]
    again = simulate(old.method, old.engine, backwards, old.examples, old.settings)
    assert same(old.run_round(old.begin()).progress, again.run_round(again.begin()).progress)


def test_a_round_reports_what_was_transmitted_and_how_it_went(prepared: Prepared) -> None:
    """Down and up for each client in turn; the loss is the mean over examples, not over clients."""
    federation = with_rounds(prepared, 3, None)
    reported: list[tuple[str, float]] = []
    result = federation.run_round(federation.begin(), lambda client, loss: reported.append((client, loss)))
    ids = sorted(tiny.SITES)
    assert result.cohort == tuple(ids)
    assert [(t.client, t.direction) for t in result.transfers] == [(id, way) for id in ids for way in ("down", "up")]
    assert all(0 < transfer.payload < transfer.bytes for transfer in result.transfers)
    assert [client for client, _ in reported] == ids
    losses = [loss for _, loss in reported]
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-9)  # everybody took two batches of four
    assert len(set(losses)) == 4
    assert result.progress.last_rounds == dict.fromkeys(ids, 0)
    assert result.progress.state.round == 1


def test_the_loss_weighs_examples(tiny_folder: Path, prepared: Prepared) -> None:
    """An epoch each: clients of 8, 14, 21 and 43 examples."""
    config = tiny.config(tiny_folder, training={"local_steps": None}, federation={"clients_per_round": 4})
    federation = tiny.variant(prepared, config).federation
    reported: dict[str, float] = {}
    result = federation.run_round(federation.begin(), reported.__setitem__)
    sizes = {id: len(client_data.train) for id, client_data in federation.clients.items()}
    expected = sum(sizes[id] * loss for id, loss in reported.items()) / sum(sizes.values())
    assert result.loss == pytest.approx(expected, rel=1e-9)
    assert abs(result.loss - np.mean(list(reported.values()))) > 1e-3


def test_what_a_client_holds_is_the_last_round_it_took_part_in(prepared: Prepared) -> None:
    federation = with_rounds(prepared, 5, 2)
    progress, expected = federation.begin(), dict[str, int]()
    for round in range(5):
        assert {id: federation.get_client(id, progress).last_round for id in federation.clients} == {
            id: expected.get(id) for id in federation.clients
        }
        progress = federation.run_round(progress).progress
        expected |= dict.fromkeys(federation.draw_cohort(round), round)
    assert progress.last_rounds == expected
    assert set(progress.states) == set(expected)


def test_the_learning_rate_follows_the_schedule(tiny_folder: Path, prepared: Prepared) -> None:
    training = {"schedule": "linear", "warmup_rounds": 1, "lr": 0.1, "local_steps": 1}
    config = tiny.config(tiny_folder, training=training, federation={"rounds": 5})
    federation = tiny.variant(prepared, config).federation
    progress, rates = federation.begin(), []
    for _ in range(5):
        result = federation.run_round(progress)
        progress = result.progress
        rates.append(result.lr)
    assert rates == pytest.approx([0.05, 0.1, 0.075, 0.05, 0.025])


def test_uniform_weights_count_clients_not_examples(prepared: Prepared) -> None:
    """With weight 1 for all, the state is the plain mean of the four replies."""
    old = prepared.federation
    clients = [replace(one, client=replace(one.client, weight=1.0)) for one in old.clients.values()]
    replies: list[dict[str, Tensor]] = []

    @dataclass(frozen=True, kw_only=True)
    class Listening(Wrapper):
        def finish(
            self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
        ) -> tuple[Job | Message, Memory]:
            result = self.inner.finish(job, trained, client, memory, round)
            assert isinstance(result[0], Message)
            replies.append(dict(result[0].tensors))
            return result

    federation = simulate(Listening(inner=old.method), old.engine, clients, old.examples, RoundSettings(1))
    state = federation.run_round(federation.begin()).progress.state
    for name, value in state.tensors.items():
        mean = torch.stack([reply[name].double() for reply in replies]).mean(0)
        assert torch.allclose(value.double(), mean, rtol=1e-7, atol=1e-8)
    assert not same(Progress(state), old.run_round(old.begin()).progress)


@pytest.mark.parametrize(("method", "matters"), [("fedit", True), ("flora", False)])
def test_moments_are_kept_on_request_and_within_a_generation(
    method: str, matters: bool, tiny_folder: Path, prepared: Prepared
) -> None:
    """FLoRA's factors are new every round: moments of the old ones are dropped even if the run keeps moments."""
    ends = []
    for state in ("reset", "keep"):
        config = tiny.config(
            tiny_folder, method={"name": method}, training={"optimizer_state": state}, model={"extras": "frozen"}
        )
        federation = tiny.variant(prepared, config).federation
        progress = federation.begin()
        for _ in range(2):
            progress = federation.run_round(progress).progress
        assert any(one.moments for one in progress.states.values()) == (state == "keep")
        ends.append(progress)
    assert same(*ends) != matters


def test_a_method_may_train_in_phases(prepared: Prepared) -> None:
    """The second job begins where the first ended, with the memory that it left; one reply is transmitted."""
    seen: list[tuple[str, str]] = []

    @dataclass(frozen=True, kw_only=True)
    class Twice(Wrapper):
        def finish(
            self, job: Job, trained: Trained, client: Client, memory: Memory, round: int
        ) -> tuple[Job | Message, Memory]:
            seen.append((client.id, job.phase))
            if job.phase == "train":
                return replace(job, phase="again", tensors=trained.tensors), {"l/x": torch.ones(1)}
            assert memory.keys() == {"l/x"}
            return self.inner.finish(job, trained, client, {}, round)[0], {"l/x": memory["l/x"] + 1}

    federation = around(prepared, Twice)
    result = federation.run_round(federation.begin())
    assert seen == [(id, phase) for id in result.cohort for phase in ("train", "again")]
    assert len(result.transfers) == 2 * len(result.cohort)
    assert {float(one.memory["l/x"]) for one in result.progress.states.values()} == {2.0}
    assert not same(result.progress, prepared.federation.run_round(federation.begin()).progress)


def test_only_what_is_in_the_message_arrives(prepared: Prepared) -> None:
    """A client gets what the bytes say, on no common ground with the server's objects."""
    ids: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Spying(Wrapper):
        def sync(self, state: ServerState, client: Client | None) -> Message:
            ids.extend(value.data_ptr() for value in state.tensors.values())
            return self.inner.sync(state, client)

        def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
            assert not {value.data_ptr() for value in message.tensors.values()} & set(ids)
            return self.inner.start(message, client, memory, round)

    federation = around(prepared, Spying)
    federation.run_round(federation.begin())
    assert ids


def test_predictions_come_in_the_order_asked_for(prepared: Prepared) -> None:
    job = prepared.evaluator.build_job(prepared.federation.begin(), None)
    indices = np.array([40, 3, 77, 12, 5])
    together = prepared.engine.predict(job, prepared.train, indices, 2)
    for row, index in zip(together, indices, strict=True):
        alone = prepared.engine.predict(job, prepared.train, np.array([index]), 1)[0]
        assert torch.allclose(row, alone, atol=1e-5)
    assert len({tuple(row.tolist()) for row in together}) == 5
    twice = prepared.engine.predict(job, prepared.train, np.array([3, 40, 3]), 2)
    assert torch.allclose(twice, together[[1, 0, 1]], atol=1e-5)
