"""Settings of a Transformers ``Trainer`` for a round or an evaluation, undone afterwards."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from fedspan.training.trainers.local import RoundPlan


@contextmanager
def add_callback(trainer: Trainer, callback: TrainerCallback) -> Generator[None]:
    """Have a trainer call a callback within this context, after its own ones."""
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)


@contextmanager
def set_round_arguments(trainer: Trainer, plan: RoundPlan) -> Generator[None]:
    """Set the arguments of one round within this context; on exit, restore the owner's."""
    args, loading = trainer.args, trainer.accelerator.dataloader_config
    settings: dict[str, Any] = {
        "num_train_epochs": float(plan.epochs),
        "max_steps": -1 if plan.steps is None else plan.steps,
        "max_grad_norm": 0.0,  # the optimizer clips, after penalties and masks
        "seed": plan.seed,
    }
    if args.data_seed is not None:
        settings["data_seed"] = plan.seed
    before, seed_before = {name: getattr(args, name) for name in settings}, loading.data_seed
    try:
        for name, value in settings.items():
            setattr(args, name, value)
        if loading.data_seed is not None:
            loading.data_seed = plan.seed
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
        loading.data_seed = seed_before


@contextmanager
def restore_model(model: nn.Module) -> Generator[None]:
    """Have Accelerate prepare a model anew within this context, and restore what that sets on the model.

    Mixed precision wraps the forward. A model marked as prepared would not be wrapped again: not by mixed precision,
    nor by DDP, without which no gradient is averaged. With FSDP, each training of a ``Trainer`` wraps ``generate`` once
    more.
    """
    names = ("forward", "_original_forward", "_is_accelerate_prepared", "generate")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    vars(model).pop("_is_accelerate_prepared", None)
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(before)


@contextmanager
def restore_losses(trainer: Trainer, model: nn.Module) -> Generator[None]:
    """Have the losses of a trainer hold its model again after this context.

    sentence-transformers puts the model's wrapper (DDP, ``torch.compile``) into a loss that holds the model, and does
    not replace one wrapper by another: the next round's loss would go through that of this round, whose gradients
    nothing averages.
    """
    loss = getattr(trainer, "loss", None)
    losses = loss.values() if isinstance(loss, Mapping) else [loss]
    modules = [module for part in losses if isinstance(part, nn.Module) for module in part.modules()]
    holders = [(module, name) for module in modules for name, child in module.named_children() if child is model]
    try:
        yield
    finally:
        for module, name in holders:
            setattr(module, name, model)


class _RandomStream:
    """Random numbers of torch of their own, on the CPU and on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [] if device.type == "cpu" else [device]
        self._kind = "cuda" if device.type == "cpu" else device.type  # fork_rng needs one also without devices
        self._seed: int | None = seed
        self._states: list[Tensor] = []

    @contextmanager
    def continue_drawing(self) -> Generator[None]:
        """Draw these random numbers within this context, from where the last one ended."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            if self._seed is not None:
                torch.manual_seed(self._seed)
                self._seed = None
            else:
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._devices, self._states[1:], strict=True):
                    torch.get_device_module(device).set_rng_state(state, device)
            yield
            others = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
            self._states = [torch.get_rng_state(), *others]


@contextmanager
def draw_by_process(trainer: Trainer, seed: int) -> Generator[None]:
    """Have each of several processes draw its own random numbers in its passes within this context.

    The loaders go on to draw equal numbers in all processes, by which they split the same order of the examples: the
    dropout of a process would otherwise advance them by the shapes of its own batches. The trainer's method is replaced
    within the context, because no callback of Transformers encloses a pass, and the owner's class may be any.
    """
    if trainer.args.world_size == 1:
        yield
        return
    stream = _RandomStream(seed + trainer.args.process_index, trainer.args.device)
    inner, own_method = trainer.training_step, vars(trainer).get("training_step")

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        with stream.continue_drawing():
            return inner(*args, **kwargs)

    trainer.training_step = training_step
    try:
        yield
    finally:
        del trainer.training_step
        if own_method is not None:
            trainer.training_step = own_method
