"""Simulated conditions, and clients that join late, leave, or are not waited for."""

import builtins
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.config import parse_config
from fedspan.core.values import Job, Message, Reduced
from fedspan.federation import round as federation_round
from fedspan.federation.absences import Absences, Awaited
from fedspan.federation.aggregation.reduction import MessageBuffer, ReplyBuffer
from fedspan.federation.conditions import PHASES, Conditions, Faults, SpeedDistribution, corrupt_reply
from fedspan.federation.evaluation import RemoteEvaluator
from fedspan.federation.presence import Presence
from fedspan.federation.progress import Progress, RoundResult
from fedspan.federation.serialization import encode_state
from fedspan.federation.transport import Orders, Transport
from fedspan.training.jobs import Assignment
from helpers import tiny
from helpers.families import others_slow
from helpers.listeners import Notes
from helpers.refusals import refused

for extra in ("Crypto", "cryptography"):
    pytest.importorskip(extra, reason="the extra fedspan[secagg] is not installed")

IDS = tuple(sorted(tiny.SITES))


def built(folder: Path, **changes: Mapping[str, Any]) -> Prepared:
    changes["federation"] = {"clients_per_round": None, **changes.get("federation", {})}
    changes = {"training": {"local_steps": 1}, **changes}
    return prepare(tiny.config(folder, **changes))


def rounds(prepared: Prepared, count: int) -> list[RoundResult]:
    progress, results = prepared.federation.begin(), list[RoundResult]()
    for _ in range(count):
        results.append(prepared.federation.run_round(progress))
        progress = results[-1].progress
    return results


def differences(one: Progress, other: Progress) -> list[str]:
    tensors, others = one.state.tensors, other.state.tensors
    return [name for name in tensors if not torch.equal(tensors[name], others[name])]


def test_conditions_are_drawn_from_the_seed_alone() -> None:
    speed = SpeedDistribution(distribution="lognormal", median=100.0, spread=2.0)
    faults = Faults(share=0.3, kind="nan")
    conditions, again, other = (Conditions(seed=n, dropout=0.5, speed=speed, faults=faults) for n in (3, 3, 4))
    ids = [f"client-{number:02}" for number in range(40)]
    silent = {id: conditions.draw_silence(id, 0, 0, PHASES) for id in ids}
    assert silent == {id: again.draw_silence(id, 0, 0, PHASES) for id in reversed(ids)}
    assert silent != {id: other.draw_silence(id, 0, 0, PHASES) for id in ids}
    assert silent != {id: conditions.draw_silence(id, 1, 0, PHASES) for id in ids}
    assert silent != {id: conditions.draw_silence(id, 0, 1, PHASES) for id in ids}
    assert set(silent.values()) == {None, *PHASES}
    assert 10 <= sum(since is None for since in silent.values()) <= 30
    assert len(conditions.draw_faulty(ids)) == 12
    assert conditions.draw_faulty(ids) == again.draw_faulty(ids) != other.draw_faulty(ids)


@pytest.mark.parametrize("distribution", ["lognormal", "uniform", "constant"])
def test_speeds_have_their_median_and_spread(distribution: Any) -> None:
    conditions = Conditions(seed=0, speed=SpeedDistribution(distribution=distribution, median=50.0, spread=3.0))
    seconds = torch.tensor(
        [conditions.compute_seconds(f"c{number}", 100) for number in range(2000)], dtype=torch.float64
    )
    assert conditions.compute_seconds("c7", 200) == pytest.approx(2 * float(seconds[7]))
    if distribution == "constant":
        assert bool((seconds == 2.0).all())
    elif distribution == "lognormal":
        assert float(seconds.median()) == pytest.approx(2.0, rel=0.1)
        assert float(seconds.log().std()) == pytest.approx(math.log(3), rel=0.1)
    else:
        assert 100 / (50 * 3) <= float(seconds.min()) < float(seconds.max()) <= 3 * 100 / 50
    assert Conditions(seed=0).compute_seconds("c7", 200) == 0.0


