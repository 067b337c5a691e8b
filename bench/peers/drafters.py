"""DSpark and EAGLE-3 of speculators, read from its checkpoints and driven module by module: its own code does the work.

Shape suffixes: L positions, F hidden states of several layers side by side, M anchors or paths, T slots, V vocabulary.
"""

from collections.abc import Sequence

import torch
from conditionals import Conditionals, Drafter, Path
from speculators import SpeculatorModelConfig
from speculators.model import SpeculatorModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor, nn
from transformers import DynamicCache


def load_drafter(folder: str, depth: int) -> Drafter:
    """The drafter of a checkpoint, in float32. depth: the most tokens that EAGLE-3 drafts; DSpark's block has its own.

    Raises ValueError where there is none, or one of another kind.
    """
    try:
        config = SpeculatorModelConfig.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"{folder}: no checkpoint of speculators (config.json and model.safetensors)") from error
    config.transformer_layer_config._attn_implementation = "sdpa"  # its default needs an accelerator
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval().requires_grad_(False)
    if isinstance(model, DSparkDraftModel):
        return DSpark(model)
    if isinstance(model, Eagle3DraftModel):
        return Eagle3(model, depth)
    raise ValueError(f"{folder}: a {type(model).__name__} is neither a DSparkDraftModel nor an Eagle3DraftModel")


class DSpark:
    """Its backbone fills the block of each anchor, its Markov head turns slots into conditionals."""

    def __init__(self, model: DSparkDraftModel) -> None:
        if model.markov_head is not None and model.markov_head.head_type == "rnn":
            raise ValueError("a DSpark whose Markov head is an rnn depends on whole paths: train vanilla or gated")
        if not model.config.sample_from_anchor or model.use_draft_vocab:
            raise ValueError("DSpark is counted with sample_from_anchor and its verifier's whole vocabulary: train so")
        self.model = model
        self.layers, self.depth = tuple(model.target_layer_ids), model.block_size
        self.hidden_size = model.config.transformer_layer_config.hidden_size
        model.verifier_lm_head = nn.Identity()  # its backbone computes targets too: nobody asks for them here

    def begin(self, hidden_LF: Tensor, tokens_L: Tensor, position_M: Tensor) -> Conditionals:
        block = self.depth  # its last positions are never anchors: padding takes their place
        hidden_1LF = nn.functional.pad(hidden_LF, (0, 0, 0, block)).unsqueeze(0)
        tokens_1L = nn.functional.pad(tokens_L, (0, block)).unsqueeze(0)
        anchors = torch.zeros_like(tokens_1L)
        anchors[0, position_M + 1] = 1  # an anchor is the root, of which no hidden state is known yet
        states, logits, *_ = self.model._backbone_forward(
            hidden_1LF,
            tokens_1L,
            anchors,
            hidden_1LF[..., : self.hidden_size],
            torch.zeros_like(tokens_1L),
            max_anchors=len(position_M),
        )
        blocks = len(position_M), block, -1
        return _Blocks(self.model, states.view(blocks), logits.view(blocks), tokens_L[position_M + 1].tolist())


class _Blocks:
    def __init__(self, model: DSparkDraftModel, state_MTD: Tensor, logits_MTV: Tensor, roots: list[int]) -> None:
        self.markov, self.state_MTD, self.logits_MTV, self.roots = model.markov_head, state_MTD, logits_MTV, roots

    def behind(self, paths: Sequence[tuple[int, Path]]) -> Tensor:
        anchors = torch.tensor([anchor for anchor, _ in paths])
        slots = torch.tensor([len(path) for _, path in paths])
        logits_MV = self.logits_MTV[anchors, slots]
        if self.markov is not None:
            last_M1 = torch.tensor([[path[-1] if path else self.roots[anchor]] for anchor, path in paths])
            state_M1D = self.state_MTD[anchors, slots].unsqueeze(1)
            logits_MV = logits_MV + self.markov.block_bias(prev_token_ids=last_M1, hidden_states=state_M1D)[:, 0]
        return logits_MV.log_softmax(dim=1)


