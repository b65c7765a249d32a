"""What a server's round costs, for every method, on replies of the shape of Llama-2-7B's attention adapters.

    python benchmarks/server.py --page docs/results/server.md
    python benchmarks/server.py --layers 8 --size 512 --clients 10      (no limits are judged at other sizes)

32 decoder layers x q, k, v, o of 4096 x 4096 at rank 8, 50 clients. Every method has a process of its own, as on a
server: what others left in the heap is not its memory. Counted: ``contribute`` of every reply, the reduction and
``update``; the slower of two rounds, on random replies made by the method's own ``start`` and ``finish``. Methods are
those of the registry that send adapters, no whole weights or gradients, and whose clients' side can be simulated in
minutes.
Beside that: the SVD of one layer's aggregate from its factors, against LAPACK on the dense float64 matrix.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspan.core.lowrank import LowRank, concatenate, svd
from fedspan.core.method import Memory, Method
from fedspan.core.tensors import Tensors, create_generator
from fedspan.core.values import Client, Job, LayerSpec, Message, OptimizerState, Reduced, Spec, Trained
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.methods.registry import METHODS
from fedspan.planning.shape_inference import count_traffic

FULL = {"layers": 128, "size": 4096, "rank": 8, "clients": 50}
AVERAGING, DECOMPOSING, MEMORY, SPEEDUP, ERROR = 2.0, 60.0, 2.0, 100.0, 1e-5
"""Limits: seconds, seconds, GiB beside the replies, times faster than dense, relative error."""
CLIENTS_DEAR = {"slora": "each of the simulated clients draws its own mask over all entries of every layer"}
"""Methods whose clients' side would take hours here, and why."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {key: {"singular": "randomized"} for key in ("federa", "fr-lora")}
"""Of methods that begin with an SVD of W0."""
DECOMPOSITIONS = ("svd", "qr", "eigh", "eig", "cholesky", "solve", "lstsq", "inv", "pinv", "svdvals")
GIB = 2**30


@dataclass(frozen=True)
class DrawnWeights:
    """A pretrained model of random weights without extras; weights are drawn on access."""

    size: int

    def get_weight(self, layer: str) -> Tensor:
        return torch.randn((self.size, self.size), generator=create_generator(0, "weight", layer)) * self.size**-0.5

    def get_extra(self, parameter: str) -> Tensor:
        raise KeyError(parameter)


@dataclass(frozen=True)
class Cost:
    """Cost of a server's round.

    Args:
        seconds: Wall-clock time in seconds.
        gibibytes: Peak of resident memory above that before the update; the latter includes the replies.
        decomposes: Whether the server called LAPACK, or needs replies one by one.
    """

    seconds: float
    gibibytes: float
    decomposes: bool


