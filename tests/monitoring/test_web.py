"""The page's server: token, host names, methods, headers, and the bounds on connections."""

import http.client
import json
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from fedspan.errors import FedspanError
from fedspan.monitoring import web
from fedspan.monitoring.web import HEADERS, WebPage, write_redirect
from helpers.refusals import refused
from helpers.written_run import HOSTILE, PretendRun

pytest.importorskip("starlette", reason="the extra fedspan[web] is not installed")
PATHS = ("/", "/page.js", "/page.css", "/state.json")


@pytest.fixture
def page(collect: Callable[[], Mapping[str, Any]]) -> Iterator[WebPage]:
    with WebPage(collect) as made:
        yield made


def request(
    page: WebPage, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def get_query(page: WebPage) -> str:
    return f"/?{urlsplit(page.url).query}"


def log_in(page: WebPage) -> dict[str, str]:
    status, headers, _ = request(page, get_query(page))
    assert (status, headers["location"]) == (303, "/")  # the token leaves the address
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax"} <= set(attributes)
    return {"Cookie": cookie}


def test_nothing_is_shown_without_the_token(page: WebPage) -> None:
    wrong = [{}, {"Cookie": f"fedspan-{page.port}=x"}, {"Cookie": f"fedspan-{page.port}="}, {"Cookie": "é=\xff"}]
    for path in (*PATHS, "/nothing", "/run.lock", "/?token=", "/?token=wrong", "/state.json?token=%ff%00"):
        for headers in wrong:
            status, _, body = request(page, path, headers=headers)
            assert status == 401
            assert b"fedit" not in body
            assert b"script" not in body


def test_with_the_token_the_page_and_the_state_are_served(page: WebPage, pretend_run: PretendRun) -> None:
    cookie = log_in(page)
    for path in PATHS:
        assert request(page, path, headers=cookie)[0] == 200
    state = json.loads(request(page, "/state.json", headers=cookie)[2])
    assert state["run"]["method"] == "fedit"


def test_each_start_has_another_token(collect: Callable[[], Mapping[str, Any]]) -> None:
    with WebPage(collect) as first, WebPage(collect) as second:
        assert urlsplit(first.url).query != urlsplit(second.url).query
        assert request(second, "/", headers=log_in(first))[0] == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost@x"])
def test_other_host_names_are_refused(page: WebPage, host: str) -> None:
    cookie = log_in(page)
    assert request(page, "/state.json", headers={**cookie, "Host": host})[0] == 421
    assert request(page, get_query(page), headers={"Host": host})[0] == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "LOCALHOST:8080", "[::1]:99"])
def test_names_of_this_machine_are_served(page: WebPage, host: str) -> None:
    assert request(page, "/state.json", headers={**log_in(page), "Host": host})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_other_than_get_and_head_are_refused(page: WebPage, method: str) -> None:
    cookie = log_in(page)
    for path in PATHS:
        assert request(page, path, method, cookie)[0] == 405


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_no_method_is_named_without_the_token(page: WebPage, method: str) -> None:
    for path in (*PATHS, "/nothing"):
        assert request(page, path, method)[0] == 401


def test_head_is_allowed(page: WebPage) -> None:
    assert request(page, "/state.json", "HEAD")[0] == 401
    status, _, body = request(page, "/state.json", "HEAD", log_in(page))
    assert (status, body) == (200, b"")


@pytest.mark.parametrize("path", ["/page.js/..", "/..%2f..%2fetc/passwd", "/static/page.js", "//page.js", "/run.lock"])
def test_no_path_names_a_file(page: WebPage, path: str) -> None:
    assert request(page, path, headers=log_in(page))[0] == 404


def test_every_response_has_the_headers(page: WebPage) -> None:
    cookie = log_in(page)
    for path, sent in (("/", cookie), ("/", {}), ("/nothing", cookie), ("/", {"Host": "x"}), (get_query(page), {})):
        _, headers, _ = request(page, path, headers=sent)
        assert {name: headers.get(name.lower(), headers.get(name)) for name in HEADERS} == HEADERS
        assert "server" not in {name.lower() for name in headers}


def test_hostile_names_stay_text_in_json(page: WebPage, pretend_run: PretendRun) -> None:
    pretend_run.add(1, failures=[{"client": HOSTILE, "attempt": 0, "reason": HOSTILE, "purpose": "train"}])
    _, headers, body = request(page, "/state.json", headers=log_in(page))
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["run"]["failures"][0]["client"] == HOSTILE.replace("\x1b", "\\x1b")


