"""The code blocks of README.md, CONTRIBUTING.md and docs/: what they are, and how commands in them are called."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
COMMANDS = ("fedspan", "pip", "make")


@dataclass(frozen=True)
class Block:
    """A code block of a page; its language is "indented" where it has no fence."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    found: list[Block] = []
    parser = MarkdownIt().disable("inline")  # what is within a paragraph is no block, and takes most of the time
    for token in parser.parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            found.append(Block(page, token.map[0] + 1, language, token.content))
    return found


def calls(text: str, folder: Path) -> list[list[str]]:
    """What a block's script calls, word by word: bash itself reads it, with the commands put into its place."""
    log = folder / "calls.jsonl"
    write = "import json,sys; print(json.dumps(sys.argv[1:]))"
    functions = [f"{name}() {{ {sys.executable} -c '{write}' {name} \"$@\" >> '{log}'; }}" for name in COMMANDS]
    log.unlink(missing_ok=True)
    subprocess.run(["bash", "-eu", "-c", "\n".join([*functions, text])], cwd=folder, check=True, timeout=60)
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
