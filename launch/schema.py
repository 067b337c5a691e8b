"""The typed shape of each entry's configuration; below launch/ nobody sees anything else.

A default stands once, in its dataclass. Hydra composes them with the differences that conf/ makes.
"""

import os
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

from hydra.core.config_store import ConfigStore
from pydantic import AfterValidator, ConfigDict, Field, PositiveInt, with_config

from ctcdraft.eval.bench import BenchConfig
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.heads import AnyHeadConfig
from ctcdraft.model.load.precision import Dtype
from ctcdraft.model.load.template_date import PINNED_DATE, check_date
from ctcdraft.train.engine import Seed
from ctcdraft.train.log import LoggerConfig
from ctcdraft.train.online import OnlineConfig
from ctcdraft.train.options import MayDiffer
from ctcdraft.train.prepare import DataConfig
from ctcdraft.train.step import Plan
from ctcdraft.train.task import check_fit
from ctcdraft.train.toy_base import ToyBaseConfig

FolderPath = Annotated[str, AfterValidator(os.path.expanduser)]  # few shells expand `~` behind a `=`
NO_OTHERS = ConfigDict(extra="forbid")  # options than those of an entry and of what is in it


@dataclass(frozen=True)
class BasePath:
    """What is loaded, and how; None: as it was in training, where a run knows that."""

    path: str | None = None  # null: the run's own base
    dtype: Dtype | None = None  # null: the run's (fp32 for another head.path)
    # for a tokenizer that comes without a chat template
    template: Literal["plain", "vicuna"] | None = None
    date: str | None = None  # what the chat template writes as today's, where it writes any
    # the tokens (text or id, or a list) that end a sequence; null: the base's own
    eos: int | str | list[int | str] | None = None
    trust_remote_code: bool = False  # true: run Python code that the base brings along

    def __post_init__(self) -> None:
        check_date(self.date)


