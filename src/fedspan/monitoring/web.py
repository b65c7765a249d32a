"""The web server of the page: a token, one host name, GET and HEAD only, bounded connections, nothing foreign."""

from __future__ import annotations

import hmac
import html
import importlib.util
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from fedspan.errors import FedspanError, build_install_command
from fedspan.files import to_json
from fedspan.monitoring.run_monitor import clean_text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses of this machine, on which the page needs no TLS."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_ASSETS = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""The only files that are served; no part of a request is used as a file name."""
_FRESH = 0.5
"""Seconds for which a collected state answers all viewers."""
_MAX_VIEWERS = 32
"""Connections with the token; the oldest is closed for a new one."""
_ALLOWANCE = 1 << 16
"""Bytes that a connection with the token may send until its next request is accepted."""
_STARTING = 10.0
"""Time limit for the start of the server, in seconds."""


def require_web() -> None:
    """Check that the packages of the web page are installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            problem = f"the web page needs {package}, which is not installed. Run: {build_install_command('web')}"
            raise FedspanError("web", None, problem=problem)


def build_app(
    collect: Callable[[], Mapping[str, Any]],
    token: str,
    hosts: Iterable[str],
    *,
    cookie: str = "fedspan",
    is_secure: bool = False,
    on_accept: Callable[[Request], None] = lambda request: None,
) -> Starlette:
    """Build the web app.

    Args:
        collect: Returns the state as plain values; it may read files, and is called by one thread at a time.
        token: The secret that every request needs: in the query ``token``, whose response sets the cookie, or in the
            cookie. It stays valid, so that several browsers can open the page.
        hosts: Host names under which the page may be requested, which excludes DNS rebinding.
        cookie: Name of the cookie; browsers send cookies to all ports of a host.
        is_secure: Whether the page is served with TLS.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route

    folder = files("fedspan.monitoring") / "page"
    assets = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _ASSETS.items()}
    state = _State(collect)

    def guard(request: Request) -> Response | None:
        """Return the response to a request without the token, or to the first one with it; None: it has the cookie."""
        requested = request.query_params.get("token")
        if requested is not None and _is_equal(requested, token):
            on_accept(request)
            response = RedirectResponse("/", status_code=303)
            # Not "strict": the redirect of someone who follows a link from elsewhere would come without the cookie.
            response.set_cookie(cookie, token, httponly=True, samesite="lax", secure=is_secure)
            return response
        if not _is_equal(request.cookies.get(cookie, ""), token):
            text = "This page needs its token. Open the address that the command printed when it started.\n"
            return PlainTextResponse(text, status_code=401)
        on_accept(request)
        return None

    async def show_asset(request: Request) -> Response:
        content, kind = assets[request.url.path]
        return guard(request) or Response(content, media_type=kind)

    async def show_state(request: Request) -> Response:
        if (refusal := guard(request)) is not None:
            return refusal
        return Response(await run_in_threadpool(state.read), media_type="application/json")

    routes = [Route(path, show_asset, methods=["GET"]) for path in assets]
    routes.append(Route("/state.json", show_state, methods=["GET"]))

    async def refuse(request: Request, error: Exception) -> Response:
        """Refuse an unknown path or method; without the token, nobody learns which ones exist."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        refusal = guard(request)
        return refusal or PlainTextResponse("The page has no such address.\n", status_code=status)

    return Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, hosts=frozenset(hosts))],
        exception_handlers={404: refuse, 405: refuse},
    )


def _is_equal(sent: str, token: str) -> bool:
    return hmac.compare_digest(sent.encode(errors="surrogatepass"), token.encode())


class _State:
    """The state as JSON, collected at most twice a second for all viewers."""

    def __init__(self, collect: Callable[[], Mapping[str, Any]]) -> None:
        self._collect = collect
        self._lock = threading.Lock()
        self._collected = -_FRESH
        self._text = b""

    def read(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._collected >= _FRESH:
                try:
                    text = to_json(self._collect())
                except Exception as error:  # files that others write must not end the page without a reason
                    text = to_json({"problem": clean_text(f"{type(error).__name__}: {error}")})
                self._text = text.encode(errors="backslashreplace")
                self._collected = time.monotonic()
            return self._text


class _Guard:
    """Middleware that refuses other host names, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if _read_host(Headers(scope=scope).get("host", "")) not in self._hosts:
            app = PlainTextResponse("This host name is not one of the page's.\n", status_code=421)
        await app(scope, receive, send_with_headers)


