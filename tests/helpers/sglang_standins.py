"""Stand-ins for what SGLang 0.5.23 needs and no CPU wheel brings, in plain torch: `install()` before it is imported.

Whatever of `sgl_kernel` and `torchvision` is missing here can be imported, and raises once it is called.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch
from torch import nn


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, bs, n
):
    """Depths and links of trees [bs, n], from who is whose ancestor."""
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    for links in (retrieve_next_token, retrieve_next_sibling):
        links.fill_(-1)
    ancestors = tree_mask.view(bs, n, n).tril(-1)
    positions.copy_((ancestors.sum(-1) + verified_seq_len[:, None]).flatten())
    for b in range(bs):
        last = {}  # the latest child of a node so far
        for node in range(1, n):
            parent = int(ancestors[b, node].nonzero().max())
            links = retrieve_next_sibling[b] if parent in last else retrieve_next_token[b]
            links[last.get(parent, parent)] = node
            last[parent] = node


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    for b, said in enumerate(target_predict.tolist()):
        at, path = 0, [0]
        while True:
            predicts[retrive_index[b, at]] = said[at]
            child = int(retrive_next_token[b, at])
            while child >= 0 and int(candidates[b, child]) != said[at]:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            at = child
            path.append(at)
        accept_index[b, : len(path)] = retrive_index[b, path].to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    found = torch.cat([req_to_token[row, start:end] for row, start, end in ranges])
    out_cache_loc[: len(found)] = found


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    at = 0
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in ranges:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]
        at += end - start


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Called once, to warm up: SGLANG_NATIVE_MOVE_KV_CACHE=1 moves keys and values in torch."""
    assert not tgt_loc.any(), "SGLANG_NATIVE_MOVE_KV_CACHE=1 is not set"


KERNELS = {
    function.__name__: function
    for function in (
        reconstruct_indices_from_tree_mask,
        verify_tree_greedy_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        fill_accept_out_cache_loc_cpu,
        copy_all_layer_kv_cache_cpu,
    )
}


class NamedMembers(type):
    """Of enums that are read while modules are imported."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in KERNELS:
            return KERNELS[name]

        def new(cls, *arguments, **named):
            raise RuntimeError(f"{self.__name__}.{name} has no stand-in")

        return NamedMembers(name, (), {"__new__": new})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sgl_kernel", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def install():
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # keeps its answer: the stand-in is none for transformers
    sys.meta_path.insert(0, Finder())
    from ctcdraft.serve import sglang

    register = sglang.register
    sglang.register = lambda: (register(), attend_to_trees())  # where the engine looks for plugins, no sooner


def attend_to_trees():
    """The backend `torch_native` verifies chains alone: with this, trees. Raises where SGLang has changed."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    plain = TorchNativeAttnBackend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return plain(self, q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache)
        pool, tree = self.token_to_kv_pool, forward_batch.spec_info
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        n, lengths = tree.draft_token_num, forward_batch.seq_lens.tolist()
        heads, keys_heads = layer.tp_q_head_num, layer.tp_k_head_num
        q = q.view(len(lengths), n, heads, layer.qk_head_dim).transpose(1, 2)
        keys, values = (part(layer.layer_id) for part in (pool.get_key_buffer, pool.get_value_buffer))
        masks, out = tree.custom_mask.view(len(lengths), n, n), []
        for b, length in enumerate(lengths):
            row = forward_batch.req_pool_indices[b]
            at = self.req_to_token_pool.req_to_token[row, : length + n].long()
            mask = torch.cat([masks.new_ones(n, length), masks[b]], dim=1)
            seen = (part[at].transpose(0, 1).unsqueeze(0) for part in (keys, values))
            options = {"attn_mask": mask, "scale": layer.scaling, "enable_gqa": heads != keys_heads}
            out.append(nn.functional.scaled_dot_product_attention(q[b : b + 1], *seen, **options))
        return torch.cat(out).transpose(1, 2).flatten(0, 1).flatten(1)

    TorchNativeAttnBackend.forward_extend = forward_extend
