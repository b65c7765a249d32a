"""A key that was exchanged on its way to the server's operator is not admitted."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

admissions = pytest.importorskip(
    "fedspan.transports.http.admissions", reason="the extra fedspan[deploy] is not installed"
)
servers = pytest.importorskip("fedspan.transports.http.server")


@pytest.fixture
def link(tmp_path: Path) -> Any:
    return servers.prepare_folder(tmp_path / "server", 9092, [], insecure=True)


@pytest.fixture
def fingerprint(call: Callable[..., Any], tmp_path: Path) -> str:
    """The fingerprint that the data owner is shown with its new key."""
    output = call("join", "--new-key", tmp_path / "node.key").output
    (word,) = (word for word in output.split() if word.startswith("SHA256:"))
    return word


def test_the_fingerprint_is_shown_to_be_compared(
    call: Callable[..., Any], link: Any, fingerprint: str, tmp_path: Path
) -> None:
    key = tmp_path / "node.key.pub"
    result = call("admit", key, "--as", "a", "--server", tmp_path / "server")
    assert result.exit_code == 0, result.output
    assert fingerprint in result.output
    assert "by telephone" in result.output
    if (keygen := shutil.which("ssh-keygen")) is not None:
        listed = subprocess.run([keygen, "-l", "-f", str(key)], capture_output=True, text=True, check=True)
        assert listed.stdout.split()[1] == fingerprint


def test_another_key_is_refused_before_it_is_admitted(
    call: Callable[..., Any], link: Any, fingerprint: str, tmp_path: Path
) -> None:
    call("join", "--new-key", tmp_path / "swapped.key")
    options = ("--as", "a", "--fingerprint", fingerprint, "--server", tmp_path / "server")
    result = call("admit", tmp_path / "swapped.key.pub", *options)
    assert result.exit_code == 2
    assert "nobody was admitted" in result.output + result.stderr
    assert admissions.read_admissions(link) == {}
    (tmp_path / "other.pub").write_text("no key")
    assert call("admit", tmp_path / "other.pub", *options).exit_code == 2
    assert admissions.read_admissions(link) == {}
    assert call("admit", tmp_path / "node.key.pub", *options).exit_code == 0
    assert [one.name for one in admissions.read_admissions(link).values()] == ["a"]
