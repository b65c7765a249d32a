"""fedspan from Python: run federations, go on with them, compare them, export what they trained, and use that."""

from fedspan.api.comparing import compare, resume_compare
from fedspan.api.diagnosing import diagnose
from fedspan.api.evaluating import evaluate
from fedspan.api.exporting import export
from fedspan.api.harness import harness
from fedspan.api.notes import read_notes
from fedspan.api.planning import plan
from fedspan.api.rehearsing import dry_run
from fedspan.api.reporting import report
from fedspan.api.reports import read_report
from fedspan.api.reproducing import reproduce, resume_reproduction
from fedspan.api.serving import predict
from fedspan.api.sweeping import resume_sweep, sweep
from fedspan.api.training import resume, run
from fedspan.config import load_config

__all__ = [
    "compare",
    "diagnose",
    "dry_run",
    "evaluate",
    "export",
    "harness",
    "load_config",
    "plan",
    "predict",
    "read_notes",
    "read_report",
    "report",
    "reproduce",
    "resume",
    "resume_compare",
    "resume_reproduction",
    "resume_sweep",
    "run",
    "sweep",
]
