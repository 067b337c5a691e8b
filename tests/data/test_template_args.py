"""What a chat template gets beside the messages: it reaches every rendering, and what it cannot read is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from bases import TEMPLATE, tiny_tokenizer
from templates import SWITCHED, SWITCHED_SPECIALS, rendered, shown

from ctcdraft.data.sources import RowError
from ctcdraft.data.template import answer_message, prompt_ids, with_template_args
from ctcdraft.model.base.llm import Base

ASK = [{"role": "user", "content": "q"}]
SAID = [*ASK, {"role": "assistant", "content": "ab"}]


def base(template=SWITCHED):
    return Base(SimpleNamespace(), tiny_tokenizer(template, SWITCHED_SPECIALS), "b", (1,), 64, False)


def test_they_reach_the_prompt_and_the_mask():
    tokenizer = base().tokenizer
    off = {"enable_thinking": False}
    assert tokenizer.decode(prompt_ids(tokenizer, ASK)).endswith("assistant\n<think>")
    assert tokenizer.decode(prompt_ids(tokenizer, ASK, None, off)).endswith("assistant\n<think></think>")
    assert shown(tokenizer, rendered(tokenizer, SAID)).endswith("<think>[[</think>ab<|im_end|>]]\n")
    assert shown(tokenizer, rendered(tokenizer, SAID, None, off)).endswith("<think></think>[[ab<|im_end|>]]\n")
    answer = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    thoughtless = replace(base(), eos_ids=(answer[-1],), template_args=off)
    assert answer_message(thoughtless, ASK, answer) == SAID[1]


def test_a_thought_where_the_prompt_has_an_empty_one_is_refused_with_the_reason():
    thoughtful = [*ASK, {**SAID[1], "reasoning_content": "hm"}]
    with pytest.raises(
        RowError, match=r'before turn 1 otherwise .* with data.template_args=\{"enable_thinking": false\}'
    ):
        rendered(base().tokenizer, thoughtful, None, {"enable_thinking": False})


def test_any_json_value_is_passed_on_as_it_is():
    notes = {"notes": ["é", "{{ 1 }}", '"']}
    tokenizer = base().tokenizer
    assert tokenizer.decode(prompt_ids(tokenizer, ASK, None, notes)).endswith('<think>é{{ 1 }}"')


def test_a_base_keeps_them_and_the_one_before_does_not():
    before = base()
    after = with_template_args(before, {"enable_thinking": False, "style": "x"})
    assert after.template_args == {"enable_thinking": False, "style": "x"}
    assert before.template_args == {}
    assert with_template_args(after, {}).template_args == {}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("enable_thoughts", "never reads enable_thoughts; it reads enable_thinking, notes, style$"),
        *((name, f"rendering itself gives the chat template its {name}") for name in ("tools", "messages")),
        *((name, f"its {name}: leave it out") for name in ("add_generation_prompt", "bos_token", "namespace")),
        *((name, f"its {name}: leave it out") for name in ("chat_template", "strftime_now", "documents")),
    ],
)
def test_a_name_that_is_not_the_templates_to_read_is_refused(name, sentence):
    with pytest.raises(ValueError, match=rf"data\.template_args: .*{sentence}"):
        with_template_args(base(), {name: 1})


def test_a_template_that_reads_none_says_so_and_marks_are_no_names():
    with pytest.raises(ValueError, match="never reads enable_thinking; it reads no name at all"):
        with_template_args(base(TEMPLATE), {"enable_thinking": True})


def test_of_several_templates_any_may_read_it():
    several = base()
    several.tokenizer.chat_template = {"default": TEMPLATE, "tool_use": SWITCHED}
    assert with_template_args(several, {"enable_thinking": True}).template_args


def test_what_is_no_template_is_a_sentence():
    broken = base("{% for m in messages %}{% generation %}")
    for work in (lambda: rendered(broken.tokenizer, SAID), lambda: with_template_args(broken, {"style": 1})):
        with pytest.raises(ValueError, match="the chat template cannot be read: "):
            work()
