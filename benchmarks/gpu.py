"""Training many clients on one GPU: tokens a second, memory, equality with the CPU, and server steps.

    python benchmarks/gpu.py --page docs/results/gpu.md           (one GPU, at most 30 minutes)
    python benchmarks/gpu.py --rounding                           (no GPU, minutes; a section of that page)
    python benchmarks/gpu.py --smoke --device cpu                 (tiny shapes, seconds; nothing is judged)

The models have random weights in the shapes of RoBERTa-large, Llama-3.2-1B and Llama-2-7B, in bfloat16, with FedIT at
rank 8 on queries and values. Texts are random tokens of random lengths. Compared are clients stacked in one pass with
PEFT's model in a loop over clients, on the same examples. Tokens are those of the texts, without padding. Equality:
one client's job in float32 on the first two blocks of each shape, on the device and on the CPU. Server steps: the
truncated SVD of one layer's aggregate of the clients' factors. Without a GPU the page says that nothing was measured.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fedspan.config import parse_config
from fedspan.core.lowrank import LowRank, concatenate, svd
from fedspan.core.values import Client, Job, Trained
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.empty import load_empty
from fedspan.models.targets import find_buffers, find_extras, find_targets
from fedspan.tasks.causal import CausalLM, EncodedPrompts
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.encoding import EncodedText, Ragged
from fedspan.training.batched import BatchedEngine
from fedspan.training.batching import draw_job_batches
from fedspan.training.jobs import Assignment
from fedspan.training.stacking import StackingRequest, wait_for

GOAL, CLOSE = 8.0, 1e-3
"""Times faster than PEFT in a loop at batch 1 with the most clients; relative distance from the CPU."""
RANK, STEPS, LABELS = 8, 4, ("no", "yes")
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A model's architecture.

    Args:
        name: Name on the page.
        head: Head of the model, as for ``models.empty.load_empty``.
        targets: Layers with adapters.
        architecture: Transformers' config as plain values.
        longest: Tokens of the longest text.
    """

    name: str
    head: Any
    targets: tuple[str, ...]
    architecture: Mapping[str, Any]
    longest: int = 128


_LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
SHAPES = (
    Shape(
        "RoBERTa-large",
        "classification",
        ("query", "value"),
        {
            **_ROBERTA,
            **{"vocab_size": 50265, "hidden_size": 1024, "intermediate_size": 4096},
            **{"num_hidden_layers": 24, "num_attention_heads": 16},
        },
    ),
    Shape(
        "Llama-3.2-1B",
        "language-model",
        ("q_proj", "v_proj"),
        {
            **_LLAMA,
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
        },
    ),
    Shape(
        "Llama-2-7B",
        "language-model",
        ("q_proj", "v_proj"),
        {
            **_LLAMA,
            **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 32},
        },
    ),
)
_TINY = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMOKE = (
    Shape("tiny RoBERTa", "classification", ("query", "value"), {**_ROBERTA, **_TINY}, 12),
    Shape("tiny Llama", "language-model", ("q_proj", "v_proj"), {**_LLAMA, **_TINY, "num_key_value_heads": 1}, 12),
)


def build(shape: Shape, dtype: torch.dtype, device: torch.device, depth: int | None = None) -> Any:
    """A model of a shape with small random weights, the same on every device."""
    model = load_empty(
        shape.name,
        shape.head,
        LABELS if shape.head == "classification" else (),
        architecture=shape.architecture,
        dtype=dtype,
        attention="sdpa",
        device=torch.device("cpu") if depth is not None else device,
        depth=depth,
    )
    return model.to(device)