@pytest.mark.parametrize(
    ("kind", "factor", "expected"), [("sign-flip", None, -1.0), ("scale", None, 10.0), ("scale", 3.0, 3.0)]
)
def test_a_corrupted_change_is_a_multiple_of_the_honest_one(kind: Any, factor: float | None, expected: float) -> None:
    start = {"l/A": torch.randn(3, 5), "l/n": torch.tensor([4])}
    reply = {"l/A": start["l/A"] + torch.randn(3, 5), "l/n": torch.tensor([7])}
    found = corrupt_reply(
        Faults(share=0.1, kind=kind, factor=factor), Message(reply), Message(start), 0, 1, "a"
    ).tensors
    assert torch.allclose(found["l/A"] - start["l/A"], expected * (reply["l/A"] - start["l/A"]), atol=1e-5)
    assert torch.equal(found["l/n"], reply["l/n"])


def test_noise_replaces_a_change_and_nan_a_reply() -> None:
    start: dict[str, Tensor] = {"l/A": torch.zeros(50, 40)}
    reply = Message({"l/A": torch.full((50, 40), 0.2)})
    noisy = corrupt_reply(Faults(share=0.1, kind="noise", factor=2.0), reply, Message(start), 0, 1, "a").tensors["l/A"]
    assert abs(float(noisy.mean())) < 0.05
    assert float(noisy.std()) == pytest.approx(0.4, rel=0.1)
    assert torch.equal(
        noisy,
        corrupt_reply(Faults(share=0.1, kind="noise", factor=2.0), reply, Message(start), 0, 1, "a").tensors["l/A"],
    )
    nan = corrupt_reply(Faults(share=0.1, kind="nan"), reply, Message(start), 0, 1, "a").tensors["l/A"]
    assert bool(nan.isnan().all())


@pytest.mark.parametrize("engine", others_slow(["loop", "batched"], ["loop"]))
def test_a_client_that_drops_out_leaves_no_trace_but_its_failure(engine: str, tiny_folder: Path) -> None:
    gone, left = IDS[0], IDS[1:]
    prepared = built(tiny_folder, engine={"name": engine}, simulation={"dropout": {gone: 1.0}})
    (result,) = rounds(prepared, 1)
    assert [(failure.client, failure.attempt) for failure in result.failures] == [(gone, 0)]
    assert "dropped out" in result.failures[0].reason
    assert set(result.progress.last_rounds) == set(left)
    assert {one.client for one in result.transfers if one.direction == "up"} == set(left)
    assert {one.client for one in result.transfers if one.direction == "down"} == set(IDS)
    plain = built(tiny_folder, engine={"name": engine})
    clients = plain.federation.clients
    tiny.use_clients(plain.federation, {id: clients[id] for id in left})
    assert not differences(result.progress, rounds(plain, 1)[0].progress)


def test_too_few_clients_are_asked_again_and_then_the_run_stops(tiny_folder: Path) -> None:
    prepared = built(tiny_folder, simulation={"dropout": 1.0}, federation={"retries": 1})
    with refused("good replies", r"round 1 needs good replies of at least 3 of 4 clients.*dropped out"):
        rounds(prepared, 1)
    prepared = built(tiny_folder, simulation={"dropout": 0.4}, federation={"min_replies": 4, "retries": 50})
    (result,) = rounds(prepared, 1)
    attempts = {failure.attempt for failure in result.failures}
    assert attempts == set(range(max(attempts) + 1))
    assert set(result.progress.last_rounds) == set(IDS)


def test_a_deadline_leaves_slow_clients_out_on_the_simulated_clock(tiny_folder: Path) -> None:
    speed = {"distribution": "lognormal", "median": 10.0, "spread": 4.0}
    prepared = built(tiny_folder, simulation={"speed": speed})
    (everybody,) = rounds(prepared, 1)
    conditions, host = (
        Conditions(seed=prepared.config.seed, speed=SpeedDistribution(**speed)),
        tiny.host_of(prepared.federation),
    )
    times = {id: conditions.compute_seconds(id, host.count_examples(id)) for id in IDS}
    assert everybody.simulated_seconds == max(times.values())
    assert not everybody.failures
    slowest, before = sorted(times.values(), reverse=True)[:2]
    deadline = (slowest + before) / 2
    (result,) = rounds(built(tiny_folder, simulation={"speed": speed}, federation={"deadline": deadline}), 1)
    (failure,) = result.failures
    assert times[failure.client] == slowest
    assert result.simulated_seconds == deadline


