"""A node's requests to a server behind the door; one that a broken connection has interrupted is continued."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import httpx

from fedspan.transports.flower.transfers import Download, Transfers
from fedspan.transports.flower.wire import (
    FETCH_BASE,
    NODE_PATH,
    RESUMABLE_BYTES,
    SEND_REPLY,
    TAKE_ORDER,
    TAKEN,
    UPLOAD_HEADER,
    UPLOAD_OFFSET,
    UploadPart,
)

__all__ = ["PAUSE", "REQUEST_SECONDS", "ResumableClient"]

REQUEST_SECONDS, _CONNECT = 180.0, 30.0
"""Time limits of a request and of a connection, in seconds. A server of a thousand nodes that all reply at once takes a
while; a request that was given up would be processed all the same, and sent again on top of it."""
_TEMPORARY = httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS
"""Statuses below 500 after which a request can be sent again: the link stalled, and what has arrived is kept, or other
requests of this node came first."""
PAUSE = 1.0
"""Seconds before a request that a broken connection lost is sent again; twice as long each time."""
_RESUMED = 0.1
"""The same, if the broken connection has transmitted a part of it."""


class ResumableClient:
    """Sends requests whose bodies and answers survive a broken connection.

    Args:
        client: The connections to the server.
        make_headers: Returns the headers of a request to a path, with its signature.
        retries: Retries of a request that a broken connection lost. Those that transmit a part of it do not count.
        transfers: What outlives the connections.
    """

    def __init__(
        self, client: httpx.Client, make_headers: Callable[[str], dict[str, str]], retries: int, transfers: Transfers
    ) -> None:
        self.client = client
        self._make_headers, self._retries, self._transfers = make_headers, retries, transfers

    def post(
        self, path: str, body: bytes, max_bytes: int, seconds: float = REQUEST_SECONDS, retries: int | None = None
    ) -> bytes:
        """Send a request, the rest of it if the connection breaks, and return the answer.

        Args:
            path: Path of the request.
            body: Its body.
            max_bytes: Maximum size of the answer in bytes.
            seconds: Time limit in seconds.
            retries: Retries of a request that a broken connection lost; None: those of this client.

        Raises:
            httpx.HTTPStatusError: If the server refuses the request.
            httpx.HTTPError: If the connection is lost, or the answer is not the server's.
        """
        left = most = self._retries if retries is None else retries
        is_resumable = len(body) >= RESUMABLE_BYTES or path.endswith(SEND_REPLY)  # no reply may be stored twice
        digest = hashlib.sha256(body).hexdigest() if is_resumable else ""
        pause, transmitted = PAUSE, 0
        while True:
            moved = 0
            try:
                if digest in self._transfers.interrupted:
                    resumption = self._find_offset(digest, len(body), max_bytes)
                    if isinstance(resumption, bytes):
                        self._transfers.interrupted.pop(digest)
                        return resumption
                    moved = resumption
                sent = self._transfers.sent
                part = UploadPart(digest, moved, len(body), sent.done, sent.total) if digest else None
                answer = self._post_once(path, body, max_bytes, seconds, part)
                self._transfers.interrupted.pop(digest, None)
                return answer
            except httpx.TransportError:
                if digest:
                    self._transfers.note_interruption(digest)
                elif (download := self._transfers.find_download(path, body)) is not None:
                    moved = download.size
                if moved and moved != transmitted:
                    left, pause, transmitted = most, _RESUMED, moved
                elif not left:
                    raise
                else:
                    left -= 1
            except httpx.HTTPStatusError as error:
                self._transfers.interrupted.pop(digest, None)
                if not digest or not left or error.response.status_code != httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise
                self._transfers.note_interruption(digest)  # the SuperLink has less or more of it than it had
                left -= 1
            time.sleep(pause)
            pause *= 2

    def _find_offset(self, digest: str, total: int, max_bytes: int) -> int | bytes:
        """Return how many bytes of a body have arrived, or the answer to the request, if all have."""
        request = digest.encode("ascii")
        answer = self._post_once(f"{NODE_PATH}{UPLOAD_OFFSET}", request, max_bytes + len(TAKEN), REQUEST_SECONDS, None)
        if answer.startswith(TAKEN):
            return answer[len(TAKEN) :]
        if not answer.isdigit() or len(answer) > 10 or int(answer) > total:
            raise httpx.RemoteProtocolError("an answer that is not an offset")
        return int(answer)

    def _post_once(self, path: str, body: bytes, max_bytes: int, seconds: float, part: UploadPart | None) -> bytes:
        headers, transfers = self._make_headers(path), self._transfers
        content: Any = body
        download = None if part is not None else transfers.find_download(path, body)
        if part is not None:
            headers |= {UPLOAD_HEADER: part.to_header(), "content-length": str(part.total - part.offset)}
            content = transfers.pace_upload(body, part, transfers.sent.show)
        elif download is not None:
            headers |= {"range": f"bytes={download.size}-", "if-range": download.tag}
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT))
        with self.client.stream("POST", path, content=content, headers=headers, timeout=timeout) as response:
            if response.status_code in _TEMPORARY or response.is_server_error:  # 5xx: it ends, or its disk is full
                raise httpx.ReadError(f"the SuperLink answered {response.status_code}")
            response.raise_for_status()
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                download = Download(response.headers.get("etag", ""))
            elif download is None or response.headers.get("etag") != download.tag:
                raise httpx.RemoteProtocolError("a part of another answer")
            is_long = part is None and bool(download.tag)
            # a base model is received in a thread of its own, beside orders
            progress = None if path.endswith(FETCH_BASE) else transfers.received
            if is_long:
                transfers.keep_download(path, body, download)
                if path.endswith(TAKE_ORDER):
                    transfers.received.begin(download.size + int(response.headers.get("content-length", "0")))
            for block in response.iter_raw():
                download.append(block)
                if download.size > max_bytes:
                    transfers.drop_download(path, body)
                    raise httpx.RemoteProtocolError(f"an answer of more than {max_bytes} bytes")
                if is_long:
                    if progress is not None:
                        progress.show(download.size)
                    transfers.down.wait(len(block))
        if is_long:
            transfers.drop_download(path, body)
        return b"".join(download.parts)
