"""What is settled when a template first looks at a message, it writes of the messages before that alone."""

import pytest
import templates
from bases import TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from ctcdraft.data.rendering import compiled, render_text
from ctcdraft.model.base import PLAIN_TEMPLATE, VICUNA_TEMPLATE

AHEAD = ("qwen-3", "mistral-nemo")


def in_loop(words):
    return "{% for m in messages %}{{ m.content }}" + words + "{% endfor %}"


USUAL = {name: template for name, (template, *_) in templates.KNOWN.items() if name not in AHEAD} | {
    "tiny": TEMPLATE,
    "plain": PLAIN_TEMPLATE,
    "vicuna, marked": VICUNA_TEMPLATE,
    "thinking": templates.thinking("thinking"),
    "switched": templates.SWITCHED,
    "inner loop": in_loop("{% for c in m.content %}{{ ',' if not loop.last }}{% endfor %}"),
    "tools' results": in_loop(  # as Qwen 2.5
        "{% if m.role == 'tool' and m.content %}"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %};{% endif %}{% endif %}"
    ),
    "past": "{% set ns = namespace(n=0) %}" + in_loop("{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ loop.previtem }}"),
    "prompt": in_loop("") + "{% if add_generation_prompt and x %}{{ messages[0] }}{% endif %}",
}


LOOKING = [
    *(in_loop("{{ '.' if loop." + name + " }}") for name in ("last", "length", "revindex", "revindex0", "nextitem")),
    in_loop("{{ loop['last'] }}"),
    in_loop("{% set inner = loop %}"),
    in_loop("{% for c in ([1] if loop.last else []) %}{{ c }}{% endfor %}"),
    in_loop("{% for m in m.parts %}{% if m.role == 'tool' %}{{ messages[-1] }}{% endif %}{% endfor %}"),
    in_loop("{% set m = {'role': 'tool'} %}{% if m.role == 'tool' %}{{ messages[-1] }}{% endif %}"),
    in_loop("{% if m.role == 'tool' or m.role == 'user' %}{{ loop.last }}{% endif %}"),
    in_loop("{% if m.role != 'tool' %}{{ loop.last }}{% endif %}"),
    in_loop("{% if m == messages[-1] %}.{% endif %}"),
    in_loop("{% if messages | length > 3 %}.{% endif %}"),
    in_loop("{{ messages[2].content }}"),
    in_loop("{{ (messages | last).role }}"),
    in_loop("{{ messages | tojson }}"),
    in_loop("") + in_loop(""),
    in_loop("") + "<end>",
    in_loop("") + "{{ eos_token }}",
    in_loop("") + "{% if not add_generation_prompt %}.{% endif %}",
    in_loop("") + "{% if add_generation_prompt %}{% else %}.{% endif %}",
    "{% set other = [messages] %}{% for m in other[0] %}{{ m.content }}{{ loop.last }}{% endfor %}",
    "{% set other = messages[1:] %}" + in_loop("{{ other | length }}"),
    "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "{% set text %}" + in_loop("") + "{% endset %}{{ text[-9:] }}",
    "{% filter upper %}" + in_loop("") + "{% endfilter %}",
    "{% macro all() %}" + in_loop("{{ loop.last }}") + "{% endmacro %}{{ all() }}",
    "{% macro of(x) %}{{ x[-1] }}{% endmacro %}{{ of(messages) }}",
    "{% set ns = namespace(all=messages) %}{{ ns.all[-1] }}",
    "{% block b %}" + in_loop("") + "{% endblock %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m != messages[-1] %}{{ m.content }}{% endfor %}",
    *(templates.KNOWN[name][0] for name in AHEAD),
    "{% if messages | length > 0 %}{{ messages[0].role }}{% endif %}" + in_loop(""),
    in_loop("") + "{{ messages }}{{ messages | string }}",
    in_loop("") + "{{ ([1] + messages) | length }}{{ messages == [] }}",
    in_loop("{{ messages.copy() | length }}"),
]
VARIABLES = {"tools": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = st.lists(st.text("ab <>", min_size=1, max_size=6), min_size=2, max_size=8).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
)


def rendered(template, messages):
    (text,), _ = render_jinja_template(conversations=[messages], chat_template=template, **VARIABLES)
    return text


@pytest.mark.parametrize("template", [*USUAL.values(), *LOOKING])
@settings(max_examples=20, deadline=None)
@given(messages=MESSAGES)
def test_what_is_settled_is_written_of_the_messages_before_alone(template, messages):
    try:
        whole = rendered(template, messages)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            render_text(template, messages, VARIABLES)
        return
    found = render_text(template, messages, VARIABLES)
    assert found.text == whole
    assert len(found.settled) == len(messages) + 1
    assert found.settled == sorted(found.settled)
    for count, settled in enumerate(found.settled):
        try:
            alone = rendered(template, messages[:count])
        except Exception:  # of none, or of so few, it refuses to write anything
            continue
        assert alone.startswith(whole[:settled]), count


@pytest.mark.parametrize("name", USUAL)
def test_usual_templates_settle_an_answer_before_they_look_at_the_next_turn(name):
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} <"} for i in range(6)]
    found = render_text(USUAL[name], messages, VARIABLES)
    for count in (2, 4, 6):
        assert found.text[: found.settled[count]].startswith(rendered(USUAL[name], messages[:count]).rstrip("\n"))


def test_one_that_looks_ahead_settles_nothing():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(6)]
    found = render_text(templates.KNOWN["qwen-3"][0], messages, VARIABLES)
    assert found.settled[1:] == [0, 0, 0, 0, 0, len(found.text)]


def test_marks_are_those_of_transformers():
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"a{i}"} for i in range(4)]
    options = {"chat_template": TEMPLATE, "return_assistant_tokens_mask": True, **VARIABLES}
    (text,), (marks,) = render_jinja_template(conversations=[messages], **options)
    found = render_text(TEMPLATE, messages, VARIABLES)
    assert (found.text, found.marks) == (text, marks)


def test_what_is_no_template_is_a_sentence():
    with pytest.raises(ValueError, match="the chat template cannot be read: "):
        compiled("{% for m in messages %}")
