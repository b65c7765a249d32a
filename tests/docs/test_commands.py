"""Every command-line option that a page names exists, and docs/commands.md has an example of every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from fedspan.cli.app import app
from helpers.code_blocks import PAGES, ROOT, blocks_of

COMMANDS = get_command(app).commands
OPTIONS = {
    name: {"--help", *(option for part in command.params for option in (*part.opts, *part.secondary_opts))}
    for name, command in COMMANDS.items()
}
OF_SCRIPTS = {
    Path("docs/methods/fedloru.md"): {"--accumulate"},
    Path("docs/published-code.md"): {"--accumulate"},
    Path("docs/results/named-entities.md"): {"--optimizer-state", "--trainings"},
    Path("docs/results/text-embedding.md"): {"--lr", "--seed"},
    Path("docs/security.md"): {"--coverage", "--number", "--seed"},
}
"""Options of benchmarks and of published code, by the page that names them."""


def find_unknown_options(text: str) -> set[str]:
    """Find options that their command lacks, in inline code that starts with fedspan, a command or an option."""
    unknown: set[str] = set()
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"(?ms)^```.*?^```", "", text)):
        words = span.removeprefix("fedspan ").split()
        if words and (span.startswith(("fedspan ", "--")) or words[0] in COMMANDS):
            known = OPTIONS.get(words[0], set().union(*OPTIONS.values()))
            unknown |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span)) - known
    return unknown


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`fedspan plan --utilization 0.2`, `--utilization`, `plan --mbit 3`", set()),
        ("`--occupation`", {"--occupation"}),
        ("`fedspan run a.yaml --mbit 3`", {"--mbit"}),
        ("`python script.py --other`\n\n```bash\nother --option\n```\n", set()),
    ],
)
def test_the_scan_finds_an_option_that_its_command_lacks(text: str, unknown: set[str]) -> None:
    assert find_unknown_options(text) == unknown


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=str)
def test_every_option_of_a_page_exists(page: Path) -> None:
    unknown = find_unknown_options((ROOT / page).read_text(encoding="utf-8"))
    assert unknown == OF_SCRIPTS.get(page, set())


def test_the_page_of_commands_has_an_example_of_each() -> None:
    examples = [block.text for block in blocks_of(Path("docs/commands.md")) if block.language == "bash"]
    assert set(re.findall(r"(?m)^fedspan (\S+)", "".join(examples))) == COMMANDS.keys()
