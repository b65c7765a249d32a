"""A node's heartbeat and process, which costs its order alone when it dies; and the socket of a data owner's host."""

import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
import yaml

from fedspan import processes
from fedspan.clients.refusals import refuse_any
from fedspan.config.node import load_node
from fedspan.deployment import deploy, host, supervisor
from fedspan.deployment.health import Heartbeat, describe_heartbeat, find_problem, read_work
from fedspan.deployment.last_order import LastOrderFile, load_last_order
from fedspan.deployment.node import NodeService
from fedspan.deployment.node_folder import LAST_ORDER, TRAINING, WORKER, get_run_folder
from fedspan.deployment.supervisor import Supervisor
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope, Order, decode_reply
from fedspan.federation.secagg.messages import decode_request
from fedspan.processes import hold_folder
from fedspan.training.stages import Stages
from fedspan.transports.flower.link import LONGEST_HEADER, forward
from helpers import pretend_service
from helpers.another_user import as_another_user
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.node_service import node, served
from helpers.refusals import refused


def age(folder: Path, seconds: float) -> None:
    """Make a heartbeat older."""
    moment = time.time() - seconds
    os.utime(folder / "heartbeat", (moment, moment))


def test_a_model_may_load_for_an_hour_and_no_longer(tmp_path: Path) -> None:
    stages = Stages(Heartbeat(tmp_path).observe)
    with stages.stage("model"):
        age(tmp_path, 3000)
        assert find_problem(tmp_path) is None
        age(tmp_path, 3700)
        assert "(last: model)" in (find_problem(tmp_path) or "")
    with stages.stage("training"):
        age(tmp_path, 1000)
        assert "(last: training)" in (find_problem(tmp_path) or "")


