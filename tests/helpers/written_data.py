"""Files of rows as tests write them, and the config that reads them."""

from pathlib import Path

from fedspan.data import DataConfig

ROWS = [{"text": f"text {row}", "label": "ab"[row % 2]} for row in range(10)]
CSV = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)


def config_for(path: Path | str, **options: object) -> DataConfig:
    """The config of a file of training examples."""
    return DataConfig.model_validate({"train": str(path), **options})


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