def test_over_selection_continues_with_the_first_that_reply(tiny_folder: Path) -> None:
    speed = {"distribution": "lognormal", "median": 10.0, "spread": 4.0}
    federation = {"clients_per_round": 2, "over_select": 2}
    prepared = prepare(tiny.config(tiny_folder, simulation={"speed": speed}, federation=federation))
    (result,) = rounds(prepared, 1)
    assert len(result.cohort) == 4
    assert len(result.progress.last_rounds) == 2
    assert set(result.late) == set(result.cohort) - set(result.progress.last_rounds)
    conditions, host = (
        Conditions(seed=prepared.config.seed, speed=SpeedDistribution(**speed)),
        tiny.host_of(prepared.federation),
    )
    times = {id: conditions.compute_seconds(id, host.count_examples(id)) for id in result.cohort}
    assert set(result.progress.last_rounds) == set(sorted(times, key=times.__getitem__)[:2])
    assert result.simulated_seconds == sorted(times.values())[1]
    assert set(result.progress.states) <= set(result.progress.last_rounds)


@pytest.mark.parametrize(
    ("kind", "reason"), [("nan", "not finite"), ("scale", "the limit is"), ("noise", None), ("sign-flip", None)]
)
def test_validation_finds_some_faults(kind: str, reason: str | None, tiny_folder: Path) -> None:
    faults = {"share": 0.25, "kind": kind, "factor": 1000.0 if kind == "scale" else None}
    prepared = built(tiny_folder, simulation={"faults": faults})
    (bad,) = prepared.config.simulation.build_conditions(prepared.config.seed).draw_faulty(IDS)
    (result,) = rounds(prepared, 1)
    if reason is None:
        assert not result.failures
        assert differences(result.progress, rounds(built(tiny_folder), 1)[0].progress)
        return
    (failure,) = result.failures
    assert failure.client == bad
    assert reason in failure.reason


def test_without_validation_every_reply_counts(tiny_folder: Path) -> None:
    simulation = {"faults": {"share": 0.25, "kind": "nan"}, "validation": False}
    (result,) = rounds(built(tiny_folder, simulation=simulation, federation={"clip_ratio": None}), 1)
    assert not result.failures
    assert any(bool(value.isnan().any()) for value in result.progress.state.tensors.values())


@pytest.mark.parametrize("engine", others_slow(["loop", "batched"], ["loop"]))
def test_secure_sums_in_the_simulator_are_the_plain_means(engine: str, tiny_folder: Path) -> None:
    secure = built(tiny_folder, engine={"name": engine}, federation={"secure": {"bits": 64}})
    plain = built(tiny_folder, engine={"name": engine})
    for hidden, known in zip(rounds(secure, 2), rounds(plain, 2), strict=True):
        assert not hidden.failures
        for name, value in known.progress.state.tensors.items():
            assert torch.allclose(hidden.progress.state.tensors[name], value, atol=1e-5), name
        assert hidden.loss == pytest.approx(known.loss, rel=1e-4)
    assert sum(one.bytes for one in hidden.transfers) > sum(one.bytes for one in known.transfers)


def test_secure_sums_survive_dropouts_between_all_exchanges(tiny_folder: Path) -> None:
    simulation, federation = {"dropout": 0.3}, {"secure": {}, "retries": 30, "rounds": 6}
    results = rounds(built(tiny_folder, simulation=simulation, federation=federation), 6)
    assert any(result.failures for result in results)
    assert all(len(result.progress.last_rounds) >= 3 for result in results)


@pytest.mark.parametrize("phase", PHASES)
def test_the_simulated_clock_waits_for_who_stops_replying_in_any_exchange(
    phase: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conditions, "draw_silence", lambda self, client, *rest: phase if client == IDS[0] else None)
    speed = {"distribution": "constant", "median": 1e6}
    changes = {"simulation": {"speed": speed}, "federation": {"secure": {}, "deadline": 50.0}}
    (result,) = rounds(built(tiny_folder, **changes), 1)
    assert result.simulated_seconds is not None
    training = result.simulated_seconds - 50.0  # none waits twice: who is silent is not asked again
    if phase == "train":
        assert training == 0  # the others train while the server waits
    else:
        assert 0 < training < 1
    assert {failure.client for failure in result.failures} <= {IDS[0]}
    assert (IDS[0] in result.progress.last_rounds) == (phase in ("confirm", "unmask"))


