"""Stop strings are those of transformers, wherever tokens, special ones and characters begin and end."""

import pytest
import torch
from bases import tiny_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from ctcdraft.model.decode.text import UNFINISHED, TextStream

SPECIALS = ("<|im_end|>", "<|channel|>")


def byte_level():
    """Bytes, and pairs of them as tokens that break characters."""
    tokenizer = tiny_tokenizer(extra=SPECIALS)
    tokenizer.add_tokens(["ab", "bc", "abc"])
    return tokenizer


def byte_fallback():
    """As Llama 2: words with a mark for the space before them, and bytes for what has no token."""
    words = [
        "<unk>",
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "c",
        "ab",
        "▁bc",
        "é",
    ]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=list(SPECIALS)
    )


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
PIECES = ["a", "b", "c", "ab", "abc", " a", " ", "é", "日", "🙂", *SPECIALS]


def tokens_of(tokenizer, pieces):
    """Of each piece by itself; a negative number is a single byte, so that characters stay broken."""
    ids = []
    for piece in pieces:
        if isinstance(piece, int):
            name = f"<0x{piece:02X}>"
            known = name in tokenizer.get_vocab()
            ids += (
                [tokenizer.convert_tokens_to_ids(name)] if known else tokenizer.encode("é")[piece % 2 : piece % 2 + 1]
            )
        else:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def test_a_stop_string_may_begin_with_the_space_of_the_prompts_first_token():
    tokenizer = TOKENIZERS["byte fallback"]
    prompt, answer = (tokens_of(tokenizer, [piece]) for piece in (" a", "a"))
    assert StopStringCriteria(tokenizer, [" aa"])(torch.tensor([[*prompt, *answer]]), None).all()
    text = TextStream(tokenizer, [" aa"], prompt)
    assert text.push(*answer)
    assert text.text == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_a_stop_string_ends_where_transformers_ends(kind, data):
    tokenizer = TOKENIZERS[kind]
    pieces = st.lists(st.sampled_from([*PIECES, 0xC3, 0xA9]), max_size=8)
    stops = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
    prompt = tokens_of(tokenizer, data.draw(pieces)) or tokenizer.encode("c", add_special_tokens=False)
    answer = tokens_of(tokenizer, data.draw(pieces))
    stop = data.draw(st.lists(stops, min_size=1, max_size=2))
    criterion = StopStringCriteria(tokenizer, stop)
    whole = [*prompt, *answer]
    if kind == "byte fallback":  # a broken character there garbles the text of whole ones beside it
        assume(UNFINISHED not in tokenizer.decode(whole))
    ends = (n for n in range(1, len(answer) + 1) if criterion(torch.tensor([whole[: len(prompt) + n]]), None).any())
    want = next(ends, None)
    text = TextStream(tokenizer, stop, prompt)
    got, shown = None, ""
    for n, token in enumerate(answer, 1):
        if text.push(token):
            got = n
            break
        shown += "".join(piece for piece, _ in text.take())
    assert got == want
    text.finish()
    shown += "".join(piece for piece, _ in text.take(final=True))
    assert shown == text.text
    everything = tokenizer.decode(answer[:got], skip_special_tokens=True)
    if UNFINISHED not in everything:  # of broken characters a whole run may be decoded otherwise
        assert everything.startswith(text.text)
        assert text.text == everything or got is not None


def test_a_prompt_is_not_read_from_within_a_character():
    tokenizer = TOKENIZERS["byte fallback"]
    character = tokenizer.encode("日", add_special_tokens=False)
    text = TextStream(tokenizer, ["日"], character * 2)
    assert [text.push(token) for token in character] == [False, False, True]


@pytest.mark.parametrize(
    ("stop", "shown"), [("<|im_end|>", "ab"), ("b<|im_end|>", "a"), ("ca", ""), ("bc", "ab"), ("b<|channel|>", "abca")]
)
def test_the_text_ends_before_the_stop_string_without_special_tokens(stop, shown):
    tokenizer = TOKENIZERS["byte level"]
    text = TextStream(tokenizer, [stop], tokenizer.encode("c"))
    for token in tokens_of(tokenizer, ["a", "b", "<|im_end|>", "c", "a", "b", "<|channel|>"]):
        if text.push(token):
            break
    text.finish()
    assert text.ended == (stop != "bc")
    assert text.text == (shown if text.ended else "abcab")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_word_behind_a_special_token_keeps_its_space(kind):
    tokenizer = TOKENIZERS[kind]
    tokens = tokens_of(tokenizer, [" a", "<|channel|>", " a", "b"])
    text = TextStream(tokenizer)
    for token in tokens:
        text.push(token)
    assert text.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert text.text.endswith(" ab")


def test_a_stop_string_in_the_first_word_cuts_where_it_begins():
    """The space before that word is in the text with the prompt, and not in what is shown."""
    tokenizer = TOKENIZERS["byte fallback"]
    text = TextStream(tokenizer, ["c"], tokens_of(tokenizer, ["a"]))
    assert text.push(tokenizer.convert_tokens_to_ids("▁bc"))
    assert text.text == "b"
