"""Every mistake of the catalogue is answered with one line, and messages.md has it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.mistakes import SECTIONS
from helpers.mistakes.messages import PAGE, format_entry, format_row
from helpers.mistakes.world import Mistake, World

ROWS = [(title, mistake) for title, mistakes in SECTIONS.items() for mistake in mistakes]


@pytest.fixture(scope="module")
def tables() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, *lines = part.splitlines()
        found[title] = [line for line in lines if line.startswith("| ")][1:]
    return found


@pytest.mark.parametrize(("title", "mistake"), ROWS, ids=[mistake.what for _, mistake in ROWS])
def test_a_mistake_is_answered_as_the_file_says(
    world: World, tables: dict[str, list[str]], title: str, mistake: Mistake
) -> None:
    field, message = world.said(mistake)
    assert field == mistake.field
    assert message.splitlines() == [message]
    assert message.startswith(f"`{field}`: ")
    assert format_row(mistake, message) in tables[title], "python tests/helpers/mistakes/messages.py writes it"
    entry = format_entry(mistake, message)
    assert entry is None or entry in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_file_has_these_rows_and_no_others(tables: dict[str, list[str]]) -> None:
    assert {title: len(rows) for title, rows in tables.items()} == {
        title: len(mistakes) for title, mistakes in SECTIONS.items()
    }
    for title, mistakes in SECTIONS.items():
        assert all(len(cell) <= 120 for line in tables[title] for cell in line.strip("| ").split(" | ")), title
        assert [line.split(" | ")[0] for line in tables[title]] == [f"| {mistake.what}" for mistake in mistakes]


def test_no_two_mistakes_of_a_section_have_one_name() -> None:
    for mistakes in SECTIONS.values():
        assert len({mistake.what for mistake in mistakes}) == len(mistakes)


def test_the_command_line_says_it_behind_error_and_exits_with_2(tmp_path: Path) -> None:
    from fedspan.cli import app

    result = CliRunner().invoke(app, ["run", str(tmp_path / "no.yaml")])
    line, page = result.stderr.splitlines()
    assert (result.exit_code, page) == (2, f"see {Path(__file__).parents[2] / 'docs' / 'config.md'}")
    assert line.startswith("error: `config`: ")
    assert "Traceback" not in result.output
