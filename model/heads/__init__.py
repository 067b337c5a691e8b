"""What drafts. `head` is the interface; kinds have their own files: slots (ctc, parallel), diffusion, medusa, and in
`stepwise` eagle, mlp and glide. Parts: copies of the base's layers (last_layers), block, transition, vocabulary."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from torch import nn

from ..base.context import Attended
from ..base.llm import Base
from .diffusion import DiffusionConfig, DiffusionHead
from .head import Head, HeadConfig
from .last_layers import layers_to_copy
from .medusa import MedusaConfig, MedusaHead
from .slots import CtcConfig, ParallelConfig, SlotHead
from .stepwise.eagle import EagleConfig, EagleHead
from .stepwise.glide import GlideConfig, GlideHead
from .stepwise.mlp import MlpConfig, MlpHead

AnyHeadConfig = Annotated[
    CtcConfig | ParallelConfig | MedusaConfig | EagleConfig | MlpConfig | GlideConfig | DiffusionConfig,
    Field(discriminator="kind"),
]
HEADS: dict[type[HeadConfig], Callable[[Any, Base, Any], Head]] = {
    CtcConfig: SlotHead,
    ParallelConfig: SlotHead,
    DiffusionConfig: DiffusionHead,
    MedusaConfig: MedusaHead,
    EagleConfig: EagleHead,
    MlpConfig: MlpHead,
    GlideConfig: GlideHead,
}


def head_config(fields: Mapping[str, Any]) -> HeadConfig:
    """The config of the kind that the fields name. Raises ValueError on an unknown kind or field, or sizes that do not
    fit."""
    return TypeAdapter(AnyHeadConfig).validate_python(dict(fields))


def head_on(base: Base, config: HeadConfig) -> Head:
    """A freshly initialised head for that base, of a draft vocabulary no larger than the base's. Raises ValueError
    where the base has fewer layers."""
    attended, drafted = layers_on(base, config), config.draft_vocab_size
    config = replace(config, draft_vocab_size=None if drafted is None or drafted >= base.vocab_size else drafted)
    return HEADS[type(config)](config, base, attended)


def attended_on(base: Base, config: HeadConfig) -> Attended | None:
    """The layers of the base whose keys and values a head of that config looks at, if any. Raises ValueError as
    `head_on` does."""
    return None if isinstance(config, GlideConfig) and not config.cross else layers_on(base, config)


def layers_on(base: Base, config: HeadConfig) -> Attended | None:
    """Those that it copies, if any. Raises ValueError where the base has fewer, or the head cannot do without them."""
    if not isinstance(config, ParallelConfig | GlideConfig):
        return None
    found = layers_to_copy(base, config.layers)
    if found is None:
        problem = f"the last layers of {base.name} are quantised or do not run alone"
        if isinstance(config, GlideConfig):
            raise ValueError(f"head=glide: {problem}: take another head")
        blind = "its slots see the last state and each other, and none of the context"
        warnings.warn(f"{problem}, so head={config.kind} copies none: {blind}", stacklevel=3)
    return found


def parameters_of(module: nn.Module) -> int:
    """How many parameters a head, or what trains it, has."""
    return sum(p.numel() for p in module.parameters())
