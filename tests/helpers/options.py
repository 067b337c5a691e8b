"""Every option with type, default and meaning: `python tests/helpers/options.py > docs/options.md`. Types are those of
the dataclasses, defaults those of the composed configuration; a meaning is the comment in conf/, or behind a field."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from omegaconf import OmegaConf

from ctcdraft.launch.cli import compose
from ctcdraft.launch.schema import ChatEntry, EvalEntry, ExportEntry, TrainEntry

CONF = Path(__file__).parents[2] / "conf"
ENTRIES = {"train": TrainEntry, "eval": EvalEntry, "chat": ChatEntry, "export": ExportEntry}
ABOUT = """Written by `tests/helpers/options.py`. Any of these goes behind a command: `optim.lr=1e-3`, `head=parallel`.
A choice, and `experiment=<one of conf/experiment/>`, changes other defaults: `--cfg job` prints what a command uses.
`launch/prepare.py` takes the options of `launch/train.py`. In eval, chat and export, null is what the run has."""
KEY = re.compile(r"^( *)(\w+):[^#\n]*(?:# ?(.*(?:\n +#.*)*))?$", re.MULTILINE)


def meanings(own: Path, choices: dict[str, str]) -> dict[str, str]:
    """What is said behind each option: in the command's own file, in those of its choices, then in all others."""
    found: dict[str, str] = {}
    chosen = [CONF / group.split("@")[0] / f"{choice}.yaml" for group, choice in choices.items()]
    for path in [own, *chosen, *sorted(CONF.glob("*/*.yaml")), CONF / "train.yaml"]:
        place = group = {"conf": [], "regenerate": ["data", "regenerate"]}.get(path.parent.name, [path.parent.name])
        for indent, key, comment in KEY.findall(path.read_text()):
            place = [*place[: len(group) + len(indent) // 2], key]
            if comment:
                found.setdefault(".".join(place), re.sub(r"\s*\n *# *", " ", comment))
    return found


def rows(schema: type, config: Any, said: dict[str, str], prefix: str = "") -> Iterator[tuple[str, ...]]:
    """(option, type, default, meaning) of a dataclass and of those in it; KeyError where nothing says what it means."""
    for field in fields(schema):
        name, kind = f"{prefix}{field.name}", get_type_hints(schema)[field.name]
        made = field.default if field.default_factory is MISSING else field.default_factory()
        default = config.get(field.name, {} if is_dataclass(kind) else made)
        if is_dataclass(kind):
            yield from rows(kind, default, said, f"{name}.")
        elif choices := [one for one in get_args(kind) if is_dataclass(one)]:  # those of the default, then others'
            listed: dict[str, tuple[str, ...]] = {}
            for one in choices:
                for row in rows(one, default if one is choices[0] else {}, said, f"{name}."):
                    listed.setdefault(row[0], row)
            yield from listed.values()
        elif field.name != "kind":  # which is what a choice of the group sets
            text = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
            comment = re.search(rf"^    {field.name}: .*?  # (.*)$", inspect.getsource(schema), re.MULTILINE)
            typed = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
            typed = re.sub(r"^Optional\[(.+)\]$", r"\1 | None", typed)
            yield f"`{name}`", f"`{typed}`", f"`{text}`", said.get(name) or (comment or said[name])[1]


def page() -> str:
    """docs/options.md."""
    text = f"# Options\n\n{ABOUT}\n"
    for entry, schema in ENTRIES.items():
        own = CONF / f"{entry}.yaml"
        listed = [one for one in yaml.safe_load(own.read_text())["defaults"] if isinstance(one, dict)]
        choices = {group: choice for one in listed for group, choice in one.items() if choice}
        config = OmegaConf.to_container(compose(entry, []), resolve=False)
        found = [*rows(schema, config, meanings(own, choices))]
        for group, choice in choices.items():
            if "@" not in group:
                others = " | ".join(sorted(path.stem for path in (CONF / group).glob("*.yaml")))
                at = next(i for i, row in enumerate(found) if row[0].startswith(f"`{group}."))
                found.insert(at, (f"**`{group}`**", "choice", f"`{choice}`", others))
        text += f"\n## `launch/{entry}.py`\n\n| option | type | default | meaning |\n|---|---|---|---|\n"
        text += "".join("| " + " | ".join(part.replace("|", "\\|") for part in row) + " |\n" for row in found)
    return text


if __name__ == "__main__":
    print(page(), end="")
