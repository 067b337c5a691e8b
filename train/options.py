"""Which options decide what comes out: all but those whose type says that they may differ."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

Option = TypeVar("Option")
MARK = "may differ"
MayDiffer = Annotated[Option, MARK]  # between commands that continue one run, or share one preparation of data


def decisive(options: Any) -> dict[str, Any]:
    """The options of a dataclass, and of those within it, that may not differ."""
    return {option.name: decisive(value) if is_dataclass(value) else value for option, value in _deciding(options)}


def departures(options: Any) -> dict[str, Any]:
    """Those of them that are not at their default. Names are hashes of these: an option that is added later changes no
    name where it stays at its default. Where a default is changed, a name stands for something else."""
    found = {}
    for option, value in _deciding(options):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if is_dataclass(value):
            value, default = departures(value), {}
        if value != default:
            found[option.name] = value
    return found


def _deciding(options: Any) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(type(options), include_extras=True)
    for option in fields(options):
        if MARK not in getattr(hints[option.name], "__metadata__", ()):
            yield option, getattr(options, option.name)
