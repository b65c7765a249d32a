"""fedspan from Python: run a federation, go on with it, export what it trained, and use that."""

from fedspan.api.exporting import export
from fedspan.api.reports import read_report
from fedspan.api.serving import evaluate, predict
from fedspan.api.training import resume, run
from fedspan.config import load_config

__all__ = ["evaluate", "export", "load_config", "predict", "read_report", "resume", "run"]
