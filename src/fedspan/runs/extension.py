"""Extension of a run that has started: more rounds than it was planned with, or more patience.

It is allowed where nothing that has been run depends on the old number, so that the run ends with the same bits as one
that was planned with the new number from its start and stacks as many clients (``training.stacking``).
"""

from __future__ import annotations

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, remove, write_atomic
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.callbacks import Listener
from fedspan.runs.environment import extend_command
from fedspan.runs.folder import RunFolder
from fedspan.runs.integrity import format_config, list_differences, require_intact
from fedspan.runs.planned_rounds import ROUNDS_FIELD, require_independent_rounds
from fedspan.runs.selection import has_stalled

__all__ = ["extend", "require_extensible"]

_ROUNDS, _PATIENCE = ROUNDS_FIELD, "federation.early_stopping"


def require_extensible(run_folder: RunFolder, stored: RunConfig, changed: RunConfig) -> None:
    """Check that a run may continue under another config.

    Args:
        run_folder: Folder of the run.
        stored: The config in the folder.
        changed: The config to extend the run with.

    Raises:
        FedspanError: If it may not; the error names the field, and what to do.
    """
    for field, (before, after) in list_differences(stored, changed).items():
        if field not in (_ROUNDS, _PATIENCE):
            problem = (
                f"the config with which this run began has {before!r}, and only {_ROUNDS} and {_PATIENCE} can change "
                "in a run. Start a new run in another folder"
            )
            raise FedspanError(field, after, problem=problem)
    done, before, after = checkpoints.read_last_saved_round(run_folder), stored.federation, changed.federation
    if after.rounds != before.rounds:
        if after.rounds <= done:
            raise FedspanError(_ROUNDS, after.rounds, f"more than {done}, the rounds that this run has finished")
        require_independent_rounds(done, stored, changed)
    if before.early_stopping != after.early_stopping and after.early_stopping is not None:
        raised = before.early_stopping is not None and after.early_stopping > before.early_stopping
        if not raised:
            problem = "a run that has started can get more patience, not less, because it may have run too many rounds"
            raise FedspanError(_PATIENCE, after.early_stopping, problem=problem)
    improved = checkpoints.read_selection(run_folder).improved
    if done < after.rounds and has_stalled(changed, done, improved):
        assert improved is not None
        problem = (
            f"early stopping ended this run after round {done}, because no round after {improved.round} was better, "
            f"and {after.early_stopping} rounds without a better one end it again. Raise it, or set it to null"
        )
        raise FedspanError(_PATIENCE, after.early_stopping, problem=problem)


def extend(run_folder: RunFolder, stored: RunConfig, changed: RunConfig, listener: Listener) -> None:
    """Make a run one that is not finished, under a changed config.

    Its report and its baselines, whose number of epochs is that of the rounds, are removed first: whatever interrupts
    this, the folder holds an unfinished run under one of the two configs.

    Args:
        run_folder: The run folder, whose lock this process holds.
        stored: The config in the folder.
        changed: The changed config.
        listener: Listener that receives notes.

    Raises:
        FedspanError: If the run cannot continue under the changed config, or the disk cannot be written.
    """
    require_intact(run_folder)
    require_extensible(run_folder, stored, changed)
    changes = list_differences(stored, changed)
    if not changes:
        return
    trained = run_folder.baselines.is_dir()
    with convert_disk_errors(run_folder.path):
        remove(run_folder.report)
        remove(run_folder.baselines)
        texts = {field: "null" if after is None else after for field, (_, after) in changes.items()}
        extend_command(run_folder, [f"{field}={text}" for field, text in texts.items()])
        write_atomic(run_folder.config, format_config(changed).encode())
    for field, (before, after) in changes.items():
        listener.on_note(f"{field} is {after} from now on, and was {before}")
    if trained:
        listener.on_note("the baselines are trained again, because their number of epochs is that of the rounds")
    last, every = stored.federation.rounds, stored.evaluation.every
    if checkpoints.read_last_saved_round(run_folder) == last < changed.federation.rounds and last % every:
        listener.on_note(f"round {last} was measured as the last one, though evaluation.every is {every}")
