"""Workers of a Ray cluster, as a config names them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedspan.config.cluster import ClusterConfig


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head.example:6379", "ray://head:10001"])
def test_addresses(address: str) -> None:
    assert ClusterConfig(address=address, workers=1).address == address


@pytest.mark.parametrize(
    "address", ["", "Local", "head", "head:", "head:123456", "http://head:80", "a b:1", "head:6379/x", "head:6379\n"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match=r"local, auto, HOST:PORT or ray://HOST:PORT"):
        ClusterConfig(address=address, workers=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 0},
        {"workers": 4097},
        {"threads_per_worker": 0},
        {"gpus_per_worker": -0.5},
        {"gpus_per_worker": 1.5},
        {"gpus_per_worker": 0.00001},
        {"gpus_per_worker": float("nan")},
        {"start_timeout": 0},
        {"start_timeout": float("inf")},
        {"gpus": 1},
    ],
)
def test_what_no_cluster_has_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="1 validation error"):
        ClusterConfig.model_validate({"workers": 2, **changes})
