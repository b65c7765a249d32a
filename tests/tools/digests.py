"""Prove that a change of the source left results as they were: record what runs leave, and compare two records.

    python tests/tools/digests.py record before.json --source ../before       # another checkout, such as a worktree
    python tests/tools/digests.py record after.json
    python tests/tools/digests.py compare before.json after.json

A record holds, for every case, the digest of each tensor of the server's checkpoints, of the clients' stores and of the
exported adapters, with the structure around them, and the rows of ledger and metrics without wall times. Cases
(``digest_cases``) are every registered method, wrapper and built-in task, and what they leave out of the
parametrizations, the reductions, the kinds of privacy and secure aggregation. They run on the loop engine, on the
batched engine with a fixed stacking plan, on two workers of Ray, and in a deployment with TLS and keys. The case
of owners' own trainers, which replace an engine, runs with the first and the last. The tool uses only the command line
and the Python API, so it can record any checkout that has them. Bits depend on the machine and the number of threads:
record both sides on one machine.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from digest_cases import TRAINERS, build_configs, get_node_data, get_sent_data
from digest_inputs import SITES, save_inputs
from digest_trainer import make_trainer

HERE = Path(__file__).resolve().parent
HOSTS = ("loop", "batched", "ray", "deployment")
TIMED = {"seconds", "time", "started", "finished", "chain"}
"""Fields of wall times, which differ from run to run, and ``chain``, by which lines of logs cover wall times."""


def digest_folder(folder: Path) -> dict[str, Any]:
    """What a run left in its folder: every tensor's digest, structures, and rows without wall times."""
    digests: dict[str, Any] = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            digests |= _digest_tensors(name, path)
        elif path.name in ("ledger.jsonl", "metrics.jsonl"):
            digests[name] = [_remove_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name in ("report.json", "partition.json"):
            content = json.loads(path.read_text())
            # The rest covers times and paths: digests of files, and the config with the paths of this machine.
            repeated = ("config", "files", "logs", "sha256")
            digests[name] = _remove_times({key: value for key, value in content.items() if key not in repeated})
    return digests


def _digest_tensors(name: str, path: Path) -> dict[str, Any]:
    """The digests of a file by its name, or, of a client's stored state, by its parts."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    structure = json.loads(header.pop("__metadata__", {}).get("fedspan", "{}"))
    structure.pop("sha256", None)  # of the file's own bytes
    tensors: dict[str, str] = {}
    for tensor, entry in header.items():
        start, end = entry["data_offsets"]
        content = data[8 + size + start : 8 + size + end]
        tensors[tensor] = f"{entry['dtype']}{entry['shape']} {hashlib.sha256(content).hexdigest()[:32]}"
    if not structure:
        return {name: {"tensors": dict(sorted(tensors.items()))}}
    if structure.get("kind") == "client":
        return {f"{Path(name).parent}/{part}": value for part, value in _split_state(structure, tensors)}
    return {name: {"value": _insert_digests(structure, tensors)}}


def _split_state(structure: Mapping[str, Any], tensors: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The parts of a client's stored state, which leaves out what is empty."""
    client = structure["of"]
    if memory := structure.get("memory"):
        yield f"{client} memory", _insert_digests(memory, tensors, True)
    for phase, own in structure.get("moments", {}).items():
        content = _insert_digests(own["moments"], tensors, True)
        yield f"{client} moments {phase}", {"generation": own["generation"], "steps": own["steps"], "moments": content}
    if "base" in structure:
        yield f"{client} base", _insert_digests(structure["base"], tensors)


def _insert_digests(structure: Any, tensors: Mapping[str, str], inside: bool = False) -> Any:
    """A structure in which numbers of tensors are replaced by their digests, under the names that they stand for."""
    if isinstance(structure, Mapping):
        return {key: _insert_digests(value, tensors, inside or key in _HOLDERS) for key, value in structure.items()}
    if isinstance(structure, list):
        return [_insert_digests(value, tensors, inside) for value in structure]
    if inside and type(structure) is int:
        return tensors.get(str(structure), structure)
    return structure


_HOLDERS = {"tensors", "memory", "moments", "deltas", "total", "value"}
"""Keys of a structure below which whole numbers name tensors."""


def _remove_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _remove_times(one) for key, one in value.items() if key not in TIMED}
    return [_remove_times(one) for one in value] if isinstance(value, list) else value


def record_host(host: str, folder: Path, only: str, write: Callable[[Mapping[str, Any]], object]) -> None:
    """Run every case on one host; a case that the checkout refuses is recorded with its refusal.

    Args:
        host: One of ``HOSTS``.
        folder: For runs; its ``inputs`` are there.
        only: A regular expression that the cases' names match.
        write: Called after each case with what is recorded so far, so that a recording that is cut off is of use.
    """
    digests: dict[str, Any] = {}
    nodes = _Nodes(folder) if host == "deployment" else None
    try:
        for name, values in build_configs(folder / "inputs", host).items():
            if not re.search(only, name):
                continue
            out = folder / host / name
            try:
                digests[name] = _run(values, folder, out) if nodes is None else _run_deployment(nodes, values, out)
            except Exception as error:
                digests[name] = {"refused": _remove_varying(str(error), folder)}
                if os.environ.get("DIGESTS_TRACE"):
                    traceback.print_exc()
            print(f"{host}: {name}: {digests[name].get('refused', 'recorded')}", file=sys.stderr, flush=True)
            write(digests)
    finally:
        if nodes is not None:
            nodes.deployment.__exit__()


