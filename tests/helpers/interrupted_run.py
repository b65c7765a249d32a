"""A run of nothing but bookkeeping, the same whenever it is stopped and resumed."""

from pathlib import Path

import torch

from fedspan.clients.mappings import copy_on_write
from fedspan.core.values import OptimizerState, ServerState
from fedspan.federation.progress import ClientState, Progress
from fedspan.logs import JsonLines
from fedspan.run_folder import RunFolder
from fedspan.runs.checkpoint import prune, resume, save, store_clients
from fedspan.runs.checkpoint_format import Checkpoint
from fedspan.runs.ledger import Ledger
from fedspan.runs.selection import Best, Selection


def state_of(round: int) -> ServerState:
    """The server state after a round."""
    return ServerState(round, {"l/A": torch.full((50,), float(round))}, scalars={"rounds": round})


def memory_of(round: int) -> dict[str, torch.Tensor]:
    """What a client keeps whose last round this was."""
    return {"l/B": torch.arange(4) * round}


def begin(path: Path) -> RunFolder:
    """Open a run, whether it was started before or not."""
    return RunFolder.resume(path) if (path / "config.yaml").exists() else RunFolder.create(path, "seed: 1\n")


def go_on(run: RunFolder, stop: int) -> None:
    """From wherever the run stands up to a round."""
    checkpoint = resume(run)
    start, best = (checkpoint.state.round, checkpoint.selection.best) if checkpoint else (0, None)
    progress = checkpoint.progress if checkpoint else Progress(state_of(0))
    with JsonLines(run.metrics) as metrics, Ledger(run.ledger) as ledger:
        for round in range(start + 1, stop + 1):
            for client in ("a", "b"):
                ledger.record(round, client, "down", 100 + round, 80)
                ledger.record(round, client, "up", 50 + round, 40)
            score = round % 4 + round / 100
            metrics.append({"round": round, "score": score, "bytes": ledger.totals.run("up").bytes})
            best = max(filter(None, (best, Best(score, 0.0, round))))
            moments = OptimizerState({"exp_avg": {"l/A": torch.ones(3) * round}}, {"l/A": round})
            positions = {run.metrics.name: metrics.commit(), run.ledger.name: ledger.commit()}
            states = copy_on_write(progress.states)
            states["a"] = states[f"c{round % 5}"] = ClientState(memory_of(round))
            states["b"] = ClientState(moments={"train": (moments, 0)})
            progress = store_clients(run, Progress(state_of(round), states, {"a": round}))
            held = {"a": round, "b": None}
            save(run, Checkpoint(progress.state, progress.states, held, Selection(best), positions))
            prune(run)
