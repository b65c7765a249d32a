"""The tiny model, prepared to be planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fedspan.planning.plan import PlannedModel


@pytest.fixture(scope="session")
def planned(tiny_folder: Path) -> PlannedModel:
    """The tiny model's layers and parameters, without values."""
    from fedspan.planning.plan import prepare_model
    from helpers import tiny

    return prepare_model(tiny.config(tiny_folder), len(tiny.LABELS))
