"""Workers of a cluster on one machine: speed of two against one, what of a round is not training, shared memory.

    python benchmarks/cluster.py --data PATH/banking77 --environment PATH --page docs/results/cluster.md

all-MiniLM-L6-v2 on Banking77's 77 intents, FedIT, as in ``benchmarks/engines.py``, whose contenders, turns and peers'
environment these are: every contender is a process that runs a round on request, and ratios are those within a
repetition. Workers have one thread each. The peers are Flower's simulation with as many actors and pfl-research with as
many processes (torch.distributed). Memory is measured with a BERT of random weights of about 400 MB.
``--quick`` is a try of a minute or two; its limits are not judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.contenders import HERE, Contender, Measured, get_fedspan_variables, take_turns
from engines.environment import PEERS, get_peer_variables, make_environment
from engines.page import Limit, compute_ratios, describe_machine, format_table, limit_table
from engines.work import Work, write_plan

FASTER, OUTSIDE, MEMORY = 1.7, 0.1, 0.5
"""Two workers against one; share of a round that is not training; a second worker's memory against the first one's."""
CLIENTS, EXAMPLES, BATCH = 50, 64, 16
MIB = 2**20


def run_workers(name: str, values: dict[str, Any], count: int, folder: Path, *options: str) -> Contender:
    """fedspan on a number of workers of one thread."""
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.json"
    path.write_text(json.dumps({**values, "threads": 1, "cluster": {"workers": count}}))
    command = [sys.executable, str(HERE / "fedspan_cluster.py"), str(path), str(folder / path.stem), *options]
    return Contender(name, command, get_fedspan_variables(1))


def run_peers(python: Path, plan: Path, folder: Path) -> list[Contender]:
    """Flower's simulation and pfl-research with two processes of one thread."""
    variables = get_peer_variables(1, folder / "flower-home")
    flower = [str(python), str(HERE / "peers_flower.py"), str(plan), "--actors", "2", "--threads", "1"]
    launch = [str(python.parent / "torchrun"), "--nproc-per-node", "2", "--master-port", "29517"]
    pfl = [*launch, str(HERE / "peers_pfl.py"), str(plan), "--threads", "1"]
    return [Contender("Flower, 2 actors", flower, variables), Contender("pfl-research, 2 processes", pfl, variables)]


def measure_in_turns(
    contenders: Sequence[Contender], repetitions: int, folder: Path, resume: bool
) -> dict[str, Measured]:
    """Measure contenders in turns (``take_turns``), or read what an earlier call with the same ``--out`` measured."""
    path = folder / "results.json"
    if resume and path.is_file():
        results = {name: Measured(**values) for name, values in json.loads(path.read_text()).items()}
        if results.keys() == {contender.name for contender in contenders}:
            return results
    results = take_turns(contenders, repetitions, folder)
    path.write_text(json.dumps({name: vars(one) for name, one in results.items()}, indent=1))
    return results


def measure_speed(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """One worker, two workers and the peers, in turns."""
    folder = args.out / "speed"
    folder.mkdir(parents=True, exist_ok=True)
    work = Work(args.data, BATCH, args.examples, args.clients, threads=1)
    engine = {"name": "batched", **({} if args.at_once is None else {"clients_per_pass": args.at_once})}
    names = [f"{count} worker{'s' * (count > 1)}, {dtype}" for dtype in args.dtypes for count in (1, 2)]
    contenders = [
        run_workers(f"{count} worker{'s' * (count > 1)}, {dtype}", work.values(dtype, engine), count, folder)
        for dtype in args.dtypes
        for count in (1, 2)
    ]
    if args.environment is not None:
        write_plan(work, folder / "plan", 1)
        contenders += run_peers(make_environment(args.environment), folder / "plan", folder)
    results = measure_in_turns(contenders, args.repetitions, folder, args.resume)
    subject = names[-1]
    rows = [format_row(name, one, results[subject], name == subject) for name, one in results.items()]
    limits: list[Limit] = []
    for dtype in args.dtypes:
        one, two = results[f"1 worker, {dtype}"], results[f"2 workers, {dtype}"]
        faster, outside = statistics.median(compute_ratios(one, two)), statistics.median(measure_shares(two))
        kept = (faster >= FASTER, outside < OUTSIDE) if args.judged else (None, None)
        limits.append(Limit(f"{dtype}: two workers against one", f"{faster:.2f}", f"at least {FASTER:g}", kept[0]))
        limits.append(Limit(f"{dtype}: not training", f"{outside:.1%} of a round", f"below {OUTSIDE:.0%}", kept[1]))
    stacked = ", ".join(f"{one.ready['stacking']} ({name})" for name, one in results.items() if "stacking" in one.ready)
    lines = [
        "## Speed",
        "",
        f"{args.clients} clients of {args.examples} examples, batches of {BATCH}, whole rounds in the driver. *Not "
        "training* is the share of a round in which the workers' engines did not train, over all workers. Peers train "
        f"in float32. Clients in a pass, as the first round measured them: {stacked}.",
        "",
        *format_table(
            ["", "ms an example", "not training", f"{subject} is faster by", "loss: round 1", "round 2"], rows
        ),
    ]
    return lines, limits


def measure_shares(result: Measured) -> list[float]:
    """What of each round is not training."""
    return [1 - round["training"] / round["seconds"] for round in result.rounds]


def format_row(name: str, result: Measured, subject: Measured, itself: bool) -> list[str]:
    """A contender's line."""
    faster = compute_ratios(result, subject)
    spread = "" if itself else f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})"
    losses = [f"{loss:.5f}" for loss in result.ready["losses"][:2]]
    return [
        name,
        f"{statistics.median(result.milliseconds()):.2f}",
        f"{statistics.median(measure_shares(result)):.1%}",
        spread,
        *losses,
    ]


