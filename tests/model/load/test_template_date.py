"""What is rendered on two days are the same bytes."""

from datetime import datetime

import pytest
from bases import tiny_tokenizer, write_base
from transformers.utils import chat_template_utils

from ctcdraft.model import load_base
from ctcdraft.model.load.template_date import PINNED_DATE, with_date, writes_date

CHAT = [{"role": "user", "content": "hi"}]
FORMATS = ("%d %b %Y", "%Y-%m-%d", "%A, %-d. %B %y", "%H:%M:%S", "%j %U %%d")
DATED = "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
DATED += "{{ 'Today Date: ' + date_string + '\n' }}"
WORDS = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"


def rendered(template, **options):
    return tiny_tokenizer(template).apply_chat_template(CHAT, tokenize=False, **options)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("day", ["2024-07-26", "2031-01-05"])
def test_every_format_is_what_the_clock_itself_would_write_at_noon_of_the_day(form, day):
    for call in (f"{{{{ strftime_now({form!r}) }}}}", f"{{% set f = {form!r} %}}{{{{ strftime_now(f)|string }}}}"):
        want = datetime.fromisoformat(f"{day} 12:00").strftime(form)
        assert rendered(with_date(call + WORDS, day)) == f"{want}user:hi</s>"


@pytest.mark.parametrize("start", ["", "\n", "\n\n", " \n", "{%- if true %}\n{% endif %}", "{# a word #}\n"])
def test_nothing_else_changes(start, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26, 12)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    marked = "{% generation %}x{% endgeneration %}"
    calls = "{% macro m() %}{{ strftime_now('%d') }}{% endmacro %}{{ m() }}{{ strftime_now is defined }}" + DATED
    for template in (start + calls + WORDS, start + DATED + marked + WORDS):
        assert rendered(with_date(template, "2024-07-26")) == rendered(template)
    given = rendered(with_date(start + DATED + WORDS, "2024-07-26"), date_string="5 May")
    assert "Today Date: 5 May" in given


def test_templates_without_a_clock_stay_as_they_are():
    for template in (WORDS, None, {"default": WORDS}, "{{ strftime_now is defined }}" + WORDS):
        assert with_date(template, "2024-07-26") == template
        assert not writes_date(template)
    both = with_date({"default": WORDS, "tool_use": DATED}, "2024-07-26")
    assert (both["default"], writes_date(both)) == (WORDS, True)


def test_a_base_writes_its_one_date_and_says_which(tmp_path):
    folder = write_base(tmp_path / "dated", template=DATED + WORDS)
    base = load_base(str(folder))
    assert base.tokenizer.apply_chat_template(CHAT, tokenize=False).startswith("Today Date: 26 Jul 2024\n")
    assert base.date == base.identity["date"] == PINNED_DATE
    other = load_base(str(folder), date="2025-01-02")
    assert other.tokenizer.apply_chat_template(CHAT, tokenize=False).startswith("Today Date: 02 Jan 2025\n")
    assert (other.identity["date"], other.date) == ("2025-01-02", "2025-01-02")
    plain = load_base(str(write_base(tmp_path / "plain")), date="2025-01-02")
    assert plain.date is None
    assert "date" not in plain.identity
    with pytest.raises(ValueError, match=r"base\.date='tomorrow': give the date .* as YYYY-MM-DD"):
        load_base(str(folder), date="tomorrow")
