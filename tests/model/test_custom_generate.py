"""model.generate(custom_generate=<exported head>) from stock transformers."""

import copy
import gc
import pickle
import shutil
import weakref

import pytest
import torch
from bases import tiny_tokenizer, write_base
from drafting import TRAINING, random_head
from transformers import AutoModelForCausalLM, GenerationConfig, WatermarkingConfig, set_seed

from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
from ctcdraft.model.base.packed import PackedLinear
from ctcdraft.model.custom_generate import _decoder
from ctcdraft.model.export import export_head
from ctcdraft.model.heads import CtcConfig


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("stock") / "b")
    base = load_base(str(folder), dtype="fp64")
    head = random_head(CtcConfig(slots=4), base)
    export_head(head, base, folder.parent / "head", TRAINING)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), str(folder.parent / "head"), base


def padded(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.2},
        {"repetition_penalty": None},
        {"eos_token_id": 77},
        {"eos_token_id": torch.tensor(77)},
    ],
)
def test_greedy_output_is_that_of_generate(stock, options):
    model, folder, _ = stock
    inputs = padded(PROMPTS)
    want = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)
    got = model.generate(
        **inputs,
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        **options,
        custom_generate=folder,
        trust_remote_code=True,
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("pad", [0, 1], ids=["padding", "end of sequence"])
def test_padding_without_a_mask_is_what_it_is_for_generate(stock, pad):
    model, folder, _ = stock
    call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": pad}
    ids = padded(PROMPTS)["input_ids"]
    ids[ids == 0] = pad
    want = model.generate(ids, **call)
    assert torch.equal(model.generate(ids, **call, custom_generate=folder, trust_remote_code=True), want)


def test_stop_strings_are_those_of_generate(stock):
    """Special tokens among them, and one that begins in the prompt."""
    model, folder, base = stock
    inputs = {"input_ids": torch.tensor([PROMPTS[0]])}
    call = {
        "max_new_tokens": 24,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": 300,
        "tokenizer": base.tokenizer,
    }
    plain = model.generate(**inputs, **{**call, "tokenizer": None})[0]
    names = [base.tokenizer.decode([token]) for token in plain.tolist()]
    stops = [names[3] + names[4], next(name for name in names[8:] if name.isascii()), "<a>", "never there"]
    lengths = set()
    for stop in stops:
        want = model.generate(**inputs, **call, stop_strings=[stop])
        for said in ([stop], stop):
            got = model.generate(**inputs, **call, stop_strings=said, custom_generate=folder, trust_remote_code=True)
            assert torch.equal(got, want)
        lengths.add(want.shape[1])
    assert len(lengths) > 2


def test_what_ends_and_pads_answers_is_what_the_call_says(stock):
    """Not what the base's folder or its tokenizer say."""
    model, folder, base = stock
    whole = Decoder(base).generate(PROMPTS[0], 24, eos=[]).tokens
    last = next(token for token in whole[4:] if whole.index(token) > 2 and token not in PROMPTS[0])
    for eos in (last, None):
        call = {**padded(PROMPTS), "max_new_tokens": 24, "do_sample": False, "eos_token_id": eos}
        if eos is None:
            call["generation_config"] = GenerationConfig()
        want = model.generate(**call)
        assert torch.equal(model.generate(**call, custom_generate=folder, trust_remote_code=True), want)
        assert (want[0, -1] == last) == (eos is not None)


@pytest.mark.parametrize("options", [{}, {"max_length": 31}])
def test_lengths_are_those_of_generate(stock, options):
    model, folder, _ = stock
    ids = torch.arange(5, 30).unsqueeze(0)
    call = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 300, **options}
    want = model.generate(ids, **call)
    assert want.shape[1] == 25 + (20 if not options else 6)
    assert torch.equal(model.generate(ids, **call, custom_generate=folder, trust_remote_code=True), want)


def test_an_answer_that_the_context_cuts_is_said(stock):
    """Where `generate` would go on."""
    model, folder, base = stock
    call = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 300, "max_new_tokens": 12}
    with pytest.warns(UserWarning, match=f"an answer ends at {base.context_length} tokens"):
        out = model.generate(torch.arange(5, 255)[None], **call, custom_generate=folder, trust_remote_code=True)
    assert out.shape[1] == base.context_length == 256


