"""The server side of a deployment: a run on a SuperLink whose server is this process.

In Flower, the SuperLink starts a ServerApp in a separate process, from a bundle that anyone who can reach it may
submit. Here the SuperLink starts nothing (``--isolation process`` without a SuperExec). A process that has the
SuperLink's secret takes over the run, and the process with the run folder and the terminal uses the grid.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import httpx
from flwr.app import Message

from fedspan.errors import FedspanError
from fedspan.transports.flower.adapter import (
    ObjectPullError,
    RunNotRunningException,
    TaskGrid,
    acquire_task,
    pull_failure,
)
from fedspan.transports.flower.messages import TooLarge, assemble_message, fetch_objects
from fedspan.transports.flower.server import ServerLink, call_flower

__all__ = ["LimitedGrid", "attach"]

_PATIENCE = 60.0
"""Time limit for taking over a submitted run, in seconds."""


class LimitedGrid(TaskGrid):
    """A grid that stops fetching a reply at the size limit and has the SuperLink delete it."""

    most = 1 << 31
    """Maximum size of a reply, in bytes."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are ready; one that is too large or incomplete is replaced by an error."""
        messages: list[Message] = []
        for head in self.list_replies(message_ids):
            contents, why = None, ""
            try:
                contents = fetch_objects(head.tree, self.pull_object, self.most)
            except TooLarge as error:
                why = f"the reply has {pull_failure(error)}"
            except ObjectPullError as error:
                why = pull_failure(error)
            self.confirm(head)
            if contents is not None:
                try:
                    messages.append(assemble_message(head.id, contents, self.most))
                    continue
                except ValueError as error:
                    why = f"the reply: {error}"
            messages.append(self.make_error(head.reply_to, why))
        return messages


@contextmanager
def attach(link: ServerLink, most: int) -> Generator[LimitedGrid]:
    """Make this process the server of a new run on a SuperLink for the duration of the context.

    Args:
        link: Connection data of the SuperLink.
        most: Maximum size of a reply, in bytes.

    Raises:
        FedspanError: If the SuperLink is unreachable, refuses, rejects the secret, or later no longer knows the run.
    """
    run = int(call_flower(link, "run", "%", "@")["run-id"])
    authority = None if link.authority is None else link.authority.read_bytes()
    grid = LimitedGrid(link.address, authority, _take_over(link, authority, run))
    grid.most = most
    try:
        with grid.serve_task():
            yield grid
    except (httpx.HTTPError, RunNotRunningException) as error:
        expected = "one that knows this run: it was down for too long, or was asked to stop it; go on with --resume"
        raise FedspanError("server", link.address, expected) from error


def _take_over(link: ServerLink, authority: bytes | None, run: int) -> str:
    """Take over the server part of a run and return its token.

    Raises:
        FedspanError: If the SuperLink refuses, or another process took over the run first.
    """
    try:
        token = acquire_task(link.address, authority, link.secret.read_bytes(), run, _PATIENCE)
    except httpx.HTTPStatusError as error:
        expected = f"the file that fedspan server wrote (the SuperLink answered {error.response.status_code})"
        raise FedspanError("secret", str(link.secret), expected) from error
    if token is None:
        raise FedspanError("server", link.address, "a SuperLink without a SuperExec of its own (fedspan server)")
    return token
