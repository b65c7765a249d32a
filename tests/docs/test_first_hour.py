"""docs/first-hour.md is what its script writes, and what its commands print."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from helpers.code_blocks import ROOT, blocks_of
from helpers.scripts import load_script

PAGE = Path("docs/first-hour.md")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("docs/generate_first_hour.py")


def printed() -> Iterator[str]:
    return (block.text.rstrip("\n") for block in blocks_of(PAGE) if block.language in ("text", "yaml"))


def test_the_page_has_the_script_s_words_and_commands(script: ModuleType) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    stamp = re.search(r"shows its output \(([^)]*)\)", text)
    assert text == script.page(printed(), stamp[1]), "run: python docs/generate_first_hour.py"


@pytest.mark.slow
def test_the_commands_print_what_the_page_says(script: ModuleType, tmp_path: Path) -> None:
    """Apart from numbers, which depend on the machine, and from predictions."""
    *found, predicted = script.run_blocks(tmp_path)
    *expected, _ = printed()
    (run,) = (block for block in found if "run folder" in block)
    assert re.findall(r"^ +(\d+)/6 ", run, re.MULTILINE) == ["1", "2", "3", "4", "5", "6"]
    is_last_best = re.search(r"^round +6,", run, re.MULTILINE) is not None
    assert ("Validation still improves: extend with" in run) == is_last_best
    assert [shape(block, script.CLINICS) for block in found] == [shape(block, script.CLINICS) for block in expected]
    assert re.fullmatch(r"(0\.\d\d  \w+\n?){3}", predicted)


def shape(block: str, clinics: dict[str, int]) -> list[str]:
    """The lines of a block without numbers, lines of progress, repeated rows and example predictions.

    Which stages took long enough to be printed before the first round, and whether the last round is the best one,
    depend on the machine as well.
    """
    lines: list[str] = []
    block = re.sub(r"Validation still improves: .*?\n\n", "", block, flags=re.DOTALL)
    for line in block.partition("a held-out text")[0].splitlines():
        if "elapsed" in line or line.startswith(("once, before", "before the first round:")):
            continue
        line = re.sub("|".join(clinics), "CLINIC", line)
        line = re.sub(r"\d[\d.,:]*%?( [kMG]?B)?", "#", line)
        line = re.sub(r"(above|below|equal to)", "BESIDE", " ".join(line.replace("─", "").split()))
        if line and (not lines or line != lines[-1]):
            lines.append(line)
    return lines
