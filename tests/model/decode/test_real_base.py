"""A real base and real data by others, where they lie beside the project; skipped with a reason elsewhere."""

import json
import os
from collections import deque
from itertools import accumulate

import numpy as np
import pytest
import torch

from ctcdraft.data.batches import Sampler
from ctcdraft.data.generated import PROMPTS
from ctcdraft.data.records import conversation_of
from ctcdraft.data.sources import read_rows
from ctcdraft.data.store import Corpus
from ctcdraft.data.template import prompt_ids, render
from ctcdraft.eval.bench import BenchConfig, load_questions
from ctcdraft.model import Decoder, DraftConfig, export_head, load_head
from ctcdraft.model.decode.generate import continue_all
from ctcdraft.model.decode.request import Request
from ctcdraft.model.heads import CtcConfig, head_on
from ctcdraft.train.task import DraftTask, ObjectiveConfig, base_features, head_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # a real LLM on a busy core takes its time
QUESTIONS, NEW_TOKENS, STEPS = 16, 48, 40
DRAFT = DraftConfig(nodes=16, prompt_lookup=8)


def test_stories_are_continued_as_transformers_does_with_and_without_drafts(stories_base, shared):
    torch.manual_seed(0)
    head = head_on(stories_base, CtcConfig()).eval()
    speculative = Decoder(stories_base, head, DraftConfig(nodes=32, budget="fixed"))
    for story in json.loads((shared / "data" / "tinystories_900.json").read_text())[:3]:
        prompt = stories_base.tokenizer(story).input_ids[:40]
        ids = torch.tensor([prompt])
        want = stories_base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        assert Decoder(stories_base).generate(prompt, 60).tokens == want[0, 40:].tolist()
        assert speculative.generate(prompt, 60).tokens == want[0, 40:].tolist()


def test_smollm2_writes_what_transformers_writes(smollm2_base):
    questions = ("Name three rivers of Europe.", "What is 17 + 25?", "Write a haiku about rain.")
    prompts = [prompt_ids(smollm2_base.tokenizer, [{"role": "user", "content": question}]) for question in questions]
    together = [Request(prompt, 32) for prompt in prompts]
    list(continue_all(smollm2_base, deque(together), 2))
    for prompt, continuation in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        want = smollm2_base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        tokens = want[0, len(prompt) :].tolist()
        assert Decoder(smollm2_base).generate(prompt, 32).tokens == continuation.tokens == tokens
        assert len(set(tokens)) > 3


@pytest.fixture(scope="module")
def plain_answers(smollm2_base):
    """(prompt, SmolLM2's own next tokens) of 16 questions: of the file of MT-Bench's that CTCDRAFT_MT_BENCH names, or
    such as they are."""
    if path := os.environ.get("CTCDRAFT_MT_BENCH"):
        asked = load_questions(BenchConfig("mt_bench", path, questions=QUESTIONS), smollm2_base, None, 0)
        turns = [question.turns[0] for question in asked]
    else:
        turns = [question["turns"][0] for question in PROMPTS.questions()[::5]]
    prompts = [prompt_ids(smollm2_base.tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    assert len(prompts) == QUESTIONS
    return [(prompt, Decoder(smollm2_base).generate(prompt, NEW_TOKENS).tokens) for prompt in prompts]


def test_no_draft_changes_what_smollm2_answers(smollm2_base, plain_answers):
    """Copied tokens are often right; an untrained head puts wrong ones beside them."""
    torch.manual_seed(0)
    head = head_on(smollm2_base, CtcConfig(slots=4, transition="full")).eval()
    trees, chains = (Decoder(smollm2_base, head, DraftConfig(kind, 16)) for kind in ("tree", "chain"))
    accepted = 0
    for number, (prompt, tokens) in enumerate(plain_answers):
        found = (chains if number % 4 == 3 else trees).generate(prompt, NEW_TOKENS)
        assert found.tokens == tokens
        accepted += sum(found.accepted)
    assert accepted > 0


def test_a_head_of_a_few_steps_helps_smollm2_after_its_export(smollm2_base, plain_answers, tmp_path):
    """On questions that it has not seen: no worse than prompt lookup alone."""
    base, unseen = smollm2_base, plain_answers[3::4]
    seen = [answer for answer in plain_answers if answer not in unseen]
    rows = [[*prompt, *tokens] for prompt, tokens in seen]
    ids = np.concatenate(rows).astype(np.int32)
    mask = np.concatenate([[0] * len(prompt) + [1] * len(tokens) for prompt, tokens in seen]).astype(np.uint8)
    corpus = Corpus(ids, mask, ids, np.array([0, *accumulate(map(len, rows))], np.int64))
    torch.manual_seed(0)
    config = CtcConfig(slots=4, merge=False, band=1, transition="full", draft_vocab_size=2048)
    head = head_for(config, base, corpus)
    task = DraftTask(head, ObjectiveConfig(labels=4), base)
    batch = Sampler(corpus, batch=12, anchors=32, labels=4, max_length=512, seed=0).collate(0, slice(None))
    features = base_features(base, batch, torch.float32, head)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss, sums = task(*features, batch)
        optimizer.zero_grad()
        (loss / sums.anchors).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach() / sums.anchors))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]

    training = {"objective": "prefix_ctc", "step": STEPS, "tokens": len(ids), "tokens_per_step": 1.0}
    export_head(head.eval(), base, tmp_path / "head", training)
    loaded = load_head(tmp_path / "head", base)
    assert all(map(torch.equal, loaded.state_dict().values(), head.state_dict().values()))
    tokens_per_step = {}
    for name, drafter in (("head", loaded), ("lookup", None)):
        found = [Decoder(base, drafter, DRAFT).generate(prompt, NEW_TOKENS) for prompt, _ in unseen]
        assert [one.tokens for one in found] == [tokens for _, tokens in unseen]
        tokens_per_step[name] = sum(len(one.tokens) for one in found) / sum(one.steps for one in found)
    assert tokens_per_step["head"] > max(1.0, tokens_per_step["lookup"] - 0.1), tokens_per_step


def test_real_conversations_parse_and_are_masked(stories_base, shared):
    for name, count in (("sharegpt_vicuna_805.json", 805), ("gsm8k_train.jsonl", 7473)):
        rows = [conversation_of(row, i) for i, row in enumerate(read_rows(str(shared / "data" / name)))]
        assert len(rows) == count
        ids, mask = render(stories_base.tokenizer, rows[0]).sequences[-1]
        answer = [token for token, m in zip(ids, mask, strict=True) if m]
        text = stories_base.tokenizer.decode(answer, skip_special_tokens=True)
        assert text.strip() == rows[0].messages[1]["content"].strip()


@pytest.mark.filterwarnings("ignore:.*no chat template")
def test_mt_bench_has_its_80_questions_in_8_categories(stories_base, shared):
    config = BenchConfig("mt_bench", str(shared / "data" / "mt_bench.jsonl"), questions=None)
    questions = load_questions(config, stories_base, None, 0)
    assert len(questions) == 80
    assert len({q.category for q in questions}) == 8
