"""Conversion of a prompt and its answer to token ids: by chat template or as plain text, truncated to a length.

Prompt and answer are tokenized separately, so that the boundary between prompt and learned text lies between two
tokens, and generation continues from exactly the ids seen in training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from fedspan.errors import FedspanError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One example as text."""

    text: str
    """The prompt: the instruction, or the user's last message."""
    answer: str
    history: tuple[dict[str, str], ...] = ()
    """Earlier messages of a conversation, each with ``role`` and ``content``."""

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Prompt:
        """Read a row with ``text``, ``answer`` and optionally ``history`` (JSON)."""
        return cls(row["text"], row["answer"], tuple(json.loads(row.get("history") or "[]")))


def render_chat(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system: str | None) -> tuple[str, str]:
    """Render prompt and answer with the model's chat template.

    Args:
        system: Message that opens the conversation, or None.

    Raises:
        FedspanError: If there is no chat template, it fails on these messages, or its text of a whole conversation does
            not begin with its text of the prompt (so the answer's beginning is unknown).
    """
    if not tokenizer.chat_template:
        raise FedspanError("data.chat", True, "false", problem="this model's tokenizer has no chat template")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages = [*messages, *prompt.history, {"role": "user", "content": prompt.text}]
    conversation = [*messages, {"role": "assistant", "content": prompt.answer}]
    try:
        prompt_text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        conversation_text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except TemplateError as error:
        raise FedspanError(
            "data.chat", True, problem=f"the model's chat template refuses the messages ({error})"
        ) from None
    if not conversation_text.startswith(prompt_text):
        raise FedspanError(
            "data.chat", True, "false", problem="this model's chat template changes a prompt once the answer follows"
        )
    return prompt_text, conversation_text[len(prompt_text) :]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Tokenize texts; ``special`` adds the tokens that the tokenizer puts before a text (never those after one)."""
    if not texts:
        return []
    # Not verbose: a text longer than the model supports is expected here and will be cut.
    rows = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]]
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    if special:  # OPT begins and ends with the same token, so a single id stays
        rows = [ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids for ids in rows]
    return rows


def truncate(prompt: list[int], answer: list[int], length: int, keep_first: bool) -> tuple[list[int], list[int]]:
    """Truncate prompt and answer to at most ``length`` ids together.

    The prompt is truncated first: it loses its beginning (the answer follows its end), down to a quarter of the length.
    An answer that still does not fit then loses its end.

    Args:
        prompt: Ids of the prompt, at least one.
        length: Maximal number of ids, at least 2.
        keep_first: Whether the prompt's first id (a model's beginning-of-text token) is never cut.
    """
    room = max(length - len(answer), min(len(prompt), max(1, length // 4)))
    if len(prompt) > room:
        prompt = [prompt[0], *prompt[len(prompt) - room + 1 :]] if keep_first else prompt[-room:]
    return prompt, answer[: length - len(prompt)]
