"""A node whose trainer trains in two processes: rank 0 serves two rounds and an evaluation, and writes what came out.

RANK=... WORLD_SIZE=2 ... python -m helpers.two_processes TINY_FOLDER OUT METHOD [--fail RANK] [--interrupt] [--fewer]
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from fedspan.core.base import to_dense
from fedspan.deployment.trainer_node import TrainerNode, adopt_node_trainer, follow
from fedspan.federation.progress import TooFewReplies
from fedspan.training.trainers.processes import Processes, count_processes
from helpers import tiny
from helpers.node_service import node, served
from helpers.trainer_clients import arguments, make_trainer

GLOBAL_BATCH = 4


class Fails(TrainerCallback):
    """Fails after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise OSError("the disk of this process is full")


class Interrupts(TrainerCallback):
    """Interrupts after the first step, as Ctrl-C does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def serve(
    tiny_folder: Path, out: Path, method: dict[str, Any], fail: int | None, interrupt: bool = False, fewer: bool = False
) -> None:
    """Serve two rounds with the trainer of one process, or of the processes of this script."""
    torch.set_num_threads(1)
    count = count_processes()
    args = arguments(
        out / "trainer",
        per_device_train_batch_size=GLOBAL_BATCH // count,
        per_device_eval_batch_size=1,
        **({} if count == 1 else {"ddp_backend": "gloo"}),
    )
    config = node(tiny_folder, out / "node", data={}, limits={"train_examples": 1})
    callbacks = [Fails()] if fail is not None and fail == args.process_index else []
    if interrupt and args.process_index == 0:
        callbacks.append(Interrupts())
    # A dropout mask depends on the batch of a process, so two would draw others than one.
    model = tiny.fresh_classifier(tiny_folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.accepts_loss_kwargs = False  # BERT's head ignores num_items_in_batch, and its loss would be doubled
    made = make_trainer(tiny_folder, "east", model=model, args=args, callbacks=callbacks)
    if fewer and args.process_index == 1:
        made.train_dataset = made.train_dataset.select(range(5))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    trainer = adopt_node_trainer(config, made)
    processes = Processes() if count > 1 else None
    if processes is not None and not processes.is_leader:
        follow(config, trainer, processes)
        return
    with closing(TrainerNode(config, trainer, processes)) as worker:
        prepared, _ = served(tiny_folder, worker.service, method=method)
        progress, losses = prepared.federation.begin(), list[float]()
        try:
            for _ in range(2):
                result = prepared.federation.run_round(progress)
                progress = result.progress
                losses.append(result.loss)
        except TooFewReplies:
            return
        validation, _ = prepared.evaluator.evaluate_clients(progress)
        assert validation is not None
        numbers = torch.tensor([*losses, validation.pooled["loss"]], dtype=torch.float64)
        tensors = {name: value.clone().contiguous() for name, value in progress.state.tensors.items()}
        base = {f"base/{name}": to_dense(value) for name, value in progress.state.base.total.items()}
        save_file({**tensors, **base, "numbers": numbers}, out / "result.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tiny_folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("method")
    parser.add_argument("--fail", type=int)
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--fewer", action="store_true")
    args = parser.parse_args()
    serve(args.tiny_folder, args.out, {"name": args.method}, args.fail, args.interrupt, args.fewer)


if __name__ == "__main__":
    main()
