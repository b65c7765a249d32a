"""How help is written and drawn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result

from helpers.command_line import get_program

Call = Callable[..., Result]


def test_help_truncates_no_word_in_80_columns() -> None:
    runner, program = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}), get_program()
    assert isinstance(program, click.Group)
    cut = {name for name in program.commands if "…" in runner.invoke(get_program(), [name, "--help"]).output}
    assert cut == set()


def test_help_shows_texts_as_they_are_written() -> None:
    """Rich takes ``[report]`` for markup, unless it is escaped."""
    runner, program = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}), get_program()
    assert isinstance(program, click.Group)
    bracketed = 0
    for name, command in program.commands.items():
        shown = " ".join(runner.invoke(get_program(), [name, "--help"]).output.split())
        texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
        for text in texts:
            plain = " ".join(text.replace("\\[", "[").split())
            assert plain in shown, (name, plain)
            bracketed += "[" in plain
    assert bracketed
    assert "fedspan[report]" in runner.invoke(get_program(), ["report", "--help"]).output


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_loads_no_parser_of_markdown_or_code(arguments: list[str]) -> None:
    """The look stays Rich's; each of these modules would take a tenth of the time of ``fedspan --help`` or more."""
    script = "import sys; from fedspan.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    assert "╭─ Options ─" in loaded.stdout
    modules = set(loaded.stdout.splitlines()[-1].split())
    assert "typer.rich_utils" in modules
    assert not {"markdown_it", "pygments", "rich.markdown", "rich.traceback"} & modules


def test_typer_draws_markdown_and_tracebacks_after_fedspan_s_help() -> None:
    """The contract of ``fedspan.cli.rich_help``: another program of Typer in the same process is drawn as ever."""
    script = """
from fedspan.cli.rich_help import import_rich_help
import_rich_help()
import sys, typer.rich_utils
from rich.markdown import Markdown
from rich.traceback import Traceback
from typer.models import DeveloperExceptionConfig

assert sys.modules["rich.markdown"].__file__
text = typer.rich_utils._make_rich_text(text="**bold**", markup_mode="markdown")
assert type(text) is Markdown, type(text)
try:
    raise ValueError
except ValueError as error:
    drawn = typer.rich_utils.get_traceback(error, DeveloperExceptionConfig(), [])
assert type(drawn) is Traceback, type(drawn)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_fills_its_lines(call: Call) -> None:
    """Line ends within a docstring's paragraph are not those of the help."""
    lines = [line.strip() for line in call("run", "--help").stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("Every round is saved"))
    assert len(lines[start + 1]) > 60