def create_large_model(folder: Path, layers: int) -> Path:
    """A BERT of random weights on MiniLM's vocabulary; six layers are 430 MB."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from fedspan.models.names import resolve_model

    path = folder / f"bert-{layers}"
    if not (path / "model.safetensors").is_file():
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:all-minilm-l6-v2"))
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=layers,
            num_attention_heads=16,
        )
        BertModel(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def measure_memory(args: argparse.Namespace) -> tuple[list[str], list[Limit]]:
    """Proportional memory of one worker and of two on a large base."""
    folder = args.out / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    model = create_large_model(folder, args.layers)
    work = Work(args.data, 4, 8, 8, threads=1)
    values = work.values("float32", {"name": "batched", "clients_per_pass": 2, "workers": 1})
    values["model"] = {**values["model"], "name": str(model), "pooling": "cls", "head_init": "random"}
    bytes_by_count: dict[int, list[int]] = {}
    peaks: dict[int, list[int]] = {}
    for count in (1, 2):
        name, apart = f"memory {count}", folder / str(count)
        apart.mkdir(exist_ok=True)
        contender = run_workers(name, values, count, folder, "--peak")
        last: Any = measure_in_turns([contender], 1, apart, args.resume)[name].rounds[-1]
        bytes_by_count[count], peaks[count] = last["memory"], last["peak"]
    first, second = sum(bytes_by_count[1]), sum(bytes_by_count[2]) - sum(bytes_by_count[1])
    shares = {
        "a second worker's memory after a round": second / first,
        "a second worker's memory while it trains": sum(peaks[2]) / sum(peaks[1]) - 1,
    }
    limits = [
        Limit(
            quantity,
            f"{share:.2f}",
            f"at most {MEMORY:g} of the first",
            share <= MEMORY if args.judged else None,
        )
        for quantity, share in shares.items()
    ]
    base = (model / "model.safetensors").stat().st_size
    rows = [
        [str(count), *(", ".join(f"{one / MIB:.0f}" for one in sizes[count]) for sizes in (bytes_by_count, peaks))]
        for count in bytes_by_count
    ]
    lines = [
        "## Memory",
        "",
        f"Workers on a base of {base / 1e6:.0f} MB in float32, which is mapped from its file, in the third round and "
        "after it, when they have returned the memory of their activations: proportional set size in MiB, in which a "
        "page that two processes share counts half for each.",
        "",
        *format_table(["workers", "each of them after a round, MiB", "while they train, MiB"], rows),
    ]
    return lines, limits


def page(args: argparse.Namespace, parts: Sequence[str], limits: Sequence[Limit]) -> str:
    """The page in markdown."""
    at_once = "" if args.at_once is None else f" --at-once {args.at_once}"
    environment = "" if args.environment is None else " --environment PATH"
    command = (
        f"python benchmarks/cluster.py --data PATH/banking77{environment} --clients {args.clients} --examples "
        f"{args.examples} --repetitions {args.repetitions} --layers {args.layers} --dtypes {' '.join(args.dtypes)}"
    )
    lines = [
        "# How much workers gain",
        "",
        "This page reports how much faster a run is with more workers. "
        "FedIT with LoRA of rank 8 on all-MiniLM-L6-v2 and Banking77's 77 intents, on the workers of a "
        "[cluster](../cluster.md) that is one machine.",
        "",
        f"Command: `{command}{at_once}`  ",
        describe_machine() + (f" Peers: {', '.join(PEERS)}." if args.environment is not None else ""),
        "",
        *limit_table(limits),
        *parts,
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv")
    parser.add_argument(
        "--environment", type=Path, help="of the peers, made on the first call; left out: fedspan alone"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/cluster"), help="for plans, logs and all numbers")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each client")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6, help="of the model whose memory is measured")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--at-once", type=int, help="clients in a pass; left out: measured")
    parser.add_argument("--quick", action="store_true", help="few clients and rounds, a small model")
    parser.add_argument("--resume", action="store_true", help="measure only what is not in the folder of --out yet")
    parser.add_argument("--page", type=Path, help="write the page to this file")
    args = parser.parse_args()
    if args.quick:
        args.clients, args.examples, args.repetitions, args.layers = 6, 16, 1, 1
    args.judged = (args.clients, args.examples) == (CLIENTS, EXAMPLES) and not args.quick
    args.out, args.data = args.out.resolve(), args.data.resolve()
    parts, limits = list[str](), list[Limit]()
    for measure in (measure_speed, measure_memory):
        lines, judged = measure(args)
        parts, limits = [*parts, *lines], [*limits, *judged]
    text = page(args, parts, limits)
    print(text)
    if args.page is not None:
        args.page.write_text(text)


if __name__ == "__main__":
    main()
