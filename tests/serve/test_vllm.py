"""The proposer against doubles of vLLM's runner, model and sampler: what it drafts, and what it refuses."""

import json
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from bases import write_base
from drafting import HEADS, prompts, random_head, served_head
from torch import nn

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base.window import Windows
from ctcdraft.model.export import export_head
from ctcdraft.serve import vllm as serving

TRAINING = {"objective": "ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
PAGE, PAGES, MOST = 4, 64, 6


class Runner:
    """vLLM's, as far as a proposer sees it. One sequence at a time, a page behind the other."""

    def __init__(self, config, target=None):
        self.use_aux_hidden_state_outputs, self.model = False, target
        self.drafter = serving.Proposer(config)

    def load_model(self):
        self.drafter.load_model(self.model)
        self._setup_eagle3_aux_hidden_state_outputs()

    def _setup_eagle3_aux_hidden_state_outputs(self):
        raise AssertionError("not for ctcdraft")

    def propose_draft_token_ids(
        self,
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        aux_hidden_states,
        spec_decode_metadata,
        common_attn_metadata,
        slot_mappings,
    ):
        batch = self.input_batch
        return self.drafter.propose(sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings)

    def _sample(self, logits, spec_decode_metadata):
        return logits, spec_decode_metadata


class Impl:
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """In a layout that nobody else reads."""


class Target(nn.Module):
    """The names under which vLLM's Llama has its parts; packed: as if its CPU build had packed them."""

    def __init__(self, base, packed=False):
        super().__init__()
        rows = [part.weight for part in (base.model.get_input_embeddings(), base.model.get_output_embeddings())]
        embedding, lm_head = (nn.Parameter(torch.cat([part, part[:4]]), requires_grad=False) for part in rows)
        if packed:
            lm_head = nn.Parameter(lm_head.view(-1), requires_grad=False)
        self.model, self.lm_head = nn.Module(), SimpleNamespace(weight=lm_head)
        self.model.embed_tokens = SimpleNamespace(weight=embedding)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(base.depth))
        for layer in self.model.layers:
            layer.self_attn = nn.Module()
            layer.self_attn.attn = nn.Module()
            layer.self_attn.attn.impl, layer.self_attn.attn.kv_cache = Impl(), torch.zeros(0)

    def set_aux_hidden_state_layers(self, layers):
        self.aux = layers


