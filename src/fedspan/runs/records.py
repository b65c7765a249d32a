"""Records in a finished run's report beside its results: the config, the files and the ends of the logs.

``integrity`` compares a whole run with it; whoever uses one exported model compares that model's files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspan.errors import FedspanError
from fedspan.files import compute_sha256
from fedspan.logs import Position
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.folder import CARD, RunFolder

RECORDS = ("config", "files", "logs")
"""Fields of report.json that ``RunReport`` lacks: the run's files are compared with them."""


@dataclass(frozen=True)
class Records:
    """What a finished run's report names beside the results.

    Args:
        config: The configuration (``describe_config``).
        files: SHA-256 of inputs and results, by path relative to the run folder.
        positions: The ends of the logs, by file name.
    """

    config: str
    files: Mapping[str, str]
    positions: Mapping[str, Position]


def read_records(run_folder: RunFolder) -> Records:
    """Read what a finished run's report names."""
    content = run_folder.read_sealed(run_folder.report)
    try:
        positions = {str(name): Position(int(length), str(head)) for name, (length, head) in content["logs"].items()}
        return Records(str(content["config"]), dict(content["files"]), positions)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        expected = f"a report with {', '.join(RECORDS)}"
        raise FedspanError(str(run_folder.report), sorted(content), expected) from error


def compute_result_digests(run_folder: RunFolder) -> dict[str, str]:
    """Return the SHA-256 of environment.json, exported files and predictions, by path relative to the run folder.

    Model cards are left out: their readers complete them.
    """
    exported = sorted(path for path in run_folder.adapter.rglob("*") if path.is_file() and path.name != CARD)
    files = (run_folder.environment, *exported, *sorted(run_folder.predictions.glob("*.safetensors")))
    return {path.relative_to(run_folder.path).as_posix(): compute_sha256(path) for path in files}


def require_same_files(run_folder: RunFolder, digests: Mapping[str, str], source: str = "the checkpoint") -> None:
    """Check files of a run.

    Args:
        run_folder: The run folder.
        digests: SHA-256 of the files, by path relative to the run folder. Other files are not checked.
        source: What names the digests, for the error.

    Raises:
        FedspanError: If a file is missing or differs; the error names the remedy.
    """
    for name, digest in digests.items():
        path = run_folder.path / name
        if not path.is_file():
            problem = f"the file is missing, and {source} names it"
        elif compute_sha256(path) != digest:
            problem = f"the file was changed after the run wrote it: its SHA-256 is not the one that {source} names"
        else:
            continue
        remedy = "Restore the file"
        # Without a checkpoint, a resumed run would start again from its first round.
        if path.is_relative_to(run_folder.adapter) and checkpoints.read_last_saved_round(run_folder):
            remedy += f", or delete {run_folder.report} and resume the run, which exports its models again"
        raise FedspanError(str(path), name, problem=f"{problem}. {remedy}")


def require_intact_model(folder: Path) -> None:
    """Check the files of a trained model against the report of the finished run that exported them.

    Args:
        folder: Folder of the model; nothing names the files of one that is not in a run's ``adapter/``.

    Raises:
        FedspanError: If a file is missing or not what the run wrote, or the report was changed.
    """
    for path in dict.fromkeys((Path(os.path.abspath(folder)), Path(os.path.realpath(folder)))):  # links, too
        for parent in path.parents[:2]:  # adapter/ or, in it, the folder of a client
            run_folder = RunFolder(parent)
            if path.is_relative_to(run_folder.adapter) and run_folder.config.is_file() and run_folder.report.is_file():
                files = read_records(run_folder).files
                exported = {name: files[name] for name in files if (parent / name).is_relative_to(path)}
                require_same_files(run_folder, exported, run_folder.report.name)
