"""`linear_lse_gather` in chunks of rows over one logits buffer: never more than one chunk of [rows, V].

The derivative of a row's lse with respect to hidden is `softmax @ weight`. It does not depend on what is
done with lse afterwards, so it is computed while the chunk's logits are still there: two GEMMs in all.
"""

import torch
from torch import Tensor

# On a CPU a chunk should stay in the cache between its two GEMMs, but below some 128 rows a GEMM itself
# gets slow; a GPU wants large GEMMs (bench/loss.py).
CHUNK_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
LEAST_ROWS = 128


def rows_per_chunk(vocab: int, bytes_per_value: int, device: str) -> int:
    """How many rows of logits one chunk holds."""
    return max(LEAST_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (vocab * bytes_per_value))


def forward(
    hidden_MD: Tensor, weight_VD: Tensor, index_MK: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns lse [M], logits [M, K] (float32 or wider) and, if asked, d lse / d hidden [M, D]."""
    M, V, K = hidden_MD.shape[0], weight_VD.shape[0], index_MK.shape[1]
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)
    lse_M = hidden_MD.new_empty(M, dtype=wide)
    logits_MK = hidden_MD.new_empty(M, K, dtype=wide)
    slope_MD = torch.empty_like(hidden_MD) if with_grad else None
    chunk = min(M, rows_per_chunk(V, hidden_MD.element_size(), hidden_MD.device.type))
    buffer = hidden_MD.new_empty(chunk, V)
    for start in range(0, M, max(1, chunk)):
        rows = slice(start, min(start + chunk, M))
        z = torch.mm(hidden_MD[rows], weight_VD.T, out=buffer[: rows.stop - rows.start])
        logits_MK[rows] = z.gather(1, index_MK[rows]).to(wide)
        lse_M[rows] = lse = torch.logsumexp(z.to(wide), dim=1)
        if slope_MD is not None:
            z.sub_(lse.unsqueeze(1)).exp_()
            torch.mm(z, weight_VD, out=slope_MD[rows])
    return lse_M, logits_MK, slope_MD
