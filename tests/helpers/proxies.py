"""Proxies between nodes and a server, as processes: of a site (CONNECT), and in front of a server.

    python -m helpers.proxies KIND SERVER_PORT [CERTIFICATE KEY]

The kinds are ``connect`` (an outbound proxy), ``inspect`` (one that opens TLS with a certificate of its own), ``pass``
(a reverse proxy that passes TLS through) and ``terminate`` (one that terminates it, with nginx's defaults: a body has
at most 1 MiB and is read before it is passed on, and an answer must begin within 60 s). It prints its port.
"""

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

BODY, SECONDS = 2**20, 60.0
"""nginx's ``client_max_body_size`` and ``proxy_read_timeout``."""


class RunningProxy(NamedTuple):
    """A proxy at work: its port, and the file with a line for each connection or request that passed it."""

    port: int
    log: Path

    def read_log(self) -> str:
        return self.log.read_text()


@contextmanager
def run_proxy(kind: str, server_port: int, folder: Path, own: Path | None = None) -> Generator[RunningProxy]:
    """Run a proxy of one of the kinds above; ``own`` has its own certificate (``keys.make_authority``)."""
    files = [] if own is None else [str(own / "server.crt"), str(own / "server.key")]
    command = [sys.executable, "-m", "helpers.proxies", kind, str(server_port), *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    log = folder / f"{kind}.log"
    with log.open("wb") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, env=environment
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield RunningProxy(int(process.stdout.readline()), log)
        finally:
            process.kill()


def note(text: str) -> None:
    """Write a line into the log."""
    print(text, file=sys.stderr, flush=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def join_ends(
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter], far: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    await asyncio.gather(pump(near[0], far[1]), pump(far[0], near[1]))


class Proxy:
    """Serves connections of one kind."""

    def __init__(self, kind: str, port: int, files: list[str]) -> None:
        self.kind, self.port, self.files = kind, port, files

    def create_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.files)
        return context

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            await getattr(self, f"serve_{self.kind}")(reader, writer)
        writer.close()

    async def serve_pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        note("connection")
        await join_ends((reader, writer), await asyncio.open_connection("127.0.0.1", self.port))

    async def serve_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        note(head.splitlines()[0])
        if not head.startswith("CONNECT "):
            writer.write(b"HTTP/1.1 405 only CONNECT\r\ncontent-length: 0\r\n\r\n")
            return
        far = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"HTTP/1.1 200 connected\r\n\r\n")
        await join_ends((reader, writer), far)

    async def serve_inspect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 connected\r\n\r\n")
        await writer.drain()
        await writer.start_tls(self.create_context())  # the node ends here, unless it trusts the proxy's authority
        note("inspected")

    async def serve_terminate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.rstrip().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            length = int(fields.get("content-length", "0"))
            if length > BODY:
                note(f"413 {first}")
                writer.write(b"HTTP/1.1 413 too large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                return
            body = await reader.readexactly(length)
            note(f"{first} {body[:40]!r}")
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            far, away = await asyncio.open_connection("127.0.0.1", self.port, ssl=trusting)
            kept = [line for line in lines if not line.lower().startswith("connection:")]
            away.write("\r\n".join([first, *kept, "connection: close", "x-forwarded-for: 192.0.2.9", "", ""]).encode())
            away.write(body)
            try:
                answer = await asyncio.wait_for(far.readuntil(b"\r\n\r\n"), SECONDS)
            except TimeoutError:
                note(f"504 {first}")
                writer.write(b"HTTP/1.1 504 too late\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                return
            writer.write(answer.replace(b"connection: close\r\n", b""))
            writer.write(await far.read(-1))
            await writer.drain()
            away.close()


async def main(kind: str, port: str, *files: str) -> None:
    proxy = Proxy(kind, int(port), list(files))
    context = proxy.create_context() if kind == "terminate" else None
    server = await asyncio.start_server(proxy.serve, "0.0.0.0", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
