"""Does decoding stop where the chat template ends an answer?"""

import warnings

import pytest
from bases import tiny_tokenizer, write_base
from templates import CHATML, GEMMA_3, KNOWN, LLAMA_2

from ctcdraft.data import end_of_turn as module
from ctcdraft.data.end_of_turn import end_of_turn
from ctcdraft.model import Decoder, load_base

OWN_ENDS = {"llama-3": "<|eot_id|>", "llama-3.1": "<|eot_id|>", "chatml": "<|im_end|>", "qwen-2.5": "<|im_end|>",
            "qwen-3": "<|im_end|>", "gemma": "<end_of_turn>", "gemma-3": "<end_of_turn>",
            "phi-3": "<|end|>", "smollm-3": "<|im_end|>", "glm-4": "<|user|>"}  # fmt: skip
NEXT_TURN = "{% for m in messages %}{{ ('<u>' if m['role'] == 'user' else '<a>') + m['content'] }}{% endfor %}"
LINES = "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
CLOSED = "{% for m in messages %}{{ m['content'] + ('<|r|>' if loop.last else '<|e|>') }}{% endfor %}"


@pytest.mark.parametrize("name", KNOWN)
def test_of_well_known_templates(name):
    template, extra, *_ = KNOWN[name]
    tokenizer = tiny_tokenizer(template, extra)
    end = OWN_ENDS.get(name, "</s>")
    assert end_of_turn(tokenizer) == (end, tokenizer.convert_tokens_to_ids(end))


def test_the_next_turn_ends_an_answer_where_nothing_else_does():
    assert end_of_turn(tiny_tokenizer(NEXT_TURN))[0] == "<u>"
    assert end_of_turn(tiny_tokenizer(LINES)) == ("### user:", None)
    assert end_of_turn(tiny_tokenizer("{{ messages[0]['content'] }}")) is None
    assert end_of_turn(tiny_tokenizer("{{ raise_exception('no') }}")) is None
    assert end_of_turn(tiny_tokenizer("{{ 'a'.index('b') }}")) is None


def test_the_last_answers_end_counts_and_not_that_of_earlier_ones():
    assert end_of_turn(tiny_tokenizer(CLOSED, ("<|r|>", "<|e|>")))[0] == "<|r|>"


def base_with(folder, template, extra, **options):
    tokenizer = tiny_tokenizer(template, extra)
    write_base(folder, template=template, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return load_base(str(folder), **options)


def missing_end(base):
    return module.missing_end(base.tokenizer, base.eos_ids, base.name)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml") / "b"
    return base_with(folder, CHATML, ("<|im_start|>", "<|im_end|>"))


def test_an_end_of_turn_that_is_no_end_of_sequence_is_said_once_with_the_option_that_mends_it(chatml):
    want = (
        "b's chat template ends an answer with '<|im_end|>' (5), which is none of the base's ends of sequence (</s> "
        "(1)): its answers run on into turns that it invents; base.eos=[5,1] ends them there"
    )
    assert missing_end(chatml) == want
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        for _ in range(3):
            module.warn_of_template(chatml)
    assert [str(warning.message) for warning in seen] == [want]
    mended = load_base(chatml.path, eos=[5, 1])
    assert missing_end(mended) is None


def test_templates_that_end_with_an_end_of_sequence_or_with_none_are_told_apart(tmp_path):
    assert missing_end(base_with(tmp_path / "a", LLAMA_2, ())) is None
    assert missing_end(base_with(tmp_path / "b", NEXT_TURN, (), eos="<u>")) is None
    assert "'### user:', which is no token" in missing_end(base_with(tmp_path / "c", LINES, ()))


def test_an_end_that_the_base_has_no_embedding_for(tmp_path):
    folder = tmp_path / "g"
    write_base(folder, template=GEMMA_3)
    tokenizer = tiny_tokenizer(GEMMA_3)
    tokenizer.add_tokens(["<end_of_turn>"], special_tokens=True)
    tokenizer.eos_token = "<end_of_turn>"
    tokenizer.save_pretrained(folder)
    base = load_base(str(folder))
    assert base.eos_ids == (1,)
    assert "'<end_of_turn>' (260), which is none of the base's ends of sequence (</s> (1))" in missing_end(base)


@pytest.mark.parametrize(("eos", "ids"), [("<|im_end|>", (5,)), (5, (5,)), ([5, "</s>"], (1, 5)), ("a", (70,))])
def test_chosen_ends_are_the_bases_own_everywhere(chatml, eos, ids):
    base = load_base(chatml.path, eos=eos)
    ids = base.tokenizer.convert_tokens_to_ids([eos]) if eos == "a" else list(ids)
    assert list(base.eos_ids) == base.model.generation_config.eos_token_id == ids
    assert base.identity["eos"] == ",".join(map(str, ids))
    assert base.identity != chatml.identity
    assert Decoder(base).generate([7, 8], 4, eos=None).tokens[-1] is not None


@pytest.mark.parametrize(
    ("eos", "reason"),
    [
        ("<|eot|>", r"base\.eos=<\|eot\|>: .*its tokenizer has no such token"),
        ([5, "oops"], r"base\.eos=oops: .*its tokenizer has no such token"),
        (262, r"base\.eos=262: .*its tokens are 0 to 261"),
        (-1, r"base\.eos=-1: .*its tokens are 0 to 261"),
        ([], r"base\.eos=\[\]: give at least one token"),
    ],
)
def test_an_end_that_the_tokenizer_does_not_know_is_one_sentence(chatml, eos, reason):
    with pytest.raises(ValueError, match=reason):
        load_base(chatml.path, eos=eos)
