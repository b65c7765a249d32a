"""The socket of a data owner's host: who may connect, what is read, and when it goes."""

import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest
import yaml

from fedspan.deployment import host
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.link import LONGEST_HEADER, forward
from helpers.another_user import as_another_user
from helpers.captured_log import CapturedLog

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
    with pytest.raises(FedspanError, match="fedspan host"):
        forward(str(tmp_path / "host.sock"), "{}", b"")


def write_node(folder: Path) -> Path:
    (folder / "data.csv").write_text("text,label\na,b\n")
    path = folder / "node.yaml"
    values = {"id": "clinic", "server": "localhost:1", "folder": "state", "data": {"train": "data.csv"}}
    path.write_text(yaml.safe_dump(values))
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
        with pytest.raises(FedspanError, match="another process listens"):
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
    with pytest.raises(FedspanError, match="--socket"):
        host.host(write_node(tmp_path), path)
    assert path.read_text() == "mine"


def test_the_user_of_the_supernode_exists(tmp_path: Path) -> None:
    with pytest.raises(FedspanError, match="--user"):
        host.host(write_node(tmp_path), tmp_path / "host.sock", "no-such-user")
