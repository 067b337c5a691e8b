"""The toy base: a small Llama trained on the toy corpus on first use, then kept in a cache.

For tests, and for machines that reach no registry: an ordinary transformers folder with its tokenizer and chat
template, made in minutes on one CPU core.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from ctcdraft.data.generated import TOY
from ctcdraft.data.records import Conversation, conversation_of
from ctcdraft.data.template import render
from ctcdraft.model.folders import digest_of, new_folder

from .options import departures

BOS, END, PAD, USER, ASSISTANT = "<s>", "<|end|>", "<pad>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
FORMAT_VERSION = 5  # of the tokenizer and the training recipe: a change makes cached bases stale
MAX_POSITIONS = 1024  # its context
LR, MATRIX_LR = 3e-3, 4.5e-3  # of embeddings and norms, and of weight matrices
WARMUP_STEPS = 40  # in which they rise
WEIGHT_DECAY = 0.1  # of all parameters
USER_WEIGHT = 0.1  # of a user token in the loss; an assistant token has 1


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
    steps: int = 600  # of training
    batch_tokens: int = 768  # per step


Document = tuple[Tensor, Tensor]  # a conversation's tokens [L], and which the assistant says, ends of turn included


def toy_folder(cache: Path, config: ToyBaseConfig) -> Path:
    """Where the toy base of that config lies in `cache`, made or not: its name hashes everything that shapes it."""
    parts = [departures(config), TOY.fingerprint, CHAT_TEMPLATE, FORMAT_VERSION]
    return cache / f"toy-{digest_of(parts)[:12]}"


def toy_base(cache: Path, config: ToyBaseConfig = ToyBaseConfig()) -> Path:
    """Return the folder of the toy base in `cache`, training it first when it is not there.

    It appears in one rename, so a training that was killed leaves nothing that could be taken for a base. The same
    config gives the same weights.
    """
    folder, threads = toy_folder(cache, config), torch.get_num_threads()
    if not folder.exists():
        # Their number shapes rounding and so the weights. Two are faster on idle cores, but stall where one is busy.
        torch.set_num_threads(1)
        try:
            with new_folder(folder) as unfinished, torch.random.fork_rng(devices=[]):
                _build(unfinished, config)
        finally:
            torch.set_num_threads(threads)
    return folder


def _build(folder: Path, config: ToyBaseConfig) -> None:
    chats = [conversation_of(row, "") for row in TOY.conversations(config.conversations, config.seed)]
    tokenizer = _train_tokenizer([turn["content"] for chat in chats for turn in chat.messages], config)
    held_out = TOY.conversations(config.held_out_conversations, config.seed, held_out=True)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.hidden_size * 3,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            **ids,
        )
    )
    _train(model, _documents(chats, tokenizer), config)
    measured = {
        "held_out": _held_out_loss(model, _documents([conversation_of(row, "") for row in held_out], tokenizer)),
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
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _documents(chats: list[Conversation], tokenizer: PreTrainedTokenizerFast) -> list[Document]:
    sequences = (sequence for chat in chats for sequence in render(tokenizer, chat).sequences)
    return [(torch.tensor(ids), torch.tensor([*mask]).bool()) for ids, mask in sequences]


def _train(model: LlamaForCausalLM, documents: list[Document], config: ToyBaseConfig) -> None:
    """Train in place: matrices by Muon, a short warmup, then a cosine down to nothing."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, MATRIX_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, LR, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY),
    ]
    warmup = min(WARMUP_STEPS, config.steps // 4)
    schedules = [get_cosine_schedule_with_warmup(optimizer, warmup, config.steps) for optimizer in optimizers]
    batches = _batches(documents, config.batch_tokens)
    model.train()
    progress = tqdm(range(config.steps), desc="toy base", unit="step")
    for _ in progress:
        ids_BL, spoken_BL = next(batches)
        weight_BL = spoken_BL.float().clamp(min=USER_WEIGHT)[:, 1:] * ids_BL[:, 1:].ne(0)
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
