import huggingface_hub.utils as hub
import pytest
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
