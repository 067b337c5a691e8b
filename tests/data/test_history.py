"""An answer's tokens come back, as the template writes them, in the prompt of the next turn."""

import pytest
from bases import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CHANNEL_SPECIALS, CHANNELS, CHATML, LLAMA_3

from ctcdraft.data.template import answer_message, prompt_ids
from ctcdraft.model.base.llm import Base

SPECIALS = {
    CHATML: ("<|im_start|>", "<|im_end|>", "<think>", "[TOOL_CALLS]"),
    LLAMA_3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    CHANNELS: CHANNEL_SPECIALS,
}
ENDS = {CHATML: "<|im_end|>", LLAMA_3: "<|eot_id|>", CHANNELS: "<|return|>"}
QUESTION = [{"role": "user", "content": "Why?"}]
TOKENIZERS = {template: tiny_tokenizer(template, special) for template, special in SPECIALS.items()}
IDS = {CHATML: "chatml", LLAMA_3: "llama-3", CHANNELS: "channels"}.get


def base(template, *eos):
    return Base(None, TOKENIZERS[template], "b", eos, 64)


def next_prompt(template, text):
    """(the first prompt, the answer's tokens, the prompt of the turn behind it)"""
    tokenizer = TOKENIZERS[template]
    answer = tokenizer.encode(text + ENDS[template], add_special_tokens=False)
    eos = tokenizer.convert_tokens_to_ids(ENDS[template])
    message = answer_message(base(template, eos), QUESTION, answer)
    again = [*QUESTION, message, {"role": "user", "content": "So?"}]
    return prompt_ids(tokenizer, QUESTION), answer, prompt_ids(tokenizer, again)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3], ids=IDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_next_prompt_begins_with_the_last_one_and_the_answers_tokens(template, data):
    inside = [special for special in SPECIALS[template] if special != ENDS[template]]
    pieces = data.draw(st.lists(st.sampled_from(["a", "b c", "é", "\n", *inside]), max_size=6))
    text = "".join(pieces).strip()  # which Llama 3's template does too
    prompt, answer, following = next_prompt(template, text)
    assert following[: len(prompt) + len(answer)] == prompt + answer


@settings(max_examples=100, deadline=None)
@given(thought=st.text("ab <", max_size=5), said=st.text("ab <", max_size=5))
def test_of_channels_the_final_words_alone_come_back(thought, said):
    tokenizer = TOKENIZERS[CHANNELS]
    thinks = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    prompt, answer, following = next_prompt(CHANNELS, f"{thinks}<|channel|>final<|message|>{said}")
    message = answer_message(base(CHANNELS, answer[-1]), QUESTION, answer)
    want = {"role": "assistant", "content": said} | ({"reasoning_content": thought} if thought else {})
    assert message == want
    back = tokenizer.encode(f"<|channel|>final<|message|>{said}<|end|>", add_special_tokens=False)
    assert following[: len(prompt) + len(back)] == prompt + back


def test_what_no_message_gives_is_left_without_special_tokens():
    tokenizer = TOKENIZERS[CHANNELS]
    answer = tokenizer.encode("a<|message|>b<|channel|>", add_special_tokens=False)
    assert answer_message(base(CHANNELS), QUESTION, answer) == {"role": "assistant", "content": "ab"}
