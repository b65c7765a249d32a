"""Count the source files that a reply passes, from a client's training to the exported adapter.

    python tests/tools/reply_path.py                          # this checkout
    python tests/tools/reply_path.py --source ../before       # another one, such as a worktree

One round of FedIT is run on the loop engine, in the simulator and in a deployment with TLS and keys. Every process of
it (the run, the serving process, the nodes and their workers) records which of the project's functions take or return
a reply: the tensors that training returned, or bytes that hold them, enciphered or not
(``reply_recorder``). After the replies are reduced, it is what they are reduced to. A function takes what its arguments
hold, other than its object, in containers and dataclasses. The count is the number of files with
such a function. Files that hold the mathematics and the model (core, methods, wrappers, models, tasks, data) are left
out: they are where a reply is made and used, not what it passes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from reply_recorder import ReplyForms, read_files

HERE = Path(__file__).resolve().parent


def trace(source: Path, deployed: bool) -> list[str]:
    """Run one round and return the files that the reply passes, sorted.

    Args:
        source: The checkout to trace.
        deployed: Whether to run a deployment; else the simulator.
    """
    with tempfile.TemporaryDirectory(prefix="reply-path-") as made:
        folder = Path(made)
        (folder / "inputs").mkdir()
        for name in ("seen", "forms", "site"):
            (folder / name).mkdir()
        root = str(source / "src" / "fedspan") + os.sep
        places = root, str(folder / "seen"), str(folder / "forms")
        (folder / "site" / "sitecustomize.py").write_text(f"import reply_recorder\nreply_recorder.start(*{places!r})\n")
        paths = [str(folder / "site"), str(source / "src"), str(HERE), str(HERE.parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        kind = "deployment" if deployed else "loop"
        subprocess.run([sys.executable, __file__, "--run", kind, str(folder)], env=environment, check=True)
        return sorted(read_files(folder / "seen", ReplyForms(folder / "forms")))


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
    from helpers.stage import Deployment

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
    parser.add_argument("--source", type=Path, default=HERE.parents[1], help="the checkout to trace; this one")
    parser.add_argument("--json", action="store_true", help="print the files, too, as JSON")
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]))
        return
    arguments = parser.parse_args()
    counts = {
        name: trace(arguments.source.resolve(), deployed)
        for name, deployed in (("simulator", False), ("deployment", True))
    }
    if arguments.json:
        print(json.dumps(counts, indent=1))
    for name, files in counts.items():
        print(f"{name}: {len(files)} files")


if __name__ == "__main__":
    main()
