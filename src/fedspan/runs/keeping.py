"""What a client of a real federation keeps between rounds, on its own disk: a file for each accepted or pending round.

``<folder>/<digest of the client's id>/kept-round-00005.safetensors`` carries its own SHA-256 and is written atomically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fedspan.engines.host import Kept, Lost
from fedspan.engines.wire import Reader, Writer, expect
from fedspan.runs.clients import Kind, moments_structure, read_moments
from fedspan.runs.files import Damaged, disk_errors, fsync_folder, write_atomic

__all__ = ["DiskKeeper"]


def _structure(writer: Writer, kept: Kept) -> Mapping[str, object]:
    moments = {phase: moments_structure(writer, state) for phase, state in kept.moments.items()}
    return {"memory": writer.tensors(kept.memory), "moments": moments, "base": writer.base(kept.base)}


def _read(reader: Reader, structure: object) -> Kept:
    moments = expect(structure, "moments", dict)
    return Kept(
        memory=reader.tensors(expect(structure, "memory", dict)),
        moments={phase: read_moments(reader, expect(moments, phase, dict)) for phase in moments},
        base=reader.base(expect(structure, "base", dict)),
    )


_KEPT: Kind[Kept] = Kind("kept", _structure, _read)


class DiskKeeper:
    """Clients' versions on a disk.

    Args:
        folder: of one run; made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: str, round: int) -> Kept:
        """``Keeper.load``."""
        try:
            return _KEPT.load(self._of(client), client, round)
        except Damaged as error:
            raise Lost(client, round, str(error.value)) from error

    def store(self, client: str, round: int, kept: Kept, needed: frozenset[int]) -> None:
        """``Keeper.store``."""
        own = self._of(client)
        target = _KEPT.path(own, client, round)
        with disk_errors(self.folder, "free some space; the last accepted round is intact"):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, _KEPT.encode(client, round, kept))
            fsync_folder(target.parent)
            stay = {_KEPT.path(own, client, one) for one in (round, *needed)}
            for path in own.glob("round-*/*.safetensors"):
                if path not in stay:
                    path.unlink()
                    path.parent.rmdir()

    def _of(self, client: str) -> Path:
        return self.folder / hashlib.sha256(client.encode()).hexdigest()[:32]