def draw_examples(shape: Shape, count: int) -> tuple[Any, Any]:
    """A task, and random texts of a quarter of the longest length to all of it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(4, shape.longest // 4), shape.longest + 1, count)
    rows = [rng.integers(3, shape.architecture["vocab_size"], length).tolist() for length in lengths]
    tokenizer: Any = SimpleNamespace(pad_token_id=1, pad_token_type_id=0)
    if shape.head == "classification":
        labels = rng.integers(0, len(LABELS), count)
        return SequenceClassification(tokenizer, LABELS, shape.longest), EncodedText(
            {"input_ids": Ragged(rows)}, labels, np.asarray(lengths, dtype=np.int64)
        )
    starts = np.asarray(lengths // 2, dtype=np.int64)
    return CausalLM(tokenizer, shape.longest), EncodedPrompts(
        Ragged(rows), starts, ("",) * count, np.asarray(lengths, dtype=np.int64), 0, 0
    )


@dataclass(frozen=True)
class Bench:
    """Clients of a model with one job each.

    Args:
        adapted: The model.
        task: The learning problem.
        examples: Examples of all clients.
        engine: The engine that stacks ``clients`` clients.
        works: Their jobs.
    """

    adapted: AdaptedModel
    task: Any
    examples: Any
    engine: BatchedEngine
    works: Mapping[str, Assignment]

    @classmethod
    def prepare(cls, shape: Shape, adapted: AdaptedModel, clients: int, batch: int) -> Bench:
        """Prepare the clients' jobs of FedIT."""
        task, examples = draw_examples(shape, clients * batch * STEPS)
        config = parse_config(
            {
                "task": "causal-lm" if shape.head == "language-model" else "sequence-classification",
                "data": {"train": "none.csv"},
                "method": {"name": "fedit", "r": RANK, "lora_alpha": 2 * RANK},
                "training": {"lr": 1e-3, "batch_size": batch, "local_steps": STEPS},
            }
        )
        method = config.build_method(replace(adapted.spec, clients=clients))
        settings = config.build_training_settings()
        engine = BatchedEngine(adapted, task, settings, 0, StackingRequest(clients, 1))
        state = method.init(adapted)
        works: dict[str, Assignment] = {}
        for number in range(clients):
            indices = np.arange(number * batch * STEPS, (number + 1) * batch * STEPS)
            client = Client(f"c{number:02}", RANK, 2.0, len(indices), 1.0)
            job = method.start(method.sync(state, client), client, {}, 0)
            assert isinstance(job, Job)
            works[client.id] = Assignment(client.id, 0, job, indices, 1e-3)
        return cls(adapted, task, examples, engine, works)

    @property
    def tokens(self) -> int:
        """Number of tokens that the jobs train on."""
        return sum(
            int(self.examples.lengths[batch].sum())
            for work in self.works.values()
            for batch in draw_job_batches(self.engine.settings, 0, work, self.examples)
        )

    def train(self) -> dict[str, Trained]:
        """Train all clients in one pass after another."""
        finished: dict[str, Trained] = {}

        def finish(work: Assignment, trained: Trained) -> None:
            finished[work.client] = trained

        sizes = {client: len(work.indices) for client, work in self.works.items()}
        self.engine.train_all(self.examples, sizes, self.works.__getitem__, finish)
        return finished


def adapt(shape: Shape, model: nn.Module) -> AdaptedModel:
    """The model with its target layers, and its classifier as extras."""
    heads = ["classifier"] if shape.head == "classification" else []
    targets = find_targets(model, LoraConfig(target_modules=list(shape.targets), modules_to_save=heads))
    extras = find_extras(model, heads)
    return AdaptedModel(model, targets, extras, find_buffers(model, extras))