def test_replies_that_wait_for_the_clock_lie_in_a_file(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"distribution": "lognormal", "median": 10.0, "spread": 4.0}

    def state() -> Progress:
        (result,) = rounds(built(tiny_folder, simulation={"speed": speed}), 1)
        return result.progress

    inner, stored = ReplyBuffer.store, list[tuple[int, str]]()
    in_memory = state()

    def store(self: ReplyBuffer, id: str, body: bytes) -> None:
        stored.append((builtins.id(self), id))
        inner(self, id, body)

    monkeypatch.setattr(ReplyBuffer, "store", store)
    monkeypatch.setattr(ReplyBuffer.__init__, "__defaults__", (1, None))
    monkeypatch.setattr(MessageBuffer.__init__, "__defaults__", (1,))
    assert not differences(in_memory, state())
    assert len({held for held, _ in stored}) == 2  # one of the clock, one of the comparison
    monkeypatch.setattr(ReplyBuffer.__init__, "__defaults__", (1, 5000))
    with refused("TMPDIR", r"the replies that wait .* budget in .* TMPDIR"):
        state()


def test_a_run_with_conditions_is_reported_and_resumed(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(
        tiny_folder,
        simulation={"dropout": 0.3, "speed": {"median": 10.0}, "faults": {"share": 0.25, "kind": "nan"}},
        federation={"rounds": 3, "clients_per_round": None, "retries": 20},
    )
    fedspan.run(values, tmp_path / "whole")
    report = fedspan.read_report(tmp_path / "whole")
    assert report.failures
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert all('"simulated_seconds"' in line for line in lines)


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": {"reduction": "mean"}},
        pytest.param({"federation": {"reduction": "flame"}}, marks=pytest.mark.slow),
        pytest.param(
            {"federation": {"weights": "uniform"}, "privacy": {"mechanism": "central", "noise": 1.0}},
            marks=pytest.mark.slow,
        ),
        {"federation": {"secure": {}}},
    ],
    ids=["clipped", "flame", "central", "secure"],
)
def test_a_reply_that_cannot_be_reduced_fails_its_own_client(changes: dict[str, Any], tiny_folder: Path) -> None:
    """Also without validation, and whichever client's turn it is."""
    if "privacy" in changes:
        pytest.importorskip("opacus", reason="the extra fedspan[privacy] is not installed")
    for seed in (3, 4, 5, 6):
        simulation = {"faults": {"share": 0.25, "kind": "nan"}, "validation": False}
        changes["federation"]["clients_per_round"] = None
        values = tiny.settings(tiny_folder, simulation=simulation, **changes)
        prepared = prepare(parse_config({**values, "seed": seed}))
        (bad,) = prepared.config.simulation.build_conditions(prepared.config.seed).draw_faulty(IDS)
        (result,) = rounds(prepared, 1)
        assert {failure.client for failure in result.failures} == {bad}
        assert "not finite" in result.failures[0].reason
        assert all(bool(value.isfinite().all()) for value in result.progress.state.tensors.values())


@pytest.mark.parametrize("wrappers", [[], [{"name": "low-precision", "uplink": "int8"}]])
def test_validated_replies_of_lora_a2_may_have_slots_in_any_layer(wrappers: list[Any], tiny_folder: Path) -> None:
    """The budget of a client of a smaller rank is not that of an untrained one, whose slots are in the first layers."""
    ranks = {"east": 1, "north": 2, "south": 2, "west": 4}
    method = {"name": "lora-a2", "r": 4, "wrappers": wrappers}
    for result in rounds(built(tiny_folder, method=method, federation={"ranks": ranks}, simulation={}), 2):
        assert result.failures == ()


PRESENT = {"north": [2, None], "south": [1, 2], "west": [2, 3]}
"""East is there all the time."""
BY_ROUND = [["east", "south"], ["east", "north", "south", "west"], ["east", "north", "west"], ["east", "north"]]


def build(folder: Path, **changes: Any) -> Prepared:
    federation = {"clients_per_round": None, "rounds": 4, "clip_ratio": None, **changes.pop("federation", {})}
    changes = {"simulation": {"present": PRESENT}, "training": {"local_steps": 1}, **changes}
    return prepare(tiny.config(folder, federation=federation, **changes))