def _read_host(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


class WebPage:
    """The page on a port of this machine, in a thread, while it is entered as a context manager.

    Args:
        port: Port to listen on; 0: any free one.
        certificate: Files of the certificate and its key; None: without TLS, on a loopback address only.

    Raises:
        FedspanError: If a package is missing, the address is not loopback and there is no certificate, or the port is
            in use.
    """

    def __init__(
        self,
        collect: Callable[[], Mapping[str, Any]],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        names: Iterable[str] = (),
        certificate: tuple[Path, Path] | None = None,
        field: str = "--port",
    ) -> None:
        require_web()
        import uvicorn

        from fedspan.transports.http.connections import BoundedProtocol, BoundedSocket, ConnectionLimits, Connections

        names = tuple(names)
        if host not in LOOPBACK and certificate is None:
            problem = "the page has no TLS here, so it is served on this machine only"
            raise FedspanError("--web-host", host, "127.0.0.1, and ssh -L from other machines", problem=problem)
        connections = Connections(ConnectionLimits(per_address=32, total=128, per_sender=_MAX_VIEWERS))
        listening = type("PageSocket", (BoundedSocket,), {"bounds": connections})
        protocol = type("PageProtocol", (BoundedProtocol,), {"bounds": connections})
        self._socket = listening.take_over(_bind(host, port, field))
        self.port = int(self._socket.getsockname()[1])
        self._token = secrets.token_urlsafe(32)
        self._name = names[0] if names and host not in LOOPBACK else host
        self._scheme = "http" if certificate is None else "https"
        app = build_app(
            collect,
            self._token,
            {*LOOPBACK, host.lower(), *(name.lower() for name in names)},
            cookie=f"fedspan-{self.port}",
            is_secure=certificate is not None,
            on_accept=lambda request: connections.accept(request.client, b"viewer", _ALLOWANCE),
        )
        config = uvicorn.Config(
            app,
            proxy_headers=False,  # connections are counted by their real address
            loop="asyncio",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
            ssl_certfile=None if certificate is None else certificate[0],
            ssl_keyfile=None if certificate is None else certificate[1],
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="web page", daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host = f"[{self._name}]" if ":" in self._name else self._name
        return f"{self._scheme}://{host}:{self.port}/?token={self._token}"

    def __enter__(self) -> Self:
        self._thread.start()
        until = time.monotonic() + _STARTING
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                self._server.should_exit = True
                raise FedspanError("web", self.port, problem="the web server did not start")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()


@contextmanager
def write_redirect(url: str) -> Generator[Path]:
    """Write an HTML file that leads to a page, readable by this user alone, and delete it at the end.

    A browser receives the address to open on its command line, which all users of the machine can list. The address of
    this file has no token.
    """
    with TemporaryDirectory(prefix="fedspan-") as folder:  # of mode 0700
        path = Path(folder) / "open.html"
        path.touch(mode=0o600)
        text = f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(url)}"><title>fedspan</title>\n'
        path.write_text(text, encoding="utf-8")
        yield path


def _bind(host: str, port: int, field: str) -> socket.socket:
    from fedspan.transports.http.connections import bind

    try:
        return bind(host, port)
    except OSError as error:
        expected = f"an address of this machine, and a port that is not in use ({error.strerror or error})"
        raise FedspanError(field, f"{host}:{port}", expected) from error