class Eagle3:
    """Its layers read the sequence once, then each node of a tree behind its own ancestors."""

    def __init__(self, model: Eagle3DraftModel, depth: int) -> None:
        if model.use_draft_vocab:
            raise ValueError("EAGLE-3 is counted with its verifier's whole vocabulary: train without draft_vocab_size")
        self.model, self.depth = model, depth
        self.layers, self.hidden_size = tuple(model.target_layer_ids), model.hidden_size

    def begin(self, hidden_LF: Tensor, tokens_L: Tensor, position_M: Tensor) -> Conditionals:
        return _Nodes(self.model, hidden_LF, tokens_L, position_M)


class _Nodes:
    """A node reads its token and its parent's state; it attends to the positions up to its anchor, and to its path."""

    def __init__(self, model: Eagle3DraftModel, hidden_LF: Tensor, tokens_L: Tensor, position_M: Tensor) -> None:
        self.model, self.position_M, self.cache = model, position_M, DynamicCache()
        hidden_LF = hidden_LF[:-1]  # each beside the token that follows it
        if model.input_norm is not None:
            hidden_LF = model.input_norm(hidden_LF)
        if model.fc_norm is not None:
            parts = zip(model.fc_norm, hidden_LF.chunk(len(model.fc_norm), dim=-1), strict=True)
            hidden_LF = torch.cat([norm(part) for norm, part in parts], dim=-1)
        self.context_L = torch.arange(len(hidden_LF))
        seen_LL = self.context_L <= self.context_L.unsqueeze(1)
        state_LD = self._read(tokens_L[1:], model.fc(hidden_LF), self.context_L + 1, seen_LL)
        self.states = {(anchor, ()): state_LD[position] for anchor, position in enumerate(position_M.tolist())}
        self.columns: dict[tuple[int, Path], list[int]] = {root: [] for root in self.states}  # of a path's nodes

    def behind(self, paths: Sequence[tuple[int, Path]]) -> Tensor:
        nodes = [(anchor, path) for anchor, path in paths if path]
        if nodes:
            self._read_nodes(nodes)
        state_MD = torch.stack([self.states[one] for one in paths])
        if not self.model.config.norm_output:
            state_MD = self.model.norm(state_MD)
        return self.model.lm_head(state_MD).log_softmax(dim=1)

    def _read_nodes(self, nodes: Sequence[tuple[int, Path]]) -> None:
        first = self.cache.get_seq_length()
        position_M = self.position_M[[anchor for anchor, _ in nodes]]
        own_MS = torch.zeros(len(nodes), first + len(nodes) - len(self.context_L), dtype=torch.bool)
        for row, (anchor, path) in enumerate(nodes):
            columns = [*self.columns[anchor, path[:-1]], first + row - len(self.context_L)]
            own_MS[row, columns] = True
            self.columns[anchor, path] = columns
        seen_MS = torch.cat([self.context_L <= position_M.unsqueeze(1), own_MS], dim=1)
        tokens_M = torch.tensor([path[-1] for _, path in nodes])
        depth_M = torch.tensor([len(path) for _, path in nodes])
        parent_MD = torch.stack([self.states[anchor, path[:-1]] for anchor, path in nodes])
        state_MD = self._read(tokens_M, parent_MD, position_M + 1 + depth_M, seen_MS)
        self.states.update(zip(nodes, state_MD, strict=True))

    def _read(self, tokens_M: Tensor, state_MD: Tensor, position_M: Tensor, seen_MS: Tensor) -> Tensor:
        """The states [M, D] that its layers make of tokens beside the states before them."""
        x = torch.cat([self.model.embed_tokens(tokens_M), state_MD], dim=-1).unsqueeze(0)
        turned = self.model.rotary_emb(x, position_M.unsqueeze(0))
        for layer in self.model.layers:
            x = layer(
                x,
                attention_mask=seen_MS[None, None],
                position_ids=position_M.unsqueeze(0),
                past_key_values=self.cache,
                position_embeddings=turned,
            )
        return self.model.norm(x)[0] if self.model.config.norm_output else x[0]
