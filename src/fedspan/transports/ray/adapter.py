"""The uses of Ray's private names: a token for one local Ray, set after Ray was imported.

Ray reads its authentication mode and token when it is imported. Here they are read again, so that a process can run a
Ray of its own behind a token and later connect to a cluster that has another one, or none.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def own_token() -> Generator[None]:
    """Protect a Ray cluster that starts within this context with a random token.

    Only this process and its children know the token, so nothing else can connect. If the user has set an
    authentication mode, or if this process is connected to Ray already, the context changes nothing.
    """
    if _MODE in os.environ or ray.is_initialized():
        yield
        return
    before = os.environ.get(_TOKEN)
    os.environ.update({_MODE: "token", _TOKEN: secrets.token_hex(32)})
    _read_again()
    try:
        yield
    finally:
        del os.environ[_MODE]
        if before is None:
            del os.environ[_TOKEN]
        else:
            os.environ[_TOKEN] = before
        _read_again()


def _read_again() -> None:
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")
