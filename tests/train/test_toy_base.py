"""The toy base is an ordinary transformers folder with a right chat template, built once."""

import json
import resource

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctcdraft.data.generated import TOY
from ctcdraft.train import toy_base as training
from ctcdraft.train.toy_base import ASSISTANT, BOS, END, USER, ToyBaseConfig, toy_base, toy_folder

TINY = ToyBaseConfig(
    conversations=50, held_out_conversations=8, vocab_size=400, hidden_size=32, layers=1, heads=2, steps=20,
    batch_tokens=512,
)  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "It is 19."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "Twice 19 is 38."},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return toy_base(cache, TINY)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_folder_loads_and_generates(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    prompt = tokenizer.apply_chat_template(
        MESSAGES[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_training_lowers_the_held_out_loss(folder):
    measured = json.loads((folder / "training.json").read_text())
    assert measured["held_out"]["nats_per_token"] < torch.tensor(float(TINY.vocab_size)).log()
    assert measured["config"]["steps"] == TINY.steps


def test_text_survives_the_tokenizer_and_digits_stay_single(tokenizer):
    for question in TOY.questions():
        ids = tokenizer(question["turns"][0])["input_ids"]
        assert tokenizer.decode(ids) == question["turns"][0]
    assert tokenizer.tokenize("1234") == list("1234")


def test_mask_covers_exactly_the_answers_and_their_end_of_turn(tokenizer):
    encoded = tokenizer.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    spoken = tokenizer.decode([token for token, is_answer in zip(ids, mask, strict=True) if is_answer])
    assert spoken == f"It is 19.{END}Twice 19 is 38.{END}"
    assert tokenizer.decode(ids) == (
        f"{BOS}{USER}What is 12 + 7?{ASSISTANT}It is 19.{END}{USER}And twice that?{ASSISTANT}Twice 19 is 38.{END}"
    )


def test_a_finished_base_is_reused(cache, folder, monkeypatch):
    monkeypatch.setattr(training, "_build", lambda *_: pytest.fail("trained again"))
    assert toy_base(cache, TINY) == folder


def test_same_config_gives_the_same_weights(folder, tmp_path):
    again = toy_base(tmp_path, TINY)
    assert again.name == folder.name
    for name in ("model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_another_config_is_another_base(cache, folder):
    assert toy_folder(cache, TINY) == folder
    assert toy_folder(cache, ToyBaseConfig()) != folder


def test_a_killed_training_leaves_no_base(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_train", killed)
    monkeypatch.setattr("ctcdraft.model.folders.shutil.rmtree", lambda *_, **__: None)  # a kill -9 cleans nothing up
    with pytest.raises(KeyboardInterrupt):
        toy_base(tmp_path, TINY)
    assert not list(tmp_path.glob("toy-*"))
    monkeypatch.undo()
    assert (toy_base(tmp_path, TINY) / "model.safetensors").exists()


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_no_base(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"toy-\w+ could not be written \(.*: make room"):
            toy_base(tmp_path, TINY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
