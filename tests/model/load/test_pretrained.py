import json
import shutil

import huggingface_hub.utils as hub
import pytest
from safetensors.torch import load_file, save_file
from transformers import logging as hf_logging

from ctcdraft.model import load_base
from ctcdraft.model.load import pretrained


@pytest.mark.parametrize("bars", [True, False])
def test_downloads_show_their_progress_and_everything_is_as_it_was_before(base_folder, monkeypatch, bars):
    seen, load = [], pretrained.AutoModelForCausalLM.from_pretrained

    def loaded(*args, **options):
        seen.append((hub.are_progress_bars_disabled(), hf_logging.is_progress_bar_enabled()))
        return load(*args, **options)

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", loaded)
    try:
        (hf_logging.enable_progress_bar if bars else hf_logging.disable_progress_bar)()
        load_base(str(base_folder))
        assert seen == [(not bars, False)]
        assert (hub.are_progress_bars_disabled(), hf_logging.is_progress_bar_enabled()) == (not bars, bars)
    finally:
        hf_logging.enable_progress_bar()


def test_a_base_is_named_after_its_folder_wherever_it_is_named_from(base_folder, monkeypatch):
    monkeypatch.chdir(base_folder)
    assert load_base(".").name == load_base(str(base_folder)).name == base_folder.name


@pytest.fixture
def copy(base_folder, tmp_path):
    """A copy of a base's folder, to be spoilt."""
    return shutil.copytree(base_folder, tmp_path / "copy")


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (lambda name: f"_orig_mod.{name}", r"lm_head.weight for one.* holds _orig_mod\.lm_head"),
        (lambda name: None if "layers.1." in name else name, r"lacks 9 .*layers\.1\.input_layernorm"),
        (lambda name: None if "lm_head" in name else name.removeprefix("model."), "lacks 1 .*lm_head.weight"),
    ],
    ids=["compiled", "a layer less", "no head"],
)
def test_weights_that_a_folder_lacks_are_not_drawn_at_random(copy, kept, reason):
    file = copy / "model.safetensors"
    weights = {kept(name): weight for name, weight in load_file(file).items()}
    save_file({name: weight for name, weight in weights.items() if name}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^base.path={copy} .*{reason}"):
        load_base(str(copy))


def test_weights_of_another_shape_are_named(copy):
    change(copy / "config.json", vocab_size=300)
    with pytest.raises(ValueError, match=r"lacks 2 .*lm_head.weight for one, or has them in another shape"):
        load_base(str(copy))


def change(file, **values):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))


@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.json"])
def test_a_chat_template_may_lie_with_the_processor(copy, name):
    file = copy / "chat_template.jinja"
    text = file.read_text()
    file.unlink()
    assert load_base(str(copy)).plain_template
    change(copy / name, chat_template=text)
    found = load_base(str(copy))
    assert found.tokenizer.chat_template == text
    assert not found.plain_template


def test_what_is_no_token_ends_no_sequence(copy):
    for strange in (-1, [1, -1, 10**6], "</s>", ["</s>"]):
        change(copy / "generation_config.json", eos_token_id=strange)
        assert load_base(str(copy)).eos_ids == (1,)


@pytest.mark.parametrize(
    ("gone", "there", "reason"),
    [
        ("model.safetensors", "adapter_config.json", r"it is an adapter .*: merge it into its base"),
        ("model.safetensors", "m-Q4.gguf", r"it holds GGUF files: give one of them, .*copy/m-Q4\.gguf"),
        ("tokenizer*", "README.md", r"it has no tokenizer: copy tokenizer\.json"),
    ],
)
def test_what_is_no_base_says_what_it_is(copy, gone, there, reason):
    for file in copy.glob(gone):
        file.unlink()
    change(copy / there, peft_type="LORA", base_model_name_or_path="meta/llama")
    with pytest.raises(ValueError, match=reason):
        load_base(str(copy))
