"""Workers, machines and drivers that die in mid-round, runs of a series, and who reaches a local Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra fedspan[cluster] is not installed")

import ray
from ray.cluster_utils import Cluster

import fedspan
from fedspan.assembly.cluster import build_host, connect_workers
from fedspan.assembly.run import Prepared, prepare
from fedspan.core.base import BaseUpdate, Increment
from fedspan.errors import FedspanError
from fedspan.federation.progress import RoundResult
from fedspan.training.config import ClusterConfig
from fedspan.transports.ray.sharing import share_teams
from fedspan.transports.ray.team import Piece, Team, WorkerHandle, open_team
from fedspan.transports.ray.worker import BaseVersion
from helpers import tiny
from helpers.plain_data import plain
from helpers.run_content import content


def config(folder: Path, engine: dict[str, Any] | None = None, **cluster: Any) -> Any:
    """All four clients, for long enough that a worker can die meanwhile."""
    changes: dict[str, Any] = {"federation": {"clients_per_round": None}, "training": {"local_steps": 40}}
    cluster = {"workers": 2, "start_timeout": 240.0, **cluster}
    return tiny.config(folder, **changes, engine=engine or {}, cluster=cluster)


pytestmark = pytest.mark.slow
BATCHED = {"name": "batched", "clients_per_pass": 2, "workers": 1}


def undisturbed(prepared: Prepared) -> list[RoundResult]:
    results = [prepared.federation.run_round(prepared.federation.begin())]
    return [*results, prepared.federation.run_round(results[0].progress)]


def require_same_rounds(expected: list[RoundResult], connected: Prepared, interrupt: Any) -> None:
    """Two rounds on workers, one of which is lost in the first, have the bits of uninterrupted ones."""
    pending = [interrupt]
    first = connected.federation.run_round(
        connected.federation.begin(), lambda client, loss: pending.pop()() if pending else None
    )
    second = connected.federation.run_round(first.progress)
    assert not pending
    for made, wanted in zip((first, second), expected, strict=True):
        assert plain(made.progress.state) == plain(wanted.progress.state)
        assert made.failures == ()
        assert made.transfers == wanted.transfers


def test_workers_that_die_are_started_again_in_this_run_and_the_next(tiny_folder: Path) -> None:
    prepared = prepare(config(tiny_folder))

    def kill() -> None:
        """Kill all workers, so that a round which ends has been done by those that were started again."""
        for handle in team.handles:
            ray.kill(handle.actor)

    with open_team(prepared.config.cluster) as team:
        require_same_rounds(undisturbed(prepared), connect_workers(prepared, team), kill)
        assert [handle.deaths for handle in team.handles] == [1, 1]
        for handle in team.handles:
            handle.lost = True  # as if they had died more often than a run starts them again
        kill()
        connected = connect_workers(prepared, team).federation
        assert not any(handle.lost for handle in team.handles)
        connected.run_round(connected.begin())


def end_process(handle: WorkerHandle) -> Any:
    return handle.actor.build.remote(os._exit, 1)


@pytest.fixture
def ready_team(tiny_folder: Path) -> Iterator[Team]:
    prepared = prepare(config(tiny_folder, workers=4))
    with open_team(prepared.config.cluster) as team:
        connect_workers(prepared, team)
        yield team


def test_workers_that_died_while_idle_cost_no_piece(ready_team: Team) -> None:
    """As on a machine with several workers that dies: the piece that one of them carries out is lost once."""
    pieces, results = [[Piece("only", 1)], [], [], []], list[str]()
    sent: list[int] = []

    def send(handle: WorkerHandle, content: str) -> Any:
        sent.append(ready_team.handles.index(handle))
        if len(sent) > 1:
            return handle.actor.has_cache.remote()
        for other in ready_team.handles:
            if other is not handle:
                ray.kill(other.actor)
        return end_process(handle)

    def fail(content: str, reason: str) -> None:
        raise AssertionError(reason)

    ready_team.share(pieces, send, lambda content, result: results.append(content), fail)
    assert results == ["only"]
    assert pieces[0][0].losses == 1
    assert len(sent) == 2
    assert ready_team.handles[sent[1]].deaths == 1  # it was restarted before it was sent the piece


def test_a_piece_of_which_three_workers_die_fails_and_the_others_are_done(ready_team: Team) -> None:
    pieces = [[Piece("deadly", 1), Piece("a", 1)], [Piece("b", 1)], [], []]
    results, failures = list[str](), list[tuple[str, str]]()

    def send(handle: WorkerHandle, content: str) -> Any:
        if content == "deadly":
            return end_process(handle)
        return handle.actor.has_cache.remote()

    ready_team.share(
        pieces,
        send,
        lambda content, result: results.append(content),
        lambda content, reason: failures.append((content, reason)),
    )
    assert failures == [("deadly", "3 workers died while they carried out its order")]
    assert sorted(results) == ["a", "b"]


def test_a_stack_that_ends_three_workers_costs_its_clients(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as failed, like clients that do not reply; the round continues with the others."""
    prepared = prepare(config(tiny_folder))
    with open_team(prepared.config.cluster) as team:
        federation = connect_workers(prepared, team).federation
        share = Team.share

        def share_deadly(team: Team, queues: Any, send: Any, *others: Any, **options: Any) -> None:
            first = queues[0][0].content

            def send_deadly(handle: WorkerHandle, content: Any) -> Any:
                deadly = content is first and isinstance(content, list)
                return end_process(handle) if deadly else send(handle, content)

            share(team, queues, send_deadly, *others, **options)

        monkeypatch.setattr(Team, "share", share_deadly)
        result = federation.run_round(federation.begin())
    assert len(result.failures) == 1
    assert len(result.cohort) == 4


