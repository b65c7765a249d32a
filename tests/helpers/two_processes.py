"""A node whose trainer trains in two processes: rank 0 serves runs of two rounds, and writes what came out.

RANK=... WORLD_SIZE=2 ... python -m helpers.two_processes TINY_FOLDER OUT METHOD [--fail RANK] [--interrupt] [--fewer]
    [--dropout RATE] [--runs COUNT] [--sentences] [--fsdp] [--checkpointing]

An evaluation follows each round. result-0.safetensors has the final tensors and the losses of the first run, and so on;
draws-RANK.safetensors has the examples and the dropout masks of each pass of a process, if there is dropout, and
bytes-RANK.json the bytes of the frozen weights that a process holds, and of all, after the runs of FSDP.
"""

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer, TrainerCallback

from fedspan.assembly.own_trainers import TrainerRuns, adopt_trainer
from fedspan.assembly.run import Prepared
from fedspan.config import parse_config
from fedspan.core.base import to_dense
from fedspan.data.files import FROM_TRAINERS
from fedspan.deployment.trainer_node import TrainerNode, adopt_node_trainer, follow
from fedspan.federation.progress import TooFewReplies
from fedspan.models.sharded import get_shard
from fedspan.training.trainers.processes import Processes, count_processes

from . import tiny
from .node_service import node, served
from .trainer_clients import QUIET, arguments, make_sentence_trainer, make_trainer, sentence_encoder

GLOBAL_BATCH = 4


