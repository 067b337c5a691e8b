"""Plain and speculative decoding of every question, interleaved, in the same runner, and compared.

As Spec-Bench measures: batch 1, each turn's own answer fed back, warm-ups, whole `generate` timed.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from ctcdraft.eval.bench import BenchConfig, Question
from ctcdraft.model.base import Base
from ctcdraft.model.decoder import Decoder, Generation

TIE_GAP = 1e-5
GENERATE_TURNS = 8


@dataclass(frozen=True)
class Divergence:
    """Where speculative output first differs from plain; top2_gap: the base's two best logits there."""

    question: str
    turn: int
    position: int
    top2_gap: float

    @property
    def is_tie(self) -> bool:
        return self.top2_gap < TIE_GAP


@dataclass
class Answered:
    """One question: seconds and tokens of both sides over its turns, and what drafting did."""

    question: Question
    turns: int = 0
    tokens: int = 0
    steps: int = 0
    speculative_seconds: float = 0.0
    plain_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    grown: int = 0
    texts: list[str] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    skipped: str = ""


def run(base: Base, decoder: Decoder, questions: list[Question], config: BenchConfig) -> list[Answered]:
    """Decode every question both ways. A turn whose prompt leaves no room in the context is skipped, with
    the reason in `skipped`. Raises ValueError when that leaves nothing."""
    plain = Decoder(base)
    _warm_up(base, (plain, decoder), questions, config)
    done = [
        _answer(base, plain, decoder, question, config, speculative_first=bool(number % 2))
        for number, question in enumerate(tqdm(questions, "decoding", unit="question", mininterval=1))
    ]
    if not any(answer.turns for answer in done):
        raise ValueError(f"no question could be decoded: {done[0].skipped}")
    return done


def generate_rate(base: Base, questions: list[Question], config: BenchConfig) -> float:
    """Tokens per second of transformers' own `generate` on the first few questions' first turns."""
    tokens, seconds = 0, 0.0
    settings = GenerationConfig(
        do_sample=False, eos_token_id=list(base.eos_ids) or None, pad_token_id=(*base.eos_ids, 0)[0]
    )
    for number, question in enumerate([questions[0], *questions[:GENERATE_TURNS]]):
        prompt = next(question.prompts(base))
        room = min(config.max_new_tokens, base.context_length - len(prompt))
        if room < 1:
            continue
        ids = torch.tensor([prompt], device=base.device)
        settings.max_new_tokens = room
        start = time.perf_counter()
        out = base.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        if number:  # the very first is a warm-up
            seconds += time.perf_counter() - start
            tokens += out.shape[1] - len(prompt)
    return tokens / seconds if seconds else 0.0


def _warm_up(base: Base, decoders: tuple[Decoder, ...], questions: list[Question], config: BenchConfig) -> None:
    for number in range(config.warmups):
        prompt = next(questions[number % len(questions)].prompts(base))
        if len(prompt) < base.context_length:
            for decoder in decoders:
                decoder.generate(prompt, min(32, config.max_new_tokens))


def _answer(
    base: Base,
    plain: Decoder,
    decoder: Decoder,
    question: Question,
    config: BenchConfig,
    *,
    speculative_first: bool,
) -> Answered:
    out = Answered(question)
    prompts = question.prompts(base)
    prompt = next(prompts)
    while True:
        if len(prompt) >= base.context_length:
            out.skipped = f"turn {out.turns + 1} has {len(prompt)} tokens, the context takes {base.context_length}"
            return out
        order = (decoder, plain) if speculative_first else (plain, decoder)
        results = {side: _timed(side, prompt, config.max_new_tokens) for side in order}
        (drafted, drafted_seconds), (told, told_seconds) = results[decoder], results[plain]
        _record(out, drafted, drafted_seconds, told_seconds)
        out.texts.append(base.tokenizer.decode(told.tokens, skip_special_tokens=True))
        if drafted.tokens != told.tokens:
            out.divergences.append(_divergence(base, question, out.turns, prompt, drafted, told))
        try:
            prompt = prompts.send(told.tokens)
        except StopIteration:
            return out


def _timed(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> tuple[Generation, float]:
    _synchronise(decoder.base)
    start = time.perf_counter()
    generation = decoder.generate(prompt, max_new_tokens)
    _synchronise(decoder.base)
    return generation, time.perf_counter() - start


def _synchronise(base: Base) -> None:
    if base.device.type == "cuda":
        torch.cuda.synchronize()


def _record(out: Answered, drafted: Generation, drafted_seconds: float, told_seconds: float) -> None:
    out.turns += 1
    out.tokens += len(drafted.tokens)
    out.grown += len(drafted.tokens) - 1
    out.steps += drafted.steps
    out.speculative_seconds += drafted_seconds
    out.plain_seconds += told_seconds
    out.accepted += drafted.accepted
    out.expected += drafted.expected
    for part, seconds in drafted.seconds.items():
        out.seconds[part] += seconds
    out.seconds["whole"] += drafted_seconds


def _divergence(
    base: Base, question: Question, turn: int, prompt: list[int], drafted: Generation, told: Generation
) -> Divergence:
    pairs = zip(drafted.tokens, told.tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted.tokens), len(told.tokens)))
    ids = torch.tensor([prompt + told.tokens[:same]], device=base.device)
    best = base.logits(base.hidden(ids)[:, -1]).float().topk(2).values[0]
    return Divergence(question.id, turn, same, float(best[0] - best[1]))