def test_other_addresses_need_tls(collect: Callable[[], Mapping[str, Any]]) -> None:
    with refused("--web-host"):
        WebPage(collect, "0.0.0.0")


def test_other_addresses_have_the_certificate(collect: Callable[[], Mapping[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra fedspan[deploy] is not installed")
    from fedspan.transports.http import keys

    keys.make_authority(tmp_path, ["127.0.0.2", "fl.example.org"])
    certificate = (tmp_path / keys.CERTIFICATE, tmp_path / keys.KEY)
    with WebPage(collect, "127.0.0.2", names=["fl.example.org", "127.0.0.2"], certificate=certificate) as page:
        assert page.url.startswith(f"https://fl.example.org:{page.port}/?token=")
        context = ssl.create_default_context(cafile=str(tmp_path / keys.AUTHORITY))
        for host, status in (("fl.example.org", 303), ("127.0.0.2", 303), ("evil.example", 421)):
            connection = http.client.HTTPSConnection("127.0.0.2", page.port, timeout=10, context=context)
            connection.request("GET", get_query(page), headers={"Host": host})
            response = connection.getresponse()
            assert response.status == status
            assert status == 421 or "Secure" in str(response.getheader("set-cookie")).split("; ")
            connection.close()


def test_a_port_in_use_is_named(collect: Callable[[], Mapping[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FedspanError, match=rf"--port.*{port}.*not in use"):
            WebPage(collect, port=port)


def test_connections_without_the_token_are_bounded(page: WebPage) -> None:
    cookie = log_in(page)
    idle = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(40)]
    try:
        for connection in idle[32:]:  # more than one address may have open without the token
            connection.settimeout(10)
            assert connection.recv(1) == b""
        assert select.select(idle[:32], [], [], 0.2)[0] == []  # still open: there is nothing to read, and no end
    finally:
        for connection in idle:
            connection.close()
    until = time.monotonic() + 30
    while True:  # closed connections are forgotten, a moment later
        try:
            assert request(page, "/state.json", headers=cookie)[0] == 200
            break
        except (http.client.HTTPException, OSError):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_no_header_names_another_connection(page: WebPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that sent the token is the one that may stay."""
    connections = pytest.importorskip("fedspan.transports.http.connections")
    cookie, clients = log_in(page), list[Any]()
    monkeypatch.setattr(connections.Connections, "accept", lambda self, client, *_: clients.append(client))
    with socket.create_connection(("127.0.0.1", page.port), 10) as viewer:
        forged = f"X-Forwarded-For: 127.0.0.1:7\r\nCookie: {cookie['Cookie']}\r\n"
        viewer.sendall(f"GET /state.json HTTP/1.1\r\nHost: 127.0.0.1\r\n{forged}\r\n".encode())
        assert viewer.recv(100).startswith(b"HTTP/1.1 200")
        assert clients == [viewer.getsockname()]


def test_large_requests_are_refused(page: WebPage) -> None:
    cookie = log_in(page)
    assert request(page, "/" + "x" * (1 << 12), headers=cookie)[0] == 404
    for headers in ({}, cookie):
        try:
            status = request(page, "/" + "x" * (1 << 21), headers=headers)[0]
        except (http.client.HTTPException, OSError):  # the connection is closed while the request is sent
            status = 400
        assert status == 400
    assert request(page, "/state.json", headers=cookie)[0] == 200


def test_an_unexpected_error_is_a_problem_that_the_page_shows() -> None:
    with WebPage(Mock(side_effect=ZeroDivisionError("by \x1b[31mzero"))) as page:
        status, _, body = request(page, "/state.json", headers=log_in(page))
        assert (status, json.loads(body)) == (200, {"problem": "ZeroDivisionError: by \\x1b[31mzero"})


def test_the_redirect_is_readable_by_its_user_alone_and_deleted() -> None:
    with write_redirect("http://127.0.0.1:1/?token=a&b=c") as path:
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert 'content="0;url=http://127.0.0.1:1/?token=a&amp;b=c"' in path.read_text()
        assert "token" not in path.as_uri()
    assert not path.parent.exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else True)
    with refused("web", r"uvicorn.*pip install 'fedspan\[web\]'"):
        web.require_web()
