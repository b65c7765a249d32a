"""A server and three data owners, each a process of its own, with TLS and keys: docs/deployment.md, step by step.

    pip install -e '.[deploy]'
    python examples/three_machines.py

Every command that the script runs is one that an operator or a data owner types; it prints them all. Here they run on
one machine, over the loopback interface; between machines they are the same, with the server's name instead of
127.0.0.1. In the end all processes are ended, whatever happened. Times: examples/README.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import fedspan
from fedspan.data.builtin import find_corpus_file

FEDSPAN = (sys.executable, "-m", "fedspan")  # what `fedspan` runs, by this very Python
OWNERS = ("clinic-a", "clinic-b", "clinic-c")


def call(*arguments: str | Path) -> None:
    """Run a command to its end."""
    words = [str(argument) for argument in arguments]
    print("$ fedspan", shlex.join(words), flush=True)
    subprocess.run([*FEDSPAN, *words], check=True)


@contextmanager
def run_command(log: Path, *arguments: str | Path) -> Generator[subprocess.Popen[bytes]]:
    """Run a command while the block runs; then end it and all processes that it started."""
    words = [str(argument) for argument in arguments]
    print("$ fedspan", shlex.join(words), f"> {log} &", flush=True)
    with log.open("wb") as output:
        # A session of its own: its process group can be ended as a whole.
        process = subprocess.Popen([*FEDSPAN, *words], stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(words: str, log: Path, process: subprocess.Popen[bytes], seconds: float = 180) -> None:
    """Wait until a process has printed a text."""
    until = time.monotonic() + seconds
    while words not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"no {words!r} in {log}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def write_partition(folder: Path, most: int | None) -> list[str]:
    """Write a csv file of the built-in patients' messages for each data owner; return the labels that all must know."""
    text = find_corpus_file("builtin:patient-messages", "train", "data.train").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))[:most]
    for number, owner in enumerate(OWNERS):
        with (folder / f"{owner}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows[number :: len(OWNERS)])
    return sorted({row["label"] for row in rows})


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="builtin:all-minilm-l6-v2", help="an encoder of BERT's kind: hub id or folder"
    )
    parser.add_argument("--layer", type=int, default=5, help="the layer to adapt; MiniLM's last one is 5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="left out: runs/three_machines, or runs/three_machines-smoke")
    parser.add_argument("--smoke", action="store_true", help="one round on 120 texts")
    args = parser.parse_args()
    args.out = args.out or Path("runs/three_machines-smoke" if args.smoke else "runs/three_machines")
    out, port = args.out.resolve(), free_port()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {args.out}: there is something in it; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    # Asked to end (kill, a scheduler), Python would end at once and leave the others behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    labels = write_partition(out, 120 if args.smoke else None)
    server, run = out / "server", out / "run"
    with ExitStack() as stack:
        # The operator starts the server, which makes an authority and a certificate.
        listening = stack.enter_context(
            run_command(out / "server.log", "server", "--folder", server, "--host", "127.0.0.1", "--port", str(port))
        )
        wait_for("listening on", out / "server.log", listening)
        for owner in OWNERS:
            # A data owner makes a key and sends its public half to the operator, who admits it under one name.
            call("join", "--new-key", out / f"{owner}.key")
            call("admit", out / f"{owner}.key.pub", "--as", owner, "--server", server)
            # The texts are made up, so metrics are sent as measured; real data need the noise of the default.
            plain = {"evaluation_epsilon": None, "evaluation_examples": 1, "train_examples": 1}
            node: dict[str, Any] = {
                "id": owner,
                "server": f"127.0.0.1:{port}",
                "authority": str(server / "ca.crt"),
                "key": str(out / f"{owner}.key"),
                "folder": str(out / f"{owner}-state"),
                "data": {"train": str(out / f"{owner}.csv")},  # neither the file nor its path leaves the owner
                "threads": 1,
                # This script is all owners at once. Elsewhere leave approve out: runs then wait for fedspan approve.
                "limits": {"approve": "auto", "models": [args.model], "methods": ["fedit", "rolora"], **plain},
            }
            (out / f"{owner}.yaml").write_text(yaml.safe_dump(node), encoding="utf-8")
            stack.enter_context(run_command(out / f"{owner}.log", "join", out / f"{owner}.yaml"))

        config: dict[str, Any] = {
            "model": {"name": args.model, "target_modules": ["query", "value"], "layers_to_transform": args.layer},
            "data": {"labels": labels},
            "partition": {"clients": len(OWNERS)},
            "method": {"name": "fedit", "r": 8, "lora_alpha": 16},
            "federation": {"rounds": 1 if args.smoke else args.rounds},
        }
        (out / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        call("submit", out / "config.yaml", "--out", run, "--server", server)
        call("status", "--server", server)

    report = fedspan.resume(run)  # of a finished run: its report
    for owner, scores in report.by_client.items():
        print(f"{owner}: {scores['accuracy']:.1%} on its own test part")
    print(f"adapter: {run / report.adapters['global']}")


if __name__ == "__main__":
    main()
