"""The engines against each other and against a centralized loop, Flower's simulation and pfl-research.

    python -m evidence.pages.engines --data PATH/banking77 --environment PATH --page docs/results/speed.md

all-MiniLM-L6-v2 on Banking77's 77 intents: LoRA of rank 8 on query and value and the head, AdamW, clipping at 1, FedAvg
over identically distributed clients. Each contender is a process that runs one round on request; rounds are
run in turns (A B C A B C ...), and what is given is the median of the ratios within a repetition. The peers are
installed into an environment of their own (``--environment``, made on the first call).
The page is written after each section. ``--sections`` picks some;
``--clients 4 --examples 4 8 --examples 32 32 --repetitions 1`` is a quick try.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from evidence.claims.report import describe_machine
from evidence.pages.engines.environment import PEERS, make_environment
from evidence.pages.engines.page import Limit, limit_table
from evidence.pages.engines.runs import measure_accuracy, measure_memory, measure_overhead
from evidence.pages.engines.speed import compare, measure_last_layers

FULL = {"clients": 50, "threads": 2, "registered": 100_000}
EXAMPLES = {4: 16, 32: 64}
"""Limits are judged at these numbers, and at as many examples of a client, by batch, or more."""
Section = Callable[[argparse.Namespace], tuple[list[str], list[Limit]]]


def sections(python: Path | None) -> dict[str, Section]:
    """The page's parts by name."""
    parts: dict[str, Section] = {}
    for batch in EXAMPLES:
        parts[f"batch{batch}"] = partial(compare, python=python, batch=batch)
    for batch in EXAMPLES:
        parts[f"last{batch}"] = partial(measure_last_layers, python=python, batch=batch)
    return {**parts, "overhead": measure_overhead, "memory": measure_memory, "accuracy": measure_accuracy}


def command(args: argparse.Namespace, done: Sequence[str]) -> str:
    """The command line that measures the sections that are done, with the paths left out."""
    parts = [f"--{name} {getattr(args, name)}" for name in FULL]
    parts += [f"--examples {batch} {count}" for batch, count in args.examples.items()]
    parts.append(f"--repetitions {args.repetitions}")
    parts.append("--simulators " + " ".join(map(str, args.simulators)))
    parts.append(f"--at-once {args.at_once}")
    parts.append(f"--accuracy-examples {args.accuracy_examples} --accuracy-rounds {args.accuracy_rounds}")
    parts.append(f"--accuracy-lr {args.accuracy_lr:g} --accuracy-seeds {' '.join(map(str, args.accuracy_seeds))}")
    parts.append(f"--attention {args.attention}")
    parts.append("--sections " + " ".join(done))
    environment = "" if args.environment is None else " --environment PATH"
    return f"python -m evidence.pages.engines --data PATH/banking77{environment} {' '.join(parts)}"


def measure(args: argparse.Namespace, python: Path | None) -> Iterator[str]:
    """Measure one section after another; after each, yield the page with those that are done."""
    body: list[str] = []
    limits: list[Limit] = []
    done: list[str] = []
    for name, section in sections(python).items():
        if name in args.sections:
            print(name, flush=True)
            lines, judged = section(args)
            body += lines
            limits += judged
            done.append(name)
            yield format_page(args, python, body, limits, done)


def format_page(
    args: argparse.Namespace,
    python: Path | None,
    body: Sequence[str],
    limits: list[Limit],
    done: Sequence[str],
) -> str:
    """The tables in markdown."""
    lines = [
        "# Speed of the engines",
        "",
        "This page compares the time of a round with PEFT, Flower and pfl-research: all-MiniLM-L6-v2 on Banking77's 77 "
        "intents, LoRA of rank 8 on query and value and the head, AdamW at 2e-3, clipping at 1, FedAvg over "
        f"{args.clients} identically distributed clients, one epoch per round, {args.threads} threads in total. "
        "The time is that of a whole round after a warm-up; for the centralized loop, of an epoch over the same "
        "examples in as many steps. Number formats are those of the frozen base (what trains is float32): Flower and "
        "pfl-research run in float32, fedspan and the PEFT loop in float32 and in bfloat16. "
        f"Numbers are medians over {args.repetitions} repetitions, each of which runs all "
        "contenders; ratios are computed within a repetition.",
        "",
        f"Command: `{command(args, done)}`  ",
        describe_machine() + (f" Peers: {', '.join(PEERS)}." if python is not None else ""),
        "",
        f"Limits are judged at {FULL['clients']} clients and {FULL['threads']} threads.",
        "",
        limit_table(limits) + "\n",
        "Peers: no dropout, as in fedspan's frozen base; texts tokenized once; padded to the longest of a batch; "
        f"{args.attention} attention (fedspan's is eager on a CPU); "
        "shuffled batches, except where the table says bucketed. Flower's client exchanges PEFT's state dict and "
        "reuses its model between rounds; `of it training` is the time within the clients' loops, divided by the "
        "actors. In the first two rounds all federations train on the same batches from the same start, and the "
        "centralized loop trains the first client's batches first: the losses show that they train the same.",
        "",
        *body,
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--environment", type=Path, help="of the peers; left out: fedspan alone")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"), help="for plans, logs and all numbers")
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--examples",
        type=int,
        nargs=2,
        action="append",
        default=[],
        metavar=("BATCH", "COUNT"),
        help=f"of each client, by batch; {EXAMPLES}",
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--simulators", type=int, nargs="*", default=[4], help="batches at which Flower and pfl run")
    parser.add_argument(
        "--attention", choices=("eager", "sdpa"), default="eager", help="of the peers; fedspan's: eager"
    )
    parser.add_argument("--at-once", type=int, default=8, help="clients in a pass where it is not measured")
    parser.add_argument("--accuracy-examples", type=int, default=5000)
    parser.add_argument("--accuracy-rounds", type=int, default=5)
    parser.add_argument("--accuracy-lr", type=float, default=8e-3)
    parser.add_argument("--accuracy-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sections", nargs="+", choices=list(sections(None)), help="left out: all")
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    args.examples = {**EXAMPLES, **dict(args.examples)}
    args.out, args.data = args.out.resolve(), args.data.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for batch, count in args.examples.items():
        if count % batch:
            parser.error(f"--examples {batch} {count}: a client's examples make whole batches")
    args.sections = args.sections or list(sections(None))
    enough = all(args.examples[batch] >= count for batch, count in EXAMPLES.items())
    args.judged = enough and all(getattr(args, name) == value for name, value in FULL.items())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the contenders end, too
    python = None if args.environment is None else make_environment(args.environment.resolve())
    text = ""
    for text in measure(args, python):
        if args.page:
            args.page.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
