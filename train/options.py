"""Which options decide what comes out: all but those whose type says that they may differ."""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

Option = TypeVar("Option")
MARK = "may differ"
MayDiffer = Annotated[Option, MARK]  # between commands that continue one run, or share one preparation of data


def decisive(options: Any) -> dict[str, Any]:
    """The options of a dataclass, and of those within it, that may not differ."""
    hints = get_type_hints(type(options), include_extras=True)
    decide = [f.name for f in fields(options) if MARK not in getattr(hints[f.name], "__metadata__", ())]
    values = {name: getattr(options, name) for name in decide}
    return {name: decisive(value) if is_dataclass(value) else value for name, value in values.items()}