def spread_into_a_copy(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """What vLLM's CPU build does with numbers that are no int64."""
    return torch.zeros(num_tokens, dtype=x.dtype)


@pytest.fixture
def engine(monkeypatch):
    """vLLM's modules, as doubles; the runner's class is a fresh one, since it is wrapped."""
    names = ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample")
    modules = {name: ModuleType(name) for name in (*names, "vllm.v1.sample.rejection_sampler")}
    sampler, runners = modules["vllm.v1.sample.rejection_sampler"], modules["vllm.v1.worker.gpu_model_runner"]
    modules["vllm.v1.sample"].rejection_sampler, sampler.expand_batch_to_tokens = sampler, spread_into_a_copy
    runners.GPUModelRunner = type("GPUModelRunner", (Runner,), dict(vars(Runner)))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(serving, "metadata_version", lambda: "0.32.0")
    return SimpleNamespace(Runner=runners.GPUModelRunner, sampler=sampler)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return served_head(tmp_path_factory.mktemp("served"))


def config_of(served, *, head=None, **changed):
    """vLLM's configuration; changed: parallel_config__tensor_parallel_size and the like."""
    config = SimpleNamespace(
        additional_config={
            "ctcdraft": {"head": str(head or served.work / "head"), "prompt_lookup": 4, "length": "fixed"}
        },
        speculative_config=SimpleNamespace(num_speculative_tokens=MOST),
        model_config=SimpleNamespace(
            model=str(served.work / "base"), max_model_len=256, quantization=None, hf_overrides={}
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        lora_config=None,
    )
    for name, value in changed.items():
        *parts, last = name.split("__")
        owner = config
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def decoded(runner, base, prompt, limit, chunk):
    """Greedy tokens and the accepted drafts of each step, as vLLM's runner comes by them."""
    *_, (tokens, accepted) = decoding(runner, base, prompt, limit, chunk)
    return tokens, accepted


def decoding(runner, base, prompt, limit, chunk, name="one"):
    """Step by step what was decoded so far."""
    tokens, computed, draft, accepted = list(prompt), 0, [], []
    attended = base.attended(1)
    while len(tokens) < len(prompt) + limit and tokens[-1] not in base.eos_ids:
        count = min(chunk, len(tokens) - computed)
        ids = [*tokens[: computed + count], *(draft if computed + count == len(tokens) else [])]
        states = base.hidden(torch.tensor([ids]), attended=attended)
        slots = torch.arange(computed, len(ids))
        for layer, (keys, values) in attended.keys_and_values(states).items():
            attention = runner.model.model.layers[layer].self_attn.attn
            keys, values = (part[0].transpose(0, 1)[computed:] for part in (keys, values))
            cache = torch.zeros(PAGES, attended.heads, PAGE, 2 * attended.width)
            attention.impl.do_kv_cache_update(attention, keys, values, cache, slots)
        D, sampled, drafted = base.hidden_size, [], ids[computed + count :]
        if computed + count == len(tokens):
            said = base.logits(states[0, len(tokens) - 1 :]).argmax(-1).tolist()
            right = next((d for d, token in enumerate(drafted) if token != said[d]), len(drafted))
            sampled = said[: right + 1][: len(prompt) + limit - len(tokens)]
            sampled = sampled[: next((n + 1 for n, token in enumerate(sampled) if token in base.eos_ids), None)]
            accepted += [right] if computed >= len(prompt) else []
        computed, tokens = computed + count + max(0, len(sampled) - 1), tokens + sampled
        runner.input_batch = SimpleNamespace(
            req_ids=[name],
            num_tokens_no_spec=np.array([len(tokens)], np.int32),
            token_ids_cpu=np.array([tokens + [0] * 8], np.int32),
        )
        (draft,) = runner.propose_draft_token_ids(
            SimpleNamespace(scheduled_spec_decode_tokens={name: drafted} if drafted else {}),
            [sampled],
            None,
            states[0, len(ids) - count - len(drafted) :, :D],
            None,
            aux_hidden_states=[states[0, len(ids) - count - len(drafted) :, D : 2 * D]],
            spec_decode_metadata=None,
            common_attn_metadata=SimpleNamespace(
                query_start_loc_cpu=torch.tensor([0, count + len(drafted)]),
                block_table_tensor=torch.arange(PAGES, dtype=torch.int32).unsqueeze(0),
            ),
            slot_mappings=None,
        )
        yield tokens[len(prompt) :], accepted


@pytest.mark.parametrize("chunk", [100, 5])
def test_a_runner_decodes_in_the_steps_of_our_chain(engine, served, chunk):
    runner = engine.Runner(config_of(served), Target(served.base))
    runner.load_model()
    assert runner.use_aux_hidden_state_outputs
    assert runner.model.aux == served.head.attended.layers[:1]
    ours = Decoder(served.base, served.head, DraftConfig("chain", MOST, budget="fixed", prompt_lookup=4))
    for prompt in prompts(3, seed=9, longest=20):
        out = ours.generate(prompt, 40)
        tokens, accepted = decoded(runner, served.base, prompt, 40, chunk)
        assert tokens == out.tokens
        assert len(accepted) == out.steps
        assert accepted[:-1] == out.accepted[:-1]  # the last is cut by whoever counts


@pytest.mark.parametrize("layers", [None, ["full_attention", "sliding_attention"]], ids=["all", "some"])
def test_a_head_sees_no_further_than_the_windows_of_its_layers(engine, tmp_path, monkeypatch, layers):
    sizes = {"sliding_window": 8, "pad_token_id": 0} | ({"layer_types": layers} if layers else {})
    served = served_head(tmp_path, "gemma2" if layers else "mistral", **sizes)
    config = config_of(served, scheduler_config__disable_hybrid_kv_cache_manager=True)
    config.additional_config["ctcdraft"]["prompt_lookup"] = 0
    ours = Decoder(served.base, served.head, DraftConfig("chain", MOST, budget="fixed", prompt_lookup=0))

    def drafted():
        runner = engine.Runner(config, Target(served.base))
        runner.load_model()
        own, found = runner.drafter.propose, []
        runner.drafter.propose = lambda *given: found.append(own(*given)) or found[-1]
        tokens, _ = decoded(runner, served.base, prompt, 40, 100)
        return tokens, [chain for (chain,) in found]

    for prompt in prompts(2, seed=9, longest=20):
        out = ours.generate(prompt, 40, keep_trees=True)
        tokens, chains = drafted()
        assert tokens == out.tokens
        trees = [tree.tokens.tolist() for tree, _ in out.trees][:24]  # the last of 40 are cut by whoever counts
        assert len(trees) > 9
        assert chains[: len(trees)] == trees
        with monkeypatch.context() as blind:
            blind.setattr(Windows, "of", lambda self, mask, *_: mask)
            assert drafted()[1] != chains


@pytest.fixture
def measuring(engine, served):
    """A runner whose drafter measures how long chains pay."""
    config = config_of(served)
    config.additional_config["ctcdraft"]["length"] = "measured"
    runner = engine.Runner(config, Target(served.base))
    runner.load_model()
    return runner


def test_measured_lengths_change_no_token_and_are_measured(measuring, served):
    for prompt in prompts(3, seed=9, longest=20):
        tokens, _ = decoded(measuring, served.base, prompt, 40, 5)
        assert tokens == Decoder(served.base).generate(prompt, 40).tokens
    lengths = measuring.drafter.lengths.of(1)
    assert lengths.count > 20
    assert lengths.plain.known == {1}
    assert max(lengths.drafted.known) > 1


def test_a_request_that_a_step_left_out_is_verified_with_the_drafts_from_before(measuring, served):
    asked = prompts(2, seed=9, longest=20)
    one, other = (
        decoding(measuring, served.base, prompt, 40, 20, name) for prompt, name in zip(asked, "ab", strict=True)
    )
    told = {}
    for begun in range(100):  # two steps of one of them, and then two of the other
        side = one if begun % 4 < 2 else other
        told[side is one] = next(side, told.get(side is one))
    for prompt, (tokens, _) in zip(asked, (told[True], told[False]), strict=True):
        assert tokens == Decoder(served.base).generate(prompt, 40).tokens
    assert measuring.drafter.lengths.of(1).count > 40


def test_a_step_without_drafts_is_sampled_as_without_a_drafter(engine, served):
    runner = engine.Runner(config_of(served), Target(served.base))
    runner.load_model()
    none, some = (SimpleNamespace(max_spec_len=most) for most in (0, 3))
    assert runner._sample("logits", none) == runner._sample("logits", None) == ("logits", None)
    assert runner._sample("logits", some) == ("logits", some)


def test_a_runner_whose_drafter_is_another_is_left_alone(engine, served):
    runner = engine.Runner(config_of(served), Target(served.base))
    runner.drafter = object()
    with pytest.raises(AssertionError, match="not for ctcdraft"):
        runner._setup_eagle3_aux_hidden_state_outputs()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"parallel_config__tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"model_config__quantization": "awq"}, "--quantization awq"),
        ({"model_config__hf_overrides": {"rope_parameters": {"rope_type": "yarn"}}}, "--hf-overrides"),
        ({"cache_config__cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"additional_config": {}}, "head: field required"),
        ({"additional_config": {"ctcdraft": {"head": "x", "nodes": 3}}}, "nodes: unexpected"),
        ({"additional_config": {"ctcdraft": {"head": "x", "top_k": 0}}}, "top_k: input should be greater than 0"),
    ],
)
def test_what_would_be_wrong_or_silently_worse_is_refused(engine, served, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine.Runner(config_of(served, **changed))


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "of unknown version"])
def test_another_version_is_refused(engine, served, version, monkeypatch):
    monkeypatch.setattr(serving, "metadata_version", lambda: version)
    with pytest.raises(ValueError, match=rf"vLLM {version}: .* tested with 0\.32"):
        engine.Runner(config_of(served))


@pytest.mark.parametrize("name", serving.TAKEN)
def test_a_runner_whose_methods_have_changed_is_refused(engine, served, name):
    setattr(engine.Runner, name, lambda self, another: None)
    with pytest.raises(ValueError, match=f"{name} takes"):
        engine.Runner(config_of(served))
    setattr(engine.Runner, name, None)
    with pytest.raises(ValueError, match=f"{name} takes None"):
        engine.Runner(config_of(served))


def test_a_runner_that_shows_no_states_is_an_error_and_no_empty_draft(engine, served):
    runner = engine.Runner(config_of(served), Target(served.base))
    runner.drafter.load_model(runner.model)
    with pytest.raises(RuntimeError, match="no hidden states"):
        runner.drafter.propose([[3]], np.array([4]), np.zeros((1, 8)))


def refusal(engine, served, target, **options):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        engine.Runner(config_of(served, **options), target).load_model()
    return str(refused.value)


def test_models_that_a_head_cannot_draft_for_are_refused(engine, served, tmp_path, monkeypatch):
    assert "packed" in refusal(engine, served, Target(served.base, packed=True))
    hidden = Target(served.base)
    del hidden.model.layers[-1].self_attn
    assert "no attention found in its layers [1]" in refusal(engine, served, hidden)
    nameless = Target(served.base)
    del nameless.lm_head
    assert "embedding and LM head" in refusal(engine, served, nameless)
    with monkeypatch.context() as silent:
        silent.delattr(Target, "set_aux_hidden_state_layers")
        assert refusal(engine, served, Target(served.base)).endswith("give --model-impl transformers")
    other = load_base(str(write_base(tmp_path / "other", seed=1)))
    export_head(random_head(HEADS[1], other), other, tmp_path / "head", TRAINING)
    assert "lm_head differ" in refusal(engine, served, Target(served.base), head=tmp_path / "head")
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"original_max_position_embeddings": 64, "pad_token_id": 0}
    long = write_base(tmp_path / "long", "phi3", rope_parameters=rope, **sizes)
    config = {"model_config__model": str(long)}
    assert "--max-model-len 64" in refusal(engine, served, Target(load_base(str(long))), **config)


