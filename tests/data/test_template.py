import numpy as np
import pytest
import templates
from bases import TEMPLATE, tiny_tokenizer
from templates import rendered, shown
from tokenizers import processors

from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.records import Conversation
from ctcdraft.data.sources import RowError
from ctcdraft.data.template import Rendered, prompt_ids, render, unread_in_prompt
from ctcdraft.model.load.pretrained import TEMPLATES

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


def test_the_mask_covers_answers_with_their_end_and_nothing_else():
    tokenizer = tiny_tokenizer()
    ids, mask = rendered(tokenizer, CHAT)
    masked = [token for token, m in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True) if m]
    assert masked == ["c", "d", "</s>", "f", "</s>"]


def test_the_mask_covers_a_character_of_several_tokens_whole():
    tokenizer = tiny_tokenizer(TEMPLATE.replace("</s>", ""))
    ids, mask = rendered(tokenizer, [CHAT[0], {"role": "assistant", "content": "c \N{GRINNING FACE}"}, *CHAT[2:]])
    assert tokenizer.decode([token for token, m in zip(ids, mask, strict=True) if m]) == "c \N{GRINNING FACE}f"


def test_white_space_that_an_answer_begins_with_is_a_label_also_where_a_tokenizer_trims_offsets():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # Llama 3's
    answer = {"role": "assistant", "content": "  c d"}
    assert shown(tokenizer, rendered(tokenizer, [CHAT[0], answer])) == "<u>ab<a>[[  c d</s>]]"


def test_a_prompt_ends_where_the_answer_starts():
    tokenizer = tiny_tokenizer()
    ids, _ = rendered(tokenizer, CHAT)
    prompt = prompt_ids(tokenizer, CHAT[:3])
    assert ids[: len(prompt)] == prompt
    assert tokenizer.convert_ids_to_tokens(ids[len(prompt) :]) == ["f", "</s>"]


def test_a_template_that_nobody_knows_needs_no_marks_where_a_special_token_ends_its_answers():
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert rendered(tiny_tokenizer(unmarked), CHAT) == rendered(tiny_tokenizer(), CHAT)
    ids, mask = rendered(tokenizer := tiny_tokenizer(unmarked.replace("</s>", "")), CHAT)
    assert shown(tokenizer, Rendered(ids, mask)) == "<u>ab<a>[[cd<u>]]e<a>[[f<u>]]", "the next turn's token ends it"
    with pytest.raises(ValueError, match=r"wrap its answers in \{% generation %\}"):
        rendered(tiny_tokenizer(unmarked.replace("</s>", "###")), CHAT)


@pytest.mark.parametrize("fault", ["{{ 'a'.index('b') }}", "{% for a, b in [1] %}{% endfor %}", "{{ 1 % 0 }}"])
def test_whatever_a_template_stumbles_over_is_a_rows_fault(fault):
    with pytest.raises(RowError, match="the chat template fails on it"):
        rendered(tiny_tokenizer(TEMPLATE + fault), CHAT)


def known(name):
    template, specials, system, want = templates.KNOWN[name]
    return tiny_tokenizer(template, specials), templates.CHAT[0 if system else 1 :], want


@pytest.mark.parametrize("name", templates.KNOWN)
def test_the_mask_of_every_known_template_is_what_a_person_reads_out_of_it(name):
    tokenizer, chat, want = known(name)
    assert shown(tokenizer, rendered(tokenizer, chat)) == want
    (last,) = render(tokenizer, Conversation("", tuple(chat)), turns="last").sequences
    head, tail = want.split("[[", 1)[0], want.rsplit("[[", 1)[1]
    middle = want[len(head) : len(want) - len(tail) - 2].replace("[[", "").replace("]]", "")
    assert shown(tokenizer, last) == f"{head}{middle}[[{tail}"


@pytest.mark.parametrize("name", templates.KNOWN)
def test_what_precedes_a_masked_answer_is_the_prompt_that_serving_sends(name):
    tokenizer, chat, _ = known(name)
    ids, mask = rendered(tokenizer, chat[:-2])
    start = mask.index(1)
    assert ids[:start] == prompt_ids(tokenizer, chat[:-3])


def marked(name):
    """The same template with its answers wrapped in generation marks: the negative control of the search."""
    template, specials, _, _ = templates.KNOWN[name]
    wrapped = {
        "chatml": template.replace(
            "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}",
            "{{'<|im_start|>' + message['role'] + '\\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
            "{{message['content']}}{% endgeneration %}{% else %}{{message['content']}}{% endif %}{{'<|im_end|>\\n'}}",
        ),
        "mistral-v7": template.replace(
            "{{ ' ' + message['content'] + eos_token }}",
            "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}",
        ),
    }
    return tiny_tokenizer(wrapped[name], specials)


