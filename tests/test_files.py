"""Files and folders: private ones, and writes in parts."""

import os
from pathlib import Path

import pytest

from fedspan.files import make_private_folder, write_atomic
from helpers.refusals import refused


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has modes")
def test_a_private_folder_is_new_empty_or_private_already(tmp_path: Path) -> None:
    new, empty, own, shared = (tmp_path / name for name in ("a/new", "empty", "own", "a shared one"))
    for path, mode in ((empty, 0o755), (own, 0o700), (shared, 0o750)):
        path.mkdir()
        path.chmod(mode)
    for path in (own, shared):
        (path / "server.db").touch()
    for path in (new, empty, own):
        make_private_folder(path, "--folder")
        assert path.stat().st_mode & 0o777 == 0o700
    with refused("--folder"):
        make_private_folder(shared, "--folder")
    assert shared.stat().st_mode & 0o777 == 0o750  # whoever shares it decides
    with refused("folder"):
        make_private_folder(own / "server.db", "folder")


def test_a_write_that_takes_only_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomic(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"
