"""The frozen base, the heads, the CTC lattice, the draft tree, the decoder and the export."""

from ctcdraft.model.objective import fused_ctc_loss

__all__ = ["fused_ctc_loss"]
