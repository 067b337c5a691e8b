"""The plugin against doubles of SGLang's registry and worker: what is drafted in it, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from drafting import prompts, served_head
from hypothesis import given
from hypothesis import strategies as st
from overfitted import overfit_head
from torch import nn

from ctcdraft.data.template import prompt_ids
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.model.draft.tree import EMPTY, Tree
from ctcdraft.serve import sglang as serving

ROOT = Path(__file__).parents[2]
ENV = Path(os.environ.get("CTCDRAFT_SGLANG", ROOT / ".venv-sglang"))
TRAINING = {"objective": "ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
ROWS, LIMIT, PLACES, REQUESTS = 9, 20, 600, 4
SHAPE = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "page_size": None}
ARGS = SHAPE | {"enable_lora": False, "lora_paths": None, "quantization": None, "kv_cache_dtype": "auto"}
ARGS |= {"disaggregation_mode": "null", "max_running_requests": None, "speculative_num_draft_tokens": None}


class CustomSpecAlgo:
    """SGLang's base of registered algorithms: it lacks what its own ones answer besides."""

    def is_ngram(self):
        return False


class Pool:
    def __init__(self, attended):
        shape = PLACES, attended.heads, attended.width
        self.layers = {layer: (torch.full(shape, 1e4), torch.full(shape, 1e4)) for layer in attended.layers}

    def get_key_buffer(self, layer):
        return self.layers[layer][0]

    def get_value_buffer(self, layer):
        return self.layers[layer][1]


class Target(nn.Module):
    """The names under which SGLang's Llama has its parts."""

    def __init__(self, base):
        super().__init__()
        rows = [part.weight for part in (base.model.get_input_embeddings(), base.model.get_output_embeddings())]
        self.model, self.lm_head = nn.Module(), SimpleNamespace(weight=rows[1])
        self.model.embed_tokens = SimpleNamespace(weight=rows[0])
        self.logits_processor = SimpleNamespace(keep_last_hidden_states=False)

    def set_eagle3_layers_to_capture(self, layers):
        self.shown = layers[0] + 1


class NGRAMWorker:
    """SGLang's, as far as the plugin builds on it: it verifies trees greedily, and computes nothing fast."""

    def __init__(self, server_args, gpu_id, nccl_port, target_worker):
        from sglang.srt.speculative import ngram_worker

        self.ngram_corpus = ngram_worker.NgramCorpus(capacity=1)
        self.model_runner, self.draft_token_num = target_worker.model_runner, ROWS

    def alloc_memory_pool(self, **named):
        self.req_to_token_pool = self.model_runner.req_to_token_pool

    def forward(self, ids, begin, places):
        """States [N, X] of the positions from `begin` on; what layers make of them goes to these places."""
        base, attended = self.model_runner.base, self.model_runner.attended
        states = base.hidden(torch.tensor([ids]), attended=attended)
        for layer, parts in attended.keys_and_values(states).items():
            for mine, made in zip(self.model_runner.token_to_kv_pool.layers[layer], parts, strict=True):
                mine[places] = made[0].transpose(0, 1)[begin:]
        return states[0, begin:, : 2 * base.hidden_size]

    def forward_batch_generation(self, batch):
        base = self.model_runner.base
        D, rows, said, counts = base.hidden_size, [], [], []
        if batch.forward_mode.is_extend():
            for one, begin, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
                read = [*one.origin_input_ids_unpadded, *one.output_ids][: begin + count]
                rows.append(self.forward(read, begin, one.places[begin : begin + count]))
                said.append([int(base.logits(rows[-1][-1:, :D]).argmax())])
        else:
            tokens, masks = self._prepare_draft_tokens(batch)
            drafts = zip(batch.reqs, tokens.reshape(-1, ROWS), masks.reshape(-1, ROWS, ROWS), strict=True)
            for one, draft, sees in drafts:
                before = [*one.origin_input_ids_unpadded, *one.output_ids][:-1]
                paths = [draft[sees[row]].tolist() for row in range(ROWS)]
                spare = torch.tensor([one.places[len(before)]])  # written by every row, the last time by the last
                states = torch.cat([self.forward(before + path, len(before) + len(path) - 1, spare) for path in paths])
                at, told = 0, [int(token) for token in base.logits(states[:, :D]).argmax(-1)]
                accepted = [told[0]]
                while (child := next((r for r in range(ROWS) if paths[r] == [*paths[at], told[at]]), None)) is not None:
                    at = child
                    accepted.append(told[at])
                end = len(before) + len(paths[at])
                self.forward(before + paths[at], len(before), one.places[len(before) : end])
                rows.append(states)
                said.append(accepted)
        counts = torch.tensor([len(one) for one in said])
        padded = torch.tensor([one + [-1] * (ROWS - len(one)) for one in said])
        states = torch.cat(rows)
        shown = SimpleNamespace(last_hidden_states=states[:, :D], hidden_states=states[:, D:])
        if self.model_runner.hides:
            shown = SimpleNamespace(last_hidden_states=None, hidden_states=None)
        drafted = SimpleNamespace(accept_tokens=padded.flatten())
        return SimpleNamespace(logits_output=shown, accept_lens=counts, next_draft_input=drafted, said=said)