def test_every_batch_renews_the_heartbeat(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[str] = []
    percents: list[int | None] = []

    def renew(self: Heartbeat, doing: str = "waiting", percent: int | None = None) -> None:
        renewed.append(doing)
        percents.append(percent)

    monkeypatch.setattr(Heartbeat, "renew", renew)
    service = NodeService(node(tiny_folder, tmp_path))
    run, _ = served(tiny_folder, service)
    assert "model" in renewed
    renewed.clear()
    percents.clear()
    progress = run.federation.run_round(run.federation.begin()).progress
    assert renewed.count("training") > 2  # its begin, and each of its batches
    shown = [percent for doing, percent in zip(renewed, percents, strict=True) if doing == "training"]
    assert shown == sorted(shown, key=lambda percent: percent or 0)
    assert (shown[0], shown[-1]) == (0, 100)
    renewed.clear()
    run.evaluator.evaluate_clients(progress)
    assert renewed.count("evaluation") >= 2


def test_a_heartbeat_says_how_much_of_the_work_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedspan.deployment.health._INTERVAL", 0.0)
    assert read_work(tmp_path) is None
    heartbeat = Heartbeat(tmp_path)
    heartbeat.renew()
    assert read_work(tmp_path) is None
    stages = Stages(heartbeat.observe)
    with stages.stage("training", 7):
        assert read_work(tmp_path) == ("training", 0)
        stages.advance("training", 3)
        assert read_work(tmp_path) == ("training", 42)
        assert describe_heartbeat(tmp_path) == "training (42 %), 0 s ago"
        assert find_problem(tmp_path) is None
        stages.advance("training", 5)
        assert read_work(tmp_path) == ("training", 100), "a client may train more than was expected"
    with stages.stage("model"):
        assert read_work(tmp_path) == ("model", None)
        assert describe_heartbeat(tmp_path) == "model, 0 s ago"
        age(tmp_path, 3000)
        assert find_problem(tmp_path) is None


def collect_percents(tiny_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Any]:
    """What the heartbeats of a node say while it carries out an order to train."""
    percents: list[Any] = []
    service = NodeService(node(tiny_folder, folder))
    run, _ = served(tiny_folder, service, **changes)
    monkeypatch.setattr(Heartbeat, "renew", lambda self, doing="", percent=None: percents.append(percent))
    run.federation.run_round(run.federation.begin())
    return percents


def test_phases_of_a_method_are_part_of_the_work(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "pfedlora", "r": 2}
    percents = collect_percents(tiny_folder, tmp_path, monkeypatch, method=method, training={"local_steps": None})
    assert percents.count(100) == 1 or percents[-1] == 100
    assert percents.index(100) > 0.9 * len(percents) - 1


def test_heartbeats_hide_the_sizes_of_secret_samples(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.hides_shares, stages = True, Stages(heartbeat.observe)
    with stages.stage("training", 8), stages.stage("hidden states", 8):  # which are not stored if an example fails
        stages.advance("hidden states", 4)
        assert read_work(tmp_path) == ("training", None)
    privacy = {"mechanism": "dp-sgd", "clip": 1.0, "noise": 1.0, "randomness": "secret"}
    percents = collect_percents(tiny_folder, tmp_path, monkeypatch, privacy=privacy, model={"head_init": "random"})
    assert set(percents) == {None}
    assert len(percents) > 2


@pytest.mark.slow  # a process that imports torch
def test_a_training_process_that_hangs_lets_the_heartbeat_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped while the supervisor waits for it: nothing renews the heartbeat."""
    monkeypatch.setattr("fedspan.deployment.supervisor._STEP", 0.05)
    folder, path = tmp_path / "state", tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump({"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder)}))
    waits = threading.Event()
    supervisor = Supervisor(path, 0.5, waits.set)
    heartbeat = Heartbeat(folder)
    order = Order("train", 0, 0, 0.1, "a", None, b"", run="none", serial=1).to_envelope()
    try:
        supervisor.answer(order)
        waits.clear()
        process = supervisor._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        heartbeat.renew("an order")
        before = (folder / "heartbeat").stat().st_mtime
        supervisor._loaded = "none"
        supervisor.answer(order)
        assert waits.is_set()
        assert (folder / "heartbeat").stat().st_mtime == before
        assert describe_heartbeat(folder).startswith("an order, ")
    finally:
        supervisor.close()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")
def test_systemd_s_watchdog_is_told_while_the_node_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("notify")
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "notify")
        heartbeat = Heartbeat(tmp_path / "state")
        heartbeat.renew()
        assert systemd.recv(64) == b"WATCHDOG=1"
        age(tmp_path / "state", 1000)
        systemd.setblocking(False)
        heartbeat.notify_watchdog()
        with pytest.raises(BlockingIOError):
            systemd.recv(64)


def make_order(serial: int) -> Envelope:
    return Order("train", 0, 0, 0.1, "a", None, b"", run="none", serial=serial).to_envelope()


def answer(supervisor: Supervisor, serial: int) -> str:
    return decode_reply(supervisor.answer(make_order(serial))).failed or ""


def require_answered(supervised: Supervisor, serial: int) -> None:
    """Require that an order counts as answered, so that a node refuses it if the server sends it again."""
    last = load_last_order(get_run_folder(Path(load_node(supervised.path).folder), "none") / LAST_ORDER)
    assert (last.serial, last.is_closed) == (serial, True)
    if supervisor._serve is not pretend_service.serve:
        assert f"order {serial} arrived before" in answer(supervised, serial)


@pytest.fixture(scope="module", params=others_slow(["pretend", "node"], ["pretend"]))
def supervised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """The tests share a supervisor and, in this order, a process: one of a node takes many seconds to start."""
    folder = tmp_path_factory.mktemp("node")
    node = {"id": "a", "server": "h:1", "data": {"train": "own.csv"}, "folder": str(folder / "state")}
    (folder / "node.yaml").write_text(yaml.safe_dump(node))
    get_run_folder(folder / "state", "none").mkdir(parents=True)
    refusal = refuse_any(decode_request(make_order(0)), FedspanError("run", "none", "a run to which it was invited"))
    (folder / "reply.json").write_text(refusal.header)
    made = Supervisor(folder / "node.yaml", 120)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pretend":
            patch.setattr(supervisor, "_serve", pretend_service.serve)
        yield made
    made.close()


def test_a_process_that_dies_is_reported_and_replaced(supervised: Supervisor) -> None:
    def kill() -> None:
        process = supervised._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    busy = supervised.path.with_name("busy")
    busy.touch()
    timer = threading.Timer(0.5, kill)
    timer.start()
    assert "the node's process ended" in answer(supervised, 1)
    timer.join()
    busy.unlink()
    require_answered(supervised, 1)
    assert "invited" in answer(supervised, 2)
    process = supervised._process
    assert process is not None
    assert "invited" in answer(supervised, 3)
    assert supervised._process is process


def test_an_order_that_takes_too_long_is_given_up_and_its_process_killed(
    supervised: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "invited" in answer(supervised, 4)
    process = supervised._process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(supervised, "seconds", 0.2)
    folder = get_run_folder(Path(load_node(supervised.path).folder), "none")
    progress = folder / TRAINING
    progress.mkdir()
    LastOrderFile(folder / LAST_ORDER).begin(make_order(5), 5)  # as the process does
    assert "limits.round_seconds" in answer(supervised, 5)
    assert supervised._process is None
    assert not process.is_alive()
    assert not progress.exists()  # another order may not take the same time again
    monkeypatch.undo()
    require_answered(supervised, 5)
    assert "invited" in answer(supervised, 6)


def test_a_process_that_dies_before_its_order_is_reported(
    supervised: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect() -> Any:
        own, other = multiprocessing.Pipe()
        other.close()
        return own

    with monkeypatch.context() as patch:
        patch.setattr(supervised, "_connect", connect)
        assert "the node's process ended" in answer(supervised, 90)
    require_answered(supervised, 90)


NODE = """
    import sys
    from pathlib import Path
    from fedspan.deployment.supervisor import Supervisor
    if __name__ == "__main__":
        supervisor = Supervisor(Path(sys.argv[1]), 600)
        line = supervisor._connect()
        print(supervisor._process.pid, flush=True)
        supervisor._wait(line, 600)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow  # starts processes that import torch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_the_process_that_trains_ends_with_a_killed_node(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(textwrap.dedent(NODE))
    command = [sys.executable, str(script), str(write_node(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        child = int(node.stdout.readline())
        lock = tmp_path / "state" / f"{WORKER}.lock"
        until = time.monotonic() + 120
        while not lock.exists():  # it trains in the folder
            assert is_running(child)
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
    try:
        until = time.monotonic() + 10
        while is_running(child):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("role", ["node", WORKER])
def test_a_second_node_does_not_start_in_the_folder(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_node(tmp_path)
    monkeypatch.setattr(processes, "_ENDING", 0.1)
    with (
        hold_folder(tmp_path / "state", role, "folder"),
        pytest.raises(FedspanError, match=rf"process {os.getpid()} works in .* as its {role}.*kill {os.getpid()}"),
    ):
        deploy.join(path, insecure=True)


LONGEST = 1000
NOBODY = 65534


@contextmanager
def listening(users: set[int] | None = None, seen: list[Envelope] | None = None) -> Iterator[Path]:
    """A socket in a folder that every user may enter, whose server returns what it receives."""

    def answer(envelope: Envelope) -> Envelope:
        if seen is not None:
            seen.append(envelope)
        return envelope

    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "host.sock"
        server = host._listen(path, {host.os.getuid()} if users is None else users, LONGEST, answer)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.mark.parametrize(("header", "body"), [("{}", b""), ("", b"body"), ("\ud800é", bytes(LONGEST))])
def test_an_envelope_and_its_reply_arrive_whole(header: str, body: bytes) -> None:
    with listening() as path:
        for _ in range(2 * host._CONNECTIONS):  # a closed connection makes room for another
            assert forward(str(path), header, body) == (header, body)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">IQ", 2, LONGEST + 1),
        struct.pack(">IQ", LONGEST_HEADER + 1, 0),
        struct.pack(">IQ", 2, 5) + b"{}body",
        struct.pack(">IQ", 1, 0) + b"\xff",
        b"\0",
    ],
    ids=["long body", "long header", "cut off", "no text", "no lengths"],
)
def test_what_is_no_envelope_is_not_answered(sent: bytes) -> None:
    seen = list[Envelope]()
    with listening(seen=seen) as path, socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10)
        line.connect(str(path))
        line.sendall(sent)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(1) == b""
    assert seen == []


def test_time_ends_a_message_whose_bytes_trickle_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SECONDS", 0.3)
    with listening() as path, socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(struct.pack(">IQ", 1000, 0))
        until = time.monotonic() + 10
        with suppress(BrokenPipeError):
            while time.monotonic() < until:
                line.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() < until


def test_a_connection_too_many_is_refused_and_logged(caplog: CapturedLog) -> None:
    with listening() as path, ExitStack() as stack:
        for _ in range(host._CONNECTIONS + 1):
            line = stack.enter_context(socket.socket(socket.AF_UNIX))
            line.connect(str(path))
        line.settimeout(10)
        assert line.recv(1) == b""
    assert f"a connection is refused: {host._CONNECTIONS} others" in caplog.text


@pytest.mark.parametrize("allowed", [False, True])
def test_only_the_named_users_may_connect(allowed: bool) -> None:
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    program += "s.sendall(bytes(12)); s.settimeout(10); print(len(s.recv(12)))"
    with listening({host.os.getuid(), NOBODY} if allowed else None) as path:
        ended = subprocess.run([*as_another_user(), "-c", program, str(path)], capture_output=True, text=True)
    if allowed:
        assert ended.stdout.strip() == "12", ended.stderr
    else:
        assert ended.stdout.strip() in ("0", ""), ended.stdout


def test_a_host_that_does_not_listen_is_an_error_of_the_forwarding_app(tmp_path: Path) -> None:
    with refused("fedspan-host", "fedspan host"):
        forward(str(tmp_path / "host.sock"), "{}", b"")


def write_node(folder: Path) -> Path:
    (folder / "data.csv").write_text("text,label\na,b\n")
    path = folder / "node.yaml"
    values = {"id": "clinic", "server": "localhost:1", "folder": "state", "data": {"train": "data.csv"}}
    path.write_text(yaml.safe_dump(values))
    (folder / "state").mkdir(mode=0o700)
    return path


def test_a_host_replaces_the_socket_that_a_killed_one_left_and_removes_its_own(tmp_path: Path) -> None:
    path, stop = tmp_path / "host.sock", Event()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    thread = Thread(target=host.host, args=(write_node(tmp_path), path), kwargs={"stop": stop}, daemon=True)
    thread.start()
    with socket.socket(socket.AF_UNIX) as line:
        while line.connect_ex(str(path)) != 0:
            assert thread.is_alive()
            time.sleep(0.01)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not path.exists()


def test_a_host_leaves_the_socket_of_a_living_one(tmp_path: Path) -> None:
    with listening() as path:
        with refused("--socket"):
            host.host(write_node(tmp_path), path)
        assert forward(str(path), "{}", b"body") == ("{}", b"body")


def test_a_stopped_host_sends_the_reply_to_its_order_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, begun, goes_on, stop, replies = list[str](), list[str](), Event(), Event(), dict[str, str]()

    def answer(_: object, envelope: Envelope) -> Envelope:
        begun.append(envelope.header)
        assert goes_on.wait(30)
        return Envelope("reply", bytes(1 << 20))

    def take(server: host._Server, envelope: Envelope) -> Envelope:
        taken.append(envelope.header)
        return answer_in_turn(server, envelope)

    answer_in_turn = host._Server.answer
    monkeypatch.setattr(host._Server, "answer", take)
    monkeypatch.setattr(host.Supervisor, "answer", answer)
    path = tmp_path / "host.sock"

    def send(header: str) -> None:
        try:
            replies[header] = forward(str(path), header, b"")[0]
        except FedspanError as error:
            replies[header] = str(error)

    running = Thread(target=host.host, args=(write_node(tmp_path), path), kwargs={"stop": stop}, daemon=True)
    running.start()
    wait_until(path.exists)
    lines = [Thread(target=send, args=(header,)) for header in ("first", "second")]
    lines[0].start()
    wait_until(lambda: begun == ["first"])
    lines[1].start()
    wait_until(lambda: len(taken) == 2)
    stop.set()
    wait_until(lambda: not path.exists())
    goes_on.set()
    for thread in (*lines, running):
        thread.join(30)
        assert not thread.is_alive()
    assert begun == ["first"]
    assert replies["first"] == "reply"
    assert "does not reply" in replies["second"]


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_host_replaces_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    path.write_text("mine")
    with refused("--socket"):
        host.host(write_node(tmp_path), path)
    assert path.read_text() == "mine"


def test_the_user_of_the_supernode_exists(tmp_path: Path) -> None:
    with refused("--user"):
        host.host(write_node(tmp_path), tmp_path / "host.sock", "no-such-user")
