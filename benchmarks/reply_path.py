"""Count the source files that a reply passes, from a client's batch to the exported adapter.

    python benchmarks/reply_path.py                          # this checkout
    python benchmarks/reply_path.py --source ../before       # another one, such as a worktree

One round of FedIT is run on the loop engine, in the simulator and in a deployment with TLS and keys. Every process
records which of the project's functions run while it works on the round: the server while it runs the round and writes
the adapters, a node while it answers an order. The count is the number of files with such a function. Files that hold
the mathematics and the model (core, methods, wrappers, models, tasks, data) are left out: they are where a reply is
made and used, not what it passes.
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
import atexit, json, os, sys, threading
MARKERS, ROOT, OUT = set({markers!r}), {root!r}, {out!r}
seen, state = set(), threading.local()

def profile(frame, event, _):
    if event not in ("call", "return"):
        return
    code = frame.f_code
    if not code.co_filename.startswith(ROOT):
        return
    depth = getattr(state, "depth", 0)
    marked = code.co_name in MARKERS
    if event == "call":
        state.depth = depth + marked
        if (depth or marked) and code.co_name != "<module>":
            name = code.co_filename[len(ROOT):]
            if name not in seen:
                seen.add(name)
                with open(os.path.join(OUT, str(os.getpid())), "a") as file:
                    file.write(name + "\\n")
    elif marked and depth:
        state.depth = depth - 1

sys.setprofile(profile)
threading.setprofile(profile)
"""


def trace(source: Path, deployed: bool) -> list[str]:
    """Run one round and return the files that the reply passes, sorted.

    Args:
        source: The checkout to trace.
        deployed: Whether to run a deployment; else the simulator.
    """
    with tempfile.TemporaryDirectory(prefix="reply-path-") as made:
        folder = Path(made)
        (folder / "inputs").mkdir()
        (folder / "seen").mkdir()
        (folder / "site").mkdir()
        root = str(source / "src" / "fedspan") + os.sep
        recorder = RECORDER.format(markers=MARKERS, root=root, out=str(folder / "seen"))
        (folder / "site" / "sitecustomize.py").write_text(recorder)
        paths = [str(folder / "site"), str(source / "src"), str(HERE)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        kind = "deployment" if deployed else "loop"
        subprocess.run([sys.executable, __file__, "--run", kind, str(folder)], env=environment, check=True)
        found = {line for path in (folder / "seen").iterdir() for line in path.read_text().splitlines()}
    return sorted(name for name in found if not name.startswith(LEFT_OUT))


def run(kind: str, folder: Path) -> None:
    """Run the round, in a process under the recorder.

    Args:
        kind: ``loop`` or ``deployment``.
        folder: Folder for inputs and outputs.
    """
    import digests

    digests.save_inputs(folder / "inputs")
    values = digests.configs(folder / "inputs", "loop")["method-fedit"]
    values["federation"] = {"rounds": 1}
    if kind == "loop":
        import fedspan

        fedspan.run(values, folder / "run")
        return
    from stage import Deployment

    values = {key: value for key, value in values.items() if key not in ("engine", "device", "threads")}
    values["data"] = {"labels": values["data"]["labels"]}
    values["partition"] = {"partitioner": "iid", "clients": len(digests.SITES), "validation": 0.1, "test": 0.1}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    with Deployment(folder / "deployed") as deployment:
        for site in digests.SITES:
            deployment.join(site, deployment.node_file(site, folder / "inputs" / f"{site}.csv"))
        deployment.submit(config, folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=HERE.parent, help="the checkout to trace; this one")
    parser.add_argument("--json", action="store_true", help="print the files, too, as JSON")
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]))
        return
    arguments = parser.parse_args()
    found = {
        name: trace(arguments.source.resolve(), deployed)
        for name, deployed in (("simulator", False), ("deployment", True))
    }
    if arguments.json:
        print(json.dumps(found, indent=1))
    for name, files in found.items():
        print(f"{name}: {len(files)} files")


if __name__ == "__main__":
    main()