def test_a_run_whose_workers_are_all_lost_ends(ready_team: Team) -> None:
    ready_team.cluster = ready_team.cluster.model_copy(update={"start_timeout": 1.0})
    for handle in ready_team.handles:
        handle.lost = True
    with pytest.raises(FedspanError, match="all workers died"):
        ready_team.share([[Piece("a", 1)], [], [], []], lambda *_: None, lambda *_: None, lambda *_: None)


def test_a_run_does_not_wait_for_the_work_of_an_aborted_one(tiny_folder: Path) -> None:
    prepared = prepare(config(tiny_folder))

    def abort(client: str, loss: float) -> None:
        raise KeyboardInterrupt

    with open_team(prepared.config.cluster) as team:
        aborted = connect_workers(prepared, team).federation
        actors = [handle.actor for handle in team.handles]
        with pytest.raises(KeyboardInterrupt):
            aborted.run_round(aborted.begin(), abort)
        connected = connect_workers(prepared, team).federation
        assert [handle.actor for handle in team.handles] != actors
        assert connected.run_round(connected.begin()).failures == ()


def test_the_same_base_is_no_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several evaluations of a round set one base, which workers receive once."""
    stored: list[bytes] = []
    monkeypatch.setattr(Team, "_start", lambda team: None)
    monkeypatch.setattr(ray, "put", stored.append)
    team = Team(ClusterConfig(workers=2))
    base = BaseUpdate()
    for number, previous in enumerate((None, 1), 1):
        base = base.add(Increment(number, {}, decay=0.5))
        for known in (previous, number):
            team.set_base(base)
            assert [team.get_base(handle)[0] for handle in team.handles] == [BaseVersion(number, known)] * 2
        assert len(stored) == number


@pytest.fixture
def machines() -> Iterator[Cluster]:
    """A head without room for workers, and two nodes for one worker each, all on this machine."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize("engine", [{}, BATCHED], ids=["loop", "batched"])
def test_a_machine_that_dies_costs_its_stacks(engine: dict[str, Any], machines: Cluster, tiny_folder: Path) -> None:
    prepared = prepare(config(tiny_folder, engine, address=machines.address))
    with open_team(prepared.config.cluster) as team:
        connected = connect_workers(prepared, team, build=build_host)
        expected = undisturbed(connected if engine else prepared)  # on workers, other clients share a pass
        node = machines.list_all_nodes()[-1]
        require_same_rounds(expected, connected, lambda: machines.remove_node(node, allow_graceful=False))
        assert [handle.version for handle in team.handles].count(None) == 1  # no room to start it again


@pytest.mark.parametrize("engine", [{}, BATCHED], ids=["loop", "batched"])
def test_a_killed_driver_continues_to_the_same_bits(engine: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny.settings(tiny_folder, training={"local_steps": 60}, engine=engine, cluster={"workers": 2})
    uninterrupted = settings if engine else {key: value for key, value in settings.items() if key != "cluster"}
    fedspan.run(uninterrupted, tmp_path / "whole", progress=False)
    code = "import json, sys, fedspan; fedspan.run(json.loads(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-c", code, json.dumps(settings), str(tmp_path / "killed")]
    metrics = tmp_path / "killed" / "metrics.jsonl"
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 1):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # In the loop engine, any number of workers has the same bits.
    fedspan.resume(tmp_path / "killed", overrides=[] if engine else ["cluster.workers=1"], progress=False)

    def files(folder: Path) -> dict[str, object]:
        return {name: value for name, value in content(folder).items() if not name.endswith("config.yaml")}

    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_runs_of_a_series_may_differ_in_their_workers(tiny_folder: Path) -> None:
    with share_teams():
        for workers in (1, 2):
            prepared = prepare(config(tiny_folder, workers=workers))
            with open_team(prepared.config.cluster) as team:
                connected = connect_workers(prepared, team).federation
                assert connected.run_round(connected.begin()).failures == ()


def test_a_process_without_the_token_is_not_let_in(tiny_folder: Path) -> None:
    code = "import sys, ray; ray.init(address=sys.argv[1], logging_level='error')"
    with open_team(config(tiny_folder).cluster):
        address = ray.get_runtime_context().gcs_address
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        for variables, admitted in ((stranger, False), (dict(os.environ), True)):
            command = [sys.executable, "-c", code, address]
            found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
            assert (found.returncode == 0) == admitted, found.stderr
    assert "RAY_AUTH_TOKEN" not in os.environ
