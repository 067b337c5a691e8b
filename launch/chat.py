"""Talk to a base with its draft head in a terminal; tokens that came from accepted drafts are tinted.

python launch/chat.py name=<run> [prompt="..."] [draft.nodes=64] [temperature=0.7]
python launch/chat.py head.path=<exported head> base.path=<model>
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ctcdraft.data.end_of_turn import warn_of_template
from ctcdraft.data.messages import encodable
from ctcdraft.data.template import answer_message, prompt_ids
from ctcdraft.launch.cli import run
from ctcdraft.launch.runs import chosen_heads
from ctcdraft.launch.schema import ChatEntry
from ctcdraft.model import Decoder, Generation, load_head
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.train.online import decoder_for

TINT, PLAIN = "\033[38;5;36m", "\033[0m"


def main(config: ChatEntry) -> int:
    base, heads, _ = chosen_heads(config)
    warn_of_template(base)
    decoder = decoder_for(base, load_head(next(iter(heads.values())), base), config.draft, config.online)
    system = encodable(config.system or "", "the system turn")
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(_turns(config.prompt)):
        messages.append({"role": "user", "content": encodable(text, "the question")})
        prompt = prompt_ids(base.tokenizer, messages, None, base.template_args)
        if len(prompt) >= base.context_length:
            raise ValueError(f"the chat has {len(prompt)} tokens, {base.name} takes {base.context_length}: begin anew")
        out = answer(decoder, prompt, config, config.seed + number)
        messages.append(answer_message(base, messages, out.tokens))
    return 0


def answer(decoder: Decoder, prompt: list[int], config: ChatEntry, seed: int) -> Generation:
    """Stream one answer to the terminal, and say what drafting was worth."""
    tinted = sys.stdout.isatty()
    sampling: Any = {option.name: getattr(config, option.name) for option in fields(Sampling)}
    for event in decoder.stream(prompt, config.max_new_tokens, seed=seed, **sampling):
        if isinstance(event, Generation):
            rate = f"{event.tokens_per_step:.2f} tokens per step (plain decoding: 1.00)"
            learnt = f", {event.seconds['learn']:.1f} s of learning" if "learn" in event.seconds else ""
            print(f"\n[{len(event.tokens)} tokens in {event.steps + 1} base forwards, {rate}{learnt}]", flush=True)
            return event
        for text, drafted in event.pieces:
            print(f"{TINT}{text}{PLAIN}" if tinted and drafted else text, end="", flush=True)
    raise AssertionError("a stream ends with its generation")


def _turns(prompt: str | None) -> Iterator[str]:
    """The one prompt of the command line, or what is typed until an empty line or end of input."""
    if prompt is not None:
        yield prompt
        return
    print("An empty line ends the chat.")
    with suppress(EOFError, KeyboardInterrupt):
        yield from iter(lambda: input("> ").strip(), "")


if __name__ == "__main__":
    run("chat", ChatEntry, main)
