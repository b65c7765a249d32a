"""The app, the decorator that registers commands, and options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ParameterInfo

import fedspan
from fedspan.errors import FedspanError

MACHINES = "Between machines"
"""Panel of the commands of a deployment."""

SERVER = Path("fedspan-server")


def option(metavar: str, help: str, *names: str) -> Any:
    """Return Typer's description of an option with a value, named as its parameter unless names are given."""
    return typer.Option(*names, metavar=metavar, help=help)


def argument(metavar: str, help: str) -> Any:
    """Return Typer's description of an argument."""
    return typer.Argument(metavar=metavar, help=help)


def flag(name: str, help: str) -> Any:
    """Return Typer's description of an option without a value."""
    return typer.Option(name, help=help)


ServerFolder = Annotated[Path, option("FOLDER", "The server's folder.", "--server")]
Json = Annotated[bool, flag("--json", "Print JSON instead of a table.")]
Overrides = Annotated[list[str] | None, option("A.B=C", "Override a config field; may be repeated.", "--set")]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Group(TyperGroup):
    """Group of commands that prints a user error on one line, followed by the page that explains it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedspanError as error:
            typer.echo(f"error: {error}", err=True)
            if (page := find_page(error.field)) is not None:
                typer.echo(f"see {page}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


class _Command(TyperCommand):
    """Command whose arguments have their help: with Typer 0.20, click from 8.5 on sets it to None."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert self.callback is not None
        annotations = self.callback.__annotations__
        for param in self.params:
            if isinstance(param, TyperArgument):
                param.help = next(
                    info.help for info in annotations[str(param.name)].__metadata__ if isinstance(info, ParameterInfo)
                )


def _format_examples(*lines: str) -> str:
    return "\n\n".join(["[bold]Examples[/bold]", *(f"[cyan]{escape(line)}[/cyan]" for line in lines)])


app = typer.Typer(
    cls=_Group,
    suggest_commands=False,  # click adds the suggestion, too
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_format_examples("fedspan demo", "fedspan run my.yaml --out runs/first", "fedspan run --help"),
)


def register_command(name: str, *examples: str, panel: str | None = None) -> Callable[[_Function], _Function]:
    """Register a function as a command of ``fedspan``; square brackets in its help are text, not rich's markup.

    Args:
        panel: Title of the group of commands in which help lists it; None: the main one.
    """

    def register(function: _Function) -> _Function:
        # Typer evaluates annotations that are texts several times for each command, whenever it shows help or runs one.
        function.__annotations__ = get_type_hints(function, include_extras=True)
        for annotation in function.__annotations__.values():
            for info in getattr(annotation, "__metadata__", ()):
                if isinstance(info, ParameterInfo) and info.help is not None:
                    info.help = escape(info.help.replace("\\[", "["))  # shared options are processed more than once
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = escape("\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs))
        return app.command(name, cls=_Command, help=text, epilog=_format_examples(*examples), rich_help_panel=panel)(
            function
        )

    return register


def refuse_options(options: Mapping[str, object], problem: str) -> None:
    """Report the first option that has a value, where none may have one."""
    for name, value in options.items():
        if value:
            raise FedspanError(name, str(value), problem=problem)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedspan {fedspan.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune a pretrained model across private data owners with low-rank updates; get one PEFT adapter back."""


PAGES = {
    "audit log": "deployment.md#audit-logs",
    "baselines": "config.md#top-level",
    "certificates": "deployment.md#renewing-certificates",
    "cluster": "cluster.md",
    "config": "config.md",
    "data": "config.md#data",
    "data.dataset": "data.md",
    "engine": "config.md#engine",
    "evaluation": "config.md#evaluation",
    "evaluation.diagnostics": "diagnostics.md",
    "federation": "config.md#federation",
    "federation.ranks": "faq.md#how-do-i-give-clients-different-ranks",
    "federation.secure": "secure-aggregation.md",
    "good replies": "deployment.md#which-replies-count",
    "limits": "node.md#limits",
    "limits.approve": "own-a-node.md#how-do-i-approve-a-run",
    "method": "config.md#method",
    "method.name": "choosing.md",
    "model": "config.md#model",
    "partition": "config.md#partition",
    "preset": "reproducing.md",
    "privacy": "privacy.md",
    "run folder": "first-hour.md#the-run",
    "server": "deployment.md",
    "simulation": "simulation.md",
    "task": "tasks.md",
    "web": "monitoring.md",
    "task_options": "tasks.md",
    "training": "config.md#training",
    "--methods": "choosing.md",
    "--over": "comparing.md",
}
"""Pages of docs/, with the heading, by an error's field or its prefix."""


def find_page(field: str) -> str | None:
    """Return the path of the page about an error's field, with the heading; None if no page explains it.

    Args:
        field: The field as the error names it: ``training.lr``. The longest matching entry counts.
    """
    parts = field.split(".")
    for count in range(len(parts), 0, -1):
        if (page := PAGES.get(".".join(parts[:count]))) is not None:
            return f"{_find_docs() / page}"
    return None


def _find_docs() -> Path:
    """Return the folder of the pages: a wheel has them in the package, a checkout has them beside ``src``."""
    package = Path(str(files("fedspan")))
    installed = package / "docs"
    return installed if installed.is_dir() else package.parents[1] / "docs"