@pytest.fixture
def engine(monkeypatch, served):
    """SGLang's modules, as doubles."""
    names = ("sglang", "sglang.srt", "sglang.srt.speculative")
    modules = {name: ModuleType(name) for name in names}
    for name in ("spec_info", "spec_registry", "ngram_worker"):
        modules[f"{names[-1]}.{name}"] = ModuleType(name)
        setattr(modules[names[-1]], name, modules[f"{names[-1]}.{name}"])
    registered = {}

    def register(name, *, supports_overlap, spec_class):
        return lambda factory: registered.update({name: (spec_class(), factory)})

    ngram = SimpleNamespace(carries_draft_hidden_states=lambda: False)
    modules[f"{names[-1]}.spec_info"].SpeculativeAlgorithm = SimpleNamespace(register=register, NGRAM=ngram)
    modules[f"{names[-1]}.spec_registry"].CustomSpecAlgo = CustomSpecAlgo
    modules[f"{names[-1]}.ngram_worker"].NGRAMWorker = NGRAMWorker
    modules[f"{names[-1]}.ngram_worker"].NgramCorpus = None  # theirs is compiled
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(serving.metadata, "version", lambda name: serving.TESTED)
    monkeypatch.setenv(serving.HEAD, str(served.work / "head"))
    serving.register()
    return registered["CTCDRAFT"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return served_head(tmp_path_factory.mktemp("served"))


def worker_of(engine, served, target=None, hides=False):
    table = SimpleNamespace(req_to_token=torch.zeros(REQUESTS, 128, dtype=torch.int32))
    runner = SimpleNamespace(model=target or Target(served.base), base=served.base, attended=served.head.attended)
    runner.token_to_kv_pool, runner.req_to_token_pool = Pool(served.head.attended), table
    runner.model_config, runner.hides = SimpleNamespace(context_len=128), hides
    args = SimpleNamespace(model_path=str(served.work / "base"))
    worker = engine[1](args)(args, 0, 0, SimpleNamespace(model_runner=runner))
    worker.alloc_memory_pool()
    return worker


class Scheduler:
    """Requests at random places, whose prompts are read in chunks, and which may be retracted."""

    def __init__(self, worker, limit=LIMIT):
        self.worker, self.free, self.limit = worker, torch.randperm(PLACES).tolist(), limit
        self.slots, self.steps = list(range(REQUESTS)), {}

    def add(self, prompt):
        one = SimpleNamespace(origin_input_ids_unpadded=prompt, output_ids=[], computed=0, slot=self.slots.pop())
        one.places = torch.tensor([self.free.pop() for _ in range(100)])
        one.sampling_params = SimpleNamespace(max_new_tokens=self.limit)
        self.worker.req_to_token_pool.req_to_token[one.slot, :100] = one.places.int()
        return one

    def retract(self, one):
        self.free = [*one.places.tolist(), *self.free]
        self.slots = [one.slot, *self.slots]
        again = self.add(one.origin_input_ids_unpadded)
        one.slot, one.places, one.computed = again.slot, again.places, 0

    def batch(self, reqs, extend):
        mode = SimpleNamespace(is_extend=lambda: extend)
        slots = torch.tensor([one.slot for one in reqs])
        seen = torch.tensor([one.computed for one in reqs])
        table = self.worker.req_to_token_pool
        return SimpleNamespace(
            reqs=reqs, forward_mode=mode, req_pool_indices=slots, seq_lens_cpu=seen, req_to_token_pool=table
        )

    def read(self, one, chunk=1000):
        while (left := len(one.origin_input_ids_unpadded) + len(one.output_ids) - one.computed) > 0:
            batch = self.batch([one], True)
            batch.prefix_lens, batch.extend_lens = [one.computed], [min(chunk, left)]
            result = self.worker.forward_batch_generation(batch)
            one.computed += batch.extend_lens[0]
        self.take(one, result.said[0])

    def step(self, reqs):
        result = self.worker.forward_batch_generation(self.batch(reqs, False))
        for one, said in zip(reqs, result.said, strict=True):
            self.steps[id(one)] = self.steps.get(id(one), 0) + 1
            one.computed += len(said)
            self.take(one, said)

    def take(self, one, said):
        for token in said[: self.limit - len(one.output_ids)]:
            one.output_ids.append(token)
            if token in self.worker.model_runner.base.eos_ids:
                break

    def unfinished(self, reqs):
        ends = self.worker.model_runner.base.eos_ids
        return [one for one in reqs if len(one.output_ids) < self.limit and one.output_ids[-1] not in ends]


@pytest.mark.parametrize("chunk", [1000, 3])
def test_tokens_and_steps_are_those_of_our_trees(engine, served, chunk):
    texts = prompts(3, seed=4)
    scheduler = Scheduler(worker_of(engine, served))
    reqs = [scheduler.add(text) for text in texts]
    for one in reqs:
        scheduler.read(one, chunk)
    while running := scheduler.unfinished(reqs):
        scheduler.step(running[::-1])
    ours = Decoder(served.base, served.head, DraftConfig(nodes=ROWS - 1, budget="fixed")).generate(texts, LIMIT)
    assert [one.output_ids for one in reqs] == [out.tokens for out in ours]
    assert [scheduler.steps[id(one)] for one in reqs] == [out.steps for out in ours]
    assert sum(out.steps for out in ours) < sum(len(out.tokens) for out in ours) - len(ours)


def test_a_retracted_request_goes_on_in_other_places(engine, served):
    (text,) = prompts(1, seed=5)
    scheduler = Scheduler(worker_of(engine, served))
    one = scheduler.add(text)
    scheduler.read(one)
    while scheduler.unfinished([one]):
        scheduler.step([one])
        if scheduler.unfinished([one]):
            scheduler.retract(one)
            scheduler.read(one)
    assert one.output_ids == Decoder(served.base).generate(text, LIMIT).tokens


@pytest.mark.parametrize("fault", ["none", "state of another row", "places of another request", "keys for values"])
def test_planted_faults_change_the_drafts(engine, served, fault, monkeypatch):
    texts = prompts(3, seed=4)
    worker = worker_of(engine, served)
    if fault == "state of another row":
        own = serving.TreeDrafts._keep
        monkeypatch.setattr(
            serving.TreeDrafts, "_keep", lambda self, slots, states, rows: own(self, slots, states, 0 * rows)
        )
    elif fault == "places of another request":
        drafts = worker.served.drafts
        worker.served.drafts = lambda newest, read, table, rooms: drafts(newest, read, table.flip(0), rooms)
    elif fault == "keys for values":
        worker.served.pages.layers = {layer: parts[::-1] for layer, parts in worker.served.pages.layers.items()}
    scheduler = Scheduler(worker)
    reqs = [scheduler.add(text) for text in texts]
    for one in reqs:
        scheduler.read(one)
    scheduler.step(reqs)
    decoder = Decoder(served.base, served.head, DraftConfig(nodes=ROWS - 1, budget="fixed"))
    right = [decoder.generate(text, LIMIT, keep_trees=True).trees[0][0] for text in texts]
    pairs = zip(worker.drafts.trees, right, strict=True)
    same = [tree.tokens.tolist() == serving.padded(one, ROWS - 1).tokens.tolist() for tree, one in pairs]
    assert all(same) == (fault == "none")


def test_where_no_states_are_shown_decoding_ends(engine, served):
    scheduler = Scheduler(worker_of(engine, served, hides=True))
    with pytest.raises(RuntimeError, match="no hidden states"):
        scheduler.read(scheduler.add([5, 9, 12]))


def test_what_is_left_over_of_a_tree_hangs_behind_the_root():
    tree = Tree(np.array([7, 8]), np.array([-1, 0]), np.array([1, 2]), np.array([0.5, 0.2], np.float32))
    full = serving.padded(tree, 4)
    assert (full.tokens.tolist(), full.parents.tolist(), full.depths.tolist()) == (
        [7, 8, 0, 1],
        [-1, 0, -1, -1],
        [1, 2, 1, 1],
    )
    assert full.path_of([7, 8, 0]) == [0, 1]
    assert serving.padded(EMPTY, 3).path_of([0, 0]) == [0]


@given(st.sets(st.integers(0, 9), max_size=6), st.integers(6, 12))
def test_no_token_hangs_behind_the_root_twice(children, nodes):
    """SGLang accepts a token of a sample as often as the tree has it."""
    n = len(children)
    tree = Tree(np.array([*children], int), np.full(n, -1), np.ones(n, int), np.full(n, 0.1, np.float32))
    full = serving.padded(tree, nodes)
    assert len({*full.tokens.tolist()}) == len(full) == nodes
    assert full.tokens[:n].tolist() == tree.tokens.tolist()


def test_the_algorithm_is_the_n_gram_one_for_the_scheduler(engine):
    algorithm, _ = engine
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.carries_draft_hidden_states()
    with pytest.raises(AttributeError):
        algorithm._of_its_own  # noqa: B018


def test_server_arguments_become_what_a_head_needs(engine):
    args = SimpleNamespace(**ARGS)
    engine[0].handle_server_args(args)
    assert args.disable_overlap_schedule
    assert args.enable_return_hidden_states
    assert (args.speculative_num_draft_tokens, args.max_running_requests) == (serving.ROWS, serving.REQUESTS)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tp_size": 2}, "--tp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"dp_size": 2}, "--dp-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"lora_paths": ["x"]}, "--enable-lora"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"page_size": 16}, "--page-size 16"),
    ],
)
def test_what_would_be_wrong_or_silently_worse_is_refused(engine, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine[0].handle_server_args(SimpleNamespace(**ARGS | changed))


def test_without_a_head_and_in_another_version_the_server_does_not_start(engine, monkeypatch):
    monkeypatch.setattr(serving.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.24: .* tested with 0\.5\.23"):
        engine[0].handle_server_args(SimpleNamespace(**ARGS))
    monkeypatch.setattr(serving.metadata, "version", lambda name: serving.TESTED)
    monkeypatch.delenv(serving.HEAD)
    with pytest.raises(ValueError, match="CTCDRAFT_HEAD is not set"):
        engine[0].handle_server_args(SimpleNamespace(**ARGS))


def test_models_and_pools_that_a_head_cannot_draft_from_are_refused(engine, served, tmp_path):
    nameless = Target(served.base)
    del nameless.lm_head
    with pytest.raises(ValueError, match="embedding and LM head"):
        worker_of(engine, served, nameless)
    windowed = served_head(tmp_path, "mistral", sliding_window=16)
    with pytest.raises(ValueError, match="see a window: give --context-length 16"):
        worker_of(engine, windowed)
    with pytest.raises(ValueError, match="does not show the states"):
        serving.show_states(object(), 1)
    pool, attended = Pool(served.head.attended), served.head.attended
    with pytest.raises(ValueError, match="Pool: its keys and values"):
        serving.pool_pages(pool, attended.layers, (attended.heads + 1, attended.width))


@pytest.mark.slow
@pytest.mark.skipif(
    not (ENV / "bin" / "python").exists(), reason=f"no SGLang in {ENV}: see tests/helpers/sglang_run.py"
)
def test_in_sglang_itself_tokens_and_steps_are_those_of_our_trees(tmp_path, common_cache):
    """With stand-ins for its kernels; some of the texts begin with one that another has read."""
    asked = ["Tell me a story about a cat and a dog.", "Why is the sky blue?"]
    base = load_base(str(overfit_head(common_cache, tmp_path, asked[0])))
    texts = [prompt_ids(base.tokenizer, [{"role": "user", "content": text}], None) for text in asked]
    texts += [texts[0] + text for text in texts]
    given = {"base": base.path, "head": str(tmp_path / "head"), "rows": 17, "prompts": texts, "limit": 40, "batch": 2}
    words = [ENV / "bin" / "python", ROOT / "tests" / "helpers" / "sglang_run.py", json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    decoder = Decoder(base, load_head(tmp_path / "head", base), DraftConfig(nodes=16, budget="fixed"))
    ours = decoder.generate(texts, 40)
    assert found["tokens"] == [out.tokens for out in ours]
    assert found["steps"] == [out.steps for out in ours]
    assert found["cached"] > 0
