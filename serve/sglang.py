"""A head as a drafter of trees in SGLang, from outside: a plugin, no fork. Experimental: it has run on a CPU alone,
with stand-ins for SGLang's kernels, which have no CPU build.

CTCDRAFT_HEAD=<exported head> python -m sglang.launch_server --model-path <base> --speculative-algorithm CTCDRAFT
                                                             [--speculative-num-draft-tokens 33]

SGLang's n-gram worker verifies trees that were made beside the engine, and needs no draft model. Ours is that worker
with a head in the place of its corpus. A head keeps nothing for a request but the state of its newest position.

Shape suffixes: B requests, N rows of a forward, R rows of a tree (root, nodes, padding), L tokens of a step, X numbers
of a hidden state, S places of a request.
"""

import os
from collections.abc import Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctcdraft.model import DraftConfig, load_head
from ctcdraft.model.draft.tree import Tree

from .base import base_of
from .state import Pages, ServedHead

HEAD = "CTCDRAFT_HEAD"  # SGLang takes every model path of its options for a folder with an architecture it knows
TESTED = "0.5.23"  # the version of SGLang
ROWS = 33  # of a tree, where none are given
REQUESTS = 16  # at once, where no number is given


def register() -> None:
    """The entry point `sglang.srt.plugins`: SGLang calls it in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):
        """For the scheduler it is the n-gram algorithm."""

        def __getattr__(self, name: str) -> Any:  # what it asks, and what the base class does not have
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.NGRAM, name)

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            set_up(server_args)

    SpeculativeAlgorithm.register("CTCDRAFT", supports_overlap=False, spec_class=Algorithm)(lambda _: worker_class())


def set_up(args: Any) -> None:
    """SGLang's arguments as a head needs them. Raises ValueError, in one sentence, on those with which drafts would be
    wrong, or silently worse."""
    version = metadata.version("sglang")
    for refused, sentence in (
        (version != TESTED, f"SGLang {version}: ctcdraft.serve was tested with {TESTED} alone"),
        (not os.environ.get(HEAD), f"{HEAD} is not set: it names the exported head, a folder or a name on the Hub"),
        (args.tp_size > 1, "--tp-size: a head drafts from whole layers, give it 1"),
        (args.pp_size > 1, "--pp-size: a head drafts from last layers, give it 1"),
        (args.dp_size > 1, "--dp-size: give it 1, and start a server for each replica"),
        (args.enable_lora or args.lora_paths, "--enable-lora: a head drafts for one base, serve it without adapters"),
        (args.quantization, f"--quantization {args.quantization}: a head drafts with unquantised weights alone"),
        (args.kv_cache_dtype != "auto", f"--kv-cache-dtype {args.kv_cache_dtype}: a head reads keys and values"),
        (args.disaggregation_mode != "null", "--disaggregation-mode: a head needs the states of the prompt it read"),
        ((args.page_size or 1) > 1, f"--page-size {args.page_size}: SGLang moves accepted nodes in pages of 1 alone"),
    ):
        if refused:
            raise ValueError(sentence)
    args.disable_overlap_schedule, args.enable_mixed_chunk = True, False
    args.enable_return_hidden_states = True
    args.max_running_requests = args.max_running_requests or REQUESTS
    rows = args.speculative_num_draft_tokens = args.speculative_num_draft_tokens or ROWS
    args.speculative_eagle_topk, args.speculative_num_steps = min(8, rows), rows


class TreeDrafts:
    """Drafts of one width, R rows each, for a verifier of trees, and the newest states that they are made from.

    Requests are known by their `slots`: numbers below `most` that no other running request has.
    """

    def __init__(self, served: ServedHead, rows: int, most: int) -> None:
        self.served, self.rows, self.most = served, rows, most
        self.newest_PX: Tensor | None = None
        self.trees: list[Tree] = []

    def make(
        self, slots_B: Tensor, read: Sequence[NDArray[np.int64]], table_BS: Tensor, rooms: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens [B * R], and who attends to whom [B * R * R], of trees at most rooms[b] deep; `read`, `table`: as in
        `ServedHead.drafts`."""
        assert self.newest_PX is not None, "a request is decoded whose prompt was not read"
        drafts = self.served.drafts(self.newest_PX[slots_B], read, table_BS, rooms)
        self.trees = [padded(tree, self.rows - 1) for tree in drafts]
        tokens = [np.concatenate([tokens[-1:], tree.tokens]) for tokens, tree in zip(read, self.trees, strict=True)]
        return np.concatenate(tokens), np.concatenate([tree.ancestors().ravel() for tree in self.trees])

    def read(self, slots_B: Tensor, states_NX: Tensor, counts: Sequence[int]) -> None:
        """Of each request counts[b] tokens of its prompt were read, one request behind the other."""
        self._keep(slots_B, states_NX, torch.tensor(counts).cumsum(0) - 1)

    def verified(self, slots_B: Tensor, states_NX: Tensor, said_BL: Tensor, counts: Sequence[int]) -> None:
        """Of the trees made last, said[b, :counts[b]] were accepted, the base's own token behind them included."""
        last = []
        for b, (tree, tokens, count) in enumerate(zip(self.trees, said_BL.tolist(), counts, strict=True)):
            path = tree.path_of(tokens[: count - 1])
            assert len(path) == count - 1, "SGLang accepted tokens that were not drafted"
            last.append(b * self.rows + (path[-1] + 1 if path else 0))
        self._keep(slots_B, states_NX, torch.tensor(last))

    def _keep(self, slots_B: Tensor, states_NX: Tensor, rows_B: Tensor) -> None:
        if self.newest_PX is None:
            self.newest_PX = states_NX.new_zeros(self.most, states_NX.shape[1])
        self.newest_PX[slots_B] = states_NX[rows_B.to(states_NX.device)]


