"""An answer is learned as the template writes it while no turn follows it, whatever it makes of it later."""

import pytest
import templates
from bases import TEMPLATE, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import shown

from ctcdraft.data.records import Conversation
from ctcdraft.data.sources import RowError
from ctcdraft.data.template import LOST_TURN, prompt_ids, render

IM = ("<|im_start|>", "<|im_end|>")
LOST_THOUGHT = "turn.reasoning_content (the template does not show it)"
# As Qwen 3 and its like: thoughts stay until the next question.
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_THOUGHT = "{% generation %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endgeneration %}"
TWO_MARKS = (  # the thought has marks of its own
    FORGETS.replace("{% generation %}", "")
    .replace("{{ '<think>' + m.reasoning_content + '</think>' }}", MARKED_THOUGHT)
    .replace("{{ m.content }}", "{% generation %}{{ m.content }}")
)
QUIET = FORGETS.replace("{{ '<think>' + m.reasoning_content + '</think>' }}", "")  # looks at thoughts, shows none
RENAMES_THE_END = (  # as gpt-oss
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SHORTENS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}"
    "{{ m.content if loop.last else m.content[:3] }}</s>{% endgeneration %}{% else %}<u>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)

OPENED = (  # as Qwen 3.5: the prompt begins a thought, and a thought in an answer's text is found there
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<think>\n' }}"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() + '\n</think>\n\n' }}"
    "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def unmarked(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


TOKENIZERS = {
    "keeps": tiny_tokenizer(TEMPLATE),
    "keeps thoughts": tiny_tokenizer(templates.thinking("reasoning_content"), IM),
    "qwen-3": tiny_tokenizer(templates.QWEN_3, (*IM, "<think>", "</think>")),
    "forgets": tiny_tokenizer(unmarked(FORGETS), IM),
    "forgets, marked": tiny_tokenizer(FORGETS, IM),
    "forgets, two marks": tiny_tokenizer(TWO_MARKS, IM),
    "quiet": tiny_tokenizer(QUIET, IM),
    "opened": tiny_tokenizer(OPENED, IM),
    "other words": tiny_tokenizer(OPENED.replace("m.content.split('</think>')[-1]", "'cd'"), IM),
    "channels": tiny_tokenizer(templates.CHANNELS, templates.CHANNEL_SPECIALS),
    "renames the end": tiny_tokenizer(RENAMES_THE_END, ("<|return|>", "<|end|>")),
    "shortens": tiny_tokenizer(SHORTENS),
}
FORGETFUL = ("forgets", "forgets, marked", "forgets, two marks")


def user(content):
    return {"role": "user", "content": content}


def answer(content, thought=None, call=None, **more):
    thoughts = {"reasoning_content": thought} if thought else {}
    calls = {"tool_calls": [{"type": "function", "function": {"name": call, "arguments": {}}}]} if call else {}
    return {"role": "assistant", "content": content, **thoughts, **calls, **more}


TWO = [user("q"), answer("ab", "hm"), user("r"), answer("cd", "so")]
CALLS = [user("q"), answer("", "hm", "clock"), {"role": "tool", "content": "noon"}, answer("ab", "so")]


def found(name, messages, turns="each"):
    """(the sequences as text with their labels in [[ ]], what none of them shows)"""
    tokenizer = TOKENIZERS[name]
    rendering = render(tokenizer, Conversation("", tuple(messages)), turns=turns)
    return [shown(tokenizer, sequence) for sequence in rendering.sequences], rendering.unread


def chat(*turns):
    """ChatML's text of (role, content) pairs."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns).replace(
        "]]<|im_end|>", "<|im_end|>]]"
    )


FIRST = chat(("user", "q"), ("assistant", "[[<think>hm</think>ab]]"))
LAST = chat(("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "[[<think>so</think>cd]]"))


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_template_that_drops_thoughts_gives_a_sequence_for_each_question(name):
    assert found(name, TWO) == ([FIRST, LAST], [])


@pytest.mark.parametrize("name", FORGETFUL)
def test_of_the_last_turn_alone_the_earlier_thought_is_counted(name):
    assert found(name, TWO, "last") == ([LAST], [LOST_THOUGHT])


@pytest.mark.parametrize("name", FORGETFUL)
def test_answers_between_two_questions_share_a_sequence(name):
    between = (
        ("user", "q"),
        ("assistant", "[[<think>hm</think><call>clock</call>]]"),
        ("tool", "noon"),
        ("assistant", "[[<think>so</think>ab]]"),
    )
    assert found(name, CALLS) == ([chat(*between)], [])
    later = (("assistant", "<call>clock</call>"), ("tool", "noon"), ("assistant", "ab"))
    more = (("user", "r"), ("assistant", "[[<think>oh</think>cd]]"))
    want = [chat(*between), chat(("user", "q"), *later, *more)]
    assert found(name, [*CALLS, user("r"), answer("cd", "oh")]) == (want, [])


@pytest.mark.parametrize("name", FORGETFUL)
def test_an_answer_that_is_not_learned_needs_no_sequence(name):
    assert found(name, [TWO[0], answer("ab", "hm", label=False), *TWO[2:]]) == ([LAST], [LOST_THOUGHT])


@pytest.mark.parametrize("name", FORGETFUL)
def test_what_lies_behind_the_last_label_and_would_change_it_is_counted(name):
    assert found(name, [*TWO[:3], answer("cd", "so", label=False)]) == ([FIRST], [LOST_TURN, LOST_TURN])
    assert found(name, TWO[:3]) == ([FIRST], [LOST_TURN])


def test_qwen_3_writes_an_empty_thought_only_before_the_last_answer():
    first = chat(("user", "q"), ("assistant", "[[<think>\n\n</think>\n\nab]]"))
    last = chat(("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "[[<think>\nso\n</think>\n\ncd]]"))
    assert found("qwen-3", [TWO[0], answer("ab"), *TWO[2:]]) == ([first, last], [])


def test_of_channels_the_thought_and_the_end_are_those_of_the_last_turn():
    asked = "<|start|>user<|message|>q<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    first = f"{asked}[[<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}ab<|return|>]]"
    last = f"{asked}{final}ab<|end|><|start|>user<|message|>r<|end|><|start|>assistant[[{final}cd<|return|>]]"
    assert found("channels", [*TWO[:3], answer("cd")]) == ([first, last], [])
    call = f"{asked}[[<|channel|>commentary to=clock<|message|>{{}}<|call|>]]<|start|>tool<|message|>noon<|end|>"
    more = f"<|start|>assistant[[<|channel|>analysis<|message|>so<|end|><|start|>assistant{final}ab<|return|>]]"
    assert found("channels", [CALLS[0], answer("", None, "clock"), *CALLS[2:]]) == ([call + more], [])


def test_an_end_of_turn_that_is_renamed_later_is_no_label():
    assert found("renames the end", [user("q"), answer("ab"), user("r"), answer("cd")]) == (
        ["<u>q<a>[[ab<|return|>]]", "<u>q<a>ab<|end|><u>r<a>[[cd<|return|>]]"],
        [],
    )


def test_marks_that_cover_an_answer_cut_short_give_no_labels_there():
    messages = [user("q"), answer("abcdef"), user("r"), answer("gh"), user("s"), answer("ijklm")]
    assert found("shortens", messages)[0] == [
        "<u>q<a>[[abcdef</s>]]",
        "<u>q<a>abc</s><u>r<a>[[gh</s>]]<u>s<a>[[ijklm</s>]]",
    ]


def test_a_thought_that_the_label_does_not_show_is_counted():
    assert found("qwen-3", [user("q"), answer("<think>\nhm\n</think>\n\nab")])[1] == []
    words = (("user", "q"), ("assistant", "[[ab]]"), ("user", "r"), ("assistant", "[[cd]]"))
    assert found("quiet", TWO) == ([chat(*words)], [LOST_THOUGHT, LOST_THOUGHT])


@pytest.mark.parametrize("said", ["<think>\nhm\n</think>\n\nab", "<think>hm</think>ab", "hm</think> ab"])
def test_a_thought_in_the_text_of_an_answer_goes_on_where_the_prompt_began_it(said):
    want = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n[[hm\n</think>\n\nab<|im_end|>]]\n"
    assert found("opened", [user("q"), answer(said)]) == ([want], [])


def test_an_answer_of_other_words_is_refused():
    with pytest.raises(RowError, match="does not show turn 1 as it is"):
        found("other words", [user("q"), answer("<think>hm</think>ab")])


@pytest.mark.parametrize("name", ["keeps", "keeps thoughts"])
def test_a_template_that_keeps_the_past_gives_one_sequence(name):
    messages = [*TWO, user("s"), answer("ef")]
    sequences, unread = found(name, messages)
    assert len(sequences) == 1
    assert sequences[0].count("[[") == 3
    assert unread == ([LOST_THOUGHT] * 2 if name == "keeps" else [])


THOUGHTS = st.one_of(st.none(), st.text("xyz", min_size=1, max_size=3))
ANSWERS = st.builds(answer, st.text("abc<", min_size=1, max_size=6), THOUGHTS, label=st.booleans())


def served(tokenizer, messages, i):
    """By brute force: the prompt of the answer messages[i] and that answer, with the place where it starts."""
    messages = [{key: value for key, value in m.items() if key != "label"} for m in messages]
    ids = tokenizer.apply_chat_template(messages[: i + 1], tokenize=True, return_dict=False)
    line_break = ids[-1] == tokenizer.convert_tokens_to_ids("Ċ")
    return ids[: len(ids) - line_break], len(prompt_ids(tokenizer, messages[:i]))


def labelled(sequence):
    """Each stretch of labels: all tokens up to its end, with the place where it starts."""
    ids, mask = sequence.ids, [*sequence.mask, 0]
    starts = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
    return [(ids[: mask.index(0, start)], start) for start in starts]


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"opened", "other words"}))
@settings(max_examples=60, deadline=None)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=5), turns=st.sampled_from(["each", "last"]))
def test_each_label_follows_its_prompt_as_the_last_turn_would(name, answers, turns):
    tokenizer = TOKENIZERS[name]
    messages = [m for i, a in enumerate(answers) for m in (user(f"q{i}"), a)]
    learned = [i for i in range(1, len(messages), 2) if messages[i]["label"]]
    learned = [i for i in learned if turns == "each" or i == len(messages) - 1]
    if not learned:
        with pytest.raises(RowError):
            render(tokenizer, Conversation("", tuple(messages)), turns=turns)
        return
    rendering = render(tokenizer, Conversation("", tuple(messages)), turns=turns)
    want = [served(tokenizer, messages, i) for i in learned]
    assert sorted(found for sequence in rendering.sequences for found in labelled(sequence)) == sorted(want)
