"""Training many clients on one GPU: speed, memory, 4-bit bases, equality with the CPU.

    python -m evidence.pages.gpu --page docs/results/gpu.md           (one GPU, at most 30 minutes)
    python -m evidence.pages.gpu --sections nf4 --minutes 5           (this table alone)
    python -m evidence.pages.gpu --smoke --device cpu                 (tiny shapes, seconds; nothing is judged)

The models have random weights in the shapes of RoBERTa-large, Llama-3.2-1B and Llama-2-7B, in bfloat16, with FedIT at
rank 8 on queries and values. Texts are random tokens of random lengths. Compared are clients stacked in one pass with
PEFT's model in a loop over clients, on the same examples. Tokens are those of the texts, without padding. Equality:
one client's job in float32 on the first two blocks of each shape, on the device and on the CPU, with SGD and with
AdamW. Server steps: the truncated SVD of one layer's aggregate of the clients' factors. Where a pass of all clients
needs more memory than the device has, half as many share a pass. NF4: the frozen linear layers of the Llama shapes in 4
bits, by bitsandbytes. Without a GPU the page says that nothing was measured. ``--sections`` picks some tables, which
name their command.
"""

import argparse
import copy
import gc
import importlib
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from evidence.claims.report import format_table
from fedspan.config import parse_config
from fedspan.core.values import Client, Job, Trained
from fedspan.errors import FedspanError
from fedspan.models.adapted import AdaptedModel
from fedspan.models.empty import load_empty
from fedspan.models.quantized import list_unquantized_modules
from fedspan.models.targets import find_buffers, find_extras, find_targets
from fedspan.tasks.causal import CausalLM, EncodedPrompts
from fedspan.tasks.classification import SequenceClassification
from fedspan.tasks.encoding import EncodedText, Ragged
from fedspan.training.batched import BatchedEngine
from fedspan.training.batching import draw_job_batches
from fedspan.training.config import EngineConfig
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.stacking import wait_for

GOAL, CLOSE, ROUNDING = 8.0, 1e-4, 2.0
"""Times faster than PEFT in a loop at batch 1 with the most clients; the limit of the relative distance of results in
float32 from the CPU's in float64, and of that distance as a multiple of the CPU's own: the larger one counts."""
REPETITIONS, LONG = 3, 6.0
"""Timed runs of a cell, of which the median counts; no further one starts after so many seconds."""
RANK, STEPS, LABELS = 8, 4, ("no", "yes")
RATES = {"sgd": 1.0, "adamw": 1e-3}
"""Learning rates. With SGD, and gradients clipped to norm 1, the factors change about as much as with AdamW."""
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
    longest: int


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "num_key_value_heads",
)


