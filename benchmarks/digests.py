"""Prove that a change of the source left results as they were: record what runs leave, and compare two records.

    python benchmarks/digests.py record before.json --source ../before       # another checkout, such as a worktree
    python benchmarks/digests.py record after.json
    python benchmarks/digests.py compare before.json after.json

A record holds, for every case, the digest of each tensor of the server's checkpoints, of the clients' stores and of the
exported adapters, with the structure around them, and the rows of ledger and metrics without wall times. Cases are
every method and every wrapper, one case for each parametrization and task beside them, on the loop engine, on the
batched engine with a fixed stacking plan, on Flower's simulation engine and in a deployment with TLS and keys. The
tool uses only the command line and the Python API, so it can record any checkout that has them. Bits depend on the
machine and the number of threads: record both sides on one machine.

Differences that a change intends are listed in ``benchmarks/digests.yaml``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
HOSTS = ("loop", "batched", "flower-sim", "deployment")
TIMED = {"seconds", "time", "started", "finished", "chain"}
"""Fields of wall times, which differ from run to run, and ``chain``, by which lines of logs cover wall times."""
TARGETS = ["query", "value", "intermediate.dense", "output.dense"]
LABELS = ("admin", "billing", "lab", "symptom")
SITES = {"north": 19, "south": 32, "west": 58}
_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
_WORDS = [f"{label}{number}" for label in LABELS for number in range(8)] + [f"word{number}" for number in range(12)]


def save_inputs(folder: Path) -> None:
    """Write the models (BERT and GPT-2 with random weights) and the data that all cases share."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    vocabulary = {word: index for index, word in enumerate([*_SPECIAL, *_WORDS])}
    small = {"vocab_size": len(vocabulary), "initializer_range": 0.3}
    bert = transformers.BertConfig(
        **small,
        pad_token_id=0,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    gpt2 = transformers.GPT2Config(
        **small, n_embd=16, n_inner=24, n_layer=2, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=3
    )
    for name, make in (
        ("bert", lambda: transformers.BertModel(bert)),
        ("gpt2", lambda: transformers.GPT2LMHeadModel(gpt2)),
    ):
        torch.manual_seed(5)
        make().save_pretrained(folder / name)
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        if name == "bert":
            tokenizer.post_processor = TemplateProcessing(
                single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
            )
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            unk_token="<unk>",
            eos_token="</s>",
            model_max_length=32,
        ).save_pretrained(folder / name)
    _save_corpus(folder)
    _save_images(folder / "images")


def _save_corpus(folder: Path) -> None:
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number, (site, size) in enumerate(SITES.items()):
        for _ in range(size):
            label = LABELS[number] if rng.random() < 2 / 3 else rng.choice(LABELS)
            words = [f"{label}{rng.randrange(8)}" for _ in range(rng.randint(1, 4))]
            words += [f"word{rng.randrange(12)}" for _ in range(rng.randint(1, 5))]
            rng.shuffle(words)
            row = {"text": " ".join(words), "label": label, "site": site, "answer": words[0]}
            rows.append({**row, "target": f"{len(words) / 4:.3f}"})
    for site in (*SITES, "all"):
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row for row in rows if site in (row["site"], "all"))


