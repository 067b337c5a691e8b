"""Labels that a head drafts itself, and what the base says of them: sequences of the student (Zhou et al. 2024,
DistillSpec, arXiv 2310.08461, section 3; Agarwal et al. 2024, GKD, arXiv 2306.13649, algorithm 1).

Along the base's own continuation a head learns what comes behind right drafts alone. Here its likeliest chain takes the
place of that continuation at some anchors, and the base's distributions behind it are the soft labels. Drafts carry no
gradient.

Shape suffixes: B rows, L positions, N anchors, U labels, P drafted tokens that are read in a row, D hidden size.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ctcdraft.data.batches import Batch
from ctcdraft.model.base.context import Anchors, AttentionMask
from ctcdraft.model.base.llm import Base
from ctcdraft.model.draft.config import DraftConfig
from ctcdraft.model.draft.drafter import Drafter, Frontier
from ctcdraft.model.draft.growth import Hints
from ctcdraft.model.heads import Head

from .task import Policy, anchors_of, document_mask, roots_of

SHARES = {"draft": 1.0, "mixed": 0.5}  # of the anchors


@torch.no_grad()
def on_policy(policy: Policy, head: Head, base: Base, batch: Batch, hidden_BLX: Tensor) -> Batch:
    """The batch with the head's drafts as labels at the policy's share of the anchors, and with the base's states that
    say each label, `said_NUD`. No draft is longer than the labels that it stands for; where it is empty they stay."""
    if policy == "base":
        return batch
    chosen_M = _chosen(batch, SHARES[policy])
    labels_NU, lengths_N, rooms = batch.labels_NU.clone(), batch.lengths_N.clone(), batch.lengths_N.tolist()
    drafter = Drafter(DraftConfig(kind="chain", nodes=labels_NU.shape[1], prompt_lookup=0))
    few = batch._replace(batch_N=batch.batch_N[chosen_M], position_N=batch.position_N[chosen_M])
    roots_BL, vocabulary = roots_of(batch), head.vocabulary(base, drafter.config.top_k)
    roots = roots_BL[few.batch_N, few.position_N].cpu().numpy()
    drafts = []
    if len(chosen_M):
        drafts = head.drafts(hidden_BLX, roots_BL, anchors_of(few), vocabulary, hints=Hints(chain=True))
    for m, (n, draft) in enumerate(zip(chosen_M.tolist(), drafts, strict=True)):
        chain = drafter.tree(draft, Frontier(roots[m : m + 1], base.eos_ids, rooms[n])).tokens
        if len(chain):
            labels_NU[n, : len(chain)] = torch.from_numpy(chain)
            lengths_N[n] = len(chain)
    batch = batch._replace(labels_NU=labels_NU, lengths_N=lengths_N)
    return batch._replace(said_NUD=states_behind(base, batch))


def _chosen(batch: Batch, share: float) -> Tensor:
    """Anchors drawn by torch's seed and what each of them holds: the same ones, whatever shares the rows out."""
    seed, kept = torch.initial_seed(), []
    for n, (position, labels) in enumerate(zip(batch.position_N.tolist(), batch.labels_NU.tolist(), strict=True)):
        words = hashlib.blake2b(f"{seed} {position} {labels}".encode(), digest_size=8).digest()
        kept += [n] if int.from_bytes(words) < share * 2**64 else []
    return torch.tensor(kept, dtype=torch.long, device=batch.batch_N.device)


def states_behind(base: Base, batch: Batch) -> Tensor:
    """The base's states that say each label, [N, U, D]: behind an anchor's root, and behind each label but the last.

    One forward: a row, and behind it the labels of its anchors, each of which sees the row up to its anchor's root, and
    the labels before it.
    """
    (B, L), U, device = batch.ids_BL.shape, batch.labels_NU.shape[1], batch.ids_BL.device
    positions_1L = torch.arange(L, device=device).unsqueeze(0)
    mask = document_mask(batch) or AttentionMask(positions_1L, (positions_1L <= positions_1L.T)[None, None])
    assert mask.allowed_BLS is not None
    place_BL, row_BLL = mask.positions_BL.expand(B, L), mask.allowed_BLS[:, 0].expand(B, L, L)
    roots = Anchors.of(batch.batch_N, batch.position_N + 1, B, mask)
    root_BA, sees_BAL = roots.context(L)
    ids_BP = roots.spread(batch.labels_NU[:, : U - 1]).flatten(1)
    place_BP = (root_BA.unsqueeze(2) + torch.arange(1, U, device=device)).flatten(1)
    path_PP = torch.block_diag(*[torch.ones(U - 1, U - 1, device=device).tril()] * roots.most).bool()
    label_BPS = torch.cat([sees_BAL.repeat_interleave(U - 1, dim=1), path_PP.expand(B, -1, -1)], dim=2)
    allowed_BSS = torch.cat([F.pad(row_BLL, (0, len(path_PP))), label_BPS], dim=1)
    mask = AttentionMask(torch.cat([place_BL, place_BP], dim=1), allowed_BSS.unsqueeze(1))
    read_BSD = base.hidden(torch.cat([batch.ids_BL, ids_BP], dim=1), mask)
    behind_NPD = roots.gathered(read_BSD[:, L:].unflatten(1, (roots.most, U - 1)))
    return torch.cat([roots.own(read_BSD).unsqueeze(1), behind_NPD], dim=1)
