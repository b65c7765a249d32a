"""What the peers share: the plan, the model through PEFT, and the ordinary local loop.

Nothing of fedspan is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

Batch = dict[str, Tensor]


class Plan:
    """A plan's folder, read.

    Args:
        folder: Folder with ``plan.json`` and ``start.safetensors``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.settings: dict[str, Any] = json.loads((Path(folder) / "plan.json").read_text())
        self.start: dict[str, Tensor] = load_file(Path(folder) / "start.safetensors")
        self.ids = [torch.tensor(ids) for ids in self.settings["input_ids"]]
        self.targets = torch.tensor(self.settings["targets"])
        self.clients: list[list[int]] = self.settings["clients"]
        self.batch_size: int = self.settings["batch"]

    def collate(self, indices: Sequence[int]) -> Batch:
        """Examples padded to the longest of them (id 0 is the padding's)."""
        chosen = [self.ids[index] for index in indices]
        mask = [torch.ones_like(ids) for ids in chosen]
        return {
            "input_ids": pad_sequence(chosen, batch_first=True),
            "attention_mask": pad_sequence(mask, batch_first=True),
            "labels": self.targets[list(indices)],
        }

    def shuffled(self, indices: Sequence[int], round: int, client: int = 0) -> list[list[int]]:
        """An ordinary epoch: every example once, in random order."""
        rng = torch.Generator().manual_seed(1_000_003 * round + client)
        order = [indices[position] for position in torch.randperm(len(indices), generator=rng).tolist()]
        return [order[position : position + self.batch_size] for position in range(0, len(order), self.batch_size)]

    def batches(self, client: int, round: int) -> list[list[int]]:
        """A client's batches of a round: those of fedspan in the rounds in which losses are compared, then ordinary."""
        checked = self.settings["checked"]
        return checked[round][client] if round < len(checked) else self.shuffled(self.clients[client], round, client)


def build_model(plan: Plan, dtype: torch.dtype, attention: str) -> PeftModel:
    """The pretrained model with LoRA on query and value, at the plan's start; dropout 0, as fedspan's base runs.

    With a narrow ``dtype``, what trains is float32, as PEFT does it for the factors.
    """
    settings = plan.settings
    config = AutoConfig.from_pretrained(settings["model"], num_labels=settings["labels"])
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["model"], config=config, dtype=dtype, attn_implementation=attention
    )
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="SEQ_CLS",
            r=settings["r"],
            lora_alpha=settings["lora_alpha"],
            target_modules=["query", "value"],
            layers_to_transform=settings["layers"],
            modules_to_save=settings["modules_to_save"],
        ),
    )
    if dtype != torch.float32:
        for name, module in adapted.named_modules():
            if name.endswith(".modules_to_save.default"):
                keep_wide(module)
    load_start(adapted, plan)
    return adapted.train()


def keep_wide(module: nn.Module) -> None:
    """A float32 module in a narrower model: AdamW's steps would be rounded away in bfloat16."""
    module.float()
    module.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))


def load_start(model: PeftModel, plan: Plan) -> None:
    """Begin (again) with the plan's adapter.

    Raises:
        ValueError: If PEFT does not know one of its tensors.
    """
    unknown = set_peft_model_state_dict(model, plan.start).unexpected_keys
    if unknown:
        raise ValueError(f"tensors of the start that the model has no place for: {unknown}")


def train(model: PeftModel, plan: Plan, batches: Iterable[Sequence[int]]) -> tuple[float, int]:
    """The ordinary loop with a new AdamW; the sum of the examples' losses, and their number."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.settings["lr"], weight_decay=0.0)
    total, count = 0.0, 0
    for indices in batches:
        optimizer.zero_grad()
        loss = model(**plan.collate(indices)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, plan.settings["max_grad_norm"])
        optimizer.step()
        total, count = total + loss.item() * len(indices), count + len(indices)
    return total, count