def read_status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def free_memory() -> None:
    """Give freed memory back to the system and forget the peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


@contextmanager
def count_decompositions() -> Iterator[list[str]]:
    """Names of LAPACK's decompositions as they are called."""
    calls: list[str] = []
    originals = {name: getattr(torch.linalg, name) for name in DECOMPOSITIONS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    for name in DECOMPOSITIONS:
        setattr(torch.linalg, name, watched(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(torch.linalg, name, original)


def simulate_training(job: Job, rng: torch.Generator) -> Trained:
    """What an engine might give back: trainable tensors moved at random, moments and gradients of the right shapes."""

    def noise(names: Any) -> dict[str, Tensor]:
        return {name: 0.01 * torch.randn(job.tensors[name].shape, generator=rng) for name in names}

    moving = () if job.steps == 0 else job.trainable_names
    tensors = {**job.tensors, **{name: job.tensors[name] + value for name, value in noise(moving).items()}}
    moments: Mapping[str, Mapping[str, Tensor]] = {}
    if job.optimizer_state is not None or job.refresh is not None:
        names = job.trainable_names
        squares = {name: value.square() for name, value in noise(names).items()}
        moments = {"exp_avg": noise(names), "exp_avg_sq": squares}
    return Trained(
        tensors=tensors,
        optimizer_state=OptimizerState(moments),
        steps=0 if job.steps == 0 else 10,
        lr_sum=0.01,
        gradient=noise(job.trainable_names) if job.want_gradient or job.steps == 0 else {},
        metrics={"loss": 1.0, "examples": 1.0},
    )


def answer(
    method: Method, message: Message, client: Client, memory: Memory, round: int
) -> tuple[Message, Memory, Tensors]:
    """A client's side of a round: its reply, its memory and the tensors that it trained last."""
    rng = create_generator(0, "reply", client.id, round)
    result: Job | Message = method.start(message, client, memory, round)
    tensors: Tensors = {}
    while isinstance(result, Job):
        trained = simulate_training(result, rng)
        result, memory = method.finish(result, trained, client, memory, round)
        tensors = trained.tensors
    return result, memory, tensors


def reduce_replies(method: Method, cohort: Sequence[Client], replies: Mapping[str, Message]) -> Reduced:
    """The server's reduction of a cohort's replies."""
    reducer = Reducer(cohort)
    for client in cohort:
        reducer.add(client.id, method.contribute(replies[client.id], client))
    return reducer.compute_result()


def measure(key: str, args: argparse.Namespace) -> Cost:
    """Two rounds of a method; the larger time and memory of the two. What ``init`` takes is not counted."""
    spec = Spec(
        tuple(LayerSpec(f"layer{k:03d}", args.size, args.size) for k in range(args.layers)), clients=args.clients
    )
    method = METHODS[key](spec=spec, r=args.rank, **OPTIONS.get(key, {}))
    state = method.init(DrawnWeights(args.size))
    memories: dict[str, Memory] = {}
    seconds, peak, calls = 0.0, 0, list[str]()
    for round in range(2):
        held = round - 1 if round else None
        cohort = [
            Client(f"client-{k:03d}", args.rank, method.get_scaling(None), 10 + k, 10.0 + k, held)
            for k in range(args.clients)
        ]
        replies: dict[str, Message] = {}
        trained: dict[str, Tensors] = {}
        for client in cohort:
            message = method.sync(state, client)
            replies[client.id], memories[client.id], tensors = answer(
                method, message, client, memories.get(client.id, {}), round
            )
            if method.declare_claims().second_exchange:
                trained[client.id] = tensors
        del message, tensors
        free_memory()
        before = read_status("VmRSS")
        with count_decompositions() as decompositions:
            start, waited = time.perf_counter(), 0.0
            reduced = reduce_replies(method, cohort, replies)
            if trained:
                order, begun = method.build_second_order(state, reduced), time.perf_counter()
                replies = {
                    client.id: method.build_second_reply(order, trained[client.id], client, round) for client in cohort
                }
                waited = time.perf_counter() - begun  # for the clients
                second = reduce_replies(method, cohort, replies)
                reduced = replace(reduced, mean={**reduced.mean, **second.mean})
            state = method.update(state, reduced)
            seconds = max(seconds, time.perf_counter() - start - waited)
        peak, calls = max(peak, read_status("VmHWM") - before), calls + decompositions
    return Cost(seconds, peak / GIB, bool(calls) or method.declare_claims().reduction == "stack")


@dataclass(frozen=True)
class Comparison:
    """One layer's truncated SVD from factors, against the dense one."""

    factored: float
    dense: float
    error: float


def compare(size: int, rank: int, clients: int) -> Comparison:
    """The rank-r truncation of ``sum p_i s_i B_i A_i``: seconds either way, and how far apart the two matrices are."""
    rng = create_generator(0, "comparison")
    pairs = [
        LowRank(torch.randn((size, rank), generator=rng), torch.randn((rank, size), generator=rng), (k + 1) / clients)
        for k in range(clients)
    ]
    svd(concatenate(pairs), rank)  # the first call loads LAPACK
    start = time.perf_counter()
    U, S, Vt = svd(concatenate(pairs), rank)
    factored = time.perf_counter() - start
    matrix = torch.zeros((size, size), dtype=torch.float64)
    for pair in pairs:
        matrix += pair.scale * (pair.B.double() @ pair.A.double())
    start = time.perf_counter()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    dense = time.perf_counter() - start
    expected = (left[:, :rank] * values[:rank]) @ right[:rank]
    return Comparison(factored, dense, float(((U * S) @ Vt - expected).norm() / expected.norm()))


def is_whole_sent(key: str, args: argparse.Namespace) -> bool:
    """Whether a reply of the first round holds as many numbers as the weights themselves."""
    spec = Spec((LayerSpec("layer", args.size, args.size),), clients=args.clients)
    method = METHODS[key](spec=spec, r=args.rank)
    (first,) = count_traffic(method, [args.rank], [[args.rank]])
    return not method.claims.adapter or first[args.rank].up >= 4 * args.size**2


def measure_alone(key: str, args: argparse.Namespace) -> Cost:
    """``measure`` in a new process, forked from one that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fedspan.federation.aggregation.reduction", "fedspan.methods.registry"]
    )  # by default, nothing
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (args.threads,)) as pool:
        return pool.submit(measure, key, args).result()


def format_verdict(kept: bool, full: bool) -> str:
    """``pass`` or ``FAIL``, where a limit applies."""
    return ("pass" if kept else "**FAIL**") if full else "not judged"


def page(args: argparse.Namespace) -> str:
    """Run everything; the tables in markdown."""
    full = all(getattr(args, name) == value for name, value in FULL.items())
    rows: list[list[str]] = []
    skipped: list[str] = []
    for key in args.methods:
        if key in CLIENTS_DEAR:
            skipped.append(f"{key} ({CLIENTS_DEAR[key]})")
            continue
        if is_whole_sent(key, args):
            skipped.append(f"{key} (sends whole weights or gradients)")
            continue
        cost = measure_alone(key, args)
        limit = DECOMPOSING if cost.decomposes else AVERAGING
        kind = "SVDs, Grams or stacks" if cost.decomposes else "averages"
        kept = cost.seconds < limit and cost.gibibytes < MEMORY
        limits = f"{limit:g} s, {MEMORY:g} GiB"
        rows.append([key, kind, f"{cost.seconds:.2f}", f"{cost.gibibytes:.2f}", limits, format_verdict(kept, full)])
        print(*rows[-1], sep=" | ", flush=True)
    compared = min(10, args.clients)
    one = compare(args.size, args.rank, compared)
    faster = one.dense / one.factored
    kept = faster >= SPEEDUP and one.error < ERROR
    chosen = "" if args.methods == sorted(METHODS) else f" --methods {' '.join(args.methods)}"
    sizes = " ".join(f"--{name} {getattr(args, name)}" for name in FULL)
    cells = f"{one.factored:.4f} | {one.dense:.2f} | {faster:.0f} | {one.error:.0e} | {format_verdict(kept, full)}"
    return "\n".join(
        [
            "# Cost of a round on the server",
            "",
            "This page lists the time and memory of each method's aggregation: `contribute` for every reply, the "
            f"reduction and `update`, on {args.layers} layers of {args.size} x {args.size} with rank {args.rank}, "
            f"{args.clients} clients and {args.threads} threads. Numbers are those of the slower of two rounds, in a "
            "process for each method. Memory is the peak in addition to the replies. Limits are judged at 128 layers "
            "of 4096 x 4096, rank 8, 50 clients.",
            "",
            f"Command: `python benchmarks/server.py {sizes} --threads {args.threads}{chosen}`  ",
            f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.machine()}, {multiprocessing.cpu_count()} cores, "
            f"torch {torch.__version__}.",
            "",
            "| method | server's work | seconds | GiB | limits | |",
            "|---|---|---|---|---|---|",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"Not measured: {'; '.join(skipped) or 'none'}.",
            "",
            "Methods that change the base by the stack of all replies hold one such increment in addition to the "
            f"replies, {args.clients * args.rank * 2 * args.size * args.layers * 4 / GIB:.1f} GiB here.",
            "",
            f"Truncated SVD of one layer's aggregate of {compared} clients, from its factors against dense float64 "
            f"(limits: {SPEEDUP:g} times faster, relative error {ERROR:g}):",
            "",
            "| factored, s | dense, s | times faster | relative error | |",
            "|---|---|---|---|---|",
            f"| {cells} |",
            "",
        ]
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=sorted(METHODS))
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = page(args)
    print(text)
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
