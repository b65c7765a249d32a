"""The files of the tests and the pages: a step of .ci/run runs every slow test, and a wheel has the pages it names."""

import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fedspan.cli.commands import PAGES

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py"))
BY_HAND = {"tests/planning/test_calibration.py", "tests/runs/test_scale.py"}
"""Slow tests of the times and sizes of the machine at hand, which other work on it fails; nothing else may be added."""


@functools.cache
def slow_files() -> set[str]:
    """Files in which a test, or a parameter of one, is marked slow."""
    marks = re.compile(r"pytest\.mark\.slow\b|\b(?:methods_by_family|others_slow)\(")
    return {file for file in FILES if marks.search((ROOT / file).read_text(encoding="utf-8"))}


def steps() -> dict[str, tuple[list[str], list[str]]]:
    """The paths that each step of .ci/run gives to ``pytest -m slow``, and those that it ignores."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", "")
    for name, arguments in re.findall(r'^step (\S+) make test PYTEST_ARGS="([^"]*)"$', text, flags=re.MULTILINE):
        words = shlex.split(arguments)
        assert words[words.index("-m") + 1] == "slow"
        assert "-k" not in words
        selected = [word for word in words if (ROOT / word).exists()]
        ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
        found[name] = selected, ignored
    return found


def is_within(file: str, paths: list[str]) -> bool:
    return any(file == path or file.startswith(path.rstrip("/") + "/") for path in paths)


def test_every_slow_test_is_of_a_step_of_ci() -> None:
    def is_run(file: str) -> bool:
        return any(is_within(file, selected) and not is_within(file, ignored) for selected, ignored in steps().values())

    assert [file for file in sorted(slow_files()) if not is_run(file)] == sorted(BY_HAND)


def test_every_attack_on_a_running_server_is_replayed_for_every_commit() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", "")
    (step,) = (line for line in text.splitlines() if line.startswith("step attacks "))
    assert steps()["attacks"] == (["tests/transports/http/test_attacks.py"], [])
    assert "--part" not in step


def test_every_path_of_a_step_holds_a_slow_test() -> None:
    slow = slow_files()
    assert steps()
    for name, (selected, ignored) in steps().items():
        assert selected, name
        for path in (*selected, *ignored):
            assert any(is_within(file, [path]) for file in slow), (name, path)


def test_no_other_file_marks_tests_slow() -> None:
    """A mark set by a conftest or another helper would not be found above."""
    others = [path for path in sorted(TESTS.rglob("*.py")) if not path.name.startswith("test_")]
    marking = [path for path in others if "mark.slow" in path.read_text(encoding="utf-8")]
    assert marking == [TESTS / "helpers" / "families.py"]


def test_no_test_imports_another() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        imports = re.findall(r"^\s*(?:from|import) .*", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not re.findall(r"\btest_\w+", " ".join(imports)), path


def test_helpers_stand_in_one_package_with_docstrings() -> None:
    others = [path for path in sorted(TESTS.rglob("*.py")) if not path.name.startswith("test_")]
    commands = [path for path in others if path.parent == TESTS / "tools" or path == TESTS / "fuzz.py"]
    others = [path for path in others if path not in commands]
    assert [path for path in others if path.name != "conftest.py" and TESTS / "helpers" not in path.parents] == []
    for path in others:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        )
        assert ast.get_docstring(tree), path
        assert [node.name for node in public if not ast.get_docstring(node)] == [], path


def test_drawings_of_the_pages_have_a_dark_variant() -> None:
    """Every color of a drawing, but for its white ground, has another one where the reader prefers dark pages."""
    drawings = list((ROOT / "docs" / "images").glob("*.svg"))
    assert drawings
    for path in drawings:
        style, _, drawn = path.read_text(encoding="utf-8").partition("</style>")
        dark = style.partition("@media (prefers-color-scheme: dark)")[2]
        assert re.search(r"^text \{ fill: .*\nsvg > rect:first-of-type \{ fill: ", dark, flags=re.MULTILINE), path
        colors = set(re.findall(r'(?:fill|stroke)="#\w+"', drawn)) - {'fill="#fff"'}
        assert {color for color in colors if f"[{color}]" not in dark} == set(), path


def find_named_pages() -> Iterator[str]:
    """Pages of docs/ that an installed package names: in messages, options and files for data owners."""
    yield from (f"docs/{page.partition('#')[0]}" for page in PAGES.values())
    texts: list[str] = []
    for path in (ROOT / "src" / "fedspan").rglob("*"):
        if path.suffix == ".py" and "docs/" in (text := path.read_text(encoding="utf-8")):
            tree = ast.parse(text)
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            constants = (
                node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings
            )
            texts += [node.value for node in constants if isinstance(node.value, str)]
        elif path.suffix in {".md", ".yaml", ".html"}:
            texts.append(path.read_text(encoding="utf-8"))
    for text in texts:
        yield from re.findall(r"docs/[\w/-]+\.md", text)


def test_the_wheel_has_the_pages_that_it_names_and_none_about_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    excluded = [pattern.strip("/") for pattern in project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]]
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert all((ROOT / path).exists() for path in excluded if "*" not in path)
    packed = {page for page in pages if not is_within(page, excluded)}
    named = set(find_named_pages())
    assert {"docs/node.md", "docs/deployment.md", "docs/tasks.md"} <= named
    assert named - packed == set()
    about_the_repository = ["docs/architecture", "docs/claims", "docs/results", "docs/published-code.md"]
    assert {page for page in packed if is_within(page, about_the_repository)} == set()
