"""The types of the names that ``fedspan/__init__.py`` loads when they are first used."""

from fedspan.assembly.task import read_notes as read_notes
from fedspan.config import RunConfig as RunConfig
from fedspan.config import load_config as load_config
from fedspan.data.catalogue import list_datasets as list_datasets
from fedspan.deployment.deploy import join as join
from fedspan.diagnostics.round_diagnosis import Diagnosis as Diagnosis
from fedspan.errors import FedspanError as FedspanError
from fedspan.experiments.comparison import CompareReport as CompareReport
from fedspan.experiments.run_comparison import compare as compare
from fedspan.experiments.run_comparison import resume_compare as resume_compare
from fedspan.experiments.run_search import resume_sweep as resume_sweep
from fedspan.experiments.run_search import sweep as sweep
from fedspan.experiments.search import SweepReport as SweepReport
from fedspan.experiments.series import Watcher as Watcher
from fedspan.methods.describe import list_methods as list_methods
from fedspan.methods.registry import register as register
from fedspan.models.names import resolve_model as resolve_model
from fedspan.planning.estimate import plan as plan
from fedspan.planning.plan import Plan as Plan
from fedspan.progress.listener import Listener as Listener
from fedspan.reports.render import report as report
from fedspan.reproduction.rehearsal import dry_run as dry_run
from fedspan.reproduction.reproduce import reproduce as reproduce
from fedspan.reproduction.reproduce import resume_reproduction as resume_reproduction
from fedspan.runs.diagnose import diagnose as diagnose
from fedspan.runs.report import RunReport as RunReport
from fedspan.runs.report import read_report as read_report
from fedspan.runs.train import resume as resume
from fedspan.runs.train import run as run
from fedspan.runs.train import simulate as simulate
from fedspan.serving.evaluate import evaluate as evaluate
from fedspan.serving.export import export as export
from fedspan.serving.harness import harness as harness
from fedspan.serving.load import predict as predict
from fedspan.tasks.definition import TaskDefinition as TaskDefinition
from fedspan.tasks.metrics import Metric as Metric
from fedspan.tasks.metrics import register_metrics as register_metrics
from fedspan.tasks.registry import list_tasks as list_tasks
from fedspan.tasks.registry import register_task as register_task
from fedspan.training.trainers.torch_loop import TorchTrainer as TorchTrainer
from fedspan.training.trainers.torch_loop import TrainingRound as TrainingRound
from fedspan.wrappers.describe import list_wrappers as list_wrappers

__version__: str