def _run(values: Mapping[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    """Run a case in this process."""
    import fedspan

    if values.get("task") == TRAINERS:
        trainers = {site: partial(make_trainer, folder / "inputs", site) for site in SITES}
        fedspan.simulate(values, out, trainers=trainers)
    else:
        fedspan.run(values, out)
    return digest_folder(out)


def _remove_varying(text: str, folder: Path) -> str:
    """A message without what differs from run to run: folders and, in logs, times."""
    return text.replace(str(folder), "FOLDER")[:500]


class _Nodes:
    """A deployment and its nodes, which join again when a case needs other data than the one before.

    Args:
        folder: For keys, states and logs; its ``inputs`` are there.
    """

    def __init__(self, folder: Path) -> None:
        from helpers.stage import Deployment

        self.folder, self.deployment = folder, Deployment(folder / "deployed").__enter__()
        self._joined: dict[str, tuple[dict[str, Any], bool]] = {}

    def join(self, values: Mapping[str, Any], has_trainers: bool) -> None:
        """Have all nodes join with the data of a case, or with their owners' own trainers."""
        for site in SITES:
            wanted = get_node_data(values, site), has_trainers
            if self._joined.get(site) == wanted:
                continue
            if site in self.deployment.processes:
                self.deployment.end(site, signal.SIGTERM)
            train, columns = Path(wanted[0]["train"]), {**wanted[0]}
            columns.pop("train")
            if has_trainers:
                path = self.deployment.node_file(site, train)
                path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "data": {}}))
                script = [sys.executable, str(HERE / "digest_trainer.py"), str(path), str(self.folder / "inputs"), site]
                self.deployment.start(site, options=script)
            else:
                split = {"validation": 0.1, "test": 0.1, "split_seed": 3}  # that of the base config
                self.deployment.join(site, self.deployment.node_file(site, train, columns, **split))
            self._joined[site] = wanted


def _run_deployment(nodes: _Nodes, values: Mapping[str, Any], out: Path) -> dict[str, Any]:
    nodes.join(values, has_trainers=out.name == TRAINERS)
    sent = {key: value for key, value in values.items() if key not in ("engine", "device", "threads")}
    sent["data"] = get_sent_data(values)
    sent["partition"] = {"partitioner": "iid", "clients": len(SITES), "validation": 0.1, "test": 0.1}
    sent["federation"] = {**values["federation"], "deadline": 60.0}
    config = nodes.folder / "config.yaml"
    config.write_text(yaml.safe_dump(sent))
    log = nodes.folder / "submit.txt"
    server = str(nodes.deployment.server)
    if _run_forked(["submit", str(config), "--out", str(out), "--server", server, "--wait", "300"], log):
        return {"refused": _remove_varying(log.read_text(), nodes.folder)}
    digests = digest_folder(out)
    for site in SITES:
        runs = sorted((nodes.deployment.folder / f"{site}-state").glob("*/kept"), key=lambda path: path.stat().st_mtime)
        for path in runs[-1:]:
            digests |= {f"node {site}/{key}": value for key, value in digest_folder(path).items()}
    return digests


def _run_forked(arguments: list[str], log: Path) -> int:
    """Run a command of the recorded checkout in a fork of this process, which has torch loaded; its exit code."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch

    from fedspan.cli import app

    torch.set_num_threads(1)
    sys.stdout.flush()
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code: object = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["fedspan", *arguments]
        app()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _record(arguments: argparse.Namespace) -> int:
    source = arguments.source.resolve()
    digests: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="digests-") as made:
        folder = Path(made)
        (folder / "inputs").mkdir()
        sys.path.append(str(HERE.parent))
        save_inputs(folder / "inputs")
        paths = [str(source / "src"), str(HERE), str(HERE.parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        environment |= {"COLUMNS": "160", "OMP_NUM_THREADS": "1"}
        for host in arguments.hosts.split(","):
            out = folder / f"{host}.json"
            command = [sys.executable, __file__, "run", host, str(out), str(folder), arguments.only]
            subprocess.run(command, env=environment, check=True)
            digests[host] = json.loads(out.read_text())
    arguments.out.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    print(f"{sum(map(len, digests.values()))} cases recorded in {arguments.out}")
    return 0


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Differences between two records, one line each."""
    for path, left, right in _list_differences(before, after):
        yield f"{path[1:]}: {_shorten(left)} -> {_shorten(right)}"


def count_compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Count the cases that both records hold as recorded, not as refused, each host's by itself."""
    pairs = [(cases.get(case), found) for host, cases in before.items() for case, found in after.get(host, {}).items()]
    return sum(one is not None and "refused" not in one and "refused" not in other for one, other in pairs)


def _list_differences(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            yield from _list_differences(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _list_differences(left, right, f"{path}[{number}]")
    elif one != other and not (one != one and other != other):
        yield path, one, other


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 120 else f"{text[:117]}..."


def _compare(arguments: argparse.Namespace) -> int:
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    differences = list(compare(before, after))
    for line in differences[: arguments.most]:
        print(line)
    result = f"{len(differences)} differences" if differences else "equal"
    print(f"{count_compared(before, after)} cases recorded on both sides: {result}")
    return 1 if differences else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="run every case and record what it leaves")
    record.add_argument("out", type=Path)
    record.add_argument("--source", type=Path, default=HERE.parents[1], help="the checkout to record; this one")
    record.add_argument("--hosts", default=",".join(HOSTS))
    record.add_argument("--only", default="", help="a regular expression that names of cases match")
    record.set_defaults(call=_record)
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--most", type=int, default=50, help="differences to print")
    comparing.set_defaults(call=_compare)
    if sys.argv[1:2] == ["run"]:  # the process that `record` starts, on the recorded checkout's own code
        host, out, folder, only = sys.argv[2:6]
        record_host(host, Path(folder), only, lambda found: Path(out).write_text(json.dumps(found)))
        return 0
    arguments = parser.parse_args()
    return int(arguments.call(arguments))


if __name__ == "__main__":
    sys.exit(main())
