"""The typed shape of each entry's configuration; below launch/ nobody sees anything else."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, PositiveInt, with_config

from ctcdraft.eval.bench import BenchConfig
from ctcdraft.model.base.sampling import Sampling
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.load.pretrained import TEMPLATES, check_dtype
from ctcdraft.model.load.template_date import PINNED_DATE, check_date
from ctcdraft.train.engine import Seed
from ctcdraft.train.log import LoggerConfig
from ctcdraft.train.loop import Plan
from ctcdraft.train.options import MAY_DIFFER
from ctcdraft.train.shards import DataConfig
from ctcdraft.train.task import check_fit
from ctcdraft.train.toy_base import ToyBaseConfig

NO_OTHERS = ConfigDict(extra="forbid")  # options than those of an entry and of what is in it


@dataclass(frozen=True)
class BasePath:
    """What is loaded, and how; None: as it was in training, where a run knows that.

    path: folder, Hub name or GGUF file. template: a built-in chat template (plain, vicuna) for a tokenizer that comes
    without one. date: what a chat template writes as today's. eos: the tokens (text or id, or a list) that end a
    sequence, instead of the base's own. trust_remote_code: run Python code that a local base brings along.
    """

    path: str | None = None
    dtype: str | None = None
    template: str | None = None
    date: str | None = None
    eos: int | str | list[int | str] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_dtype(self.dtype or "fp32")
        check_date(self.date)
        if self.template is not None and self.template not in TEMPLATES:
            raise ValueError(f"base.template={self.template!r} is unknown: choose one of {tuple(TEMPLATES)}")


@dataclass(frozen=True)
class BaseConfig(BasePath):
    """kind: `toy` (made on first use, as `training` says), `smollm2` (fetched on first use; or path, where that is
    given) or `local` (path)."""

    dtype: str = "fp32"
    date: str = PINNED_DATE
    kind: Literal["toy", "smollm2", "local"] = "toy"
    training: ToyBaseConfig = field(default_factory=ToyBaseConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "local" and self.path is None:
            raise ValueError("base=local needs base.path=<folder of a transformers model, Hub name, or .gguf file>")


def check_regenerate(data: Any) -> Any:
    """Raises ValueError where data.regenerate is a switch: it says how, and data.labels whether."""
    if isinstance(data, dict) and isinstance(data.get("regenerate"), bool):
        word = str(data["regenerate"]).lower()
        raise ValueError(
            f"data.regenerate={word}: it says how, not whether: use data.labels=argmax to keep the answers"
        )
    return data


@with_config(NO_OTHERS)
@dataclass(frozen=True, kw_only=True)
class TrainEntry(Plan):
    """launch/train.py and launch/prepare.py (conf/train.yaml)."""

    base: BaseConfig
    data: Annotated[DataConfig, BeforeValidator(check_regenerate)]
    bench: BenchConfig = field(metadata=MAY_DIFFER)
    logger: LoggerConfig = field(metadata=MAY_DIFFER)
    name: str | None = field(default=None, metadata=MAY_DIFFER)
    runs_dir: str = field(default="runs", metadata=MAY_DIFFER)
    cache_dir: str = field(default=".cache", metadata=MAY_DIFFER)

    def __post_init__(self) -> None:
        check_fit(self.head, self.objective)
        if self.head.kind == "eagle" and self.train.pack:
            raise ValueError("head=eagle drafts in rows of one document: leave train.pack at false")


@dataclass(frozen=True)
class HeadPath:
    path: str | None = None


@dataclass(frozen=True)
class ChatOptions:
    """template_args: what the chat template gets beside the messages; None: what it got in the head's training."""

    template_args: dict[str, Any] | None = None


@with_config(NO_OTHERS)
@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """A run's head and base, or an exported head with a base of its own."""

    draft: DraftConfig
    head: HeadPath = HeadPath()
    base: BasePath = BasePath()
    data: ChatOptions = ChatOptions()
    name: str | None = None
    seed: Seed = 0
    runs_dir: str = "runs"


@dataclass(frozen=True, kw_only=True)
class EvalEntry(HeadChoice):
    """launch/eval.py (conf/eval.yaml). heads: several, each the name of a run or the folder of an exported head.

    count: do not decode; count tokens per step along the base's own answers, which are kept in cache_dir.
    """

    bench: BenchConfig
    logger: LoggerConfig
    heads: list[str] = field(default_factory=list)
    count: bool = False
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        if self.heads and (self.name is not None or self.head.path is not None):
            raise ValueError("heads=[...] says which heads: leave out name and head.path")


@dataclass(frozen=True, kw_only=True)
class ChatEntry(HeadChoice, Sampling):
    """launch/chat.py (conf/chat.yaml)."""

    prompt: str | None = None
    system: str | None = None
    max_new_tokens: PositiveInt = 512


@with_config(NO_OTHERS)
@dataclass(frozen=True)
class ExportEntry:
    """launch/export.py (conf/export.yaml)."""

    base: BasePath = BasePath()
    name: str | None = None
    runs_dir: str = "runs"
    output: str | None = None
