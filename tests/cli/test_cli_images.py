"""The commands on runs that inspect images, and on a model that was trained from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from peft import PeftModel

import fedspan
from helpers import tiny_images

Call = Callable[..., Result]


@pytest.fixture(scope="module")
def screens(call: Call, images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By kind of model: a run's folder and what the command showed."""
    shown: dict[str, tuple[Path, str]] = {}
    for name, kind in (("resnet", "resnet"), ("scratch", "builtin:resnet-8")):
        folder = tmp_path_factory.mktemp(name)
        values = tiny_images.settings(images, kind, federation={"rounds": 1})
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        result = call("run", folder / "run.yaml", "--out", folder / "run")
        assert result.exit_code == 0, result.output
        shown[name] = folder / "run", result.stdout
    return shown


@pytest.mark.parametrize("name", ["resnet", "scratch"])
def test_the_closing_screen(name: str, screens: dict[str, tuple[Path, str]]) -> None:
    """Scores, a held-out image by its file, and how to try it: with an image."""
    folder, screen = screens[name]
    report = json.loads((folder / "report.json").read_text())
    assert "macro-F1" in screen
    assert "a held-out image" in screen
    assert all(Path(row["text"]).is_file() for row in report["examples"])
    assert f"fedspan predict {folder} image.png" in screen.replace("\n", "")
    kind = {"resnet": "adapter", "scratch": "model"}[name]
    assert [line for line in screen.splitlines() if line.startswith(kind) and line.endswith(str(folder / "adapter"))]


@pytest.mark.parametrize("name", ["resnet", "scratch"])
def test_the_snippet_loads_the_model(name: str, images: Path, screens: dict[str, tuple[Path, str]]) -> None:
    """Of a base that was trained for five other classes, too."""
    folder, screen = screens[name]
    lines = [line.strip() for line in screen.splitlines() if "import " in line or "from_pretrained" in line]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    model = names["model"].eval()
    assert not isinstance(model, PeftModel)
    assert any("merge_and_unload" in line for line in lines) == (name == "resnet")
    assert ("import fedspan.models.resnet" in lines) == (name == "scratch")
    paths = sorted((images / "pictures" / "north").rglob("*.png"))
    source = images / "resnet" if name == "resnet" else folder / "adapter"
    shares = model(pixel_values=tiny_images.pixels(source, paths)).logits.softmax(1).amax(1)
    assert [share for _, share in fedspan.predict(folder, paths)] == pytest.approx(shares.tolist(), abs=1e-4)


def test_predicting_on_files(call: Call, images: Path, screens: dict[str, tuple[Path, str]]) -> None:
    paths = sorted((images / "pictures" / "north" / "red").iterdir())[:2]
    folder, _ = screens["resnet"]
    answers = fedspan.predict(folder, [str(path) for path in paths])
    shown = call("predict", folder, *paths).stdout.splitlines()
    assert shown == [f"{label}\t{share:.4f}\t{path}" for (label, share), path in zip(answers, paths, strict=True)]
    rows = json.loads(call("predict", folder, *paths, "--json").stdout)
    assert [(row["text"], row["label"]) for row in rows] == [
        (str(path), label) for (label, _), path in zip(answers, paths, strict=True)
    ]


def test_measuring_on_a_folder(call: Call, images: Path, screens: dict[str, tuple[Path, str]]) -> None:
    folder, _ = screens["scratch"]
    result = call("evaluate", folder, "--data", images / "pictures", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["examples"] == sum(tiny_images.SITES.values())


def test_a_whole_model_is_exported_merged(call: Call, screens: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    folder, _ = screens["scratch"]
    assert call("export", folder, "--out", tmp_path / "model", "--form", "merged").exit_code == 0
    files = {path.name: path.read_bytes() for path in (folder / "adapter").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == files
