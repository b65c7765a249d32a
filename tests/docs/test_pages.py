"""Pages of the documentation: what scripts write is current; links, options, tables and named tests are right."""

import ast
import doctest
import inspect
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import fedspan
from fedspan.cli.app import app
from helpers.code_blocks import PAGES, ROOT, blocks_of
from helpers.scripts import load_script

DOCS = ROOT / "docs"
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Names of all tests."""


def test_the_pages_of_the_config_and_of_a_node_s_file_are_current() -> None:
    module = load_script("docs/generate_config.py")
    for page, written in (("config.md", module.page()), ("node.md", module.format_node_page())):
        assert (DOCS / page).read_text(encoding="utf-8") == written, "run: python docs/generate_config.py"


def test_the_figures_of_results_show_the_numbers_of_their_pages() -> None:
    module = load_script("docs/generate_figures.py")
    for page, (header, _) in module.FIGURES.items():
        digest = module.compute_digest(module.read_table(page, header))
        drawn = (DOCS / "results" / f"{page}.svg").read_text(encoding="utf-8")
        assert f"<dc:description>{digest}<" in drawn, "run: python docs/generate_figures.py"
        assert f"]({page}.svg)" in (DOCS / "results" / f"{page}.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = Counter(re.findall(r"[\w/.-]+\.md", str(nav)))
    assert listed == Counter(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.slow
def test_the_page_of_models_is_what_the_families_do() -> None:
    module = load_script("docs/generate_models.py")
    written = (DOCS / "models.md").read_text(encoding="utf-8")
    assert written == module.page(), "run: python docs/generate_models.py"


COMMANDS = get_command(app).commands
OPTIONS = {
    name: {"--help", *(option for part in command.params for option in (*part.opts, *part.secondary_opts))}
    for name, command in COMMANDS.items()
}
OF_SCRIPTS = {
    Path("docs/flower.md"): {
        "--enable-supernode-auth",
        *("--auth-supernode-private-key", "--disable-runtime-dependency-installation", "--node-config"),
        *("--run-config", "--simulation", "--trusted-entities"),
    },
    **{Path(f"docs/{name}.md"): {"--accumulate"} for name in ("claims/fedloru", "methods/fedloru", "published-code")},
}
"""Options of scripts, of Flower and of published code, by the page that names them."""


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


LONGEST = 120
"""Number of visible characters of the longest cell."""
QUOTING = {Path("docs/published-code.md")}
"""Pages whose cells list names of tests."""


def find_long_cells(text: str) -> list[str]:
    """Find the cells of a page's tables that are too long, without the addresses of their links."""
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    rows = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell.strip()) for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(re.sub(r"[\[\]]", "", cell)) > LONGEST]


def test_the_scan_measures_what_is_visible() -> None:
    fits, long = "x" * LONGEST, "y" * (LONGEST + 1)
    table = f"| [{fits}](page.md) | {long} |\n"
    assert find_long_cells(table) == [long]
    assert find_long_cells(f"```text\n{table}```\n") == []


@pytest.mark.parametrize("page", [p for p in PAGES if p not in QUOTING], ids=str)
def test_no_cell_of_a_table_is_long(page: Path) -> None:
    assert find_long_cells((ROOT / page).read_text(encoding="utf-8")) == []


def read_attacks() -> tuple[list[str], list[str]]:
    """Return the rows of the table of attacks, and the entries of the list of their tests."""
    page = (ROOT / "tests" / "attacks.md").read_text(encoding="utf-8")
    rows = page[page.index("| no. | attack |") :].split("\n\n", 1)[0].splitlines()[2:]
    entries = page[page.index("\n1. `test_") + 1 :].splitlines()
    return rows, entries


def test_every_attack_has_a_test_that_is_there() -> None:
    rows, entries = read_attacks()
    assert len(rows) > 30
    assert [row.split(" | ")[0] for row in rows] == [f"| {number}" for number in range(1, len(rows) + 1)]
    assert [entry.partition(". ")[0] for entry in entries] == [str(number) for number in range(1, len(rows) + 1)]
    for entry in entries:
        named = re.findall(r"`(test_[^`]*)`", entry)
        assert named, entry
        assert set(named) <= TESTS, set(named) - TESTS