@dataclass(frozen=True)
class BaseConfig(BasePath):
    """kind: `toy` (made on first use, as `training` says), `smollm2` (fetched on first use; or path, where that is
    given) or `local` (path)."""

    path: str | None = None  # folder, name on the Hub, or .gguf file
    dtype: Dtype = "auto"  # auto: bf16 where this machine is faster in it, else fp32
    date: str = PINNED_DATE
    kind: Literal["toy", "smollm2", "local"] = "smollm2"
    training: ToyBaseConfig = field(default_factory=ToyBaseConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "local" and self.path is None:
            raise ValueError("base=local needs base.path=<folder of a transformers model, Hub name, or .gguf file>")


@with_config(NO_OTHERS)
@dataclass(frozen=True, kw_only=True)
class TrainEntry(Plan):
    """launch/train.py and launch/prepare.py (conf/train.yaml)."""

    base: BaseConfig
    data: DataConfig
    bench: MayDiffer[BenchConfig]
    logger: MayDiffer[LoggerConfig]
    name: MayDiffer[str | None] = None  # run folder runs/<name>; null: named after base, head, objective and a hash
    runs_dir: MayDiffer[FolderPath] = "runs"  # where runs lie
    cache_dir: MayDiffer[FolderPath] = ".cache"  # the base and prepared data

    def __post_init__(self) -> None:
        check_fit(self.head, self.objective)
        if self.objective.policy != "base" and self.zero.stage == 3:
            raise ValueError(
                f"objective.policy={self.objective.policy} drafts with whole weights: take zero=2 or lower"
            )


@dataclass(frozen=True)
class HeadPath:
    path: FolderPath | None = None  # another exported head, a folder or a Hub name; then base.path is needed too


@dataclass(frozen=True)
class ChatOptions:
    # what the chat template gets beside the messages; null: what it got in the head's training
    template_args: dict[str, Any] | None = None


@with_config(NO_OTHERS)
@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """A run, with its base or another."""

    base: BasePath = BasePath()
    name: str | None = None  # the run whose head it is; null: the newest
    runs_dir: FolderPath = "runs"  # where runs lie


@dataclass(frozen=True, kw_only=True)
class HeadChoice(RunChoice):
    """A run's head and base, or an exported head with a base of its own."""

    head: HeadPath = HeadPath()

    def __post_init__(self) -> None:
        if self.name is not None and self.head.path is not None:
            raise ValueError("name and head.path each say which head: leave one of them out")


@dataclass(frozen=True, kw_only=True)
class DecoderChoice(HeadChoice):
    """A head, and how our own decoder drafts with it."""

    draft: DraftConfig
    data: ChatOptions = ChatOptions()
    online: OnlineConfig = field(default_factory=OnlineConfig)
    seed: Seed = 0  # of everything random
    cache_dir: FolderPath = ".cache"  # a base that was dequantised, and its answers that are counted along


@dataclass(frozen=True, kw_only=True)
class EvalEntry(DecoderChoice):
    """launch/eval.py (conf/eval.yaml)."""

    bench: BenchConfig
    logger: LoggerConfig
    # several instead: names of runs, or exported heads: folders or Hub names (then base.path is needed too)
    heads: list[FolderPath] = field(default_factory=list)
    # true: do not decode, count tokens per step along the base's own answers: minutes, not hours
    count: bool = False
    open: bool = False  # true: show report.html in a browser

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads and (self.name is not None or self.head.path is not None):
            raise ValueError("heads=[...] says which heads: leave out name and head.path")
        if self.count and self.online.every is not None:
            raise ValueError("count=true counts along answers that are known: online=on learns while it decodes")


@dataclass(frozen=True, kw_only=True)
class ChatEntry(DecoderChoice, Sampling):
    """launch/chat.py (conf/chat.yaml)."""

    prompt: str | None = None  # one question, answered and done; null: a conversation
    system: str | None = None  # a system turn
    max_new_tokens: PositiveInt = 512  # per answer

    def __post_init__(self) -> None:
        DecoderChoice.__post_init__(self)
        Sampling.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class ExportEntry(RunChoice):
    """launch/export.py (conf/export.yaml)."""

    output: FolderPath | None = None  # another folder to write the head to


@dataclass(frozen=True, kw_only=True)
class ServeEntry(HeadChoice):
    """launch/serve.py (conf/serve.yaml)."""

    host: str = "127.0.0.1"  # where it listens; 0.0.0.0: for other machines too
    port: Annotated[int, Field(ge=1, le=65535)] = 8000  # of the server
    nodes: PositiveInt = 12  # tokens of a draft, at most: a chain
    env: FolderPath = ".venv-vllm"  # the environment of the engine, made where it is not there
    args: list[str | int | float] = field(default_factory=list)  # more of vLLM's own: args=[--max-model-len,4096]
    wait: PositiveInt = 1800  # seconds in which it must answer: large models take long to load


@with_config(NO_OTHERS)
@dataclass(frozen=True)
class RunsEntry:
    """launch/runs.py (conf/runs.yaml)."""

    runs_dir: FolderPath = "runs"  # where runs lie


ENTRIES = {
    "train": TrainEntry,
    "eval": EvalEntry,
    "chat": ChatEntry,
    "export": ExportEntry,
    "serve": ServeEntry,
    "runs": RunsEntry,
}


def defaults_of(schema: Any) -> dict[str, Any]:
    """The defaults of a dataclass and of those in it; what has none is left out, and conf/ says it."""
    found: dict[str, Any] = {}
    kinds = get_type_hints(schema)
    for option in fields(schema):
        kind = kinds[option.name]
        if is_dataclass(kind):
            found[option.name] = defaults_of(kind)
        elif option.default is not MISSING:
            found[option.name] = option.default
        elif option.default_factory is not MISSING:
            found[option.name] = option.default_factory()
    return found


def store_defaults() -> None:
    """Give Hydra each entry's `options_of_<entry>`, and a choice of `head` per kind: no file holds any of these."""
    for entry, schema in ENTRIES.items():
        ConfigStore.instance().store(f"options_of_{entry}", defaults_of(schema))
    for head in get_args(get_args(AnyHeadConfig)[0]):
        ConfigStore.instance().store(head.kind, defaults_of(head), group="head")
