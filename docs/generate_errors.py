"""Write docs/errors.md from the tests' catalogue of mistakes, each provoked: ``python docs/generate_errors.py``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.mistakes import SECTIONS
from helpers.mistakes.world import Mistake, World

PAGE = Path(__file__).parent / "errors.md"
INTRO = """# Error messages

This page lists the error messages of mistakes that a user can correct. A message names the field, the problem, and
what is expected. The command line prints it on one line after `error:`, prints the page with more information below
it, and exits with code 2. In Python it is a `FedspanError` with the attributes `field`, `value`, `expected` and
`problem`. `python docs/generate_errors.py` provokes every one of these mistakes and writes this page; the tests
provoke them, too. FOLDER replaces a path of the user, and `...` at the end a library's text, which differs between its
versions.
"""


def format_row(mistake: Mistake, message: str) -> str:
    """A line of a table."""
    what, said = (text.replace("|", "\\|") for text in (mistake.what, message))
    return f"| {what} | {_code(said)} |"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page(said: Callable[[Mistake], str]) -> str:
    """The whole page; ``said`` makes a mistake and gives the message."""
    parts = [INTRO]
    for title, mistakes in SECTIONS.items():
        rows = [format_row(mistake, said(mistake)) for mistake in mistakes]
        parts.append("\n".join([f"## {title}", "", "| mistake | message |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="fedspan-") as root:
        world = World(Path(root))
        PAGE.write_text(page(lambda mistake: world.said(mistake)[1]), encoding="utf-8")
