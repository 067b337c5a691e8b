"""The frozen base, the heads, the CTC lattice, the draft tree, the decoder and the export."""

import gc

COLLECTS = gc.isenabled()
gc.disable()  # torch and transformers make a million objects and no garbage: looking for it takes half a second

from .base.llm import Base
from .decode.decoder import Decoder, Generation
from .draft.config import DraftConfig
from .export import export_head, load_head
from .heads import (
    CtcConfig,
    EagleConfig,
    GlideConfig,
    Head,
    HeadConfig,
    MedusaConfig,
    MlpConfig,
    ParallelConfig,
    head_on,
)
from .load.pretrained import load_base
from .loss.objective import fused_ctc_loss

if COLLECTS:
    gc.enable()

__all__ = [
    "Base",
    "CtcConfig",
    "Decoder",
    "DraftConfig",
    "EagleConfig",
    "Generation",
    "GlideConfig",
    "Head",
    "HeadConfig",
    "MedusaConfig",
    "MlpConfig",
    "ParallelConfig",
    "export_head",
    "fused_ctc_loss",
    "head_on",
    "load_base",
    "load_head",
]
