"""Check what the measured results of benchmark, claims and results are of: ``python docs/check_results.py``.

The paragraph of a command ``python -m evidence...``, or the table below it, names the commit that was measured, or the
paragraph says *outdated*. A result is current while the modules of its methods and engine that the command imports have
the same syntax tree, docstrings aside, as at that commit. Prints those that are not; fails only if a commit is missing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("claims/*.md", "results/*.md", "benchmark.md")
ENGINE = ("core", "methods", "wrappers", "training", "models", "federation/aggregation", "transports/http")
"""Folders of fedspan that determine a run's numbers."""
NEUTRAL = ("fedspan.experiments", "fedspan.experiments.intervals", "fedspan.errors")
"""Modules that no run depends on."""
COMMAND = re.compile(r"`python -m (evidence[\w.]+)")
COMMIT = re.compile(r"(?i)\b(?:commit|code:) (?:commit )?([0-9a-f]{8,40})\b")


def list_results(page: str) -> Iterator[tuple[str, str | None]]:
    """Each paragraph's command and its commit: empty if it is marked outdated, None if it is missing."""
    paragraphs = re.sub(r"(?ms)^```.*?^```", "", page).split("\n\n")
    for paragraph, below in pairwise([*paragraphs, ""]):
        if command := COMMAND.search(paragraph):
            commit = COMMIT.search(paragraph) or re.match(r"\|.*\| ([0-9a-f]{8}) \|", below, re.DOTALL)
            yield command[1], commit[1] if commit else "" if "outdated" in paragraph.lower() else None


@cache
def parse(source: str) -> ast.Module:
    """The tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body.pop(0)
    return tree


def find_file(module: str) -> Path | None:
    """The file of a module or package, None if it has none."""
    path = Path("src" if module.startswith("fedspan") else ".", *module.split("."))
    files = (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py")
    return next((one for one in files if (ROOT / one).is_file()), None)


def is_engine(path: Path) -> bool:
    """Whether a file is of the methods or the engine."""
    return path.as_posix().startswith(tuple(f"src/fedspan/{name}/" for name in ENGINE))


@cache
def list_imports(module: str) -> frozenset[Path]:
    """The files of methods and engine that a command imports, directly or not; all, if it uses more than those."""
    start = find_file(module)
    waiting, seen = {start} if start else set[Path](), set[Path]()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for node in ast.walk(parse((ROOT / path).read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            for name in names:
                found = find_file(name) if name.startswith(("fedspan", "evidence")) else None
                if found is None or found in seen:
                    continue
                if is_engine(found) or name.startswith("evidence"):
                    waiting.add(found)
                elif name not in NEUTRAL and not is_engine(path):
                    every = (ROOT / "src/fedspan").rglob("*.py")
                    return frozenset(one for one in (file.relative_to(ROOT) for file in every) if is_engine(one))
    return frozenset(seen)


def git(*words: str) -> str | None:
    """What git prints; None if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def list_changes(module: str, commit: str) -> list[str] | None:
    """The files of methods and engine below a command that differ from those of a commit; None: it is unknown here."""
    changed = git("diff", "--name-only", commit, "--", *(f"src/fedspan/{name}" for name in ENGINE))
    if changed is None:
        return None
    differing: list[str] = []
    for path in sorted(set(map(Path, changed.split())) & list_imports(module)):
        before = git("show", f"{commit}:{path}")
        now = (ROOT / path).read_text(encoding="utf-8")
        if before is None or ast.dump(parse(before)) != ast.dump(parse(now)):
            differing.append(path.relative_to("src/fedspan").as_posix())
    return differing


def main() -> int:
    """Print the results that are not current; return 1 if one has no commit."""
    failed = 0
    for path in sorted(path for pages in PAGES for path in (ROOT / "docs").glob(pages)):
        for module, commit in list_results(path.read_text(encoding="utf-8")):
            name = f"{path.relative_to(ROOT)}: {module}"
            if commit is None:
                print(f"{name}: MISSING: neither a commit nor the word 'outdated'")
                failed = 1
            elif (changes := list_changes(module, commit) if commit else []) is None:
                print(f"{name}: commit {commit} is not in this clone")
            elif changes or not commit:
                files = f"{len(changes)} files changed since {commit}, such as {changes[0]}" if changes else "marked"
                print(f"{name}: outdated ({files})")
    return failed


if __name__ == "__main__":
    sys.exit(main())
