"""The conditions for resuming a run where it stopped."""

from __future__ import annotations

from fedspan.config import RunConfig
from fedspan.data.partition import Partition
from fedspan.errors import FedspanError
from fedspan.files import read_bytes
from fedspan.runs.checkpoint import Checkpoint
from fedspan.runs.folder import RunFolder

__all__ = ["load_partition", "require_same_run"]


def require_same_run(place: RunFolder, config: RunConfig, kept: Checkpoint | None) -> None:
    """Check that config.yaml still describes the run of a checkpoint.

    Raises:
        FedspanError: If it was changed in a section that the checkpoint's tensors depend on.
    """
    if kept is not None and kept.extra.get("config", config.identity) != config.identity:
        expected = "the seed, task, model, data, partition and method that the run began with; only paths may change"
        raise FedspanError("config", str(place.config), expected)


def load_partition(place: RunFolder) -> Partition | None:
    """Load the partition that a run was started with, if it is stored."""
    if not place.partition.exists():
        return None
    return Partition.from_json(read_bytes(place.partition).decode(errors="replace"), str(place.partition))
