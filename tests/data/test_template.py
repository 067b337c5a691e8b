import numpy as np
import pytest
from bases import TEMPLATE, tiny_tokenizer

from ctcdraft.data.prompts import cut_prompts
from ctcdraft.data.template import prompt_ids, render
from ctcdraft.model.base import PLAIN_TEMPLATE

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


def test_the_mask_covers_answers_with_their_end_and_nothing_else():
    tokenizer = tiny_tokenizer()
    ids, mask = render(tokenizer, CHAT)
    masked = [token for token, m in zip(tokenizer.convert_ids_to_tokens(ids), mask, strict=True) if m]
    assert masked == ["c", "d", "</s>", "f", "</s>"]


def test_a_prompt_ends_where_the_answer_starts():
    tokenizer = tiny_tokenizer()
    ids, _ = render(tokenizer, CHAT)
    prompt = prompt_ids(tokenizer, CHAT[:3])
    assert ids[: len(prompt)] == prompt
    assert tokenizer.convert_ids_to_tokens(ids[len(prompt) :]) == ["f", "</s>"]


def test_a_template_without_generation_marks_is_refused_with_advice():
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match=r"wrap its answers in \{% generation %\}"):
        render(tiny_tokenizer(unmarked), CHAT)


def test_the_plain_template_masks_and_prompts_alike():
    tokenizer = tiny_tokenizer(PLAIN_TEMPLATE)
    ids, mask = render(tokenizer, CHAT)
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
