"""The folder of a base model, as a server offers one."""

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, with files that are not offered beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in {
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 40,
        "vocab.txt": b"a\nb\n",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
        "adapter_config.json": b"{}",
        ".hidden.json": b"{}",
        "README.md": b"text",
        "private.json": b"{}",
        "other.safetensors": b"another model",
        "model.safetensors.index.json": b"{}",  # transformers reads model.safetensors
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder.json").mkdir()
    return folder