class Fails(TrainerCallback):
    """Fails after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise OSError("the disk of this process is full")


class Interrupts(TrainerCallback):
    """Interrupts after the first step, as Ctrl-C does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def record_draws(trainer: Trainer, draws: dict[str, torch.Tensor]) -> None:
    """Record the examples of each pass in training, and which values its first dropout keeps, flattened."""

    def record_inputs(module: nn.Module, args: object, inputs: dict[str, torch.Tensor]) -> None:
        if module.training:
            draws[f"inputs/{len(draws) // 2}"] = inputs["input_ids"].clone()

    def record_mask(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if module.training:
            draws[f"mask/{len(draws) // 2}"] = (output != 0).flatten()

    trainer.model.register_forward_pre_hook(record_inputs, with_kwargs=True)
    trainer.model.bert.embeddings.dropout.register_forward_hook(record_mask)


def enable_fsdp(trainer: Trainer) -> None:
    """Have a trainer with ``fsdp=True`` train with FSDP on the CPU, where Accelerate would ignore it and use DDP."""
    state = trainer.accelerator.state
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def count_bytes(model: nn.Module) -> list[int]:
    """Return how many bytes of a model's frozen weights this process holds, and how many there are in all."""
    values = [value for name, value in model.named_parameters() if not name.startswith("classifier.")]
    return [sum(part.numel() * part.element_size() for part in parts) for parts in (map(get_shard, values), values)]


def serve(
    tiny_folder: Path,
    out: Path,
    method: dict[str, Any],
    fail: int | None = None,
    interrupt: bool = False,
    fewer: bool = False,
    dropout: float = 0.0,
    runs: int = 1,
    fsdp: bool = False,
    checkpointing: bool = False,
) -> None:
    """Serve runs with the trainer of one process, or of the processes of this script."""
    torch.set_num_threads(1)
    count = count_processes()
    args = arguments(
        out / "trainer",
        per_device_train_batch_size=GLOBAL_BATCH // count,
        per_device_eval_batch_size=1,
        gradient_checkpointing=checkpointing,
        **({} if count == 1 else {"ddp_backend": "gloo"}),
        **({"fsdp": True} if fsdp else {}),
    )
    config = node(tiny_folder, out / "node", data={}, limits={"train_examples": 1})
    callbacks = [Fails()] if fail is not None and fail == args.process_index else []
    if interrupt and args.process_index == 0:
        callbacks.append(Interrupts())
    model = tiny.fresh_classifier(
        tiny_folder / "bert", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    model.accepts_loss_kwargs = False  # BERT's head ignores num_items_in_batch, and its loss would be doubled
    made = make_trainer(tiny_folder, "east", model=model, args=args, callbacks=callbacks)
    if fsdp:
        enable_fsdp(made)
    if fewer and args.process_index == 1:
        made.train_dataset = made.train_dataset.select(range(5))
    draws: dict[str, torch.Tensor] = {}
    if dropout:
        record_draws(made, draws)
    trainer = adopt_node_trainer(config, made)
    processes = Processes() if count > 1 else None
    if processes is not None and not processes.is_leader:
        follow(config, trainer, processes)
    else:
        with closing(TrainerNode(config, trainer, processes)) as worker:
            for run in range(runs):
                serve_run(tiny_folder, worker, method, out / f"result-{run}.safetensors")
    if fsdp:
        (out / f"bytes-{args.process_index}.json").write_text(json.dumps(count_bytes(model)))
    if draws:
        save_file(draws, out / f"draws-{args.process_index}.safetensors")


def serve_run(tiny_folder: Path, worker: TrainerNode, method: dict[str, Any], file: Path) -> None:
    """Serve one run of two rounds (``run_rounds``)."""
    prepared, _ = served(tiny_folder, worker.service, method=method)
    run_rounds(prepared, file)


def run_rounds(prepared: Prepared, file: Path) -> None:
    """Run two rounds, and write the final tensors and the losses to a file, unless a round failed."""
    progress, losses = prepared.federation.begin(), list[float]()
    for _ in range(2):
        try:
            result = prepared.federation.run_round(progress)
        except TooFewReplies:
            return
        progress = result.progress
        validation, _ = prepared.evaluator.evaluate_clients(progress)
        losses += [result.loss, validation.pooled["loss"]]
    tensors = {name: value.clone().contiguous() for name, value in progress.state.tensors.items()}
    base = {f"base/{name}": to_dense(value) for name, value in progress.state.base.total.items()}
    save_file({**tensors, **base, "numbers": torch.tensor(losses, dtype=torch.float64)}, file)


def simulate_sentences(tiny_folder: Path, out: Path, method: dict[str, Any]) -> None:
    """Run two rounds of a sentence-transformers trainer in one process or in those of this script, without a server."""
    torch.set_num_threads(1)
    count = count_processes()
    args = pytest.importorskip("sentence_transformers").SentenceTransformerTrainingArguments(
        **QUIET | {"per_device_train_batch_size": GLOBAL_BATCH // count, "per_device_eval_batch_size": 1},
        output_dir=str(out / "trainer"),
        **({} if count == 1 else {"ddp_backend": "gloo"}),
    )
    trainer = adopt_trainer(make_sentence_trainer(sentence_encoder(tiny_folder), args))
    processes = Processes() if count > 1 else None
    if processes is not None and not processes.is_leader:
        follow(node(tiny_folder, out / "node", id="east"), trainer, processes)
        return
    values = {
        "model": {"name": str(tiny_folder / "bert"), "target_modules": ["query", "value"]},
        "method": {"r": 2, **method},
        "training": {"optimizer": "sgd", "lr": 0.5, "local_epochs": 1},
        "task": "trainer",
        "data": {"train": FROM_TRAINERS},
        "partition": {"partitioner": "natural", "column": "owner"},
    }
    with closing(TrainerRuns({"east": trainer}, processes)) as runs:
        run_rounds(runs.prepare(parse_config(values)), out / "result-0.safetensors")
        if processes is not None:
            processes.close()


def main() -> None:
    """Run in each of the processes what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tiny_folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("method")
    parser.add_argument("--fail", type=int)
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--fewer", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--sentences", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    options = vars(parser.parse_args())
    options["method"] = {"name": options["method"]}
    if options.pop("sentences"):
        simulate_sentences(options["tiny_folder"], options["out"], options["method"])
    else:
        serve(**options)


if __name__ == "__main__":
    main()
