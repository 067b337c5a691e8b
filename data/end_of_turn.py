"""What a chat template writes behind an answer, and whether decoding ends there."""

import warnings
from collections.abc import Sequence
from typing import Any

from ctcdraft.model.base.llm import Base

ASKED, ANSWERED, NEXT = "zqaskedzq", "zqansweredzq", "zqnextzq"


def end_of_turn(tokenizer: Any) -> tuple[str, int | None] | None:
    """What stands behind an answer: the token and its id, or text that is no single token, with None.

    Found by rendering; behind a last answer, else between an answer and the next question, where templates like GLM-4's
    begin that with a token that ends the answer. None where the template writes nothing there, or shows no answer.
    """
    turns = [("user", ASKED), ("assistant", ANSWERED), ("user", NEXT)]
    messages = [{"role": role, "content": content} for role, content in turns]
    for chat in (messages[:2], messages):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # whatever the template stumbles over
            return None
        _, answered, behind = text.rpartition(ANSWERED)
        behind = behind.partition(NEXT)[0].strip()
        if answered and behind:
            first = tokenizer(behind, add_special_tokens=False).input_ids[0]
            if first in tokenizer.added_tokens_decoder:
                return tokenizer.convert_ids_to_tokens(first), first
            return behind.split("\n")[0], None
    return None


def missing_end(tokenizer: Any, eos_ids: Sequence[int], base: str) -> str | None:
    """Why answers of the base of that name may not end, with advice; None where the template's end of turn is one that
    decoding stops at."""
    found = end_of_turn(tokenizer)
    if found is None or found[1] in eos_ids:
        return None
    end, token = found
    own = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in eos_ids) or "none"
    if token is None:
        said, cure = f"{end!r}, which is no token, so", "base.eos=<token> names an end, base.template another template"
    else:
        said = f"{end!r} ({token}), which is"
        cure = f"base.eos=[{','.join(map(str, (token, *eos_ids)))}] ends them there"
    return (
        f"{base}'s chat template ends an answer with {said} none of the base's ends of sequence ({own}): its "
        f"answers run on into turns that it invents; {cure}"
    )


def warn_of_template(base: Base) -> None:
    """The warnings, once in a process, that a base's chats are written in the plain format, or that answers may not
    end."""
    if base.plain_template:
        warnings.warn(f"{base.name} has no chat template: chat is written as 'User: ... Assistant: ...'", stacklevel=1)
    if problem := missing_end(base.tokenizer, base.eos_ids, base.name):
        warnings.warn(problem, stacklevel=1)