def test_a_model_takes_its_decoders_with_it_and_a_new_head_is_seen(stock, tmp_path):
    _, folder, base = stock
    place = tmp_path / "head"
    shutil.copytree(folder, place)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float64)
    first = _decoder(model, place, base.tokenizer, 4)
    assert _decoder(model, place, base.tokenizer, 4) is first
    head = random_head(CtcConfig(slots=4), base, seed=1)
    export_head(head, base, place, TRAINING)
    second = _decoder(model, place, base.tokenizer, 4)
    assert not torch.equal(second.head.slot, first.head.slot)
    gone = weakref.ref(model)
    del model, first, second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_decoded_can_be_copied_and_pickled(stock, copied):
    _, folder, base = stock
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float64)
    call = {**padded(PROMPTS[:1]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**call)
    for one in (model, copied(model)):
        assert torch.equal(one.generate(**call, custom_generate=folder, trust_remote_code=True), want)
        other = copied(one)
        assert not other._ctcdraft_decoders, "a copy would hold the head twice"
        assert torch.equal(other.generate(**call, custom_generate=folder, trust_remote_code=True), want)


def test_a_model_that_was_converted_is_drafted_for_in_its_new_precision(stock, tmp_path):
    base = load_base(stock[2].path)
    export_head(random_head(CtcConfig(slots=4), base), base, tmp_path / "head", TRAINING)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    call = {**padded(PROMPTS[:1]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    made = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        want = model.generate(**call)
        for _ in range(2):
            out = model.generate(**call, custom_generate=str(tmp_path / "head"), trust_remote_code=True)
            assert torch.equal(out, want)
            made.append([*model._ctcdraft_decoders.values()])
    first, again, second, _, third, _ = made
    assert first == again
    assert len(first) == len(second) == len(third) == 1, "those of before hold on to memory"
    assert first != third, "a captured graph would read where the weights were"


@pytest.mark.parametrize("loaded_there", [False, True])
def test_inference_mode_is_a_mode_like_others(tmp_path, loaded_there):
    """Also for a base and head that are large enough for packed layers, and for calls behind it."""
    folder = str(write_base(tmp_path / "b", hidden_size=256))
    with torch.inference_mode():
        base = load_base(folder)
        head = random_head(CtcConfig(slots=4, draft_vocab_size=256), base)
    export_head(head, base, tmp_path / "head", TRAINING)
    with torch.inference_mode(loaded_there):
        model = AutoModelForCausalLM.from_pretrained(folder)
    call = {**padded(PROMPTS[:1]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**call)
    for mode in (True, False):
        with torch.inference_mode(mode):
            assert torch.equal(
                model.generate(**call, custom_generate=str(tmp_path / "head"), trust_remote_code=True), want
            )
            decoder = Decoder(base, load_head(tmp_path / "head", base), DraftConfig(budget="fixed"))
            assert decoder.generate(PROMPTS[0], 8).tokens == want[0, 4:].tolist()
            assert isinstance(decoder.vocabulary.tokens._lm_head, PackedLinear)


def test_samples_are_the_decoders_own(stock):
    model, folder, base = stock
    inputs = padded(PROMPTS)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9}
    call = {**inputs, **options, "custom_generate": folder, "trust_remote_code": True, "pad_token_id": 0}
    got = model.generate(**call, seed=5)
    for row, (number, prompt) in zip(got, enumerate(PROMPTS), strict=True):
        want = Decoder(base).generate(prompt, 12, temperature=0.8, top_p=0.9, seed=5 + number).tokens
        assert row[6 : 6 + len(want)].tolist() == want
    set_seed(1)
    first = model.generate(**call)
    set_seed(1)
    assert torch.equal(first, model.generate(**call))
    assert not torch.equal(first, model.generate(**call))
    every = [
        model.generate(**call | of, seed=5)
        for of in ({"temperature": 1.0, "top_p": 1.0}, {"temperature": None, "top_p": None, "top_k": None})
    ]
    assert torch.equal(*every)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "no num_beams=4"),
        ({"min_new_tokens": 3}, "no min_new_tokens=3"),
        ({"streamer": object()}, "no streamer"),
        ({"exponential_decay_length_penalty": (2, 1.5)}, "no exponential_decay_length_penalty"),
        ({"watermarking_config": WatermarkingConfig()}, "no watermarking_config"),
        ({"top_h": 0.5}, "no top_h"),
        ({"frobnicate": 1}, "no frobnicate"),
        ({"no_repeat_ngram_size": 2}, "no no_repeat_ngram_size=2"),
        ({"min_p": 0.1}, "no min_p=0.1"),
        ({"forced_eos_token_id": 0}, "no forced_eos_token_id=0"),
        ({"guidance_scale": 0}, "no guidance_scale=0"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(stock, options, message):
    model, folder, _ = stock
    with pytest.raises(ValueError, match=message):
        model.generate(
            torch.tensor([[5, 6]]), max_new_tokens=4, custom_generate=folder, trust_remote_code=True, **options
        )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, r"give input_ids \[batch, length\]"),
        ({"input_ids": torch.tensor([5, 6])}, r"give input_ids \[batch, length\]"),
        (
            {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 3)},
            r"attention_mask is \[1, 3\], input_ids \[1, 2\]",
        ),
    ],
)
def test_inputs_of_other_shapes_are_refused_in_a_sentence(stock, inputs, message):
    model, folder, _ = stock
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, max_new_tokens=4, custom_generate=folder, trust_remote_code=True)


def test_another_models_head_is_refused(stock, tmp_path):
    _, folder, _ = stock
    other = AutoModelForCausalLM.from_pretrained(write_base(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match="cannot draft for"):
        other.generate(
            torch.tensor([[5, 6]]),
            max_new_tokens=4,
            custom_generate=folder,
            trust_remote_code=True,
            tokenizer=tiny_tokenizer(),
        )
