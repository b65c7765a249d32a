"""``fedspan admit``, ``revoke`` and ``renew``: their options, and what expires soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

admissions = pytest.importorskip(
    "fedspan.transports.flower.admissions", reason="the extra fedspan[flower] is not installed"
)
keys = pytest.importorskip("fedspan.transports.flower.keys")
servers = pytest.importorskip("fedspan.transports.flower.server")
from fedspan.cli.admission import warn_of_expiry  # noqa: E402


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The link to a server that is not there."""
    found = SimpleNamespace(folder=tmp_path, authority=tmp_path / "ca.crt")
    monkeypatch.setattr(servers, "read_link", lambda folder: found)
    return found


def test_options_of_an_admission_are_passed_on(
    call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def admit(link: Any, key: Path, name: str, **options: Any) -> Any:
        calls.append((key, name, options))
        return SimpleNamespace(max_examples=options["max_examples"])

    monkeypatch.setattr(admissions, "admit_node", admit)
    assert call("admit", "a.key.pub").output == "admitted a.key.pub\n"
    options = ("--as", "clinic-a", "--days", 3, "--replace", "--max-examples", 50)
    assert call("admit", "a.key.pub", *options).output == (
        "admitted a.key.pub, which must use the id clinic-a, with the weight of at most 50 examples\n"
    )
    assert calls == [
        (Path("a.key.pub"), "", {"days": 730, "replace": False, "max_examples": None}),
        (Path("a.key.pub"), "clinic-a", {"days": 3, "replace": True, "max_examples": 50}),
    ]


def test_every_revoked_key_is_named(call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissions, "revoke_node", lambda link, node, reason: [7, 9] if reason == "stolen" else [])
    result = call("revoke", "clinic-a", "--reason", "stolen")
    assert result.output == "revoked the key of clinic-a (node 7)\nrevoked the key of clinic-a (node 9)\n"


def test_certificates_are_renewed_in_two_steps(
    call: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(keys, "renew_authority", lambda folder, names: events.append(names) or tmp_path / "new.crt")
    monkeypatch.setattr(keys, "activate_authority", lambda folder: events.append("activated"))
    monkeypatch.setattr(admissions, "open_audit_log", lambda link: SimpleNamespace(write=events.append))
    first = call("renew", "--name", "fl.example.org")
    assert f"{tmp_path / 'new.crt'}\nthen run here: fedspan renew --activate" in first.output
    assert "the renewed certificates are in use" in call("renew", "--activate").output
    assert events == [["fl.example.org"], "certificates renewed", "activated", "certificates activated"]


def test_what_expires_soon_is_named_with_the_command(
    link: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    days = {"certificates": keys.SOON - 0.5}
    monkeypatch.setattr(keys, "compute_days_left", lambda *paths: days["certificates"])
    admitted = {
        7: SimpleNamespace(name="clinic-a", days_left=2.5),
        8: SimpleNamespace(name="", days_left=-1.0),
        9: SimpleNamespace(name="clinic-b", days_left=keys.SOON),
    }
    monkeypatch.setattr(admissions, "read_admissions", lambda link: admitted)
    warn_of_expiry(link)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the server's certificates expire in {int(keys.SOON - 0.5)} days: fedspan renew",
        "warning: the admission of clinic-a expires in 2 days: fedspan admit KEY.pub --replace",
        "warning: the admission of node 8 expires in 0 days: fedspan admit KEY.pub --replace",
    ]
    days["certificates"] = keys.SOON
    admitted.clear()
    warn_of_expiry(link)
    assert capsys.readouterr().err == ""