@pytest.mark.parametrize("name", ["embedding", "embed_in"])  # gpt-oss, GPT-NeoX
def test_an_embedding_of_another_name_is_found(engine, served, name):
    target = Target(served.base)
    setattr(target.model, name, target.model.embed_tokens)
    del target.model.embed_tokens
    runner = engine.Runner(config_of(served), target)
    runner.load_model()
    one = torch.tensor([3])
    assert torch.equal(runner.drafter.drafter.base.embed(one), served.base.embed(one))


def test_layers_whose_pages_are_handed_out_apart_are_refused(engine, served, tmp_path):
    """vLLM shows a proposer the block table of one kind of layers; by it the pages of the other are anybody's."""
    base = load_base(str(write_base(tmp_path / "mixed", "gemma2", sliding_window=256, pad_token_id=0)))
    export_head(random_head(HEADS[1], base), base, tmp_path / "head", TRAINING)
    config = {"model_config__model": base.path, "head": tmp_path / "head"}
    sentence = refusal(engine, served, Target(base), **config)
    assert sentence.startswith("mixed has layers with a window and others")
    assert sentence.endswith("give --disable-hybrid-kv-cache-manager")
    config["scheduler_config__disable_hybrid_kv_cache_manager"] = True
    engine.Runner(config_of(served, **config), Target(base)).load_model()


