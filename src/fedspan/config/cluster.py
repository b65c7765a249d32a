"""Workers of a simulation on a Ray cluster."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from fedspan.config.section import Section

_SMALLEST_SHARE = 0.0001  # Ray's
_ADDRESS = re.compile(r"(ray://)?[^\s/:]+:\d{1,5}")


class ClusterConfig(Section):
    """Workers that train the clients, each in a process of its own with the engine of ``engine``."""

    address: str = Field(
        default="local",
        description="local: a temporary Ray on this machine, which no other machine can reach. auto: the cluster "
        "that this machine belongs to (RAY_ADDRESS, or ray start). HOST:PORT or ray://HOST:PORT: "
        "another cluster. Anyone who can reach a cluster can run code on it: see docs/security.md.",
    )
    workers: int = Field(
        ge=1,
        le=4096,
        description="Number of workers. Clients are distributed among them by tokens; with engine.name: loop the "
        "results do not depend on the number, with batched they agree to rounding.",
    )
    threads_per_worker: int = Field(default=1, ge=1, le=1024, description="CPU threads per worker, instead of threads.")
    gpus_per_worker: float = Field(
        default=0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of a GPU per worker; 0.5: two workers share one. 0: workers train on the CPU.",
    )
    start_timeout: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that workers may take to start, or to restart after all have failed.",
    )

    @field_validator("gpus_per_worker")
    @classmethod
    def _validate_share(cls, value: float) -> float:
        if 0 < value < _SMALLEST_SHARE:
            raise ValueError(f"0, or a share from {_SMALLEST_SHARE} to 1")
        return value

    @field_validator("address")
    @classmethod
    def _validate_address(cls, value: str) -> str:
        if value not in ("local", "auto") and not _ADDRESS.fullmatch(value):
            raise ValueError("local, auto, HOST:PORT or ray://HOST:PORT")
        return value
