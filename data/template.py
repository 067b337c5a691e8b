"""Conversations -> tokens through the tokenizer's chat template, with the answers masked in."""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from ctcdraft.data.records import RowError

Messages = Sequence[dict[str, str]]


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Tokens up to where the assistant's next answer starts. Raises ValueError when the template refuses."""
    rendered = _apply(tokenizer, messages, add_generation_prompt=True)
    return list(rendered["input_ids"])


def render(tokenizer: Any, messages: Messages) -> tuple[list[int], list[int]]:
    """Tokens of a whole conversation and its loss mask: 1 on the assistant's tokens.

    Raises ValueError, with advice, for a template that does not mark its answers, or marks everything.
    """
    rendered = _apply(tokenizer, messages, return_assistant_tokens_mask=True)
    ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
    if not any(mask) or all(mask):
        raise ValueError(
            "the tokenizer's chat template does not mark the assistant's tokens: wrap its answers in "
            "{% generation %}...{% endgeneration %}, or keep data.regenerate=true, which needs no mask"
        )
    return ids, mask


def _apply(tokenizer: Any, messages: Messages, **options: bool) -> dict[str, Any]:
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error


def text_ids(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """(leading special tokens, tokens of the text itself)."""
    ids = tokenizer(text).input_ids
    bare = tokenizer(text, add_special_tokens=False).input_ids
    lead = 1 if ids[: len(bare) + 1] != bare and ids and ids[0] == tokenizer.bos_token_id else 0
    return ids[:lead], bare
