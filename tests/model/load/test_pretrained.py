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
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 40}))
    with pytest.raises(ValueError, match=r"lacks 2 .*lm_head.weight for one, or has them in another shape"):
        load_base(str(copy))