def train_with_peft(shape: Shape, model: nn.Module, clients: int, batch: int) -> Callable[[], int]:
    """Return a function that trains clients one by one with PEFT's model, and counts their tokens."""
    task, examples = draw_examples(shape, clients * batch * STEPS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    device = before[0].device

    def run() -> int:
        tokens = 0
        model.train()
        for client in range(clients):
            with torch.no_grad():
                for parameter, start in zip(trained, before, strict=True):
                    parameter.copy_(start)
            optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
            for step in range(client * STEPS, (client + 1) * STEPS):
                indices = range(step * batch, (step + 1) * batch)
                loss = task.compute_loss(model, task.collate(examples, indices, device))
                loss.backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                tokens += int(examples.lengths[list(indices)].sum())
        return tokens

    return run


def measure_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of a run, after one that warms up."""
    run()
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def measure_peak_memory(run: Callable[[], Any], device: torch.device) -> float | None:
    """Peak of allocated GPU memory in GiB; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait_for(device)
    return torch.cuda.max_memory_allocated(device) / GIB


@dataclass(frozen=True)
class Agreement:
    """How two blocks of a shape train on a device.

    Args:
        distance: Greatest relative distance of one client's trained tensors from the CPU's, float32.
        repeats: Whether eight clients that share a pass get the same bits again, by number format and
            ``deterministic``.
    """

    distance: float
    repeats: Mapping[tuple[str, bool], bool]


def check_agreement(shape: Shape, device: torch.device) -> Agreement:
    """Compare training on the device with training on the CPU, and with itself."""
    model = build(shape, torch.float32, torch.device("cpu"), depth=2)
    results = []
    for device_of_pass in (torch.device("cpu"), device):
        bench = Bench.prepare(shape, adapt(shape, copy.deepcopy(model).to(device_of_pass)), 1, 2)
        results.append(bench.train()["c00"].tensors)
    gaps = [(results[1][name] - value).norm() / value.norm().clamp(min=1e-3) for name, value in results[0].items()]
    repeats: dict[tuple[str, bool], bool] = {}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        bench = Bench.prepare(shape, adapt(shape, copy.deepcopy(model).to(device, dtype)), 8, 2)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            first = {client: dict(trained.tensors) for client, trained in bench.train().items()}
            second = bench.train()
            repeats[name, deterministic] = all(
                torch.equal(value, second[client].tensors[path])
                for client, tensors in first.items()
                for path, value in tensors.items()
            )
    torch.use_deterministic_algorithms(False)
    return Agreement(float(max(gaps)), repeats)


def measure_rounding(shape: Shape) -> float:
    """Measure the greatest relative distance of the CPU's own float32 from float64, in the job of `check_agreement`."""
    model, cpu = build(shape, torch.float32, torch.device("cpu"), depth=2), torch.device("cpu")
    narrow, wide = (
        Bench.prepare(shape, adapt(shape, copy.deepcopy(model).to(cpu, dtype)), 1, 2).train()["c00"].tensors
        for dtype in (torch.float32, torch.float64)
    )
    return max(float((narrow[name] - value).norm() / value.norm().clamp(min=1e-3)) for name, value in wide.items())


def format_rounding(shapes: Sequence[Shape], smoke: bool) -> str:
    """Return a section about the CPU's own rounding, to be read beside the distances from it."""
    return "\n".join(
        [
            "## Rounding of the CPU",
            "",
            "The distances above can be compared with that of the same job on the CPU in float32 from float64. A "
            "device whose distance is at most a few times as large rounds differently and is not wrong.",
            "",
            f"Command: `python benchmarks/gpu.py --rounding{' --smoke' if smoke else ''}`  ",
            f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, torch {torch.__version__}.",
            "",
            "| shape | relative distance |",
            "|---|---|",
            *(f"| {shape.name} | {measure_rounding(shape):.1e} |" for shape in shapes),
            "",
        ]
    )


def measure_server_step(size: int, clients: int, device: torch.device) -> float:
    """Seconds of the truncated SVD of one layer's aggregate, from the clients' factors."""
    rng = torch.Generator().manual_seed(0)
    pairs = [
        LowRank(torch.randn(size, RANK, generator=rng), torch.randn(RANK, size, generator=rng), 1 / clients).to(device)
        for _ in range(clients)
    ]
    return measure_seconds(lambda: svd(concatenate(pairs), RANK), device)


def measure_rows(shape: Shape, args: argparse.Namespace, device: torch.device, until: float) -> list[list[str]]:
    """The table's rows of a shape, one for each batch size; cells after the time limit say so."""
    rows: list[list[str]] = []
    loops: dict[int, float] = {}
    narrow = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads = ["classifier"] if shape.head == "classification" else None
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(shape.targets), modules_to_save=heads)
    peft = get_peft_model(build(shape, narrow, device), config)
    few = min(args.clients[-1], 8)
    for batch in args.batches:
        if time.monotonic() < until:
            run = train_with_peft(shape, peft, few, batch)
            loops[batch] = run() / measure_seconds(run, device)
    del peft
    gc.collect()
    adapted = adapt(shape, build(shape, narrow, device))
    for batch in args.batches:
        rates: dict[int, float] = {}
        memory: dict[int, float | None] = {}
        for clients in args.clients:
            if time.monotonic() >= until:
                break
            try:
                bench = Bench.prepare(shape, adapted, clients, batch)
                rates[clients] = bench.tokens / measure_seconds(bench.train, device)
                memory[clients] = measure_peak_memory(bench.train, device)
            except FedspanError as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                rates[clients] = 0.0  # out of memory
                torch.cuda.empty_cache()
        rows.append(format_row(shape, batch, loops.get(batch), rates, memory, args))
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def format_row(
    shape: Shape,
    batch: int,
    loop: float | None,
    rates: Mapping[int, float],
    memory: Mapping[int, float | None],
    args: argparse.Namespace,
) -> list[str]:
    """Format a row: PEFT, each number of clients, the gain, memory, and the goal's verdict at batch 1."""
    most = args.clients[-1]
    gain = rates[most] / loop if loop and rates.get(most) else None
    cells = [shape.name, str(batch), f"{loop:,.0f}" if loop else "not reached"]
    for clients in args.clients:
        rate = rates.get(clients)
        cells.append("not reached" if rate is None else f"{rate:,.0f}" if rate else "out of memory")
    cells.append("" if gain is None else f"{gain:.1f}")
    used = [memory.get(clients) for clients in (args.clients[0], most)]
    cells += ["" if value is None else f"{value:.2f}" for value in used]
    judged = batch == 1 and not args.smoke
    cells.append("" if not judged else "not measured" if gain is None else "pass" if gain >= GOAL else "FAIL")
    return cells


