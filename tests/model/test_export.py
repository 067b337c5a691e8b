import json

import numpy as np
import pytest
import torch
from bases import TEMPLATE, tiny_tokenizer, write_base
from drafting import random_head
from transformers import AutoModelForCausalLM

from ctcdraft.model import export_head, load_base, load_head
from ctcdraft.model.base.cache import TreeCache
from ctcdraft.model.heads import CtcConfig, head_config, head_on
from ctcdraft.model.load.pretrained import base_of

TRAINING = {"objective": "prefix_ctc", "step": 3, "tokens": 100, "tokens_per_step": 1.5}


@pytest.fixture
def exported(base, tmp_path):
    torch.manual_seed(0)
    head = head_on(base, CtcConfig(slots=4)).eval()
    export_head(head, base, tmp_path / "head", TRAINING)
    return head, tmp_path / "head"


@pytest.mark.parametrize(("kind", "layers"), [("ctc", 1), ("ctc", 2), ("parallel", 1), ("medusa", 2)])
def test_export_then_load_gives_the_same_lattice_bit_for_bit(base_folder, tmp_path, kind, layers):
    base = load_base(str(base_folder))
    torch.manual_seed(1)
    head = random_head(head_config({"kind": kind, "slots": 4, "layers": layers}), base)
    export_head(head, base, tmp_path / "head", TRAINING)
    loaded = load_head(tmp_path / "head", base)
    assert loaded.attended == head.attended
    ids, read = torch.tensor([[5, 6, 7, 8]]), TreeCache(2, 1, 64)
    hidden, root = base.hidden(ids, cache=read, attended=head.attended), base.embed(ids)
    read.commit([range(4)])
    newest = read.newest([4], 4, hidden.device)
    slots = [(h.fill(hidden, root, newest, read), torch.tensor([8]), h) for h in (head, loaded)]
    lattices = [h.candidates(*given, h.vocabulary(base, 8)).lattices()[0] for *given, h in slots]
    assert np.array_equal(lattices[0].log_p, lattices[1].log_p)
    assert np.array_equal(lattices[0].log_blank, lattices[1].log_blank)
    assert (tmp_path / "head" / "README.md").read_text().count("prefix_ctc") == 1


def test_the_card_of_a_head_that_no_engine_serves_says_nothing_of_engines(base, tmp_path):
    for kind, served in (("medusa", True), ("mlp", False)):
        export_head(random_head(head_config({"kind": kind, "slots": 3}), base), base, tmp_path / kind, TRAINING)
        assert ("ctcdraft serve" in (tmp_path / kind / "README.md").read_text()) == served


def test_what_heads_of_before_hold_besides_is_passed_over(exported, base):
    """Rates of copied tokens were fitted to each head's development sequences once."""
    _, folder = exported
    config = json.loads((folder / "config.json").read_text())
    rates = {"first": [0.2, 0.5], "second": [0.1], "later": [0.5, 0.6]}
    (folder / "config.json").write_text(json.dumps({**config, "copy_rates": rates}))
    assert load_head(folder, base).config == exported[0].config


def test_other_ends_of_sequence_and_another_date_than_in_training_are_said(exported, base_folder, tmp_path, recwarn):
    _, folder = exported
    load_head(folder, load_base(str(base_folder)))
    assert not recwarn
    load_head(folder, load_base(str(base_folder), eos=[1, 9]))
    assert "was trained with base.eos=[1], and tiny-llama has [1,9] here" in str(recwarn.pop().message)
    dated = str(write_base(tmp_path / "dated", template="{{ strftime_now('%Y') }}" + TEMPLATE))
    base = load_base(dated)
    export_head(head_on(base, CtcConfig(slots=4)), base, tmp_path / "of-dated", TRAINING)
    load_head(tmp_path / "of-dated", base)
    assert not recwarn
    load_head(tmp_path / "of-dated", base_of(base.model, base.tokenizer, dated))  # whose chats others render
    assert not recwarn
    load_head(tmp_path / "of-dated", load_base(dated, date="2025-01-31"))
    said = str(recwarn.pop().message)
    assert "was trained with base.date=2024-07-26, and dated has 2025-01-31 here: give it the same" in said


def test_another_base_is_refused_with_both_names(exported, tmp_path):
    other = load_base(str(write_base(tmp_path / "other-base", seed=9)), dtype="fp64")
    with pytest.raises(ValueError, match=r"trained on tiny-llama and cannot draft for other-base: .*lm_head"):
        load_head(exported[1], other)


def test_float16_rounds_an_lm_head_and_that_is_said(exported, base_folder, tmp_path):
    rounded, other = (
        base_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16), tiny_tokenizer(), str(path))
        for path in (base_folder, write_base(tmp_path / "other", num_hidden_layers=3))
    )
    with pytest.warns(UserWarning, match="cannot be told in float16"):
        head = load_head(exported[1], rounded)
    assert torch.equal(head.enter.weight, exported[0].enter.weight.float())
    with pytest.raises(ValueError, match="their config, lm_head differ"):
        load_head(exported[1], other)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_missing_byte_is_refused(exported, base, name):
    path = exported[1] / name
    path.write_bytes(path.read_bytes()[:-1] if name != "config.json" else path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"damaged|export it again"):
        load_head(exported[1], base)


def test_a_folder_that_is_no_head_is_refused(base, base_folder, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_head(tmp_path / "nowhere", base)
    with pytest.raises(ValueError, match="not that of an exported head"):
        load_head(base_folder, base)


@pytest.mark.parametrize("damage", [None, {"base": ["name", "config", "tokenizer", "lm_head"]}, {"training": 1}])
def test_a_config_of_another_kind_is_refused(exported, base, damage):
    path = exported[1] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}) if damage else "[" * 100_000)
    with pytest.raises(ValueError, match="not that of an exported head"):
        load_head(exported[1], base)


def test_a_config_that_does_not_fit_its_weights_is_refused(exported, base):
    path = exported[1] / "config.json"
    config = json.loads(path.read_text())
    config["head"]["slots"] = 5
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not hold the head"):
        load_head(exported[1], base)


def test_a_folder_with_anything_else_in_it_is_never_replaced(exported, base, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("gold")
    with pytest.raises(ValueError, match="something else than an exported head"):
        export_head(exported[0], base, precious, TRAINING)
    assert (precious / "thesis.txt").read_text() == "gold"
    export_head(exported[0], base, exported[1], TRAINING)
    assert load_head(exported[1], base) is not None


def test_a_crash_while_exporting_keeps_the_older_head(exported, base, monkeypatch):
    head, folder = exported
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr("ctcdraft.model.export.SHIM", None)  # the last that is written
    with pytest.raises(TypeError):
        export_head(head, base, folder, TRAINING)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(("path", "message"), [("./nowhere", "no such folder"), ("nowhere", "not a causal LM")])
def test_a_base_that_is_not_there_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        load_base(path)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a causal LM"):
        load_base(str(tmp_path))
