"""The same config and seed give the same bits, in asynchronous runs and range tests too; logs and the ledger's sums."""

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedspan
from fedspan.assembly.run import Prepared, prepare
from fedspan.assembly.server import connect
from fedspan.config import RunConfig, parse_config
from fedspan.deployment.flower_simulation import get_nodes_folder, reply_as
from fedspan.deployment.handshake import build_server_config
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.logs import EMPTY, JsonLines, encode_chain_line, read_lines
from fedspan.methods.registry import METHODS
from fedspan.run_folder import RunFolder
from fedspan.runs import start
from fedspan.runs.checkpoint import load_latest
from fedspan.runs.learning_rate import EXPONENTS, choose_rate, run_range_test, set_rate
from fedspan.runs.ledger import Ledger, Totals, TrafficCount, read_totals
from fedspan.runs.report import RunReport
from helpers import tiny, tiny_decoders
from helpers.listeners import Notes
from helpers.refusals import refused
from helpers.run_content import content
from helpers.watched_rounds import differences


def perturb_generators(number: int) -> None:
    """Global generators in some state or other, and memory that was used."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
    torch.full((1000,), float("nan"))


@st.composite
def changes(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    method = draw(st.sampled_from(sorted(METHODS)))
    return {
        "method": {"name": method} | ({"tau": 1} if method == "fedloru" else {}),
        "federation": {"rounds": 2, "clients_per_round": draw(st.sampled_from([None, 2]))},
        "training": {
            "optimizer": draw(st.sampled_from(["adamw", "sgd"])),
            "lora_dropout": draw(st.sampled_from([0.0, 0.3])),
            "group_by_length": draw(st.booleans()),
            "optimizer_state": draw(st.sampled_from(["reset", "keep"])),
            "local_steps": 2,
        },
    }


@pytest.mark.parametrize("task", ["sequence-classification", pytest.param("causal-lm", marks=pytest.mark.slow)])
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=changes(), seed=st.integers(0, 2**63 - 1))
def test_a_repeated_run_has_the_same_bits(
    task: str, change: dict[str, Any], seed: int, tiny_folder: Path, decoders: Path
) -> None:
    made = tiny_decoders.settings(decoders, **change) if task == "causal-lm" else tiny.settings(tiny_folder, **change)
    with tempfile.TemporaryDirectory() as name:
        contents: list[dict[str, object]] = []
        for number in range(2):
            perturb_generators(number)
            folder = Path(name) / "run"
            fedspan.run({**made, "seed": seed}, folder)
            contents.append(content(folder))
            shutil.rmtree(folder)
        assert contents[0].keys() == contents[1].keys()
        assert [path for path in contents[0] if contents[0][path] != contents[1][path]] == []
        assert any(path.endswith("adapter_model.safetensors") for path in contents[0])


def test_another_seed_gives_other_bits(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, federation={"rounds": 1})
    for seed in (1, 2):
        fedspan.run({**values, "seed": seed}, tmp_path / str(seed))
    files = [(tmp_path / seed / "adapter" / "adapter_model.safetensors").read_bytes() for seed in ("1", "2")]
    assert files[0] != files[1]


@pytest.mark.slow  # a process that imports everything
def test_another_process_with_another_hash_seed(tiny_folder: Path, tmp_path: Path) -> None:
    """Sets and dicts of strings come in another order there."""
    values = tiny.settings(tiny_folder, federation={"rounds": 2})
    values["partition"] = {"partitioner": "dirichlet", "clients": 4}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**values, "threads": 1, "baselines": ["local-only"]}))
    fedspan.run(tmp_path / "config.yaml", tmp_path / "here")
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": other, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fedspan", "run", str(tmp_path / "config.yaml"), "--out"]
    subprocess.run([*command, str(tmp_path / "there")], env=environment, check=True, capture_output=True)
    here, there = content(tmp_path / "here"), content(tmp_path / "there")
    assert [path for path in here if here[path] != there.get(path)] == []
    assert here.keys() == there.keys()


METHOD = {"name": "fedsa-lora", "wrappers": ["fedavgm"]}
"""Clients store a factor and their moments, and the server a momentum."""


def make_config(
    folder: Path,
    *,
    simulation: dict[str, Any] | None = None,
    federation: Mapping[str, Any] | None = None,
    **buffered: Any,
) -> RunConfig:
    buffered = {"concurrency": 3, **buffered}
    values = tiny.settings(
        folder,
        method=METHOD,
        federation={"rounds": 6, "clients_per_round": 2, "buffered": buffered, **(federation or {})},
        training={"optimizer_state": "keep", "local_steps": 1},
    )
    return tiny.parse_config(
        {**values, "simulation": simulation or {"speed": {"distribution": "uniform", "median": 10, "spread": 3}}}
    )


@pytest.fixture(scope="module")
def recorded(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    start.run(make_config(tiny_folder), folder)
    return folder


def require_same_end(folder: Path, expected: Path) -> None:
    ours, theirs = (load_latest(RunFolder(path)) for path in (folder, expected))
    for part in ("state", "states", "last_rounds"):
        assert differences(dict(vars(ours))[part], dict(vars(theirs))[part]) == []
    adapter = Path("adapter", "adapter_model.safetensors")
    assert (folder / adapter).exists() == (expected / adapter).exists()


def get_arrivals(folder: Path) -> list[object]:
    return [row["arrivals"] for row in read_lines(RunFolder(folder).metrics)]


@pytest.mark.slow
def test_a_stopped_run_ends_as_one_that_was_not(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    """Stopped twice, while orders are open whose states are older than the run's newest."""
    config, folder = make_config(tiny_folder), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        start.run(config, folder, listener=Notes(2))
    with pytest.raises(KeyboardInterrupt):
        start.run(None, folder, resume=True, listener=Notes(4))
    checkpoint = load_latest(RunFolder(folder))
    assert set(checkpoint.open.states) == {order.round for order in checkpoint.open.orders}
    assert min(checkpoint.open.states) < 3
    start.run(None, folder, resume=True)
    require_same_end(folder, recorded)
    assert get_arrivals(folder) == get_arrivals(recorded)
    ours, theirs = (load_latest(RunFolder(path)) for path in (folder, recorded))
    assert differences(ours.open, theirs.open) == []