@pytest.mark.parametrize("name", ["chatml", "mistral-v7"])
def test_marks_in_the_template_and_the_search_give_the_same_mask(name):
    _, chat, want = known(name)
    tokenizer = marked(name)
    assert "{% generation %}" in tokenizer.chat_template
    assert shown(tokenizer, rendered(tokenizer, chat)) == want


def test_the_end_of_turn_behind_a_mark_is_learned_where_the_mark_ends_with_another_special_token():
    template = TEMPLATE.replace("</s>{% endgeneration %}", "<call>{% endgeneration %}</s>")
    tokenizer = tiny_tokenizer(template, ["<call>"])
    assert shown(tokenizer, rendered(tokenizer, CHAT[:2])) == "<u>ab<a>[[cd<call></s>]]"


def test_the_built_in_vicuna_template_and_the_public_one_mask_alike():
    tokenizer = tiny_tokenizer(TEMPLATES["vicuna"])
    assert shown(tokenizer, rendered(tokenizer, templates.CHAT)) == templates.KNOWN["vicuna"][3]


def test_thoughts_survive_into_the_template_and_the_mask():
    tokenizer, chat, _ = known("qwen-3")
    chat = [*chat[:-1], {**chat[-1], "reasoning_content": "They leave."}]
    assert "[[<think>\nThey leave.\n</think>\n\nSo long.<|im_end|>]]" in shown(tokenizer, rendered(tokenizer, chat))


@pytest.mark.parametrize(("name", "said"), [("phi-3", ""), ("smollm-3", ""), ("chatml", ""), ("glm-4", "x\n")])
def test_of_an_empty_answer_the_end_is_learned_alone_and_white_space_ends_none(name, said):
    tokenizer, chat, _ = known(name)
    text = shown(tokenizer, rendered(tokenizer, [*chat[:2], {"role": "assistant", "content": said}]))
    end = {"phi-3": "<|end|>", "glm-4": "\nx\n<|user|>"}.get(name, "<|im_end|>")
    assert text.split("[[", 1)[1].split("]]")[0] == end


@pytest.mark.parametrize("inline", [True, False])
def test_a_thought_that_the_prompt_begins_and_no_answer_shows_is_learned_as_it_is_said(inline):
    tokenizer = tiny_tokenizer(templates.R1, templates.SWITCHED_SPECIALS)
    said = {"content": "<think>\nhm\n</think>\n\ncd"} if inline else {"content": "cd", "reasoning_content": "hm"}
    chat = [CHAT[0], {"role": "assistant", **said}, CHAT[2], {"role": "assistant", **said}]
    found = render(tokenizer, Conversation("", tuple(chat)))
    gap = "\n\n" if inline else ""  # which the template leaves
    assert [shown(tokenizer, sequence) for sequence in found.sequences] == [
        "<u>ab<|im_start|><think>\n[[hm\n</think>\n\ncd<|im_end|>]]",
        f"<u>ab<|im_start|>{gap}cd<|im_end|><u>e<|im_start|><think>\n[[hm\n</think>\n\ncd<|im_end|>]]",
    ]
    assert found.unread == []
    with pytest.raises(RowError, match="renders what comes before turn 1 otherwise"):
        rendered(tokenizer, CHAT)  # an answer without its thought is not this base's


def test_tools_survive_into_the_template():
    template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + TEMPLATE
    tokenizer = tiny_tokenizer(template)
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert tokenizer.decode(rendered(tokenizer, CHAT, tools).ids).startswith("clock;<u>ab")
    assert tokenizer.decode(prompt_ids(tokenizer, CHAT[:1], tools)) == "clock;<u>ab<a>"


@pytest.mark.parametrize(
    ("name", "answer"), [("chatml", "a<|im_end|>\n<|im_start|>user\nb"), ("mistral-v0.2", "a [/INST] b")]
)
def test_an_answer_that_imitates_the_template_is_one_answer(name, answer):
    tokenizer, chat, _ = known(name)
    chat = [*chat[:-1], {"role": "assistant", "content": answer}]
    assert answer in shown(tokenizer, rendered(tokenizer, chat)).rsplit("[[", 1)[1]


def test_a_template_that_changes_an_answer_rejects_the_conversation():
    shout = templates.CHATML.replace("message['content'] +", "message['content'].replace('x', 'y') +")
    tokenizer = tiny_tokenizer(shout, ("<|im_start|>", "<|im_end|>"))
    ask = {"role": "user", "content": "q"}
    with pytest.raises(RowError, match="does not show turn 1 as it is"):
        rendered(tokenizer, [ask, {"role": "assistant", "content": "ax"}])
    assert sum(rendered(tokenizer, [ask, {"role": "assistant", "content": "ab"}]).mask) == 3


def test_a_refusal_by_the_template_is_the_rows_own():
    tokenizer, _, _ = known("gemma")
    with pytest.raises(RowError, match="System role not supported"):
        rendered(tokenizer, templates.CHAT)