def test_every_replayed_attack_is_in_the_table() -> None:
    text = (ROOT / "tests" / "attacks.md").read_text(encoding="utf-8")
    attacks = (ROOT / "tests" / "transports" / "http" / "test_attacks.py").read_text(encoding="utf-8")
    for name in re.findall(r"^(?:async )?def (test_\w+)", attacks, re.MULTILINE):
        assert f"`{name}`" in text, name


def test_the_title_of_a_module_is_no_clause() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        title = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert not re.match(r"(How|What|When|Where|Whether|Which|Who|Why)\b", title), f"{path}: {title.splitlines()[0]}"


def test_all_that_is_public_has_an_example_whose_calls_and_fields_exist() -> None:
    public = {name: value for name in fedspan.__all__ if callable(value := getattr(fedspan, name))}
    assert len(public) > 35
    for name, value in public.items():
        text = (inspect.getdoc(value) if inspect.isfunction(value) else value.__dict__.get("__doc__")) or ""
        trees = [ast.parse(example.source) for example in doctest.DocTestParser().get_examples(text)]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func)[:8] == "fedspan."]
        for call in calls:
            signature = inspect.signature(public[ast.unparse(call.func)[8:]])
            signature.bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
        if inspect.isfunction(value):
            assert "\nReturns:\n" in text or inspect.signature(value).return_annotation in (None, "None"), name
            assert f"fedspan.{name}" in [ast.unparse(call.func) for call in calls], name
            continue
        assert trees, name
        read = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "report"]
        assert {node.attr for node in read} <= {*dir(value), *value.__annotations__}, name


def test_every_trap_has_a_test_that_is_there() -> None:
    text = (ROOT / "docs" / "published-code.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| trap", "|---"))]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`(test_[^`]*)`", row.rstrip("| ").rpartition(" | ")[2])
        assert named, row
        assert set(named) <= TESTS, set(named) - TESTS


RESULTS = load_script("docs/check_results.py")


def test_every_result_names_the_commit_that_was_measured() -> None:
    pages = [page for pages in RESULTS.PAGES for page in DOCS.glob(pages)]
    results = [(page.name, *one) for page in pages for one in RESULTS.list_results(page.read_text(encoding="utf-8"))]
    assert len(results) > 8
    assert [one for one in results if one[2] is None] == []


def test_every_table_of_intervals_in_the_claims_names_its_seeds() -> None:
    headers = [
        f"{page.name}: {line}"
        for page in (DOCS / "claims").glob("*.md")
        for line, below in pairwise(page.read_text(encoding="utf-8").splitlines())
        if below.startswith("|---") and "interval" in line
    ]
    assert len(headers) > 3
    assert [line for line in headers if "seeds" not in line] == []


def test_a_result_has_the_commit_of_its_paragraph() -> None:
    page = (
        "`python -m evidence.a --x`. Commit 0123abcd, now.\n\nCommand: `python -m evidence.b`  \nCode: 4567cdef.\n\n"
        "`python -m evidence.c` is outdated.\n\n```text\n`python -m evidence.d`\n```\n\n`python -m evidence.e`\n\n"
        "Commit 0123abcd\n\n`python -m evidence.f`\n\n| row | 89abcdef |\n| row | 89abcdef |"
    )
    expected = [("evidence.a", "0123abcd"), ("evidence.b", "4567cdef"), ("evidence.c", ""), ("evidence.e", None)]
    expected.append(("evidence.f", "89abcdef"))
    assert list(RESULTS.list_results(page)) == expected


def test_a_result_depends_on_what_its_command_imports() -> None:
    theory = {path.as_posix() for path in RESULTS.list_imports("evidence.claims.fedgalore_ajive")}
    assert {"src/fedspan/core/alignment.py", "evidence/claims/planted_views.py"} <= theory
    assert not any(path.startswith("src/fedspan/methods/") for path in theory)
    runs = {path.as_posix() for path in RESULTS.list_imports("evidence.pages.head_start")}
    assert {"src/fedspan/methods/rolora.py", "src/fedspan/training/loop.py"} <= runs


def test_words_in_docstrings_change_no_result() -> None:
    one, same, other = (
        RESULTS.parse(f"def f(x):\n    {body}") for body in ('"""A."""\n    return x', "return x", "return -x")
    )
    assert RESULTS.ast.dump(one) == RESULTS.ast.dump(same) != RESULTS.ast.dump(other)
