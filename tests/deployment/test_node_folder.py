"""Where a node keeps what belongs to a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedspan.deployment.node_folder import get_run_folder


def test_a_run_s_name_chooses_a_folder_and_leads_out_of_none(tmp_path: Path) -> None:
    """The name is the server's: no path of it is followed, and other letters are another run, on any disk."""
    names = ("a", "A", "../../home", "/etc", "", "a" * 5000, "é\0")
    folders = {get_run_folder(tmp_path, name) for name in names}
    assert len(folders) == len({folder.name.lower() for folder in folders}) == len(names)
    assert {folder.parent for folder in folders} == {tmp_path}
    assert get_run_folder(tmp_path, "a").name == hashlib.sha256(b"a").hexdigest()[:32]
