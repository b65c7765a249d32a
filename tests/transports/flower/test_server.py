"""A server's folder: names that its certificate is good for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedspan.errors import FedspanError

servers = pytest.importorskip("fedspan.transports.flower.server", reason="the extra fedspan[flower] is not installed")


def test_a_name_that_the_certificate_is_not_good_for_is_refused(tmp_path: Path) -> None:
    servers.prepare_folder(tmp_path, 9092, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["fl.example.org"], insecure=False)
    servers.prepare_folder(tmp_path, 9093, [], insecure=False)
    servers.prepare_folder(tmp_path, 9093, ["127.0.0.1", "localhost"], insecure=False)
    with pytest.raises(FedspanError, match=r"`--name`: 'other\.example\.org'.*fl\.example\.org, localhost"):
        servers.prepare_folder(tmp_path, 9093, ["other.example.org"], insecure=False)
