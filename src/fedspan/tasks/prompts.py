"""From a prompt and its answer to token ids: the model's chat template or plain text, cut to a length.

Prompt and answer are tokenised apart, so that the border between what is given and what is learnt lies between two
tokens, and generation goes on from exactly the ids that training saw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from fedspan.errors import FedspanError

__all__ = ["Prompt", "cut", "render", "tokenise"]


@dataclass(frozen=True)
class Prompt:
    """One example as text.

    Args:
        text: what is given: the instruction, or the last message of the user.
        answer: what is learnt.
        history: earlier messages of a conversation, each with ``role`` and ``content``.
    """

    text: str
    answer: str
    history: tuple[dict[str, str], ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Prompt:
        """A row with ``text``, ``answer`` and maybe ``history`` (JSON)."""
        return cls(row["text"], row["answer"], tuple(json.loads(row.get("history") or "[]")))


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system: str | None) -> tuple[str, str]:
    """Prompt and answer as the model's chat template writes them.

    Args:
        tokenizer: with a chat template.
        prompt: the example.
        system: a message that opens the conversation, or none.

    Raises:
        FedspanError: there is no chat template, it fails on these messages, or what it writes of a whole conversation
            does not begin with what it writes of the prompt (so nothing says where the answer begins).
    """
    if not tokenizer.chat_template:
        raise FedspanError("data.chat", True, "false: this model's tokenizer has no chat template")
    given = [] if system is None else [{"role": "system", "content": system}]
    given = [*given, *prompt.history, {"role": "user", "content": prompt.text}]
    whole = [*given, {"role": "assistant", "content": prompt.answer}]
    try:
        before = str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
        after = str(tokenizer.apply_chat_template(whole, tokenize=False))
    except TemplateError as error:
        raise FedspanError("data.chat", True, f"messages that the model's chat template takes ({error})") from None
    if not after.startswith(before):
        raise FedspanError("data.chat", True, "false: this model's chat template rewrites a prompt once it is answered")
    return before, after[len(before) :]


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Ids of texts; ``special`` adds what the tokenizer puts before a text (never what it puts behind one)."""
    if not texts:
        return []
    # Not verbose: that a text is longer than the model knows is no news here, it will be cut.
    rows = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=special, verbose=False)["input_ids"]]
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    if special:  # OPT begins with what it ends with, so a single id stays
        rows = [ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids for ids in rows]
    return rows


def cut(prompt: list[int], answer: list[int], length: int, keep_first: bool) -> tuple[list[int], list[int]]:
    """Prompt and answer in at most ``length`` ids together.

    The prompt gives way first: it loses its beginning (the answer follows its end), down to a quarter of the length.
    Only an answer that then still does not fit loses its end.

    Args:
        prompt: at least one id.
        answer: ids.
        length: at least 2.
        keep_first: keep the prompt's first id (a model's sign for the beginning of a text) whatever is cut.
    """
    room = max(length - len(answer), min(len(prompt), max(1, length // 4)))
    if len(prompt) > room:
        prompt = [prompt[0], *prompt[len(prompt) - room + 1 :]] if keep_first else prompt[-room:]
    return prompt, answer[: length - len(prompt)]