def test_clients_are_present_between_their_first_and_last_round() -> None:
    presence = Presence({"a": ((1, 3), (5, None)), "b": ((0, 2),)})
    assert [presence.is_present("a", round) for round in range(7)] == [False, True, True, False, False, True, True]
    assert [presence.select_present("cba", round) for round in (0, 1, 2, 5)] == [
        ["c", "b"], ["c", "b", "a"], ["c", "a"], ["c", "a"]
    ]  # fmt: skip
    assert [presence.list_changes(round) for round in (0, 1, 2, 3, 4, 5)] == [
        ((), ()), (("a",), ()), ((), ("b",)), ((), ("a",)), ((), ()), (("a",), ())
    ]  # fmt: skip
    changed = Presence({"b": ()}).change(1, {"a", "b"}, {"c"}).change(3, (), {"a", "b"}).change(5, {"a"}, ())
    assert changed.spans == {"a": ((1, 3), (5, None)), "b": ((1, 3),), "c": ((0, 1),)}
    presence.require_enough(3, 0, 2)
    with refused("clients", r"1 of 3 clients are present in round 4\. Expected at least 2 \(federation"):
        presence.require_enough(3, 3, 2)


@pytest.mark.parametrize("key", [pytest.param("fedit", marks=pytest.mark.slow), "fedsa-lora"])
def test_a_round_is_a_plain_loop_over_the_clients_present(key: str, tiny_folder: Path) -> None:
    """The oracle trains the present clients one by one and averages by examples; FedSA-LoRA keeps B on the client."""
    prepared = build(tiny_folder, method={"name": key, "r": 2}, engine={"name": "loop"})
    federation, engine = prepared.federation, prepared.engine
    method, progress = federation.method, federation.begin()
    memories: dict[str, Any] = {}
    state, last_rounds = progress.state, dict[str, int]()
    for round, ids in enumerate(BY_ROUND):
        result = federation.run_round(progress)
        progress = result.progress
        assert list(result.cohort) == ids
        assert not result.failures
        assert not result.late
        replies = dict[str, Message]()
        engine.adapted.set_base(state.base)
        for id in ids:
            data = federation.clients[id]
            client = replace(data.client, last_round=last_rounds.get(id))
            job = method.start(method.sync(state, client), client, memories.get(id, {}), round)
            lr = federation.training.compute_lr(round, 4)
            trained = engine.train(Assignment(id, round, job, data.train, lr), federation.examples)
            reply, memories[id] = method.finish(job, trained, client, memories.get(id, {}), round)
            assert not isinstance(reply, Job)
            replies[id], last_rounds[id] = reply, round
        total = sum(tiny_examples := [len(federation.clients[id].train) for id in ids])
        names = replies[ids[0]].tensors
        mean = {
            name: sum(
                (count / total) * replies[id].tensors[name].double()
                for id, count in zip(ids, tiny_examples, strict=True)
            )
            for name in names
        }
        mean = {name: torch.as_tensor(value).to(names[name].dtype) for name, value in mean.items()}
        state = method.update(state, Reduced(mean=mean, count=len(ids)))
        for name, value in state.tensors.items():
            torch.testing.assert_close(progress.state.tensors[name], value, rtol=1e-5, atol=1e-7)
        assert progress.last_rounds == last_rounds
    assert set(progress.states) == set(memories)


