"""Names of trackers, and whether they are installed."""

from __future__ import annotations

import importlib.util

import pytest

from fedspan.errors import FedspanError
from fedspan.runs.trackers import TRACKERS, require_trackers


def test_an_unknown_tracker_is_refused_with_all_names() -> None:
    with pytest.raises(FedspanError, match="tensorboard, wandb, mlflow, trackio") as caught:
        require_trackers(["tensorboards"])
    assert "tensorboards" in str(caught.value)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_one_is_named_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else object())
    others = [other for other in TRACKERS if other != name]
    require_trackers(others)
    with pytest.raises(FedspanError, match=f"the package {name} is missing. Run: pip install {name}"):
        require_trackers([*others, name])