def test_a_record_of_arrivals_repeats_a_run(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    """With clients of other speeds, and stopped in between: the record alone decides."""
    speeds, folder = {"speed": {"distribution": "constant"}}, tmp_path / "run"
    config = make_config(tiny_folder, simulation=speeds, replay=str(recorded))
    with pytest.raises(KeyboardInterrupt):
        start.run(config, folder, listener=Notes(3))
    start.run(None, folder, resume=True)
    require_same_end(folder, recorded)
    assert get_arrivals(folder) == get_arrivals(recorded)
    assert all("simulated_seconds" not in row for row in read_lines(RunFolder(folder).metrics))


def test_a_record_that_does_not_fit_is_refused(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    with refused("federation.buffered.replay"):
        start.run(make_config(tiny_folder, replay=str(tmp_path / "none")), tmp_path / "first")
    config = make_config(tiny_folder, replay=str(recorded))
    longer = config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": 7})})
    with refused("federation.buffered.replay"):
        start.run(longer, tmp_path / "second")
    assert not RunFolder(tmp_path / "second").metrics.exists()  # before any training
    update = {"rounds": 7, "early_stopping": 7}  # the recorded run may have stopped early, and this one as well
    stopping = config.model_copy(update={"federation": config.federation.model_copy(update=update)})
    with refused("federation.buffered.replay"):
        start.run(stopping, tmp_path / "stopping")
    changed = tmp_path / "changed"
    changed.mkdir()
    text = RunFolder(recorded).metrics.read_text()
    (changed / "metrics.jsonl").write_text(text.replace('"arrivals": [["', '"arrivals": [["x', 1))
    with pytest.raises(FedspanError, match="does not match"):
        start.run(make_config(tiny_folder, replay=str(changed)), tmp_path / "third")


@pytest.mark.slow
def test_a_stopped_replay_goes_on_with_its_record_alone(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    place, other, folder = tmp_path / "record", tmp_path / "other", tmp_path / "run"
    shutil.copytree(recorded, place)
    with pytest.raises(KeyboardInterrupt):
        start.run(make_config(tiny_folder, replay=str(place)), folder, listener=Notes(2))
    start.run(make_config(tiny_folder, simulation={"speed": {"distribution": "constant"}}), other)
    assert get_arrivals(other) != get_arrivals(recorded)
    place.rename(tmp_path / "moved")
    shutil.copytree(other, place)
    with refused("federation.buffered.replay"):
        start.run(None, folder, resume=True)
    shutil.rmtree(place)
    (tmp_path / "moved").rename(place)
    start.run(None, folder, resume=True)
    require_same_end(folder, recorded)


SECONDS = {"east": 1.0, "north": 2.0, "south": 3.5, "west": 9.0}


class Machines(AsynchronousTransport):
    """Clients that store their state on the disk and take so many seconds each; some replies do not arrive."""

    def __init__(self, run: Path, silent: Collection[int]) -> None:
        self.run, self.silent = str(run), silent
        self.open: dict[str, tuple[float, Envelope]] = {}
        self.clock, self.received, self.sent = 0.0, 0, 0
        self.replied, self.assumed, self.stalled = set[str](), set[str](), set[str]()
        self.asked = list[frozenset[str]]()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        assert not self.open.keys() & set(orders), "a client that trains handles no other order"
        self.asked.append(frozenset(orders))
        for id in orders:
            on_reply(id, self.reply(id, orders[id]))

    def reply(self, id: str, order: Envelope) -> Envelope:
        return reply_as(self.run, 1, order)

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        for id in orders:
            assert id not in self.open
            self.open[id] = self.clock + SECONDS[id], orders[id]
            self.sent += 1

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        if not self.open:
            return None
        id = min(self.open, key=lambda id: self.open[id][0])
        self.clock, order = self.open.pop(id)
        self.received += 1
        self.replied.add(id)
        self.stalled.discard(id)
        return id, "no reply within 5 s" if self.received in self.silent else self.reply(id, order)

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        self.open = {id: order for id, order in self.open.items() if id in ids}
        return frozenset(self.open)

    def list_training(self) -> frozenset[str]:
        return frozenset(self.open)

    def list_stalled(self) -> frozenset[str]:
        return frozenset(self.stalled)

    def assume_training(self, ids: Collection[str]) -> None:
        self.assumed |= set(ids)
        self.stalled |= set(ids)


def make_machines(*silent: int) -> tuple[start.HostRun, list[Machines]]:
    made = list[Machines]()

    def host(run_folder: RunFolder, prepared: Prepared, run_rounds: Callable[[Prepared], RunReport]) -> RunReport:
        made.append(Machines(run_folder.path.resolve(), silent))
        return run_rounds(connect(prepared, made[-1], nodes=get_nodes_folder(run_folder.path)))

    return host, made


def deploy_config(folder: Path, concurrency: int = 3, **federation: Any) -> RunConfig:
    config = make_config(folder, concurrency=concurrency)
    values = {**config.model_dump(exclude_unset=True), "simulation": None}
    return tiny.parse_config({**values, "federation": {**values["federation"], **federation}})


def require_repeated(run: Path, folder: Path, tiny_folder: Path, federation: Mapping[str, Any] | None = None) -> None:
    """Require that a simulation of the record of a run ends with the same state."""
    start.run(make_config(tiny_folder, replay=str(run), federation=federation), folder)
    ours, theirs = (load_latest(RunFolder(path)) for path in (folder, run))
    assert differences(ours.state, theirs.state) == []
    assert ours.last_rounds == theirs.last_rounds
    assert get_arrivals(folder) == get_arrivals(run)


def test_the_record_of_clients_elsewhere_repeats_their_run_in_the_simulator(tiny_folder: Path, tmp_path: Path) -> None:
    """One client is so slow that its replies are old, and two replies do not arrive."""
    host, made = make_machines(3, 9)
    start.run(deploy_config(tiny_folder, concurrency=4), tmp_path / "run", host=host)
    (machines,) = made
    rows = list(read_lines(RunFolder(tmp_path / "run").metrics))
    assert max(age for row in rows for _, age in row["arrivals"]) >= 2
    failures = [failure for row in rows for failure in row.get("failures", [])]
    assert [(one["reason"], one["purpose"]) for one in failures] == [("no reply within 5 s", "train")] * 2
    assert machines.received == 6 * 2 + 2
    assert all("simulated_seconds" not in row for row in rows)
    assert all(2 <= len(ids) < 4 for ids in machines.asked[1:-1])  # evaluation leaves out the clients that train
    assert machines.asked[0] == machines.asked[-1] == set(SECONDS)  # nobody trains at the start and at the end
    ledger = list(read_lines(RunFolder(tmp_path / "run").ledger))
    orders = [row for row in ledger if row["direction"] == "down" and row["purpose"] == "train"]
    assert len(orders) == machines.sent == machines.received + 2  # two clients still trained in the end
    require_repeated(tmp_path / "run", tmp_path / "again", tiny_folder)


OUTLIERS = {"rounds": 4, "clients_per_round": 3, "max_norm_ratio": 1.02}
"""Rounds in which replies are compared with the median of three or four, and one is often too large."""


def list_outliers(run: Path) -> list[str]:
    rows: list[Any] = list(read_lines(RunFolder(run).metrics))
    failures = [failure for row in rows for failure in row.get("failures", [])]
    assert all(len(row["arrivals"]) <= 3 for row in rows)
    return [failure["client"] for failure in failures if "the cohort's norm" in failure["reason"]]


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_record_with_rejected_replies_repeats_the_run(elsewhere: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """A rejected reply moved the median of the norms, and is not in the record."""
    host, _ = make_machines()
    if elsewhere:
        start.run(deploy_config(tiny_folder, concurrency=4, **OUTLIERS), tmp_path / "run", host=host)
    else:
        start.run(make_config(tiny_folder, concurrency=4, federation=OUTLIERS), tmp_path / "run")
    assert list_outliers(tmp_path / "run")
    require_repeated(tmp_path / "run", tmp_path / "again", tiny_folder, OUTLIERS)
    assert not list_outliers(tmp_path / "again")


def test_a_record_of_larger_rounds_is_refused(tiny_folder: Path, recorded: Path, tmp_path: Path) -> None:
    config = make_config(tiny_folder, replay=str(recorded), federation={"clients_per_round": 1})
    with refused("federation.buffered.replay"):
        start.run(config, tmp_path / "run")


@pytest.mark.slow
def test_a_server_that_starts_again_sends_new_orders(tiny_folder: Path, tmp_path: Path) -> None:
    host, machines = make_machines(2)
    with pytest.raises(KeyboardInterrupt):
        start.run(deploy_config(tiny_folder), tmp_path / "run", host=host, listener=Notes(3))
    lost = dict(machines[0].open)
    assert lost
    checkpoint = load_latest(RunFolder(tmp_path / "run"))
    assert {order.client for order in checkpoint.open.orders} == set(lost)
    assert checkpoint.open.states == {}  # nobody can use them
    start.run(None, tmp_path / "run", resume=True, host=host)
    assert len(machines) == 2
    assert machines[1].assumed == set(lost)  # they may still train for the first server
    assert len(get_arrivals(tmp_path / "run")) == 6
    require_repeated(tmp_path / "run", tmp_path / "again", tiny_folder)


def test_orders_that_are_too_old_to_count_are_closed(tiny_folder: Path, tmp_path: Path) -> None:
    host, made = make_machines()
    config = deploy_config(tiny_folder, buffered={"concurrency": 4, "max_staleness": 2}, rounds=8)
    start.run(config, tmp_path / "run", host=host)
    (machines,) = made
    rows: list[Any] = list(read_lines(RunFolder(tmp_path / "run").metrics))
    failures = [failure for row in rows for failure in row.get("failures", [])]
    assert {failure["client"] for failure in failures} == {"west"}
    assert all(failure["reason"].startswith("its order is 3 rounds old") for failure in failures)
    assert machines.clock > SECONDS["west"]
    assert machines.replied == {"east", "north", "south"}
    assert machines.assumed == {"west"}


def test_a_round_with_too_few_replies_sends_further_orders_and_then_stops(tiny_folder: Path, tmp_path: Path) -> None:
    """All four clients fail, and all again: attempts are counted as in synchronous rounds."""
    host, machines = make_machines(*range(1, 9))
    start.run(deploy_config(tiny_folder, retries=2), tmp_path / "run", host=host)
    first = next(read_lines(RunFolder(tmp_path / "run").metrics))
    assert [failure["attempt"] for failure in first["failures"]] == [0] * 4 + [1] * 4
    host, machines = make_machines(*range(1, 13))
    with refused("good replies", r"round 1 needs good replies .* and has 0"):
        start.run(deploy_config(tiny_folder, retries=2), tmp_path / "stopped", host=host)
    assert machines[0].received == 12


AUTO = {"lr": "auto"}


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_smallest_of_the_rates_that_are_about_as_good_is_chosen() -> None:
    assert choose_rate(1.0, ((1e-3, 0.9), (1e-2, 0.505), (1e-1, 0.5))) == 1e-2
    assert choose_rate(1.0, ((1e-3, 0.9), (1e-2, 0.51), (1e-1, 0.5))) == 1e-1
    assert choose_rate(1.0, ((1e-3, 1.2), (1e-2, 1.1), (1e-1, math.inf))) == 1e-2  # all are worse than the start
    with refused("training.lr"):
        choose_rate(1.0, ((1e-3, math.inf), (1e-2, math.inf)))


def test_a_range_test_tries_rates_around_the_default_and_is_repeatable(tiny_folder: Path, interrupted: Path) -> None:
    prepared = prepare(parse_config(tiny.settings(tiny_folder, training=AUTO)))
    default = prepared.config.default_lr
    found = run_range_test(prepared, default)
    assert [lr for lr, _ in found.losses] == pytest.approx([default * 10 ** (power / 2) for power in EXPONENTS])
    assert found.lr == choose_rate(found.start, found.losses)
    assert len({loss for _, loss in found.losses}) == len(EXPONENTS)
    assert min(loss for _, loss in found.losses) < found.start
    assert found.to_json_values() == json.loads((interrupted / "learning_rate.json").read_text())
    assert set_rate(prepared, 0.5).federation.training.compute_lr(0, 3) == 0.5
    assert prepared.federation.training.compute_lr(0, 3) == default


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_trains_with_the_chosen_rate_and_stores_the_test(engine: str, tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, training=AUTO, engine={"name": engine})
    report = fedspan.run(values, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "learning_rate.json").read_text())
    assert report.learning_rate == stored
    assert set(rates(tmp_path / "run")) == {stored["lr"]}
    assert [trial["lr"] for trial in stored["losses"]] == sorted(trial["lr"] for trial in stored["losses"])
    assert fedspan.read_report(tmp_path / "run") == report
    fixed = tiny.settings(tiny_folder, training={"lr": stored["lr"]}, engine={"name": engine})
    assert fedspan.run(fixed, tmp_path / "fixed").scores == report.scores


@pytest.fixture(scope="module")
def interrupted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(tiny.settings(tiny_folder, training=AUTO, federation={"rounds": 3}), folder, listener=Notes(1))
    return folder


def test_a_resumed_run_uses_the_stored_rate(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (chosen,) = rates(folder)
    monkeypatch.setattr("fedspan.runs.start.run_range_test", None)  # it is not run again
    fedspan.resume(folder)
    assert rates(folder) == [chosen] * 3


def test_a_stored_rate_that_was_damaged_is_an_error(interrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    for text in ("{}", '{"lr": -1}', '{"lr": true}', '{"lr": Infinity}', "[1]", "not json"):
        (folder / "learning_rate.json").write_text(text)
        with pytest.raises(FedspanError, match=r"learning_rate\.json"):
            fedspan.resume(folder)


@pytest.mark.slow
def test_centralized_training_has_a_range_test_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    values = tiny.settings(tiny_folder, training=AUTO, federation={"rounds": 1})
    values["baselines"] = ["centralized", "local-only"]
    report = fedspan.run(values, tmp_path / "run")
    own = report.baselines["centralized"]["learning_rate"]
    assert own["losses"] != report.learning_rate["losses"]
    assert "learning_rate" not in report.baselines["local-only"]
    assert {entry.name for entry in (tmp_path / "run" / "baselines" / "centralized").iterdir()} == {
        "predictions",
        "report.json",
    }
    named = fedspan.run(values | {"centralized_lr": 0.01, "baselines": ["centralized"]}, tmp_path / "named")
    assert "learning_rate" not in named.baselines["centralized"]


def test_it_is_refused_where_no_validation_part_or_no_example_can_be_used(tiny_folder: Path) -> None:
    given = tiny.settings(tiny_folder, training=AUTO)
    with refused("training.lr"):
        parse_config({**given, "partition": {**given["partition"], "validation": 0.0}})
    with refused("training.lr"):
        parse_config({**given, "privacy": {"mechanism": "local", "epsilon": 3.0}})
    remote = {key: value for key, value in given.items() if key not in ("data", "partition")}
    with refused("training.lr"):
        build_server_config({**remote, "data": {"labels": list(tiny.LABELS)}, "partition": {"clients": 2}})
    for wrong in (0, -1.0, "fast", True, float("inf"), None):
        with refused("training.lr"):
            parse_config(tiny.settings(tiny_folder, training={"lr": wrong}))


DIRECTIONS: tuple[Literal["down", "up"], ...] = ("down", "up")
ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.text(max_size=4) | st.sampled_from(["NaN", "a/b", "\n", "\u2028", "\udc80"]),
        st.sampled_from(DIRECTIONS),
        st.integers(0, 10**12),
        st.integers(0, 10**12),
    ),
    max_size=20,
)


def everything(totals: Totals) -> dict[str, object]:
    rounds = totals.rounds
    return {way: (totals.run(way), [totals.count_round(way, round) for round in rounds]) for way in DIRECTIONS}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES)
def test_sums_are_rebuilt_from_a_file(tmp_path: Path, entries: list[tuple[int, str, Literal["up"], int, int]]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    with Ledger(path) as ledger:
        for entry in entries:
            ledger.record(*entry)
        assert ledger.commit().length == path.stat().st_size
        assert everything(read_totals(path)) == everything(ledger.totals)
        for direction in DIRECTIONS:
            of_direction = [entry for entry in entries if entry[2] == direction]
            assert ledger.totals.run(direction) == TrafficCount(
                len(of_direction), sum(entry[3] for entry in of_direction), sum(entry[4] for entry in of_direction)
            )
    with Ledger(path) as again:
        assert everything(again.totals) == everything(ledger.totals)
    assert len(path.read_bytes().splitlines()) == len(entries)


def test_by_round(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.record(1, "a", "down", 10, 8)
        ledger.record(1, "b", "down", 20, 16)
        ledger.record(2, "a", "up", 5, 4)
        ledger.record(2, "a", "down", 1, 0)
        totals = ledger.totals
    assert (totals.run("down"), totals.rounds) == (TrafficCount(3, 31, 24), (1, 2))
    assert totals.count_round("down", 1) == TrafficCount(2, 30, 24)
    assert totals.count_round("up", 1) == TrafficCount()


def test_what_is_not_for_training_is_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(1, "a", "down", 10, 8)
        ledger.record(1, "b", "down", 30, 16, "evaluate")
        ledger.record(1, "b", "down", 5, 4, "export")
        ledger.commit()
    for totals in (ledger.totals, read_totals(path)):
        assert totals.run("down") == totals.count_purpose("down", "train") == TrafficCount(1, 10, 8)
        assert totals.out_of_round == {"evaluate": {"down": 30, "up": 0}, "export": {"down": 5, "up": 0}}


def test_lines_reach_the_file_at_the_commit_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"round": 1})
        assert path.read_bytes() == b""
        end = lines.commit()
        assert end.length == path.stat().st_size > 0
        assert lines.commit() == end
        lines.append({"round": 2})
    assert list(read_lines(path)) == [{"round": 1}], "a round that was not committed is dropped"
    with JsonLines(path) as lines:
        lines.append({"round": 2})
        assert lines.commit().length == path.stat().st_size == 2 * end.length


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"loss": math.nan, "bound": -math.inf, "exact": 0.1, "name": "NaN", "clients": {"a": math.inf}, "seen": 3}
    with JsonLines(path) as lines:
        lines.append(row)
        with pytest.raises(TypeError):
            lines.append({"loss": torch.ones(())})
        lines.commit()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert len(strict.pop("chain")) == 64
    assert strict == {"loss": None, "bound": None, "exact": 0.1, "name": "NaN", "clients": {"a": None}, "seen": 3}
    assert list(read_lines(path)) == [strict]


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_full_disk_adds_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "metrics.jsonl"
    real = getattr(os, step)
    with JsonLines(path) as lines:
        lines.append({"round": 1})
        lines.commit()
        lines.append({"round": 2})

        def half(descriptor: int, *data: memoryview) -> None:
            real(descriptor, *(part[:5] for part in data))
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, half)
            with refused("run folder", r"the disk is full\. The last finished round is intact"):
                lines.commit()
        assert list(read_lines(path)) == [{"round": 1}]
        lines.commit()
    assert list(read_lines(path)) == [{"round": 1}, {"round": 2}]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []
    assert read_totals(tmp_path / "none.jsonl").run("up") == TrafficCount()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[1]", b"null", b"", b"[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    head, first = encode_chain_line(EMPTY.head, {"round": 1})
    path.write_bytes(first + line + b"\n" + encode_chain_line(head, {"round": 3})[1])
    with pytest.raises(FedspanError, match=r"metrics\.jsonl, line 2"):
        list(read_lines(path))


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "sideways"},
        {"bytes": "many"},
        {"client": None},
        {"round": 1.5},
        {"purpose": "fun"},
        {"purpose": []},
    ],
)
def test_an_entry_of_another_kind_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "ledger.jsonl"
    entry = {"round": 1, "client": "a", "direction": "up", "bytes": 3, "payload": 2}
    with JsonLines(path) as lines:
        lines.append(entry)
        lines.append({**entry, **change})
        lines.commit()
    with pytest.raises(FedspanError, match=r"ledger\.jsonl, line 2"):
        Ledger(path)
