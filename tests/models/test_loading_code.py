"""Models whose folder holds code of its own: it is not run, and nobody is asked whether to run it."""

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.errors import FedspanError
from fedspan.models.empty import load_empty
from fedspan.models.loading import load_pretrained, load_scratch
from helpers import tiny

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"
LOADERS = {"from_pretrained", "from_config"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of an unknown type with code for it, which an operator would allow to run."""
    path = tiny.save_model("bert", tmp_path)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (path / "own.py").write_text(f"{code}from transformers import BertConfig as OwnConfig, BertModel as OwnModel\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    return path


@pytest.mark.parametrize("load", [load_pretrained, load_scratch, load_empty])
def test_a_folder_s_own_code_is_not_run(load: Any, folder: Path) -> None:
    device = {"device": torch.device("meta")} if load is load_empty else {}
    with pytest.raises(FedspanError, match="custom code"):
        load(str(folder), "classification", tiny.LABELS, **device)
    assert not (folder.parent / "ran").exists()


def test_every_call_of_transformers_loaders_refuses_code() -> None:
    calls = 0
    for path in SOURCE.rglob("*.py"):
        content = path.read_text(encoding="utf-8")
        tree = ast.parse(content if any(loader in content for loader in LOADERS) else "")
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in LOADERS else ""
            if text and not text.startswith("Peft"):  # PEFT's adapters hold no code
                calls += 1
                using = [call for call in ast.walk(tree) if uses(call, text)]
                assert using, (path, text)
                assert all(is_refusing(call) for call in using), (path, text)
    assert calls >= 9


def uses(call: ast.AST, text: str) -> bool:
    """Whether a call calls a loader, or binds its arguments."""
    if not isinstance(call, ast.Call):
        return False
    return ast.unparse(call.func) == text or (bool(call.args) and ast.unparse(call.args[0]) == text)


def is_refusing(call: ast.AST) -> bool:
    assert isinstance(call, ast.Call)
    trusted = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
    return [ast.unparse(value) for value in trusted] == ["False"]