def padded(tree: Tree, nodes: int) -> Tree:
    """With the first tokens of the vocabulary behind the root, up to so many nodes, none that is drafted there: SGLang
    accepts a token of a sample as often as the tree has it."""
    others = np.setdiff1d(np.arange(nodes), tree.tokens[tree.depths == 1])[: nodes - len(tree)]
    spare = np.zeros_like(others)
    tokens, depths = np.concatenate([tree.tokens, others]), np.concatenate([tree.depths, spare + 1])
    psi = np.concatenate([tree.psi, spare.astype(np.float32)])
    return Tree(tokens, np.concatenate([tree.parents, spare - 1]), depths, psi)


def show_states(model: Any, layer: int) -> None:
    """Have the model return its last states, and those that enter that layer. Raises ValueError where it cannot."""
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise ValueError(f"{type(model).__name__} does not show the states of its layers, from which a head drafts")
    model.set_eagle3_layers_to_capture([layer - 1])  # it shows what enters the layer behind
    model.logits_processor.keep_last_hidden_states = True


def pool_pages(pool: Any, layers: Sequence[int], shape: tuple[int, int]) -> Pages:
    """SGLang's pool of keys and values of these layers, [P, H, W] each with `shape` (H, W), as pages of one position:
    views of it. Raises ValueError where the pool is laid out otherwise."""
    found = {}
    for layer in layers:
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        if any(part.shape[1:] != shape or not part.is_floating_point() for part in (keys, values)):
            raise ValueError(f"{type(pool).__name__}: its keys and values are not [places, {shape[0]}, {shape[1]}]")
        found[layer] = keys.unsqueeze(1), values.unsqueeze(1)
    return Pages(found)


def worker_class() -> type:
    """SGLang's n-gram worker with a head that drafts."""
    from sglang.srt.speculative import ngram_worker

    class Worker(ngram_worker.NGRAMWorker):
        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            corpus = SimpleNamespace(reset=lambda: None, erase_match_state=lambda requests: None)  # ours never asks it
            with patch.object(ngram_worker, "NgramCorpus", lambda **_: corpus):
                super().__init__(server_args, gpu_id, nccl_port, target_worker)
            model = self.model_runner.model
            self.context = self.model_runner.model_config.context_len
            base = base_of(model, server_args.model_path, self.context, "--context-length")
            if base.windows.width is not None and base.windows.width < self.context:
                raise ValueError(
                    f"{base.name} has layers that see a window: give --context-length {base.windows.width}"
                )
            self.head = load_head(os.environ[HEAD], base)
            draft = DraftConfig(nodes=self.draft_token_num - 1, budget="fixed")
            self.served = ServedHead(base, self.head, draft)
            if self.head.attended is not None:
                show_states(model, min(self.head.attended.layers))

        def alloc_memory_pool(self, **named: Any) -> None:
            super().alloc_memory_pool(**named)
            if (attended := self.head.attended) is not None:
                shape = attended.heads, attended.width
                self.served.pages = pool_pages(self.model_runner.token_to_kv_pool, attended.layers, shape)
            self.drafts = TreeDrafts(self.served, self.draft_token_num, len(self.req_to_token_pool.req_to_token))

        def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
            read = [np.array([*one.origin_input_ids_unpadded, *one.output_ids], np.int64) for one in batch.reqs]
            assert [len(tokens) - 1 for tokens in read] == batch.seq_lens_cpu.tolist()
            left = [one.sampling_params.max_new_tokens - len(one.output_ids) for one in batch.reqs]
            rooms = [min(self.context - len(tokens), most) - 1 for tokens, most in zip(read, left, strict=True)]
            slots_B = batch.req_pool_indices
            return self.drafts.make(slots_B, read, batch.req_to_token_pool.req_to_token[slots_B], rooms)

        def _update_ngram_corpus(self, batch: Any) -> None: ...

        def forward_batch_generation(self, batch: Any, *arguments: Any, **named: Any) -> Any:
            prompts = batch.forward_mode.is_extend()
            result = super().forward_batch_generation(batch, *arguments, **named)
            shown = result.logits_output
            states = [part for part in (shown.last_hidden_states, shown.hidden_states) if part is not None]
            if not states:
                raise RuntimeError("SGLang showed ctcdraft no hidden states: its worker has changed")
            states_NX = torch.cat(states, dim=-1)
            if prompts:
                self.drafts.read(batch.req_pool_indices, states_NX, batch.extend_lens)
            else:
                said_BL = result.next_draft_input.accept_tokens.view(len(batch.reqs), -1)
                self.drafts.verified(batch.req_pool_indices, states_NX, said_BL, result.accept_lens.tolist())
            return result

    return Worker
