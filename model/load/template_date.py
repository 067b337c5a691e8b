"""The date that a chat template writes, pinned: what is rendered tomorrow are the bytes of today."""

import re
from datetime import date, datetime, time
from typing import TypeVar

CLOCK = "strftime_now"  # transformers' function in templates: those of Llama-3.2 and gpt-oss write today's date with it
PINNED_DATE = "2024-07-26"  # what Llama-3's templates write where there is no clock
DIRECTIVES = "aAbBcdeDFHIjmMpSTuUVwWxXyY"
Template = TypeVar("Template", str, dict[str, str], None)


def check_date(day: str | None) -> None:
    """Raises ValueError on what is no date."""
    try:
        date.fromisoformat(day or PINNED_DATE)
    except ValueError:
        raise ValueError(f"base.date={day!r}: give the date that the chat template writes as YYYY-MM-DD") from None


def writes_date(template: str | dict[str, str] | None) -> bool:
    """Does a tokenizer's chat template (or one of its several) ask for the date?"""
    templates = template.values() if isinstance(template, dict) else [template or ""]
    return any(re.search(rf"\b{CLOCK}\s*\(", text) for text in templates)


def with_date(template: Template, day: str) -> Template:
    """The chat template with its clock stopped at noon of that day: a macro takes the place of transformers' function.

    Templates without a clock stay as they are. Raises as `check_date` does.
    """
    check_date(day)
    if isinstance(template, dict):
        return {name: with_date(text, day) for name, text in template.items()}
    return _stopped_clock(day) + template if template and writes_date(template) else template


def _stopped_clock(day: str) -> str:
    noon = datetime.combine(date.fromisoformat(day), time(12))
    signs = [f"%{sign}" for sign in DIRECTIVES] + [f"%-{sign}" for sign in "dHIjmMSy"]
    values = [("%%", "\0"), *((sign, noon.strftime(sign)) for sign in signs), ("\0", "%")]
    filters = "".join(f"|replace({sign!r}, {value!r})" for sign, value in values)
    # an empty expression behind the macro: behind a block the template's first line break would be lost
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{{{{ '' }}}}"
