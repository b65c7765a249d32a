"""Bodies of nodes' requests that arrive in parts, and the answers that are kept for nodes that may have lost them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fedspan.transports.flower.bodies import Receive, Refused, read_into
from fedspan.transports.flower.limits import DoorLimits
from fedspan.transports.flower.progress import ProgressClock
from fedspan.transports.flower.uploads import Uploads
from fedspan.transports.flower.wire import TAKEN, UploadPart

__all__ = ["ResumedBodies"]


class ResumedBodies:
    """Reads bodies part by part, over one connection after another.

    Args:
        limits: Limits on the requests of one node.
    """

    def __init__(self, limits: DoorLimits) -> None:
        self._limits, self._uploads = limits, Uploads(limits)

    async def read_part(
        self, receive: Receive, length: int, part: UploadPart, key: bytes | None, name: str, clock: ProgressClock
    ) -> bytes:
        """Read a part of a body, and return the body when it is complete; otherwise keep what has arrived.

        Args:
            receive: Receives the part.
            length: Its size in bytes.
            part: What the request declares of it.
            key: Public key of the node; None: of a server without keys.
            name: Name of the node.
            clock: Says when progress is logged.

        Raises:
            Refused: If it does not continue the body, or does not end with what was declared.
        """
        owner = key or part.digest.encode()
        if length != part.total - part.offset:
            raise Refused(400, "a part that does not end with its body")
        try:
            upload = self._uploads.begin(owner, part, name, clock)
        except ValueError as error:
            raise Refused(416, "not the part that follows") from error
        request = upload.requests
        try:
            await read_into(receive, length, self._limits, upload, request)
        except BaseException:
            if upload.requests == request:
                self._uploads.interrupt(upload)
                asyncio.get_running_loop().call_later(self._limits.partial_seconds + 1, self._uploads.drop_expired)
            raise
        try:
            return self._uploads.finish(owner, part.digest, upload)
        except ValueError as error:
            raise Refused(400, "not the body that was declared") from error

    @asynccontextmanager
    async def keep_answer(self, key: bytes | None, part: UploadPart | None) -> AsyncGenerator[Callable[[bytes], None]]:
        """Process a request, and yield the function that keeps its answer for a node that may have lost it."""
        if part is None:
            yield lambda answer: None
            return
        owner = key or part.digest.encode()
        async with self._uploads.process(owner, part.digest):
            yield partial(self._uploads.keep_answer, owner, part.digest)

    async def find_offset(self, digest: bytes, key: bytes | None) -> bytes:
        """Return how many bytes of a body have arrived, as digits, or the answer to its request, if all have.

        Args:
            digest: SHA-256 of the body.
            key: Public key of the node; None: of a server without keys.

        Raises:
            Refused: If it is no SHA-256.
        """
        if len(digest) != 64 or not digest.isalnum():
            raise Refused(400, "not the SHA-256 of a body")
        owner, name = key or digest, digest.decode("ascii")
        answer = await self._uploads.find_answer(owner, name)
        return b"%d" % self._uploads.find_offset(owner, name) if answer is None else TAKEN + answer
