"""The commands with their help, and the display of errors and Ctrl-C."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import fedspan
from fedspan.cli import (
    compare,
    data,
    deploy,
    diagnose,
    doctor,
    init,
    methods,
    plan,
    report,
    reproduce,
    status,
    train,
    trained_model,
)
from fedspan.cli.hints import hint
from fedspan.errors import FedspanError

__all__ = ["app"]


class _Group(TyperGroup):
    """Prints a user's mistake on one line, and the page that explains it on another."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedspanError as error:
            typer.echo(f"error: {error}", err=True)
            if (page := hint(error.field)) is not None:
                typer.echo(f"see docs/{page}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


def _examples(*lines: str) -> str:
    """Build an epilog of examples, separated by blank lines."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"[cyan]{line}[/cyan]" for line in lines)])


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples("fedspan demo", "fedspan run my.yaml --out runs/first", "fedspan run --help"),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedspan {fedspan.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Fine-tune a pretrained model across private data owners with low-rank updates; get one PEFT adapter back."""


app.command(
    "demo",
    epilog=_examples(
        "fedspan demo",
        "fedspan demo --set method.name=fedsa-lora --out runs/personal",
        "fedspan demo --show-config > my.yaml",
    ),
)(train.demo)
app.command(
    "init",
    epilog=_examples(
        "fedspan init messages.csv",
        "fedspan init notes.parquet --text note --label diagnosis --by hospital --out hospitals.yaml",
        "fedspan init dialogues.jsonl --task causal-lm --model Qwen/Qwen2.5-0.5B",
    ),
)(init.init)
app.command(
    "run",
    epilog=_examples(
        "fedspan run my.yaml --out runs/first",
        "fedspan run my.yaml --set method.name=ffa-lora --set training.lr=2e-3",
        "fedspan run --resume runs/first",
    ),
)(train.run)
app.command(
    "compare",
    epilog=_examples(
        "fedspan compare my.yaml --methods fedit,rolora,flora --seeds 0,1,2 --out runs/three",
        "fedspan compare my.yaml --methods fedit,fedloru --set-for fedloru:method.tau=5 --out runs/two",
        "fedspan compare --resume runs/three --against flora",
    ),
)(compare.compare)
app.command(
    "sweep",
    epilog=_examples(
        "fedspan sweep my.yaml --over training.lr=1e-4,1e-3,1e-2 --over method.r=4,8 --out runs/sweep",
        "fedspan sweep my.yaml --over training.lr=1e-4..1e-1 --trials 12 --rounds 3 --out runs/search",
        "fedspan sweep --resume runs/search",
    ),
)(compare.sweep)
app.command(
    "reproduce",
    epilog=_examples(
        "fedspan reproduce",
        "fedspan reproduce rolora-table1 --scale full --dry-run",
        "fedspan reproduce rolora-table1 --data ~/data --out runs/table1",
    ),
)(reproduce.reproduce)
app.command(
    "methods",
    epilog=_examples(
        "fedspan methods",
        "fedspan methods fedloru",
        "fedspan methods --json",
    ),
)(methods.methods)
app.command(
    "plan",
    epilog=_examples(
        "fedspan plan --model FacebookAI/roberta-large --clients 50 --rank 4",
        "fedspan plan my.yaml",
        "fedspan plan my.yaml --methods all --set method.r=16",
        "fedspan plan my.yaml --examples 5000 --length 25 --device A100 --mbit 100",
    ),
)(plan.plan)
app.command("doctor", epilog=_examples("fedspan doctor", "fedspan doctor --folder /data/runs --json"))(doctor.doctor)
app.command("data", epilog=_examples("fedspan data", "fedspan data sst2", "fedspan data --json"))(data.data)
app.command(
    "partition",
    epilog=_examples(
        "fedspan partition my.yaml",
        "fedspan partition my.yaml --set partition.alpha=0.1 --png partition.png",
    ),
)(methods.partition)
app.command(
    "predict",
    epilog=_examples(
        'fedspan predict runs/first "Can I move my appointment to Friday?"',
        "fedspan predict runs/first --file messages.txt > labels.tsv",
        'fedspan predict runs/personal --client client-03 "Where do I park?"',
    ),
)(trained_model.predict)
app.command(
    "evaluate",
    epilog=_examples(
        "fedspan evaluate runs/first",
        "fedspan evaluate exported/ --data new.csv --text message --label intent",
        "fedspan evaluate runs/instruct --tasks mmlu,arc_easy --shots 5",
    ),
)(trained_model.evaluate)
app.command(
    "report",
    epilog=_examples(
        "fedspan report runs/first",
        "fedspan report runs/three --out three.html --diagnose",
        "fedspan report runs/first runs/second --out both.html",
    ),
)(report.report)
app.command(
    "diagnose",
    epilog=_examples("fedspan diagnose runs/first", "fedspan diagnose runs/first --round best --pairs 6 --json"),
)(diagnose.diagnose)
app.command(
    "export",
    epilog=_examples(
        "fedspan export runs/first --out adapter",
        "fedspan export runs/first --out model --form merged",
        "fedspan export runs/personal --out theirs --client client-03",
    ),
)(trained_model.export)
_MACHINES = "Between machines"
app.command(
    "server", rich_help_panel=_MACHINES, epilog=_examples("fedspan server --name fl.example.org", "fedspan server -h")
)(deploy.server)
app.command("admit", rich_help_panel=_MACHINES, epilog=_examples("fedspan admit clinic-a.key.pub --as clinic-a"))(
    deploy.admit
)
app.command(
    "join", rich_help_panel=_MACHINES, epilog=_examples("fedspan join --new-key node.key", "fedspan join node.yaml")
)(deploy.join)
app.command(
    "submit",
    rich_help_panel=_MACHINES,
    epilog=_examples("fedspan submit config.yaml --out runs/first", "fedspan submit --resume runs/first"),
)(deploy.submit)
app.command("status", rich_help_panel=_MACHINES, epilog=_examples("fedspan status", "fedspan status --run runs/first"))(
    status.status
)