def _save_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (folder / label).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 128, (12, 12), dtype=np.uint8) + (128 if label == "light" else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.png")


def _start() -> dict[str, str]:
    """A random head on Transformers' own classifier, as in checkouts that know nothing else."""
    from fedspan.config import ModelConfig

    defaults = {"head_init": "random", "pooling": "stock"}
    return {name: value for name, value in defaults.items() if name in ModelConfig.model_fields}


def _build_base(folder: Path) -> dict[str, Any]:
    return {
        "seed": 3,
        "device": "cpu",
        "threads": 1,
        "model": {"name": str(folder / "bert"), "target_modules": TARGETS, "max_length": 16, **_start()},
        "data": {"train": str(folder / "all.csv"), "test_fraction": 0.0, "labels": list(LABELS)},
        "partition": {"partitioner": "natural", "column": "site", "validation": 0.1, "test": 0.1},
        "method": {"name": "fedit", "r": 2, "lora_alpha": 4},
        "federation": {"rounds": 3, "clients_per_round": 2},
        "training": {"lr": 0.02, "local_steps": 3, "batch_size": 4},
        "evaluation": {"batch_size": 32, "metric": "loss"},  # no two rounds are equal by it
    }


def build_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Changes to the base config, section by section, by case: methods and wrappers as this checkout registers them."""
    from fedspan.methods.registry import METHODS
    from fedspan.wrappers.registry import WRAPPERS

    made: dict[str, dict[str, Any]] = {f"method-{name}": {"method": {"name": name}} for name in METHODS}
    sgd = {"training": {"optimizer": "sgd"}}
    for name in WRAPPERS:
        made[f"wrapper-{name}"] = {"method": {"name": "fedit", "wrappers": [{"name": name}]}, **sgd}
    made |= {
        "method-slora-stages": {"method": {"name": "slora", "sparse_rounds": 1}},
        "method-fedloru-accumulation": {"method": {"name": "fedloru", "tau": 2}},
        "moments-stored": {"training": {"optimizer_state": "keep"}},
        "reduction-median": {"federation": {"reduction": "median"}},
        "reduction-trimmed-mean": {"federation": {"reduction": "trimmed-mean"}},
        "reduction-multi-krum": {"federation": {"reduction": "multi-krum"}},
        "reduction-geometric-median": {"federation": {"reduction": "geometric-median"}},
        "reduction-flame": {"federation": {"reduction": "flame"}},
        "clip-fixed-norm": {"federation": {"max_norm": 0.05}},
        "full-cohort": {"federation": {"clients_per_round": None}},
        "dropout": {"training": {"lora_dropout": 0.1}},
        "accumulation": {"training": {"gradient_accumulation_steps": 2}},
        "regression": {
            "task": "regression",
            "data": {"label": "target", "labels": None},
        },
        "causal-lm": {
            "task": "causal-lm",
            "model": {"name": str(folder / "gpt2"), "target_modules": ["c_attn", "c_proj"]},
            "data": {"prompt": "{text}", "answer": "answer", "labels": None},
        },
        "image-classification": {
            "task": "image-classification",
            "data": {"train": str(folder / "images"), "labels": None},
            "model": {"name": "builtin:resnet-8", "pretrained": False, "target_modules": "all-linear"},
            "partition": {"partitioner": "iid", "column": None, "clients": 3},
        },
        "privacy-central": {
            "privacy": {"mechanism": "central", "clip": 1.0, "noise": 0.5, "randomness": "seed"},
            "federation": {"weights": "uniform"},
        },
        "privacy-local": {"privacy": {"mechanism": "local", "clip": 1.0, "noise": 0.5, "randomness": "seed"}},
        "privacy-dp-sgd": {"privacy": {"mechanism": "dp-sgd", "clip": 1.0, "noise": 0.5, "randomness": "seed"}},
        "personal-and-moments": {"method": {"name": "fedsa-lora"}, "training": {"optimizer_state": "keep"}},
    }
    return made


def build_configs(folder: Path, host: str) -> dict[str, dict[str, Any]]:
    """Whole configs by case, for one host."""
    engine = {"batched": {"name": "batched", "clients_per_pass": 2, "workers": 1}, "loop": {"name": "loop"}}
    engine["flower-sim"] = {"name": "flower-sim", "workers": 1}
    made: dict[str, dict[str, Any]] = {}
    for name, changes in build_cases(folder).items():
        values = _build_base(folder)
        for section, change in changes.items():
            merged = {**values.get(section, {}), **change} if isinstance(change, Mapping) else change
            if isinstance(merged, Mapping):
                merged = {key: value for key, value in merged.items() if value is not None}
            values[section] = merged
        made[name] = {**values, "engine": engine.get(host, {"name": "loop"})}
    return made


def digest_folder(folder: Path) -> dict[str, Any]:
    """What a run left in its folder: every tensor's digest, structures, and rows without wall times."""
    digests: dict[str, Any] = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            digests[name] = _digest_tensors(path)
        elif path.name in ("ledger.jsonl", "metrics.jsonl"):
            digests[name] = [_remove_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name in ("report.json", "partition.json"):
            content = json.loads(path.read_text())
            # The rest covers times and paths: digests of files, and the config with the paths of this machine.
            repeated = ("config", "files", "logs", "sha256")
            digests[name] = _remove_times({key: value for key, value in content.items() if key not in repeated})
    return digests


def _digest_tensors(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    structure = json.loads(header.pop("__metadata__", {}).get("fedspan", "{}"))
    structure.pop("sha256", None)  # of the file's own bytes
    tensors: dict[str, str] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        content = data[8 + size + start : 8 + size + end]
        tensors[name] = f"{entry['dtype']}{entry['shape']} {hashlib.sha256(content).hexdigest()[:32]}"
    if not structure:
        return {"tensors": dict(sorted(tensors.items()))}
    return {"value": _insert_digests(structure, tensors)}


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
    import fedspan

    digests: dict[str, Any] = {}
    deployment = _start_deployment(folder) if host == "deployment" else None
    try:
        for name, values in build_configs(folder / "inputs", host).items():
            if not re.search(only, name):
                continue
            out = folder / host / name
            try:
                if deployment is None:
                    fedspan.run(values, out)
                    digests[name] = digest_folder(out)
                else:
                    digests[name] = _run_deployment(deployment, folder, values, out)
            except Exception as error:
                digests[name] = {"refused": _remove_varying(str(error), folder)}
                if os.environ.get("DIGESTS_TRACE"):
                    traceback.print_exc()
            print(f"{host}: {name}: {digests[name].get('refused', 'recorded')}", file=sys.stderr, flush=True)
            write(digests)
    finally:
        if deployment is not None:
            deployment.__exit__()


def _remove_varying(text: str, folder: Path) -> str:
    """A message without what differs from run to run: folders and, in logs, times."""
    return text.replace(str(folder), "FOLDER")[:500]


def _start_deployment(folder: Path) -> Any:
    from stage import Deployment

    made = Deployment(folder / "deployed").__enter__()
    _join(made, folder)
    return made


def _join(deployment: Any, folder: Path, case: str = "") -> None:
    """Have all nodes join, again if they had joined, with the data of a case."""
    for site in SITES:
        if site in deployment.processes:
            deployment.end(site, signal.SIGTERM)
        train = folder / "inputs" / f"{site}.csv"
        columns = {"label": "target"} if case == "regression" else {}
        if case == "image-classification":
            train = folder / "inputs" / "images"
        split = {"validation": 0.1, "test": 0.1, "split_seed": 3}  # that of _base
        deployment.join(site, deployment.node_file(site, train, columns, **split))


def _run_deployment(deployment: Any, folder: Path, values: Mapping[str, Any], out: Path) -> dict[str, Any]:
    sent = {key: value for key, value in values.items() if key not in ("engine", "device", "threads")}
    sent["data"] = {key: value for key, value in values["data"].items() if key in ("labels", "prompt", "answer")}
    # The nodes' usual files hold the data of another task.
    if has_own_task := out.name in ("regression", "image-classification"):
        _join(deployment, folder, out.name)
    if out.name == "image-classification":
        sent["data"]["labels"] = ["dark", "light"]
    sent["partition"] = {"partitioner": "iid", "clients": len(SITES), "validation": 0.1, "test": 0.1}
    sent["federation"] = {**values["federation"], "deadline": 60.0}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(sent))
    log = folder / "submit.txt"
    arguments = ["submit", str(config), "--out", str(out), "--server", str(deployment.server), "--wait", "300"]
    code = _run_forked(arguments, log)
    if has_own_task:
        _join(deployment, folder)
    if code:
        return {"refused": _remove_varying(log.read_text(), folder)}
    digests = digest_folder(out)
    for site in SITES:
        runs = sorted((deployment.folder / f"{site}-state").glob("*/kept"), key=lambda path: path.stat().st_mtime)
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


def compare(before: Mapping[str, Any], after: Mapping[str, Any], changes: Mapping[str, Any]) -> Iterator[str]:
    """Differences between two records, but for those that ``changes`` intends, one line each."""
    for host in sorted({*before, *after}):
        one, other = before.get(host, {}), after.get(host, {})
        for case in sorted({*one, *other}):
            for path, left, right in _list_differences(
                _apply_map(one.get(case), changes), _apply_map(other.get(case), changes)
            ):
                if _is_shorter(case, path, left, right, changes) or _is_changed(case, path, changes):
                    continue
                yield f"{host} {case} {path}: {_shorten(left)} -> {_shorten(right)}"


def _is_shorter(case: str, path: str, left: Any, right: Any, changes: Mapping[str, Any]) -> bool:
    """Whether a number of bytes is smaller by what `shorter` allows: scalars that messages no longer hold."""
    allowed = changes.get("shorter") or {}
    if case not in allowed.get("cases", ()) or not re.search(r"/(bytes|bytes/down|other_bytes/\w+/down)$", path):
        return False
    messages = 1 if path.startswith("/ledger.jsonl") else allowed["messages"]
    return type(left) is type(right) is int and 0 < left - right <= messages * allowed["most"]


def _is_changed(case: str, path: str, changes: Mapping[str, Any]) -> bool:
    """Whether a later change of behavior, listed with its reason, is allowed to show there."""
    return any(
        re.search(one["cases"], case) and re.search(one.get("where", ""), path) for one in changes.get("changed") or ()
    )


def _apply_map(value: Any, changes: Mapping[str, Any]) -> Any:
    """A record under the committed map: keys renamed, keys that are gone left out."""
    gone, renamed = set(changes.get("gone", ())), dict(changes.get("renamed", {}))
    if isinstance(value, Mapping):
        return {renamed.get(key, key): _apply_map(one, changes) for key, one in value.items() if key not in gone}
    return [_apply_map(one, changes) for one in value] if isinstance(value, list) else value


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


def _record(arguments: argparse.Namespace) -> int:
    source = arguments.source.resolve()
    digests: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="digests-") as made:
        folder = Path(made)
        (folder / "inputs").mkdir()
        save_inputs(folder / "inputs")
        paths = [str(source / "src"), str(HERE)]
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


def _compare(arguments: argparse.Namespace) -> int:
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    path = HERE / "digests.yaml"
    changes = yaml.safe_load(path.read_text()) if path.is_file() else {}
    differences = list(compare(before, after, changes or {}))
    for line in differences[: arguments.most]:
        print(line)
    count = sum(len(cases) for cases in after.values())
    print(f"{count} cases: {len(differences)} differences" if differences else f"{count} cases: equal")
    return 1 if differences else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="run every case and record what it leaves")
    record.add_argument("out", type=Path)
    record.add_argument("--source", type=Path, default=HERE.parent, help="the checkout to record; this one")
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