def page(args: argparse.Namespace, device: torch.device) -> str:
    """Measure everything, and write the page."""
    until = time.monotonic() + 60 * args.minutes
    shapes: Sequence[Shape] = SMOKE if args.smoke else SHAPES
    rows = [row for shape in shapes for row in measure_rows(shape, args, device, until)]
    found = {shape.name: check_agreement(shape, device) for shape in shapes}
    size = 32 if args.smoke else 4096
    steps = {
        device_name: measure_server_step(size, args.clients[-1], torch.device(device_name))
        for device_name in ("cpu", str(device))
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    counts = " | ".join(f"clients: {clients}" for clients in args.clients)
    rule = "|".join(["---"] * (7 + len(args.clients)))
    agreement = [
        f"| {name} | {one.distance:.1e} | {'' if args.smoke else 'pass' if one.distance < CLOSE else 'FAIL'} | "
        + " | ".join("yes" if repeated else "no" for repeated in one.repeats.values())
        + " |"
        for name, one in found.items()
    ]
    return "\n".join(
        [
            *HEADER,
            f"Command: `python benchmarks/gpu.py --minutes {args.minutes:g}{' --smoke' if args.smoke else ''}`  ",
            f"Date: {time.strftime('%Y-%m-%d')}. Device: {name}, torch {torch.__version__}.",
            "",
            "## Tokens a second",
            "",
            f"FedIT at rank {RANK}, {STEPS} steps a client. Memory is the peak, in GiB, with the fewest and with the "
            f"most clients. Goal at batch 1 with the most clients: {GOAL:g} times PEFT's loop.",
            "",
            f"| shape | batch | PEFT in a loop | {counts} | times faster | memory, fewest | memory, most | goal |",
            f"|{rule}|",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            "## Equality with the CPU, and with itself",
            "",
            f"Distance: one client's job in float32 on two blocks, relative to the CPU's; limit {CLOSE:g}. Same bits: "
            "eight clients in one pass on two blocks, trained twice, with and without `deterministic: true`.",
            "",
            "| shape | distance | | same bits, float32 | with `deterministic` | bfloat16 | with `deterministic` |",
            "|---|---|---|---|---|---|---|",
            *agreement,
            "",
            "## Server steps",
            "",
            f"Truncated SVD of one layer of {size} x {size} from the factors of {args.clients[-1]} clients, seconds.",
            "",
            "| device | seconds |",
            "|---|---|",
            *(f"| {device_name} | {value:.4f} |" for device_name, value in steps.items()),
            "",
        ]
    )


HEADER = (
    "# Training on a GPU",
    "",
    "This page reports how much faster one GPU trains many clients in shared passes than one after another. The models "
    "have random weights in the shapes of the named ones, in bfloat16, and texts are random tokens, a quarter of the "
    "longest length (128) to all of it. PEFT trains eight clients, one after another. Each number is one measurement "
    "after a run that warms up, and neighbouring rows show how much such numbers vary. "
    "[Training](../architecture/training.md#devices) "
    "describes the engine.",
    "",
)
NOT_MEASURED = "\n".join(
    [
        *HEADER,
        "Not measured yet: no GPU was available to the project. On a machine with one, "
        "`python benchmarks/gpu.py --page docs/results/gpu.md` writes this page in at most 30 minutes. It measures "
        "tokens a second of 1, 8 and 50 clients at batches of 1 to 8 against a loop over clients with PEFT (goal: 8 "
        "times at batch 1), memory, equality with the CPU, and server steps, on random weights in the shapes of "
        "RoBERTa-large, Llama-3.2-1B and Llama-2-7B.",
        "",
        "Correctness on a device other than the CPU is tested with a pretend one "
        "([Training](../architecture/training.md#devices)).",
        "",
    ]
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="no measurement starts later")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--clients", type=int, nargs="+", default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--rounding", action="store_true", help="print the CPU's own rounding instead; needs no GPU")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    args.clients = args.clients or ([1, 3] if args.smoke else [1, 8, 50])
    args.batches = args.batches or ([1, 2] if args.smoke else [1, 2, 4, 8])
    if args.rounding:
        text = format_rounding(SMOKE if args.smoke else SHAPES, args.smoke)
    elif args.device.startswith("cuda") and not torch.cuda.is_available():
        text = NOT_MEASURED
    else:
        text = page(args, torch.device(args.device))
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
