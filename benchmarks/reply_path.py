"""Count the source files that a reply passes, from a client's batch to the exported adapter.

    python benchmarks/reply_path.py                          # this checkout
    python benchmarks/reply_path.py --source ../before       # another one, such as a worktree

One round of FedIT is run on the loop engine, in the simulator and in a deployment with TLS and keys. Every process
records which of the project's functions run while it works on the round: the server while it runs the round and writes
the adapters, a node while it answers an order. A function counts if an argument other than its object, or its result,
holds a tensor or an encoded message (in containers and dataclasses, too); functions that only draw random numbers,
count bytes, or write logs do not. The count is the number of files with such a function; ``--all`` counts the files
with any function that runs. Files that hold the mathematics and the model (core, methods, wrappers, models, tasks,
data) are left out: they are where a reply is made and used, not what it passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
LEFT_OUT = ("cli/", "config/", "core/", "methods/", "wrappers/", "models/", "tasks/", "data/", "errors.py", "analysis/")
MARKERS = (
    "run_round",
    "run_rounds",
    "play",
    "write_adapters",
    "conclude",
    "_answer",
    "_answer_one",
    "answer",
    "reply",
    "reply_as",
)
"""Functions that work on a round, under their names of before and after the redesign."""

RECORDER = """
import dataclasses, os, sys, threading
MARKERS, ROOT, OUT, ALL = set({markers!r}), {root!r}, {out!r}, {everything!r}
seen, state = set(), threading.local()

def carries(value, depth=5):
    if isinstance(value, bytes):
        return len(value) >= 256
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    if type(value) is dict:
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return False
    return any(carries(part, depth - 1) for part in parts[:12])

def arguments(frame):
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = frame.f_locals
    return [values[name] for name in names if name not in ("self", "cls") and name in values]

def profile(frame, event, result):
    if event not in ("call", "return"):
        return
    code = frame.f_code
    if not code.co_filename.startswith(ROOT):
        return
    depth = getattr(state, "depth", 0)
    marked = code.co_name in MARKERS
    if event == "call":
        state.depth = depth + marked
    name = code.co_filename[len(ROOT):]
    if (depth or marked) and code.co_name != "<module>" and name not in seen:
        if ALL or carries(result) or (event == "call" and any(carries(value) for value in arguments(frame))):
            seen.add(name)
            with open(os.path.join(OUT, str(os.getpid())), "a") as file:
                file.write(name + "\\n")
    if event == "return" and marked and depth:
        state.depth = depth - 1

sys.setprofile(profile)
threading.setprofile(profile)
"""


def trace(source: Path, deployed: bool, everything: bool) -> list[str]:
    """Run one round and return the files that the reply passes, sorted.

    Args:
        source: The checkout to trace.
        deployed: Whether to run a deployment; else the simulator.
        everything: Whether to count functions without tensors or messages, too.
    """
    with tempfile.TemporaryDirectory(prefix="reply-path-") as made:
        folder = Path(made)
        (folder / "inputs").mkdir()
        (folder / "seen").mkdir()
        (folder / "site").mkdir()
        root = str(source / "src" / "fedspan") + os.sep
        recorder = RECORDER.format(markers=MARKERS, root=root, out=str(folder / "seen"), everything=everything)
        (folder / "site" / "sitecustomize.py").write_text(recorder)
        paths = [str(folder / "site"), str(source / "src"), str(HERE)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        kind = "deployment" if deployed else "loop"
        subprocess.run([sys.executable, __file__, "--run", kind, str(folder)], env=environment, check=True)
        files = {line for path in (folder / "seen").iterdir() for line in path.read_text().splitlines()}
    return sorted(name for name in files if not name.startswith(LEFT_OUT))


def run(kind: str, folder: Path) -> None:
    """Run the round, in a process under the recorder.

    Args:
        kind: ``loop`` or ``deployment``.
        folder: Folder for inputs and outputs.
    """
    import digest_cases
    import digest_inputs

    digest_inputs.save_inputs(folder / "inputs")
    values = digest_cases.build_configs(folder / "inputs", "loop")["method-fedit"]
    values["federation"] = {"rounds": 1}
    if kind == "loop":
        import fedspan

        fedspan.run(values, folder / "run")
        return
    from stage import Deployment

    values = {key: value for key, value in values.items() if key not in ("engine", "device", "threads")}
    values["data"] = {"labels": values["data"]["labels"]}
    values["partition"] = {"partitioner": "iid", "clients": len(digest_inputs.SITES), "validation": 0.1, "test": 0.1}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    with Deployment(folder / "deployed") as deployment:
        for site in digest_inputs.SITES:
            train = folder / "inputs" / f"{site}.csv"
            deployment.join(site, deployment.node_file(site, train, validation=0.1, test=0.1))
        deployment.submit(config, folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=HERE.parent, help="the checkout to trace; this one")
    parser.add_argument("--all", action="store_true", help="count files with any function that runs")
    parser.add_argument("--json", action="store_true", help="print the files, too, as JSON")
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]))
        return
    arguments = parser.parse_args()
    counts = {
        name: trace(arguments.source.resolve(), deployed, arguments.all)
        for name, deployed in (("simulator", False), ("deployment", True))
    }
    if arguments.json:
        print(json.dumps(counts, indent=1))
    for name, files in counts.items():
        print(f"{name}: {len(files)} files")


if __name__ == "__main__":
    main()
