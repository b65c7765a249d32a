"""Where a SuperLink's processor time goes, by layer, from the stacks that ``sampling/sitecustomize.py`` writes."""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

OWN, FLOWER, DATABASE, OTHER = "fedspan's door", "Flower's own code", ("SQLite", "SQLAlchemy"), "other"
CALLS = {
    DATABASE[0]: r"cursor\.execute|\.do_(execute|commit|rollback|begin)\(|dbapi_connection\.|sqlite3\.connect"
    r"|connection\.(execute|commit|rollback|close)\(|cursor\.(fetch|close)|\.fetch(one|all|many)\(",
    "signatures and hashes": r"\.(verify|sign|digest|hexdigest)\(|sha256\(|load_(pem|ssh)_",
    "protobuf": r"\.(ParseFromString|FromString|SerializeToString|CopyFrom|ByteSize|MergeFrom)\(",
}
"""Layers whose work is a call of a compiled library, by what the calling line contains."""
FILES = {
    "TLS": r"/asyncio/sslproto\.py|/ssl\.py",
    DATABASE[0]: r"/sqlite3/",
    DATABASE[1]: r"/sqlalchemy/",
    "signatures and hashes": r"/cryptography/|/flwr/supercore/primitives/asymmetric|/hashlib\.py|/hmac\.py",
    "protobuf": r"/google/protobuf/",
    "Starlette, FastAPI, anyio": r"/(starlette|fastapi|anyio|pydantic)/",
    "uvicorn, asyncio": r"/(uvicorn|h11|httptools|asyncio)/",
    FLOWER: r"/flwr/",
    OWN: r"/fedspan/",
}
"""Layers by the file of a frame."""
LAYERS = list(dict.fromkeys([*FILES, *CALLS, OTHER]))
IDLE = {("selectors.py", "select"), ("threading.py", "wait"), ("queue.py", "get"), ("thread.py", "_worker")}
"""Files and functions in which a thread waits for work."""
Stack = Sequence[tuple[str, str, int]]


@contextmanager
def sampled_superlinks(folder: Path) -> Generator[None]:
    """SuperLinks that start in this context can be sampled, with ``folder`` for the results."""
    place = str(Path(__file__).with_name("sampling"))
    os.environ["FEDSPAN_BENCHMARK_SAMPLES"] = str(folder)
    sys.path.insert(0, place)  # a deployment's processes get this process's path
    try:
        yield
    finally:
        sys.path.remove(place)
        del os.environ["FEDSPAN_BENCHMARK_SAMPLES"]


@contextmanager
def sampling(folder: Path, seconds: float = 60.0) -> Generator[None]:
    """Sample during this context, and wait for the results."""
    (folder / "measure").touch()
    try:
        yield
    finally:
        (folder / "measure").unlink()
    until = time.monotonic() + seconds
    while not (folder / "stacks.json").exists():
        if time.monotonic() > until:
            raise RuntimeError("the SuperLink was not sampled")
        time.sleep(0.05)


def find_layer(stack: Stack) -> str | None:
    """The layer of a stack's innermost frame that belongs to one; None: the thread waits for work."""
    path, function, number = stack[0]
    if (Path(path).name, function) in IDLE:
        return None
    line = linecache.getline(path, number)
    for layer, pattern in CALLS.items():
        if re.search(pattern, line):
            return layer
    for path, *_ in stack:
        for layer, pattern in FILES.items():
            if re.search(pattern, path):
                return layer
    return OTHER


def read_layers(folder: Path) -> dict[str, float]:
    """Seconds of processor time by layer; threads that waited for work when they were sampled are left out."""
    seconds = dict.fromkeys(LAYERS, 0.0)
    for spent, stack in json.loads((folder / "stacks.json").read_text()):
        if (layer := find_layer(stack)) is not None:
            seconds[layer] += spent
    return seconds
