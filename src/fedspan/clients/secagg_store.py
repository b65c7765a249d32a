"""The session store of secure aggregation on a client's disk: one file a client, readable by its owner only.

``<folder>/<digest of the client's id>/session.json``, next to the client's stored state, is replaced as a whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from fedspan.clients.secagg import Session
from fedspan.errors import FedspanError
from fedspan.files import disk_errors, read_bytes, write_atomic

__all__ = ["DiskSessionStore"]


class DiskSessionStore:
    """Sessions on a disk.

    Args:
        folder: The folder of one run, as in ``DiskClientStore``; created when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: str) -> Session | None:
        """``SessionStore.load``.

        Raises:
            FedspanError: If the file is damaged, so that the phases answered so far are unknown.
        """
        path = self._of(client)
        if not path.is_file():
            return None
        try:
            return Session.model_validate_json(read_bytes(path))
        except ValidationError as error:
            expected = "what fedspan wrote there; remove it once no round runs"
            raise FedspanError(str(path), "damaged", expected) from error

    def store(self, client: str, session: Session) -> None:
        """``SessionStore.store``."""
        path = self._of(client)
        with disk_errors(self.folder, "free some space; the round can be run again"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(path, session.model_dump_json().encode(), 0o600)

    def _of(self, client: str) -> Path:
        return self.folder / hashlib.sha256(client.encode()).hexdigest()[:32] / "session.json"
