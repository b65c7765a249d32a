"""Diagnostics of one round of an existing run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fedspan.assembly.run import collect_objects, prepare
from fedspan.diagnostics.round_diagnosis import Diagnosis, diagnose_round
from fedspan.errors import FedspanError
from fedspan.run_folder import RunFolder, describe_missing_run
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.checkpoint_format import load as load_checkpoint
from fedspan.runs.integrity import read_resolved_config, require_intact, require_same_base
from fedspan.runs.privacy_budget import load_noise_key
from fedspan.runs.report import is_run, read_partition


def diagnose(
    run_folder: str | Path,
    round: int | Literal["best", "last"] = "last",
    *,
    pairs: int = 3,
    examples: int = 500,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
) -> Diagnosis:
    """Run one more round from a checkpoint without storing it, and measure the clients' updates.

    Args:
        run_folder: Folder of a run on this machine, finished or not.
        round: The checkpoint to start from: ``last``, ``best`` (by validation), or a number; a run stores those of its
            last two rounds and of the best one.
        pairs: Maximum number of client pairs between whose models the loss is measured; 0: none.
        examples: Maximum number of held-out examples for these measurements.
        data: The data, if the run began with data passed from Python.
        model: The model, if the run began with one passed from Python, with its weights as they were then.
        tokenizer: The tokenizer, if the run began with one passed from Python.

    Returns:
        Numbers by layer (``layers``) and by pair (``barriers``); the dataclasses document each.

    Examples:
        >>> diagnosis = fedspan.diagnose("runs/first", round="best", pairs=0)
        >>> diagnosis.alignment

    Raises:
        FedspanError: If there is no run or no such checkpoint, the run is a deployment's (its clients' data are
            elsewhere), or a number is invalid.
    """
    for name, value, least in (("pairs", pairs, 0), ("examples", examples, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FedspanError(name, value, f"a whole number from {least}")
    folder = Path(run_folder)
    if not is_run(folder):
        expected = "the folder of a run (config.yaml is in it)"
        raise FedspanError("run folder", str(folder), expected, problem=describe_missing_run(folder))
    run_files, config = RunFolder(folder), read_resolved_config(folder)
    if not run_files.partition.is_file():
        raise FedspanError(
            "run folder",
            str(folder),
            "a run on this machine",
            problem="the data of this run's clients are on other machines",
        )
    require_intact(run_files)
    objects = collect_objects(config, "fedspan.diagnose", data, model, tokenizer)
    checkpoint = load_checkpoint(checkpoints.select_checkpoint(run_files, round))
    prepared = prepare(config, read_partition(folder), load_noise_key(run_files.path, config), objects=objects)
    if prepared.base_digest is not None:
        require_same_base(run_files, prepared.base_digest(), "model")
    return diagnose_round(
        prepared.federation,
        checkpoint.progress,
        prepared.train if prepared.test is None else prepared.test,
        title=config.method.title,
        seed=config.seed,
        batch_size=prepared.evaluator.batch_size,
        pairs=pairs,
        examples=examples,
    )
