"""The types of the names that ``fedspan/__init__.py`` loads when they are first used."""

from fedspan.api import compare as compare
from fedspan.api import diagnose as diagnose
from fedspan.api import evaluate as evaluate
from fedspan.api import export as export
from fedspan.api import harness as harness
from fedspan.api import plan as plan
from fedspan.api import predict as predict
from fedspan.api import report as report
from fedspan.api import resume as resume
from fedspan.api import resume_compare as resume_compare
from fedspan.api import resume_sweep as resume_sweep
from fedspan.api import run as run
from fedspan.api import sweep as sweep
from fedspan.config import RunConfig as RunConfig
from fedspan.config import load_config as load_config
from fedspan.data.catalogue import list_datasets as list_datasets
from fedspan.errors import FedspanError as FedspanError
from fedspan.methods.describe import list_methods as list_methods
from fedspan.methods.registry import register as register
from fedspan.models.names import resolve_model as resolve_model
from fedspan.runs.comparing import CompareReport as CompareReport
from fedspan.runs.diagnosing import Diagnosis as Diagnosis
from fedspan.runs.listener import Listener as Listener
from fedspan.runs.plans import Plan as Plan
from fedspan.runs.series import Watcher as Watcher
from fedspan.runs.session import RunReport as RunReport
from fedspan.runs.sweeping import SweepReport as SweepReport
from fedspan.wrappers.describe import list_wrappers as list_wrappers

__version__: str
