"""The files that a node reads, with mistakes in them: an error that names the file, and nothing else."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from fedspan import __version__
from fedspan.clients.store import DiskClientStore, LostStateError
from fedspan.config.node import load_node
from fedspan.core.base import BaseUpdate, Increment
from fedspan.core.values import OptimizerState
from fedspan.deployment.handshake import Invitation
from fedspan.deployment.last_order import LastOrder, load_last_order
from fedspan.deployment.node import load_invitation
from fedspan.errors import FedspanError
from fedspan.federation.progress import ClientState
from helpers.fuzzing import mangled

NODE = {
    "id": "clinic-a",
    "server": "fl.example.org:9092",
    "authority": "ca.crt",
    "key": "node.key",
    "data": {"train": "messages.csv", "text": "message"},
    "limits": {"methods": ["fedit"], "rounds": 50, "round_seconds": 60.0},
}


def fuzz(path: Path, good: bytes, read: Callable[[Path], object], count: int, seed: int) -> None:
    """Read mutated files, of which some are refused.

    Anything but a FedspanError is a failure, and so is a file that takes long.
    """
    rng, refused = random.Random(seed), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(good)
    read(path)
    for _ in range(count):
        data = mangled(good, rng)
        path.write_bytes(data)
        try:
            read(path)
        except FedspanError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; of {data[:4000]!r}") from error
    assert refused


def test_invitations(tmp_path: Path) -> None:
    good = Invitation(run="r", version=__version__, config='{"federation": {"rounds": 3}}')
    fuzz(tmp_path / "invitation.json", good.model_dump_json().encode(), load_invitation, 500, 1)


def test_last_orders(tmp_path: Path) -> None:
    good = LastOrder(serial=1763780000000000, digest="0" * 64, starts=1)
    fuzz(tmp_path / "serial", good.model_dump_json().encode(), load_last_order, 500, 2)


def test_node_files(tmp_path: Path) -> None:
    fuzz(tmp_path / "node.yaml", yaml.safe_dump(NODE).encode(), load_node, 100, 3)


def test_what_a_client_keeps(tmp_path: Path) -> None:
    client_store = DiskClientStore(tmp_path)
    moments = OptimizerState({"exp_avg": {"layer/A": torch.ones(2, 3)}}, {"layer/A": 4})
    base = BaseUpdate().add(Increment(0, {"layer": torch.ones(2, 2)}))
    client_store.store("a", 1, ClientState({"layer/B": torch.ones(3, 2)}, {"train": (moments, 0)}, base), frozenset())
    (path,) = tmp_path.rglob("*.safetensors")
    good = path.read_bytes()

    def read(_: Path) -> object:
        try:
            return client_store.load("a", 1)
        except LostStateError as error:
            raise error from None

    fuzz(path, good, read, 300, 4)
    # With a checksum that is right: whoever can write the file can make one.
    digest = next(good[at : at + 64] for at in range(len(good)) if _is_digest(good[at : at + 64]))
    blank = good.replace(digest, b"0" * 64, 1)
    rng = random.Random(5)
    for _ in range(300):
        data = mangled(blank, rng)
        path.write_bytes(data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1))
        try:
            read(path)
        except FedspanError:
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; of {data[:4000]!r}") from error


def _is_digest(text: bytes) -> bool:
    return len(text) == 64 and all(byte in b"0123456789abcdef" for byte in text)


def test_key_files(tmp_path: Path) -> None:
    keys = pytest.importorskip("fedspan.transports.http.keys", reason="the extra fedspan[deploy] is not installed")
    path = tmp_path / "node.key"
    keys.make_node_key(path)
    fuzz(path, path.read_bytes(), keys.load_node_key, 300, 6)
