"""Write tests/errors/messages.md, each mistake provoked: ``python tests/helpers/mistakes/messages.py``."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
sys.path.append(str(Path(__file__).parents[2]))

from helpers.mistakes import SECTIONS
from helpers.mistakes.world import Mistake, World

PAGE = Path(__file__).parents[2] / "errors" / "messages.md"
INTRO = """# Error messages

Mistakes that a user can correct, and the messages. `python tests/helpers/mistakes/messages.py` provokes each of them
and writes this file. FOLDER stands for a path of the user, LONG_NAME for a name of 300 characters, and `...` at the end
of a message for a library's text. Long messages are shortened in a table and follow it in full.
"""


LONGEST = 120
"""Number of characters of the longest cell. A longer message is shortened there and follows the table in full."""


def format_row(mistake: Mistake, message: str) -> str:
    """A line of a table."""
    cell = _code(message)
    if len(cell) > LONGEST:
        end = message.rindex(" ", 0, LONGEST - len(_code("` ...")))
        cell = _code(f"{message[:end]} ...")
    what, cell = (text.replace("|", "\\|") for text in (mistake.what, cell))
    return f"| {what} | {cell} |"


def format_entry(mistake: Mistake, message: str) -> str | None:
    """A line below the table, with the whole message; None: the table has it."""
    return None if len(_code(message)) <= LONGEST else f"- {mistake.what} {_code(message)}"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page(said: Callable[[Mistake], str]) -> str:
    """The whole page; ``said`` makes a mistake and gives the message."""
    parts = [INTRO]
    for title, mistakes in SECTIONS.items():
        messages = [(mistake, said(mistake)) for mistake in mistakes]
        rows = [format_row(*message) for message in messages]
        parts.append("\n".join([f"## {title}", "", "| mistake | message |", "|---|---|", *rows]) + "\n")
        if entries := [entry for message in messages if (entry := format_entry(*message)) is not None]:
            parts.append("\n".join(["In full:", "", *entries]) + "\n")
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
