"""The toy base: a small Llama trained on the toy corpus on first use, then kept in a cache.

For tests, and for machines that reach no registry: an ordinary transformers folder with its tokenizer and chat
template, made in minutes on one CPU core.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ctcdraft.data import toy
from ctcdraft.model.folders import new_folder

BOS, END, PAD, USER, ASSISTANT = "<s>", "<|end|>", "<pad>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
FORMAT_VERSION = 4  # of the tokenizer and the training recipe: a change makes cached bases stale


@dataclass(frozen=True)
class ToyBaseConfig:
    """How the toy base is built; the defaults are the real one, smaller values serve tests."""

    seed: int = 0  # of conversations and weights
    conversations: int = 12_000  # to train on
    held_out_conversations: int = 160  # to measure its loss on
    vocab_size: int = 1024  # of its tokenizer
    hidden_size: int = 128  # D
    layers: int = 4  # transformer layers
    heads: int = 4  # attention heads
    max_positions: int = 1024  # its context
    steps: int = 600  # of training
    batch_tokens: int = 768  # per step
    lr: float = 3e-3  # of embeddings and norms
    matrix_lr: float = 4.5e-3  # of weight matrices
    warmup_steps: int = 40  # in which the learning rates rise
    weight_decay: float = 0.1  # of all parameters
    threads: int = 1  # two are faster on idle cores, but stall by a factor of ten when one is busy
    user_weight: float = 0.1  # of a user token in the loss; an assistant token has 1


Document = tuple[Tensor, Tensor]  # a conversation's tokens [L], and which the assistant says, ends of turn included


def toy_folder(cache: Path, config: ToyBaseConfig) -> Path:
    """Where the toy base of that config lies in `cache`, made or not: its name hashes everything that shapes it."""
    parts = [asdict(config), toy.fingerprint(), CHAT_TEMPLATE, FORMAT_VERSION]
    return cache / f"toy-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]}"


def toy_base(cache: Path, config: ToyBaseConfig = ToyBaseConfig()) -> Path:
    """Return the folder of the toy base in `cache`, training it first when it is not there.

    It appears in one rename, so a training that was killed leaves nothing that could be taken for a base. The same
    config gives the same weights.
    """
    folder = toy_folder(cache, config)
    if not folder.exists():
        with new_folder(folder) as unfinished, torch.random.fork_rng(devices=[]), _threads(config.threads):
            _build(unfinished, config)
    return folder


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Fix the number of threads, which shapes rounding and so the weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(folder: Path, config: ToyBaseConfig) -> None:
    start = time.perf_counter()
    rows = [row["conversations"] for row in toy.conversations(config.conversations, config.seed)]
    tokenizer = _train_tokenizer([turn["value"] for turns in rows for turn in turns], config)
    held_out = toy.conversations(config.held_out_conversations, config.seed, held_out=True)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.hidden_size * 3,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            **ids,
        )
    )
    _train(model, [_encode(turns, tokenizer) for turns in rows], config)
    measured = {
        "held_out": _held_out_loss(model, [_encode(row["conversations"], tokenizer) for row in held_out]),
        "parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
        "config": asdict(config),
    }
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(measured, indent=2) + "\n")


def _train_tokenizer(texts: list[str], config: ToyBaseConfig) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own. The pad token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[PAD, BOS, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )


def _encode(turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> Document:
    """The tokens that the chat template gives, without the cost of rendering it."""
    ids, spoken = [tokenizer.bos_token_id], [False]
    user, assistant = (tokenizer.convert_tokens_to_ids(role) for role in (USER, ASSISTANT))
    for turn, text in zip(turns, tokenizer.backend_tokenizer.encode_batch([t["value"] for t in turns]), strict=True):
        answer = turn["from"] == "gpt"
        content = [*text.ids, tokenizer.eos_token_id] if answer else text.ids
        ids += [assistant if answer else user, *content]
        spoken += [False, *[answer] * len(content)]
    return torch.tensor(ids), torch.tensor(spoken)


def _train(model: LlamaForCausalLM, documents: list[Document], config: ToyBaseConfig) -> None:
    """Train in place: matrices by Muon, a short warmup, then a cosine down to a hundredth."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    decay = config.weight_decay
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, config.matrix_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, config.lr, betas=(0.9, 0.98), weight_decay=decay),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=optimizer.param_groups[0]["lr"],
            total_steps=config.steps,
            pct_start=min(0.5, config.warmup_steps / config.steps),
            div_factor=100,
            final_div_factor=1,
            cycle_momentum=False,
        )
        for optimizer in optimizers
    ]
    batches = _batches(documents, config.batch_tokens)
    model.train()
    progress = tqdm(range(config.steps), desc="toy base", unit="step")
    for _ in progress:
        ids_BL, spoken_BL = next(batches)
        weight_BL = spoken_BL.float().clamp(min=config.user_weight)[:, 1:] * ids_BL[:, 1:].ne(0)
        loss = (_next_token_loss(model, ids_BL) * weight_BL).sum() / weight_BL.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def _next_token_loss(model: LlamaForCausalLM, ids_BL: Tensor) -> Tensor:
    """[B, L-1] in nats. Padding stands on the right, where causal attention keeps it out of sight."""
    logits_BLV: Any = model(input_ids=ids_BL[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BLV.transpose(1, 2), ids_BL[:, 1:], reduction="none")


def _batches(documents: list[Document], batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (ids, spoken), both [B, L] and padded, of documents of equal length or nearly so."""
    batches: list[list[Document]] = [[]]
    for ids_L, spoken_L in sorted(documents, key=lambda document: len(document[0])):
        if batches[-1] and (len(batches[-1]) + 1) * len(ids_L) > batch_tokens:
            batches.append([])
        batches[-1].append((ids_L, spoken_L))
    while True:
        for i in torch.randperm(len(batches)).tolist():
            ids_BL, spoken_BL = (pad_sequence([*part], True) for part in zip(*batches[i], strict=True))
            yield ids_BL, spoken_BL


@torch.no_grad()
def _held_out_loss(model: LlamaForCausalLM, documents: list[Document]) -> dict[str, float]:
    """Mean negative log-likelihood in nats, of every token and of the assistant's tokens."""
    model.eval()
    loss = torch.cat([_next_token_loss(model, ids_L[None])[0] for ids_L, _ in documents])
    spoken = torch.cat([spoken_L[1:] for _, spoken_L in documents])
    return {"nats_per_token": loss.mean().item(), "nats_per_assistant_token": loss[spoken].mean().item()}
