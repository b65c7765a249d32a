"""What installed packages declare as entry points: found by group and name, or an error that names the package."""

import importlib
from pathlib import Path

import pytest

from fedspan.errors import FedspanError
from fedspan.packages import load_installed


def test_an_object_is_loaded_by_its_group_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "declared_package.py").write_text("VALUE = ['declared']\n")
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('half installed')\n")
    info = tmp_path / "declared_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared-package\nVersion: 1.0\n")
    lines = ["[fedspan.methods]", "mine = declared_package:VALUE", "broken = broken_package:VALUE"]
    (info / "entry_points.txt").write_text("\n".join([*lines, "lost = declared_package:NOTHING", ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert load_installed("fedspan.methods", "mine", "method.name") == ("declared_package:VALUE", ["declared"])
    assert load_installed("fedspan.tasks", "mine", "task") is None
    assert load_installed("fedspan.methods", "yours", "method.name") is None
    for name, reason in (
        ("broken", r"broken_package:VALUE cannot be imported \(RuntimeError: half installed\)"),
        ("lost", r"declared_package:NOTHING cannot be imported \(AttributeError: .*NOTHING"),
    ):
        with pytest.raises(FedspanError, match=reason) as caught:
            load_installed("fedspan.methods", name, "method.name")
        assert (caught.value.field, caught.value.value) == ("method.name", name)
