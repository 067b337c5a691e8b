"""Where a template is said not to look ahead, what it wrote is the beginning of what it writes."""

import pytest
import templates
from bases import TEMPLATE
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from ctcdraft.data.lookahead import looks_ahead
from ctcdraft.model.base import PLAIN_TEMPLATE, VICUNA_TEMPLATE

CHAT = frozenset(["user", "assistant"])
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
    "any message": "{% if messages | length > 0 %}{{ messages[0].role }}{% endif %}" + in_loop(""),
    "past": "{% set ns = namespace(n=0) %}" + in_loop("{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ loop.previtem }}"),
    "prompt": in_loop("") + "{% if add_generation_prompt and x %}{{ messages[0] }}{% endif %}",
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_templates_do_not_look_ahead(name):
    assert not looks_ahead(USUAL[name], CHAT)


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
]


@pytest.mark.parametrize("template", LOOKING)
def test_whatever_else_is_taken_to_look_ahead(template):
    assert looks_ahead(template, CHAT)


def test_the_roles_of_a_conversation_decide_which_branches_count():
    assert looks_ahead(USUAL["tools' results"], CHAT | {"tool"})


def test_what_is_no_template_is_a_sentence():
    with pytest.raises(ValueError, match="the chat template cannot be read: "):
        looks_ahead("{% for m in messages %}", CHAT)


MESSAGES = st.lists(st.text("ab <>", min_size=1, max_size=6), min_size=2, max_size=8).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
)


@pytest.mark.parametrize("name", USUAL)
@settings(max_examples=40, deadline=None)
@given(messages=MESSAGES, data=st.data())
def test_a_shorter_conversation_is_the_beginning_of_a_longer_one(name, messages, data):
    cut = 2 * data.draw(st.integers(1, len(messages) // 2))
    conversations = [messages[:cut], messages]
    options = {"chat_template": USUAL[name], "bos_token": "<s>", "eos_token": "</s>"}
    (short, whole), _ = render_jinja_template(conversations=conversations, **options)
    assert whole.startswith(short.rstrip("\n"))
