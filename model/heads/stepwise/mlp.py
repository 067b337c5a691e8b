"""`mlp`: a recurrent perceptron from the base's hidden state on, with token tables of its own.

Wertheimer et al. 2024 (IBM's combined token and embedding speculator, arXiv 2404.19124), all stages one as in their
released code (fms-extras, `tie_wts` and `scale_input`). Theirs begins at random, and here tables begin as the base's.

Shape suffixes: B batch, Q rows of one pass, X draft tokens, D hidden size of the base, W width.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from ...base.context import Attended
from ...base.llm import Base
from ..head import CHECKED, Size
from ..vocabulary import DraftVocabulary
from .beam import StepwiseConfig, StepwiseHead

EPS = 1e-6  # of its norms
SHARP = 5.0  # a new head's output table beside its embeddings: logits as far apart as a language model's


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class MlpConfig(StepwiseConfig):
    kind: Literal["mlp"] = "mlp"
    width: Size = 512  # of states and token tables


class MlpHead(StepwiseHead):
    """s_k = GELU(norm(P s_{k-1} + E x_{k-1} sqrt((1 - a^2) W/2) / a)), a = 2^(-1/2T), token k by softmax(H s_k): s_0 is
    the base's normed state over sqrt 2, with a P of its own, x_0 the root. Neither it nor they look at anything else.

    All tokens that it can read and not draft share one embedding.
    """

    config: MlpConfig
    encodes = False

    def __init__(self, config: MlpConfig, base: Base, attended: Attended | None = None) -> None:
        super().__init__(config, base, attended)
        W, tokens = config.width, config.draft_vocab_size or base.vocab_size
        self.embedding = nn.Embedding(tokens + 1, W)
        self.enter = nn.Linear(base.hidden_size, W, bias=False)
        self.proceed = nn.Linear(W, W, bias=False)
        self.norm = nn.RMSNorm(W, eps=EPS)
        self.shift = nn.Parameter(torch.zeros(W))
        self.output = nn.Linear(W, tokens, bias=False)
        self.state_weight = 0.5 ** (0.5 / config.slots)  # so that s_0 is half of the last state
        self.token_weight = math.sqrt((1.0 - self.state_weight**2) * W / 2.0)

    @torch.no_grad()
    def warm_start(self, base: Base) -> None:
        """Tables begin as rows of the base's, turned to its width by an A, and so does the first state: as GELU(x) is
        x/2 and an even part, <A w, GELU(A h)> is near <w, h>/2. Tokens are read through another turn, so that none of
        them foretells itself."""
        D, W, tokens = base.hidden_size, self.config.width, super().draft_vocabulary(base)
        said_XD, read_XD = tokens.lm_weight[:, :D].float(), base.embed(tokens.ids).float()
        read_XD = torch.cat([read_XD, read_XD.mean(dim=0, keepdim=True)])
        said_turn_WD, read_turn_WD = (nn.init.orthogonal_(said_XD.new_empty(W, D)) for _ in range(2))
        self.output.weight.copy_(SHARP * W**-0.5 / said_XD.std() * said_XD @ said_turn_WD.T)
        self.embedding.weight.copy_(W**-0.5 / read_XD.std() * read_XD @ read_turn_WD.T)
        self.enter.weight.copy_(said_turn_WD)
        nn.init.eye_(self.proceed.weight)

    def draft_vocabulary(self, base: Base) -> DraftVocabulary:
        return DraftVocabulary(base, super().draft_vocabulary(base).ids, self.output.weight)

    def embedded(self, tokens: DraftVocabulary, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.embedding(tokens.numbered(ids))

    def begin(self, hidden_BQD: Tensor, token_BQW: Tensor, *seen: Any) -> Tensor:
        state_BQD = F.rms_norm(hidden_BQD, (self.hidden_size,), eps=EPS) / math.sqrt(2.0)
        return self._next(self.enter(state_BQD), token_BQW)

    def step(self, state_BQW: Tensor, token_BQW: Tensor, *seen: Any) -> Tensor:
        return self._next(self.proceed(state_BQW), token_BQW)

    def _next(self, state: Tensor, token: Tensor) -> Tensor:
        return F.gelu(self.norm(self.state_weight * state + self.token_weight * token) + self.shift)
