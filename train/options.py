"""Which options decide what comes out, as metadata of their fields."""

from dataclasses import fields, is_dataclass
from typing import Any

MAY_DIFFER = {"may_differ": True}  # between commands that continue one run, or share one preparation of data


def decisive(options: Any) -> dict[str, Any]:
    """The options of a dataclass, and of those within it, that may not differ."""
    values = {field.name: getattr(options, field.name) for field in fields(options) if not field.metadata}
    return {name: decisive(value) if is_dataclass(value) else value for name, value in values.items()}
