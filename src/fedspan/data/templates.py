"""Prompt templates, which turn the columns of a row into the prompt of a language model."""

from __future__ import annotations

import string
from collections.abc import Mapping

from fedspan.errors import FedspanError, suggest_nearest

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    # Stanford Alpaca's two prompts: with an input, and without.
    "alpaca": (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "instruction": (
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    # MetaMath's: Alpaca's second prompt with another column and a hint to reason step by step.
    "metamath": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{query}\n\n### Response: Let's think step by step.\n",
    ),
    "question": ("Question: {question}\nAnswer: ",),
}
"""Forms by name; a row uses the first one whose columns all have a value."""


class Template:
    """A prompt with columns in braces.

    Args:
        forms: Alternative forms; a row uses the first one whose columns all exist and are not empty, else the last.
    """

    def __init__(self, forms: tuple[str, ...]) -> None:
        self._forms = [list(string.Formatter().parse(form)) for form in forms]
        self.columns = tuple(dict.fromkeys(name for form in self._forms for _, name, _, _ in form if name is not None))
        """All columns that the template names."""
        self.required = tuple(name for _, name, _, _ in self._forms[-1] if name is not None)
        """Columns of the last form, which every prompt requires."""

    def render(self, row: Mapping[str, object]) -> str:
        """Render the prompt of a row; a missing value is an empty text."""
        for form in self._forms:
            names = [name for _, name, _, _ in form if name is not None]
            if all(_format_value(row.get(name)).strip() for name in names):
                break
        else:
            form = self._forms[-1]
        return "".join(text + ("" if name is None else _format_value(row.get(name))) for text, name, _, _ in form)


def _format_value(value: object) -> str:
    return "" if value is None else str(value)


def parse_template(prompt: str, field: str) -> Template:
    """Return the template that a user names or writes.

    Args:
        prompt: A name (``alpaca``), or a text with columns in braces (``{question}``); ``{{`` is a brace.
    """
    if prompt in TEMPLATES:
        return Template(TEMPLATES[prompt])
    if "{" not in prompt:
        problem = f"{prompt!r} has no column in braces, such as {{question}}, and no template has that name. "
        raise FedspanError(field, prompt, problem=problem + suggest_nearest(prompt, TEMPLATES))
    try:
        parsed = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise FedspanError(field, prompt, f"columns in braces, and {{{{ for a brace itself ({error})") from None
    names = [name for _, name, _, _ in parsed if name is not None]
    if not names or any(not name or spec or conversion for _, name, spec, conversion in parsed if name is not None):
        raise FedspanError(field, prompt, "plain names of columns in braces, {question}, and {{ for a brace itself")
    return Template((prompt,))