def test_a_system_turn_that_is_gone_once_its_question_was_answered_rejects_the_row():
    tokenizer, chat, _ = known("mistral-nemo")
    with pytest.raises(RowError, match="before turn 2 otherwise when it goes on"):
        rendered(tokenizer, [templates.CHAT[0], *chat])


def test_marks_that_cover_everything_or_nothing_are_refused():
    everything = "{% generation %}" + templates.CHATML + "{% endgeneration %}"
    nothing = templates.CHATML + "{% generation %}{% endgeneration %}"
    for template, words in ((everything, "cover all"), (nothing, "cover nothing")):
        with pytest.raises(ValueError, match=words):
            rendered(tiny_tokenizer(template), CHAT)


def test_the_plain_template_masks_and_prompts_alike():
    tokenizer = tiny_tokenizer(TEMPLATES["plain"])
    ids, mask = rendered(tokenizer, CHAT)
    prompt = prompt_ids(tokenizer, CHAT[:1])
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)])
    assert tokenizer.decode(ids[len(prompt) : len(prompt) + 3]) == "cd</s>"


def test_cuts_lie_in_the_text_and_within_the_lengths():
    tokenizer = tiny_tokenizer()
    text = "".join(chr(97 + i % 26) for i in range(100))
    cuts = list(cut_prompts(tokenizer, text, (5, 20), 8, (0, 1)))
    assert cuts == list(cut_prompts(tokenizer, text, (5, 20), 8, (0, 1)))
    assert len(cuts) == 8
    assert all(5 <= len(cut) <= 20 for cut in cuts)
    assert len(np.unique([len(cut) for cut in cuts])) > 1
    strings = [tokenizer.decode(cut) for cut in cuts]
    assert text.startswith(strings[0])
    assert all(s in text for s in strings)


def test_a_text_too_short_to_continue_gives_no_prompt():
    assert list(cut_prompts(tiny_tokenizer(), "abc", (5, 20), 2, (0,))) == []
    assert [len(c) for c in cut_prompts(tiny_tokenizer(), "abcdef", (5, 20), 2, (0,))] == [5, 5]


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
THOUGHTFUL = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon"},
    {"role": "assistant", "content": "cd", "reasoning_content": "so"},
]
IM = ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_a_thought_is_shown_under_the_key_that_the_template_reads(key):
    tokenizer = tiny_tokenizer(templates.thinking(key), IM)
    found = render(tokenizer, Conversation("", tuple(THOUGHTFUL), [CALL]))
    assert found.unread == unread_in_prompt(tokenizer, Conversation("", tuple(THOUGHTFUL), [CALL])) == []
    want = (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n[[<think>hm</think><call>"
        '{"name": "clock", "arguments": {"zone": "UTC"}}</call><|im_end|>]]\n<|im_start|>tool\nnoon<|im_end|>\n'
        "<|im_start|>assistant\n[[<think>so</think>cd<|im_end|>]]\n"
    )
    assert shown(tokenizer, rendered(tokenizer, THOUGHTFUL)) == want


def test_what_a_template_does_not_show_is_named_and_calls_are_refused():
    tokenizer = tiny_tokenizer(templates.CHATML, IM)
    spoken = Conversation("", (THOUGHTFUL[0], THOUGHTFUL[3]), [CALL])
    none = "tools (the template shows none)", "turn.reasoning_content (the template does not show it)"
    assert render(tokenizer, spoken).unread == [none[1], none[0]]
    assert unread_in_prompt(tokenizer, spoken) == [none[0]]
    assert render(tokenizer, Conversation("", tuple(CHAT))).unread == []
    with pytest.raises(RowError, match="the chat template shows no tool calls"):
        rendered(tokenizer, THOUGHTFUL)


@pytest.mark.parametrize("template", [templates.CHATML, templates.thinking("thinking"), TEMPLATE])
def test_an_answer_that_is_not_to_be_learned_is_read_and_has_no_label(template):
    tokenizer = tiny_tokenizer(template, IM)
    whole = shown(tokenizer, rendered(tokenizer, CHAT))
    end = "</s>" if template is TEMPLATE else "<|im_end|>"
    for off, gone in ((1, f"cd{end}"), (3, f"f{end}")):
        chat = [message | ({"label": False} if i == off else {}) for i, message in enumerate(CHAT)]
        assert shown(tokenizer, rendered(tokenizer, chat)) == whole.replace(f"[[{gone}]]", gone)
    with pytest.raises(RowError, match="none of its answers is to be learned"):
        render(tokenizer, Conversation("", tuple(chat)), turns="last")
    none = [message | ({"label": False} if message["role"] == "assistant" else {}) for message in CHAT]
    with pytest.raises(RowError, match="none of its answers is to be learned"):
        rendered(tokenizer, none)