def test_a_gpu_engines_backend_that_is_not_known_is_refused_at_the_start(engine, served, monkeypatch):
    base = Mock(device=torch.device("cuda"), windows=SimpleNamespace(width=None))
    for name, given in (("base_of", base), ("load_head", served.head), ("ServedHead", None)):
        monkeypatch.setattr(serving, name, lambda *_, given=given: given)
    target = Target(served.base)
    target.model.layers[-1].self_attn.attn.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    assert refusal(engine, served, target).startswith("--attention-backend FLASHINFER: choose one of ('FLASH_ATTN', ")


def test_a_gpu_engines_pages_are_views_in_the_backends_that_are_known():
    cache = torch.randn(3, 2, PAGE, 16)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    attention = {7: SimpleNamespace(attn_backend=backend, kv_cache=cache)}
    serving.check_readable(attention)
    pages = serving.engine_pages(attention)
    keys, values = pages.layers[7]
    assert keys.shape == values.shape == (3, PAGE, 2, 8)
    assert keys.data_ptr() == cache.data_ptr()
    backend.get_name = lambda: "FLASHMLA"
    with pytest.raises(ValueError, match="FLASHMLA"):
        serving.check_readable(attention)


def test_sampling_is_mended_where_it_is_broken_and_nowhere_else(engine, served):
    engine.Runner(config_of(served))
    mended, counts = engine.sampler.expand_batch_to_tokens, torch.tensor([2, 5, 6], dtype=torch.int32)
    spread = mended(torch.tensor([0.7, 0.0, 1.2]), counts, 6, replace_from=0, replace_to=1)
    assert spread.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0, 1.0, 1.2])
    engine.Runner(config_of(served))
    assert engine.sampler.expand_batch_to_tokens is mended


def test_the_command_line_of_the_docs_is_json():
    text = serving.__doc__
    words = [text[text.index(mark) :].split("'")[1] for mark in ("--speculative-config", "--additional-config")]
    assert json.loads(words[0])["model"] == f"{serving.Proposer.__module__}.{serving.Proposer.__name__}"
    assert "head" in json.loads(words[1])["ctcdraft"]