@pytest.mark.parametrize("cohort", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_cohorts_and_metrics_are_of_the_clients_present(cohort: int | None, tiny_folder: Path) -> None:
    prepared = build(tiny_folder, federation={"clients_per_round": cohort})
    progress = prepared.federation.begin()
    for ids in BY_ROUND:
        result = prepared.federation.run_round(progress)
        assert len(result.cohort) == min(cohort or 4, len(ids))
        assert set(result.cohort) <= set(ids)
        progress = result.progress
        validation, _ = prepared.evaluator.evaluate_clients(progress)
        assert set(validation.by_client) <= set(ids)


def test_a_secure_sum_has_the_clients_present(tiny_folder: Path) -> None:
    simulation = {"present": {"north": [2, None]}}
    plain = build(tiny_folder, simulation=simulation, federation={"rounds": 2})
    secure = build(tiny_folder, simulation=simulation, federation={"rounds": 2, "secure": {"bits": 64}})
    mine, theirs = plain.federation.begin(), secure.federation.begin()
    for count in (3, 4):
        result = secure.federation.run_round(theirs)
        mine, theirs = plain.federation.run_round(mine).progress, result.progress
        assert len(result.cohort) == count
        for name, value in mine.state.tensors.items():
            torch.testing.assert_close(theirs.state.tensors[name], value, rtol=1e-4, atol=1e-5)


def test_a_killed_run_resumes_to_the_bit_and_logs_who_came_and_left(tiny_folder: Path, tmp_path: Path) -> None:
    federation = {"clients_per_round": None, "rounds": 4}
    config = tiny.config(tiny_folder, federation=federation, simulation={"present": PRESENT})
    fedspan.run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(config, tmp_path / "killed", listener=Notes(2))
    fedspan.resume(tmp_path / "killed")
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["round"]]
    assert [row["cohort"] for row in rows] == BY_ROUND
    assert [row.get("joined") for row in rows] == [None, ["north", "west"], None, None]
    assert [row.get("left") for row in rows] == [None, None, ["south"], ["west"]]
    weights = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_a_federation_without_late_clients_is_what_it_was(tiny_folder: Path) -> None:
    every = build(tiny_folder, simulation={"present": {"north": [1, None]}})
    usual = build(tiny_folder, simulation={})
    one = every.federation.run_round(every.federation.begin())
    other = usual.federation.run_round(usual.federation.begin())
    assert encode_state(one.progress.state) == encode_state(other.progress.state)
    assert one.transfers == other.transfers


GONE = IDS[0]


def test_an_absent_client_is_waited_for_after_two_four_eight_times_the_limit() -> None:
    absences = Absences(lambda number: ["a", "b"])
    absent = [round for round in range(20) if absences.find(round, ["a", "b"], {"b": round - 1}, 2)]
    assert absent == [2, 3, 5, 6, 7, *range(9, 16), 17, 18, 19]
    assert absences.find(5, ["a", "b"], {"a": 3, "b": 4}, 2) == frozenset()
    assert absences.find(5, ["a", "b"], {"a": 2, "b": 4}, 2) == {"a"}
    assert absences.find(5, ["a", "b"], {"b": 4}, None) == frozenset()


def test_only_rounds_of_selected_clients_count_and_a_cohort_of_absent_ones_is_waited_for() -> None:
    absences = Absences(lambda number: ["a", "b"] if number % 3 == 0 else ["b"])
    assert [round for round in range(10) if absences.find(round, ["a", "b"], {"b": round - 1}, 2)] == [4, 5, 6, 7, 8, 9]
    absences = Absences(lambda number: ["a", "b"])
    assert absences.find(3, ["a", "b"], {}, 2) == frozenset()


def test_an_exchange_continues_when_the_others_have_replied_and_suffice() -> None:
    awaited = Awaited(["a", "b", "c"], ["c"])
    assert not awaited.is_over("a", lambda: ["a"], 2)
    assert awaited.is_over("b", lambda: ["a", "b"], 2)
    few = Awaited(["a", "b", "c"], ["c"])
    assert not few.is_over("a", lambda: ["a"], 2)
    assert not few.is_over("b", lambda: ["a"], 2)  # it failed: the absent one is needed
    assert few.is_over("c", lambda: ["a", "c"], 2)
    everyone = Awaited(["a", "b"], [])
    assert not any(everyone.is_over(id, lambda: ["a", "b"], 1) for id in "ab")


def build_waiting(folder: Path, simulation: Mapping[str, Any] | None = None, **federation: Any) -> Prepared:
    speed = {"distribution": "constant", "median": 1e6}
    changes: Mapping[str, Any] = {"simulation": {"speed": speed, **(simulation or {})}}
    given = {"clients_per_round": None, "deadline": 50.0, "rounds": 6, **federation}
    return prepare(tiny.config(folder, federation=given, **changes))


