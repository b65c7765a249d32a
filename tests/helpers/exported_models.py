"""Rounds of a run, and what its model and the models that are written of it predict of its test set."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import ModelCard
from peft import PeftModel
from torch import Tensor, nn

from fedspan.assembly.run import Prepared, prepare
from fedspan.config import RunConfig
from fedspan.federation.progress import Progress
from fedspan.run_folder import CARD

from . import tiny


def run_rounds(config: RunConfig, rounds: int = 2) -> tuple[Prepared, Progress]:
    """Prepare a run, and make its first rounds."""
    made = prepare(config)
    progress = made.federation.begin()
    for _ in range(rounds):
        progress = made.federation.run_round(progress).progress
    return made, progress


def predict_with(made: Prepared, model: nn.Module) -> Tensor:
    """What a model predicts of the run's test set."""
    batch = made.task.collate(made.test, range(len(made.test)), torch.device("cpu"))
    with torch.no_grad():
        return made.task.predict(model.eval(), batch)


def predict_with_peft(made: Prepared, adapter: Path) -> Tensor:
    """Logits of whoever has the adapter, PEFT and the published model, or the whole model that was written."""
    images = made.config.task == "image-classification"
    auto: Any = (
        transformers.AutoModelForImageClassification if images else transformers.AutoModelForSequenceClassification
    )
    if not (adapter / "adapter_config.json").is_file():
        model: nn.Module = auto.from_pretrained(adapter)
    else:
        base = made.config.model.name
        fresh = auto.from_pretrained(base) if images else tiny.fresh_classifier(base)
        model = PeftModel.from_pretrained(fresh, str(adapter))
    return predict_with(made, model)


def predict_with_engine(made: Prepared, progress: Progress, client: str | None = None) -> Tensor:
    """Logits of the engine under the model of a client, or the global one."""
    return made.engine.predict(made.evaluator.build_job(progress, client), made.test, np.arange(len(made.test)), 50)


def run_its_card(folder: Path, inputs: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The names that the first block of a card's section on use defines, with the library that the card names.

    Args:
        inputs: What takes the place of the block's inputs, as code.
    """
    card = ModelCard.load(folder / CARD)
    code = card.text.partition("## Use")[2].partition("```python\n")[2].partition("```")[0]
    for old, new in {**inputs, "FOLDER": str(folder)}.items():
        assert old in code
        code = code.replace(old, new)
    assert f"from {str(card.data.library_name).replace('-', '_')} import" in code
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    return names


def load_as_its_card_says(folder: Path) -> Any:
    """The model that the first block of a card's section on use loads."""
    return run_its_card(folder)["model"].eval()


def close(one: Tensor, other: Tensor) -> bool:
    """Whether no number differs by 1e-4."""
    return float((one - other).abs().max()) < 1e-4
