"""The frozen base, the heads, the CTC lattice, the draft tree, the decoder and the export."""

from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, DraftConfig, Generation
from ctcdraft.model.export import export_head, load_head
from ctcdraft.model.head import Head, HeadConfig, build_head
from ctcdraft.model.load import load_base
from ctcdraft.model.objective import fused_ctc_loss

__all__ = [
    "Base",
    "Decoder",
    "DraftConfig",
    "Generation",
    "Head",
    "HeadConfig",
    "build_head",
    "export_head",
    "fused_ctc_loss",
    "load_base",
    "load_head",
]