@pytest.mark.parametrize("secure", [None, pytest.param({}, marks=pytest.mark.slow)], ids=["plaintext", "secure"])
def test_a_silent_client_costs_two_deadlines_and_not_every_round_s(
    secure: dict[str, Any] | None, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = "train" if secure is None else "keys"
    monkeypatch.setattr(Conditions, "draw_silence", lambda self, client, *rest: phase if client == GONE else None)
    results = rounds(build_waiting(tiny_folder, secure=secure), 5)
    seconds = [result.simulated_seconds or 0.0 for result in results]
    assert [number for number, spent in enumerate(seconds) if spent >= 50] == [0, 1, 4]
    assert max(seconds[2:4]) < 1
    assert all(GONE in result.cohort and GONE not in result.progress.last_rounds for result in results)
    assert all({one.client for one in result.transfers if one.direction == "down"} == set(IDS) for result in results)
    again = build_waiting(tiny_folder, secure=secure)  # as a run that was stopped and resumed
    resumed = again.federation.run_round(results[1].progress)
    assert resumed.simulated_seconds == seconds[2]
    assert encode_state(resumed.progress.state) == encode_state(results[2].progress.state)
    everybody = rounds(build_waiting(tiny_folder, secure=secure, max_missed_rounds=None), 3)
    assert all((result.simulated_seconds or 0) >= 50 for result in everybody)


def return_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is silent for two rounds, and then slower than all others."""
    monkeypatch.setattr(
        Conditions, "draw_silence", lambda self, client, round, *rest: "train" if client == GONE and round < 2 else None
    )
    monkeypatch.setattr(Conditions, "compute_seconds", lambda self, client, examples: 9.0 if client == GONE else 1.0)


def test_a_client_that_is_back_and_slow_counts_again(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    return_slowly(monkeypatch)
    results = rounds(build_waiting(tiny_folder), 6)
    assert [result.progress.last_rounds.get(GONE) for result in results] == [None, None, None, None, 4, 5]
    assert [result.simulated_seconds for result in results] == [50.0, 50.0, 1.0, 1.0, 9.0, 9.0]
    assert [result.late for result in results] == [(), (), (GONE,), (GONE,), (), ()]


def test_an_outlier_replaces_no_reply_of_a_client_that_is_back(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile, began = IDS[1], [False]
    return_slowly(monkeypatch)
    monkeypatch.setattr(Conditions, "draw_faulty", lambda self, ids: frozenset({hostile} if began[0] else ()))
    scaled = {"faults": {"share": 0.25, "kind": "scale", "factor": 1000.0}}
    last = rounds(build_waiting(tiny_folder, scaled, min_replies=3), 2)[-1]
    began[0] = True
    result = build_waiting(tiny_folder, scaled, min_replies=3).federation.run_round(last.progress)
    assert result.progress.last_rounds[GONE] == 2
    assert [(one.client, one.attempt) for one in result.failures] == [(hostile, 0)]
    assert result.simulated_seconds == 9.0


def test_an_evaluation_does_not_wait_for_an_absent_client(tiny_folder: Path) -> None:
    federation = build_waiting(tiny_folder).federation
    asked, ended, replies = list[str](), list[str](), dict[str, str]()

    class Silent(Transport):
        def begin(self, *args: object) -> None: ...

        def exchange(self, orders: Orders, on_reply: Callable[[str, str], bool], *args: object) -> None:
            asked.extend(orders)
            ended.extend(id for id in IDS[1:] if on_reply(id, replies.get(id, "it failed")))

    start = federation.begin()
    progress = replace(start, state=replace(start.state, round=3), last_rounds={id: 2 for id in IDS if id != GONE})
    evaluator = RemoteEvaluator(federation.replace_transport(Silent()), 8)
    evaluator.evaluate_clients(progress)
    assert tuple(asked) == IDS
    assert not ended  # nobody was measured yet: the absent one is needed
    with pytest.MonkeyPatch.context() as patch:
        scores = SimpleNamespace(task="evaluate", round=3, scores={"test": {"examples": 0.0}})
        patch.setattr(federation_round, "open_reply", lambda id: SimpleNamespace(**vars(scores), id=id))
        replies.update({id: id for id in IDS})
        evaluator.evaluate_clients(progress)
        assert ended == [IDS[-1]]
        evaluator.evaluate_clients(replace(progress, last_rounds=dict.fromkeys(IDS, 2)))
        assert ended == [IDS[-1]]  # of nobody absent, everyone is waited for
