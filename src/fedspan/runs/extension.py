"""Changes to the config of a run that has started: more rounds or patience, or other resources.

More rounds than planned, or more patience, are allowed where nothing that has been run depends on the old number, so
that the run ends with the same bits as one that was planned with the new number from its start and stacks as many
clients (``training.stacking``). Other fields may change if a resume allows it (``integrity.is_resource``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, remove, write_atomic
from fedspan.progress.listener import Listener
from fedspan.run_folder import RunFolder
from fedspan.runs import checkpoint as checkpoints
from fedspan.runs.environment import extend_command, mark_changed
from fedspan.runs.integrity import (
    ROUNDS_FIELD,
    format_config,
    is_resource,
    list_differences,
    require_independent_rounds,
)
from fedspan.runs.selection import has_stalled

_ROUNDS, _PATIENCE = ROUNDS_FIELD, "federation.early_stopping"


def require_extensible(run_folder: RunFolder, stored: RunConfig, changed: RunConfig) -> None:
    """Check that a run may continue under another config."""
    changes = list_differences(stored, changed)
    for field, (before, after) in changes.items():
        if field not in (_ROUNDS, _PATIENCE) and not is_resource(field, before, after):
            problem = (
                f"the config with which this run began has {before!r}, and only {_ROUNDS}, deadlines, cluster and "
                "engine can change in a run. Start a new run in another folder"
            )
            raise FedspanError(field, after, problem=problem)
    if not _changes_length(changes):
        return
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


def has_effect(run_folder: RunFolder, stored: RunConfig, changed: RunConfig) -> bool:
    """Return whether a run would differ under a changed config; a finished one does by more rounds or patience only."""
    changes = list_differences(stored, changed)
    return bool(changes) and (_changes_length(changes) or not run_folder.report.is_file())


def _changes_length(changes: Iterable[str]) -> bool:
    return any(field in (_ROUNDS, _PATIENCE) for field in changes)


def extend(run_folder: RunFolder, stored: RunConfig, changed: RunConfig, listener: Listener) -> None:
    """Let a run continue under a changed config.

    If it gets more rounds or patience, it is no longer finished: its report and its baselines, whose number of epochs
    is that of the rounds, are removed first, so that whatever interrupts this, the folder holds an unfinished run under
    one of the two configs. A finished run that gets neither keeps its config.
    """
    require_extensible(run_folder, stored, changed)
    if not has_effect(run_folder, stored, changed):
        return
    changes = list_differences(stored, changed)
    changes_length = _changes_length(changes)
    trained = changes_length and run_folder.baselines.is_dir()
    with convert_disk_errors(run_folder.path):
        if changes_length:
            remove(run_folder.report)
            remove(run_folder.baselines)
        extend_command(run_folder, list_overrides(changes, changed))
        if not changes.keys() <= {_ROUNDS, _PATIENCE}:
            mark_changed(run_folder)
        write_atomic(run_folder.config, format_config(changed).encode())
    for field, (before, after) in changes.items():
        listener.on_note(f"{field} is {after} from now on, and was {before}")
    if trained:
        listener.on_note("the baselines are trained again, because their number of epochs is that of the rounds")
    last, every = stored.federation.rounds, stored.evaluation.every
    if checkpoints.read_last_saved_round(run_folder) == last < changed.federation.rounds and last % every:
        listener.on_note(f"round {last} was measured as the last one, though evaluation.every is {every}")


def list_overrides(changes: Mapping[str, tuple[Any, Any]], changed: RunConfig) -> list[str]:
    """Return changes as overrides, ``section.field=value``; a section that the run no longer has is one of them."""
    sections, overrides = changed.model_dump(mode="json"), dict[str, str]()
    for field, (_, after) in changes.items():
        section = field.partition(".")[0]
        if sections[section] is None:
            overrides[section] = "null"
        else:
            overrides[field] = json.dumps(after)
    return [f"{field}={text}" for field, text in overrides.items()]
