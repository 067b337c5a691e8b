"""A peer's drafter is counted by our ruler, and reads hidden states that are its base's."""

import itertools
import json
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from drafting import prompts
from safetensors.torch import load_file

from ctcdraft.model import Decoder, DraftConfig, load_base
from ctcdraft.model.base.context import Anchors
from ctcdraft.model.heads import ParallelConfig
from ctcdraft.model.heads.slots import SlotHead
from ctcdraft.model.replay import Transcript, replay

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))
from answers import answers_of, span
from conditionals import LayersBase, PeerHead, grown
from states import write_states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(talking):
    return load_base(talking.path, dtype="fp32")


def answers(base, count=5, limit=24):
    rows = []
    for prompt in prompts(count, seed=3):
        tokens = [*prompt, *Decoder(base).generate(prompt, limit).tokens]
        rows.append(Transcript(np.array(tokens), np.arange(len(tokens)) >= len(prompt)))
    return rows


class Slots:
    """The conditionals of a head of ours whose slots do not depend on each other."""

    def __init__(self, base, head):
        self.base, self.head = base, head
        self.layers, self.depth, self.hidden_size = (2,), head.config.slots, base.hidden_size

    def begin(self, hidden_LF, tokens_L, position_M):
        hidden_1LD = self.base.model.base_model.norm(hidden_LF).unsqueeze(0)
        root_1LD = self.base.embed(tokens_L.roll(-1)).unsqueeze(0)
        slots = self.head(hidden_1LD, root_1LD, Anchors.of(torch.zeros_like(position_M), position_M, 1))
        self.log_p_MTV = self.base.logits(slots.states_NTD).log_softmax(dim=2)
        return self

    def behind(self, paths):
        return torch.stack([self.log_p_MTV[anchor, len(path)] for anchor, path in paths])


def test_a_peer_that_drafts_as_a_head_of_ours_counts_the_same(base):
    head, rows = SlotHead(ParallelConfig(slots=5, draft_vocab_size=None), base).eval(), answers(base)
    torch.manual_seed(0)
    for p in head.parameters():
        p.data.add_(torch.randn_like(p) * 0.3)
    peer = PeerHead(Slots(base, head), base, nodes=9)
    ways = itertools.product(("tree", "chain"), (0, 7))
    drafts = [DraftConfig(kind, 9, prompt_lookup=copies, budget="fixed") for kind, copies in ways]
    ours = replay(base, {str(draft): Decoder(base, head, draft) for draft in drafts}, rows)
    theirs = replay(LayersBase.of(base), {str(draft): Decoder(base, peer, draft) for draft in drafts}, rows)
    ours, theirs = ({label: [*chain(*several)] for label, several in found.items()} for found in (ours, theirs))
    for label, several in ours.items():
        for one, other in zip(several, theirs[label], strict=True):
            assert one.sources == other.sources
            assert one.expected == pytest.approx(other.expected, abs=1e-4)
    assert any("head" in sources for several in ours.values() for one in several for sources in one.sources)


class Markov:
    """A token depends on the one before it, and on the anchor."""

    def __init__(self, anchors, tokens):
        self.log_p = (
            torch.randn(anchors, tokens, tokens, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(2)
        )

    def behind(self, paths):
        return torch.stack([self.log_p[anchor, path[-1] if path else 0] for anchor, path in paths])


def test_a_tree_holds_the_best_paths_and_the_whole_chain():
    model, ends, depth, nodes = Markov(3, 5), frozenset([4]), 4, 12
    for anchor, tree in enumerate(grown(model, 3, nodes, depth, ends)):
        log_p = {}
        for path in itertools.chain(*(itertools.product(range(5), repeat=n) for n in range(1, depth + 1))):
            if not ends & {*path[:-1]}:
                steps = zip((0, *path), path, strict=False)
                log_p[path] = float(sum(model.log_p[anchor, a, b] for a, b in steps))
        best = sorted(log_p, key=log_p.get, reverse=True)[:nodes]
        paths = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths[:nodes] == best
        assert np.log(tree.psi) == pytest.approx([log_p[path] for path in paths], abs=1e-4)
        chain = ()
        while len(chain) < depth and not ends & {*chain}:
            chain = max((path for path in log_p if path[:-1] == chain), key=log_p.get)
            assert chain in paths


def test_stored_states_are_those_of_the_base(base, tmp_path):
    rows = answers(base)
    write_states(LayersBase.of(base), rows, (0, 1, 2), tmp_path)
    data = load_from_disk(tmp_path)
    assert data["seq_len"][:].tolist() == [len(known.tokens) for known in rows]
    for number, known in enumerate(rows):
        assert data[number]["input_ids"].tolist() == known.tokens.tolist()
        assert data[number]["loss_mask"].tolist() == known.answered.tolist()
        stored = load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors")
        assert stored["token_ids"].tolist() == known.tokens.tolist()
        ids = torch.from_numpy(known.tokens).unsqueeze(0)
        states = base.model.base_model(ids, output_hidden_states=True).hidden_states
        hidden = stored["hidden_states"].float()
        assert torch.allclose(hidden[:, :2], torch.stack(states[:2], dim=2)[0], rtol=1e-2, atol=1e-2)
        assert torch.allclose(base.model.base_model.norm(hidden[:, 2]), states[2][0], rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="other rows"):
        write_states(LayersBase.of(base), rows[1:], (0, 1, 2), tmp_path)


def test_rows_without_answers_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}))
    (known,) = answers_of(path, [span(":")], 1024)
    assert known.answers() == [(1, 3)]
    with pytest.raises(ValueError, match="no row lies in --rows"):
        answers_of(path, [span("1:2")], 1024)
    for row in ({"input_ids": [1, 2]}, {"input_ids": [1, 2], "loss_mask": [1]}, {"input_ids": "x", "loss_mask": "y"}):
        path.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=r"row 0: .*(input_ids|loss_mask).*: give tokenised answers"):
            answers_of(path, [span(":")], 1024)