def make_roberta(name: str, longest: int, *sizes: int) -> Shape:
    """A RoBERTa with a classifier and ``SIZES``."""
    values = {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
    targets = ("query", "value")
    return Shape(name, "classification", targets, {**values, **dict(zip(SIZES, sizes, strict=False))}, longest)


def make_llama(name: str, longest: int, *sizes: int, **more: Any) -> Shape:
    """A Llama with ``SIZES``."""
    values = {"model_type": "llama", "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    targets = ("q_proj", "v_proj")
    return Shape(name, "language-model", targets, {**values, **dict(zip(SIZES, sizes, strict=True)), **more}, longest)


SHAPES = (
    make_roberta("RoBERTa-large", 128, 50265, 1024, 4096, 24, 16),
    make_llama("Llama-3.2-1B", 128, 128256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    make_llama("Llama-2-7B", 128, 32000, 4096, 11008, 32, 32, 32),
)
SMOKE = (make_roberta("tiny RoBERTa", 12, 60, 16, 24, 2, 2), make_llama("tiny Llama", 12, 60, 16, 24, 2, 2, 1))


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


def quantize(model: nn.Module, dtype: torch.dtype) -> Any:
    """Store a model's frozen linear layers in NF4, as ``model.quantization`` does; its weights are those of `build`."""
    bitsandbytes: Any = importlib.import_module("bitsandbytes.nn")  # its types leave out the classes
    kept = re.compile("|".join(list_unquantized_modules(())))
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, module in layers:
        if kept.fullmatch(path):
            continue
        device, bias = module.weight.device, module.bias is not None
        layer = bitsandbytes.Linear4bit(
            module.in_features, module.out_features, bias, dtype, True, "nf4", device=torch.device("meta")
        )
        weight = module.weight.detach().cpu()  # it is quantized on its way to the device
        layer.weight = bitsandbytes.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4")
        layer.bias = module.bias
        model.set_submodule(path, layer.to(device))
    return model


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
    def prepare(
        cls,
        shape: Shape,
        adapted: AdaptedModel,
        clients: int,
        batch: int,
        optimizer: str = "adamw",
        clients_per_pass: int | None = None,
    ) -> "Bench":
        """Prepare the clients' jobs of FedIT, by default for one pass of all clients."""
        task, examples = draw_examples(shape, clients * batch * STEPS)
        config = parse_config(
            {
                "task": "causal-lm" if shape.head == "language-model" else "sequence-classification",
                "data": {"train": "none.csv"},
                "method": {"name": "fedit", "r": RANK, "lora_alpha": 2 * RANK},
                "training": {"lr": RATES[optimizer], "batch_size": batch, "local_steps": STEPS, "optimizer": optimizer},
            }
        )
        method = config.build_method(replace(adapted.spec, clients=clients))
        settings = config.build_training_settings()
        options = EngineConfig(clients_per_pass=clients_per_pass or clients, workers=1, prefix_cache=False)
        engine = BatchedEngine(LoopEngine(adapted, task, settings, 0, options))
        state = method.init(adapted)
        works: dict[str, Assignment] = {}
        for number in range(clients):
            indices = np.arange(number * batch * STEPS, (number + 1) * batch * STEPS)
            client = Client(f"c{number:02}", RANK, 2.0, len(indices), 1.0)
            job = method.start(method.sync(state, client), client, {}, 0)
            assert isinstance(job, Job)
            works[client.id] = Assignment(client.id, 0, job, indices, RATES[optimizer])
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


@dataclass(frozen=True)
class Measured:
    """A cell of the table.

    Args:
        rate: Tokens a second; None: out of memory even with one client in a pass.
        memory: Peak of allocated GPU memory in GiB; None on a CPU.
        clients_per_pass: Number of clients that shared a pass.
    """

    rate: float | None
    memory: float | None
    clients_per_pass: int


def measure_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median wall-clock seconds of a few runs, after one that warms up."""
    run()
    wait_for(device)
    seconds: list[float] = []
    while len(seconds) < REPETITIONS and sum(seconds) < LONG:
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def measure_clients(shape: Shape, adapted: AdaptedModel, clients: int, batch: int, device: torch.device) -> Measured:
    """Measure clients in one pass or, while that needs too much memory, in passes of half as many."""
    share = clients
    while True:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            bench = Bench.prepare(shape, adapted, clients, batch, clients_per_pass=share)
            rate = bench.tokens / measure_seconds(bench.train, device)
        except FedspanError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            if share == 1:
                return Measured(None, None, share)
            share = (share + 1) // 2
        else:
            memory = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
            return Measured(rate, memory, share)


@dataclass(frozen=True)
class Agreement:
    """How two blocks of a shape train on a device.

    Args:
        distances: By optimizer, the greatest relative distance of one client's tensors in float32 from the CPU's in
            float64: the device's, and the CPU's own.
        repeats: Whether eight clients that share a pass get the same bits again, by number format and
            ``deterministic``.
    """

    distances: Mapping[str, tuple[float, float]]
    repeats: Mapping[tuple[str, bool], bool]

    @property
    def agrees(self) -> bool:
        """Whether the device's results are about as close as the CPU's."""
        return all(device < max(CLOSE, ROUNDING * cpu) for device, cpu in self.distances.values())


def find_distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The greatest relative distance of a tensor, in the Frobenius norm."""
    gaps = [
        (found[name].cpu().double() - value.cpu().double()).norm() / value.cpu().double().norm().clamp(min=1e-9)
        for name, value in expected.items()
    ]
    return float(max(gaps))


def check_agreement(shape: Shape, device: torch.device) -> Agreement:
    """Compare training on the device with training on the CPU, and with itself."""
    cpu = torch.device("cpu")
    model = build(shape, torch.float32, cpu, depth=2)

    def train(place: torch.device, dtype: torch.dtype, optimizer: str) -> Mapping[str, torch.Tensor]:
        adapted = adapt(shape, copy.deepcopy(model).to(place, dtype))
        return Bench.prepare(shape, adapted, 1, 2, optimizer).train()["c00"].tensors

    distances: dict[str, tuple[float, float]] = {}
    for optimizer in RATES:
        exact = train(cpu, torch.float64, optimizer)
        found = [train(place, torch.float32, optimizer) for place in (device, cpu)]
        distances[optimizer] = find_distance(found[0], exact), find_distance(found[1], exact)
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
    return Agreement(distances, repeats)


def format_quantized(
    shapes: Sequence[Shape], args: argparse.Namespace, device: torch.device, until: float
) -> list[str]:
    """Compare 4-bit bases with others, and return the section about it."""
    batch, dtype = args.batches[-1], working_dtype(device)
    counts = sorted({args.clients[0], min(args.clients[-1], 8)})
    plain = str(dtype).removeprefix("torch.")
    rows: list[list[str]] = []
    for shape in (shape for shape in shapes if shape.head == "language-model"):
        for base in (plain, "NF4"):
            cells = ["not reached"] + [""] * (2 * len(counts) - 1)
            if base == "NF4" and importlib.util.find_spec("bitsandbytes") is None:
                cells[0] = "bitsandbytes is not installed"
            elif time.monotonic() < until:
                gc.collect()
                model = build(shape, dtype, device)
                adapted = adapt(shape, model if base == plain else quantize(model, dtype))
                del model
                found = [measure_clients(shape, adapted, clients, batch, device) for clients in counts]
                memory = ["" if cell.memory is None else f"{cell.memory:.2f}" for cell in found]
                cells = [*(format_rate(cell, clients) for cell, clients in zip(found, counts, strict=True)), *memory]
                del adapted
            rows.append([shape.name, base, *cells])
            print(*rows[-1], sep=" | ", flush=True)
    head = [f"clients: {clients}" for clients in counts] + [f"memory, clients: {clients}" for clients in counts]
    return [
        "## 4-bit bases",
        "",
        f"Tokens a second at batch {batch}, and the peak of memory in GiB, with the frozen base in {plain} and in NF4 "
        "(`model.quantization: nf4`, bitsandbytes).",
        "",
        format_table(["shape", "base", *head], rows) + "\n",
    ]


def working_dtype(device: torch.device) -> torch.dtype:
    """The number format in which speed is measured."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def measure_loops(shape: Shape, args: argparse.Namespace, device: torch.device, until: float) -> dict[int, float]:
    """Tokens a second of PEFT's model in a loop over clients, by batch size, as far as the time suffices."""
    heads = ["classifier"] if shape.head == "classification" else None
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(shape.targets), modules_to_save=heads)
    peft = get_peft_model(build(shape, working_dtype(device), device), config)
    rates: dict[int, float] = {}
    for batch in args.batches:
        if time.monotonic() < until:
            run = train_with_peft(shape, peft, min(args.clients[-1], 8), batch)
            rates[batch] = run() / measure_seconds(run, device)
    return rates


def measure_rows(shape: Shape, args: argparse.Namespace, device: torch.device, until: float) -> list[list[str]]:
    """The table's rows of a shape, one for each batch size; cells after the time limit say so."""
    rows: list[list[str]] = []
    loops = measure_loops(shape, args, device, until)
    gc.collect()
    adapted = adapt(shape, build(shape, working_dtype(device), device))
    for batch in args.batches:
        cells: dict[int, Measured] = {}
        for clients in args.clients:
            if time.monotonic() < until:
                cells[clients] = measure_clients(shape, adapted, clients, batch, device)
        rows.append(format_row(shape, batch, loops.get(batch), cells, args))
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def format_rate(cell: Measured, clients: int) -> str:
    """Tokens a second of a number of clients, and how many shared a pass if not all did."""
    if cell.rate is None:
        return "out of memory"
    return f"{cell.rate:,.0f}" + ("" if cell.clients_per_pass == clients else f" ({cell.clients_per_pass} a pass)")


def format_row(
    shape: Shape, batch: int, loop: float | None, cells: Mapping[int, Measured], args: argparse.Namespace
) -> list[str]:
    """Format a row: PEFT, each number of clients, the gain, memory, and the goal's verdict at batch 1."""
    few, most = cells.get(args.clients[0]), cells.get(args.clients[-1])
    gain = most.rate / loop if loop and most and most.rate else None
    row = [shape.name, str(batch), f"{loop:,.0f}" if loop else "not reached"]
    for clients in args.clients:
        cell = cells.get(clients)
        row.append("not reached" if cell is None else format_rate(cell, clients))
    row.append("" if gain is None else f"{gain:.1f}")
    row += ["" if cell is None or cell.memory is None else f"{cell.memory:.2f}" for cell in (few, most)]
    judged = batch == 1 and not args.smoke
    row.append("" if not judged else "not measured" if gain is None else "pass" if gain >= GOAL else "FAIL")
    return row


def format_command(args: argparse.Namespace, device: torch.device) -> list[str]:
    """The command, and the date and the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    options = f" --minutes {args.minutes:g}" + (" --smoke" if args.smoke else "")
    for option in ("sections", "clients", "batches"):
        if (values := getattr(args, option)) != args.defaults[option]:
            options += f" --{option} {' '.join(map(str, values))}"
    return [
        f"Command: `python -m evidence.pages.gpu{options}`  ",
        f"Date: {time.strftime('%Y-%m-%d')}. Device: {name}, torch {torch.__version__}.",
        "",
    ]


def format_agreement(shapes: Sequence[Shape], device: torch.device, args: argparse.Namespace) -> list[str]:
    """Compare the device with the CPU and with itself, and return the section about it."""
    rows: list[list[str]] = []
    for shape in shapes:
        found = check_agreement(shape, device)
        cells = [f"{distance:.1e}" for pair in found.distances.values() for distance in pair]
        cells += ["" if args.smoke else "pass" if found.agrees else "FAIL"]
        cells += ["yes" if repeated else "no" for repeated in found.repeats.values()]
        rows.append([shape.name, *cells])
        print(*rows[-1], sep=" | ", flush=True)
    return [
        "## Equality with the CPU, and with itself",
        "",
        "One client's job on two blocks in float32, as the relative distance of its tensors from the CPU's in float64, "
        f"trained on the GPU and on the CPU. Limit: {ROUNDING:g} times the CPU's distance, or {CLOSE:g} if that is "
        "more. AdamW divides a gradient by its own size, and so enlarges the rounding of small ones.",
        "",
        "*Same bits*: eight clients in one pass on two blocks, trained twice, with and without `deterministic: true`.",
        "",
        format_table(
            [
                *("shape", "SGD, GPU", "SGD, CPU", "AdamW, GPU", "AdamW, CPU", ""),
                *("same bits, float32", "with `deterministic`", "same bits, bfloat16", "with `deterministic`"),
            ],
            rows,
        )
        + "\n",
    ]


def format_speed(shapes: Sequence[Shape], args: argparse.Namespace, device: torch.device, until: float) -> list[str]:
    """Compare clients that share passes with PEFT's loop, and return the section about it."""
    rows: list[list[str]] = []
    for number, shape in enumerate(shapes):  # no shape takes the time of those after it
        left = until - time.monotonic()
        rows += measure_rows(shape, args, device, time.monotonic() + left / (len(shapes) - number))
    counts = [f"clients: {clients}" for clients in args.clients]
    gains = ["times faster", "memory, fewest", "memory, most", "goal"]
    return [
        "## Tokens a second",
        "",
        f"FedIT at rank {RANK}, {STEPS} steps a client. Memory is the peak, in GiB, with the fewest and with the "
        f"most clients. Where a pass of all clients needs more memory than the GPU has, the cell says how many "
        f"shared one. Goal at batch 1 with the most clients: {GOAL:g} times PEFT's loop.",
        "",
        format_table(["shape", "batch", "PEFT in a loop", *counts, *gains], rows) + "\n",
    ]


SECTIONS = ("speed", "nf4", "equality")
"""The page's tables, in its order."""


def page(args: argparse.Namespace, device: torch.device) -> str:
    """Measure the requested sections, and write the page, or those sections alone."""
    shapes = SMOKE if args.smoke else SHAPES
    end = time.monotonic() + 60 * args.minutes
    # What takes no time limit comes first, then the shortest.
    measures: dict[str, Callable[[], list[str]]] = {
        "equality": lambda: format_agreement(shapes, device, args),
        "nf4": lambda: format_quantized(shapes, args, device, end),
        "speed": lambda: format_speed(shapes, args, device, end),
    }
    parts = {name: measure() for name, measure in measures.items() if name in args.sections}
    command = format_command(args, device)
    if args.sections == list(SECTIONS):
        return "\n".join([*HEADER, *command, *(line for name in SECTIONS for line in parts[name])])
    lines = [line for name in args.sections for line in (*parts[name][:2], *command, *parts[name][2:])]
    return "\n".join(lines)


HEADER = (
    "# Training on a GPU",
    "",
    "This page reports how much faster one GPU trains many clients in shared passes than one after another. The models "
    "have random weights in the shapes of the named ones, in bfloat16, and texts are random tokens, a quarter of the "
    "longest length (128) to all of it. PEFT trains eight clients, one after another. Each number is the median of up "
    f"to {REPETITIONS} runs after one that warms up. [Training](../architecture/training.md) describes the engine.",
    "",
)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="no measurement starts later")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--clients", type=int, nargs="+", default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="left out: all")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    defaults: dict[str, list[Any]] = {
        "sections": list(SECTIONS),
        "clients": [1, 3] if args.smoke else [1, 8, 50],
        "batches": [1, 2] if args.smoke else [1, 2, 4, 8],
    }
    args.defaults = defaults
    for name, values in defaults.items():
        setattr(args, name, getattr(args, name) or values)
    args.sections = [name for name in SECTIONS if name in args.sections]
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU")
    text = page(args, torch.device(args.device))
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
