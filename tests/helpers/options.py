"""Every option with type, default and meaning: `python tests/helpers/options.py > docs/options.md`. Types are those of
the dataclasses, defaults those of the composed configuration; a meaning is the comment above a field, or behind it."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from ctcdraft.launch.cli import CONF, compose
from ctcdraft.launch.schema import ENTRIES

ABOUT = """Written by `tests/helpers/options.py`. Any of these goes behind a command: `optim.lr=1e-3`, `head=parallel`.
A choice, and `experiment=<one of conf/experiment/>`, changes other defaults: `--cfg job` prints what a command uses.
`launch/prepare.py` takes the options of `launch/train.py`. In eval, chat and export, null is what the run has."""
FIELD = re.compile(r"^((?:    # .*\n)*)    (\w+): [^#\n]*(?:# (.*))?$", re.MULTILINE)


def meanings(schema: type) -> dict[str, str]:
    """What is said about each field of a dataclass, by itself or by those that it inherits from."""
    found: dict[str, str] = {}
    for part in filter(is_dataclass, reversed(schema.__mro__)):
        for above, name, behind in FIELD.findall(inspect.getsource(part)):
            if said := behind or re.sub(r"\s*# ", " ", above).strip():
                found[name] = said
    return found


def rows(schema: type, config: Any, prefix: str = "") -> Iterator[tuple[str, ...]]:
    """(option, type, default, meaning) of a dataclass and of those in it; KeyError where nothing says what it means."""
    said = meanings(schema)
    for field in fields(schema):
        name, kind = f"{prefix}{field.name}", get_type_hints(schema)[field.name]
        default = config.get(field.name, {} if is_dataclass(kind) else field.default)
        if is_dataclass(kind):
            yield from rows(kind, default, f"{name}.")
        elif choices := [one for one in get_args(kind) if is_dataclass(one)]:  # those of the default, then others'
            listed: dict[str, tuple[str, ...]] = {}
            for one in choices:
                for row in rows(one, default if one is choices[0] else {}, f"{name}."):
                    listed.setdefault(row[0], row)
            yield from listed.values()
        elif field.name != "kind":  # which is what a choice of the group sets
            assert default is not MISSING, name
            text = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
            typed = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            typed = re.sub(r"^Optional\[(.+)\]$", r"\1 | None", typed)
            yield f"`{name}`", f"`{typed}`", f"`{text}`", said[field.name]


def choices_of(group: str) -> str:
    with hydra.initialize_config_module(CONF, version_base="1.3"):
        return " | ".join(GlobalHydra.instance().config_loader().get_group_options(group))


def page() -> str:
    """docs/options.md."""
    text = f"# Options\n\n{ABOUT}\n"
    for entry, schema in ENTRIES.items():
        config = OmegaConf.to_container(compose(entry, []), resolve=False)
        root = Path(inspect.getfile(compose)).parents[1] / "conf" / f"{entry}.yaml"
        found = [*rows(schema, config)]
        for listed in yaml.safe_load(root.read_text())["defaults"]:
            for group, choice in listed.items() if isinstance(listed, dict) else ():
                if choice is not None:
                    at = next(i for i, row in enumerate(found) if row[0].startswith(f"`{group}."))
                    found.insert(at, (f"**`{group}`**", "choice", f"`{choice}`", choices_of(group)))
        text += f"\n## `launch/{entry}.py`\n\n| option | type | default | meaning |\n|---|---|---|---|\n"
        text += "".join("| " + " | ".join(part.replace("|", "\\|") for part in row) + " |\n" for row in found)
    return text


if __name__ == "__main__":
    print(page(), end="")
