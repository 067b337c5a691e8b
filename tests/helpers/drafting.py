"""Prompts, random heads and scripted drafts for the tests of the decoder."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import torch
from bases import write_base
from transformers import DynamicCache

from ctcdraft.data.store import Example, load_corpus, save_corpus
from ctcdraft.model import Decoder, DraftConfig, export_head, load_base
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.base.context import Anchors
from ctcdraft.model.draft.tree import Tree
from ctcdraft.model.heads import CtcConfig, EagleConfig, GlideConfig, MedusaConfig, MlpConfig, ParallelConfig, head_on
from ctcdraft.model.heads.diffusion import DiffusionConfig

HEADS = [
    CtcConfig(slots=5, transition="none", merge=True, band=None),
    CtcConfig(slots=5, layers=1, rank=8),
    ParallelConfig(slots=5),
    ParallelConfig(slots=5, transition="full", layers=1, rank=8),
    MedusaConfig(slots=5, layers=2),
    DiffusionConfig(slots=5, layers=1, fills=3),
    EagleConfig(slots=5, width=32, beam=3),
    MlpConfig(slots=5, width=24, beam=3),
    GlideConfig(slots=5, beam=3),
]

TRAINING = {"objective": "prefix_ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}

SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 40},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "repetition_penalty": 1.2},
]


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 260, rng.integers(1, longest)).tolist() for _ in range(count)]


def random_head(config, base, seed=0):
    torch.manual_seed(seed)
    head = head_on(base, config).to(base.device, base.dtype).eval()
    for p in head.parameters():
        p.data.add_(torch.randn_like(p) * 0.3)
    return head


def export_random_heads(base, folder, *names):
    """{name: folder of an exported head}, each with weights of its own."""
    for seed, name in enumerate(names):
        export_head(random_head(CtcConfig(slots=4), base, seed), base, folder / name, TRAINING)
    return {name: folder / name for name in names}


def served_head(work, family="llama", **sizes):
    """A base and an exported head of it in folders of `work`, as an engine serves them."""
    base = load_base(str(write_base(work / "base", family, **sizes)))
    head = random_head(HEADS[1], base)
    export_head(head, base, work / "head", TRAINING)
    return SimpleNamespace(work=work, base=base, head=head)


def random_corpus(folder, count, shortest, longest):
    """So many sequences of lengths in between, whose last two thirds are an answer."""
    rng, examples = np.random.default_rng(0), []
    for _ in range(count):
        ids = rng.integers(4, 30, int(rng.integers(shortest, longest))).tolist()
        examples.append(Example(ids, [int(i >= len(ids) // 3) for i in range(len(ids))], ids))
    save_corpus(folder / "train.safetensors", examples)
    return load_corpus(folder, "train")


@torch.no_grad()
def slots_behind(ids_BL, head, base):
    """What the head drafts from, once the base has read all but the last of these tokens, which are the roots."""
    B, L = ids_BL.shape
    read = TreeCache(base.model.config.num_hidden_layers, B, L)
    hidden = base.hidden(ids_BL[:, :-1], cache=read, attended=head.attended)
    read.commit([range(L - 1)] * B)
    return head.fill(hidden, base.embed(ids_BL[:, 1:]), read.newest([L - 1] * B, L - 1, hidden.device), read)


def difference_from_the_base(base, layers, length=12):
    """The one slot of a fresh head, entered by what enters the base's own layers a position later, beside what the base
    makes of it; of the largest number."""
    head = head_on(base, ParallelConfig(slots=1, layers=layers)).to(base.dtype).eval()
    D, ids = base.hidden_size, torch.randint(2, 260, (2, length), generator=torch.Generator().manual_seed(0))
    states = base.hidden(ids, attended=head.attended)
    entering = states[..., D : 2 * D].roll(-1, 1)  # of the position after each
    given = torch.cat([states[..., :D], entering, states[..., 2 * D :]], dim=-1)
    anchors = Anchors.of(torch.arange(2).repeat_interleave(length - 1), torch.arange(length - 1).repeat(2), 2)
    with torch.no_grad():
        got = head(given, torch.zeros(2, length, D, dtype=base.dtype), anchors).states_NTD[:, 0]
    want = states[:, 1:, :D].flatten(0, 1)
    return float((got - want).abs().max() / want.abs().max())


def assert_entries_of_a_fresh_prefill(base, cache, tokens, number=0):
    """The keys and values that `cache` holds of a sequence are those of reading it anew; returns their count."""
    fresh, length = DynamicCache(), int(cache.lengths[number])
    base.hidden(torch.tensor([tokens[:length]], device=base.device), cache=fresh)
    for i, layer in enumerate(fresh.layers):
        keys, values = (part[number, :, :length] for part in cache.committed(i))
        assert torch.allclose(keys, layer.keys[0], atol=1e-10)
        assert torch.allclose(values, layer.values[0], atol=1e-10)
    return length


def oracle_decoder(base, truth, wrong_at=None, nodes=16, seed=0):
    """A decoder whose tree holds the true continuation among random branches, wrong at one depth."""
    rng = np.random.default_rng(seed)

    class Scripted(Decoder):
        def _propose(self, request, lattice):
            at = len(request.out.tokens)
            path = truth[at : at + min(6, request.room)]
            tokens, parents, depths = [], [], []
            spine = -1
            for d, token in enumerate(path):
                for _ in range(2):  # decoys first, so the accepted path is not a prefix of the rows
                    tokens.append((token + int(rng.integers(1, 250))) % 260)
                    parents.append(spine)
                    depths.append(d + 1)
                tokens.append(token if wrong_at is None or d < wrong_at else (token + 251) % 260)
                parents.append(spine)
                depths.append(d + 1)
                spine = len(tokens) - 1
            return Tree(
                np.array(tokens, np.int64),
                np.array(parents, np.int64),
                np.array(depths, np.int64),
                np.ones(len(tokens), np.float32),
            )

        def advance(self, step):
            super().advance(step)
            self.check(step.active, step.cache)

    scripted = Scripted(base, random_head(replace(HEADS[0], slots=6), base), DraftConfig("tree", 64, budget="fixed"))
    scripted.check = lambda active, cache: None
    return scripted


class Whims:
    """In the place of a decoder's `Lengths`: the head rests, and drafts of several requests are cut, as dice say."""

    def __init__(self, seed=0, rests=0.6):
        self.rng, self.share, self.drafts = np.random.default_rng(seed), rests, Mock()

    def of(self, requests):  # of every size of a batch
        return self

    def sleeps(self, requests):
        return self.rng.random() < self.share / 4

    def rests(self, requests):
        return self.rng.random() < self.share

    def cut(self, trees, by_head, look=0.0, alone=None):
        count = int(self.rng.integers(0, 10))
        return [tree.first(count) for tree in trees]

    def observe(self, *_):
        pass


def random_trees(base, truth, seed):
    """A decoder whose trees have any shape and size, and hold more or less of the truth anywhere in them."""
    rng = np.random.default_rng(seed)

    class Random(Decoder):
        def _propose(self, request, lattice):
            at, room = len(request.out.tokens), min(request.room, 6)
            tokens, parents, depths = [], [], []
            taken = set()
            for _ in range(int(rng.integers(0, 30))):
                parent = int(rng.integers(-1, len(tokens)))
                depth = 1 if parent < 0 else depths[parent] + 1
                right = truth[at + depth - 1] if at + depth <= len(truth) else 5
                token = right if rng.random() < 0.6 else int(rng.integers(2, 260))
                if depth <= room and (parent, token) not in taken:
                    taken.add((parent, token))
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depth)
            arrays = (np.array(row, np.int64) for row in (tokens, parents, depths))
            return Tree(*arrays, np.ones(len(tokens), np.float32))

    return Random(base, random_head(replace(HEADS[0], slots=6), base), DraftConfig("tree", 32, budget="fixed"))
