import shutil

import numpy as np
import pytest
import torch
from commands import forks
from gguf import GGMLQuantizationType
from gguf_files import HEADS, LAYERS, WIDTH, write_gguf
from safetensors import SafetensorError
from transformers import GgufConfig, LlamaForCausalLM

from ctcdraft.model import load_base
from ctcdraft.model.load import gguf
from ctcdraft.model.load.gguf import convert_gguf, converted

pytestmark = pytest.mark.slow


def left_in(cache):
    """What a cache holds besides locks."""
    return [path for path in cache.glob("*") if path.suffix != ".lock"] if cache.exists() else []


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def interleaved(weight, heads):
    """llama.cpp's order of the rows of a query or key projection, from transformers' (half against half)."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_the_folder_has_the_weights_of_the_file_bit_for_bit(tmp_path, kind):
    source = write_gguf(tmp_path / "m.gguf", kind)
    state = LlamaForCausalLM.from_pretrained(convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")).state_dict()
    names = {
        "attn_norm": "input_layernorm",
        "attn_output": "self_attn.o_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    pairs = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "token_embd.weight"}
    pairs["model.norm.weight"] = "output_norm.weight"
    for i in range(LAYERS):
        pairs |= {f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight" for ours, theirs in names.items()}
        for part, heads in (("q", HEADS), ("k", HEADS // 2)):
            got = interleaved(state.pop(f"model.layers.{i}.self_attn.{part}_proj.weight").numpy(), heads)
            np.testing.assert_array_equal(got, source[f"blk.{i}.attn_{part}.weight"])
    assert set(state) == set(pairs)
    for name, value in state.items():
        assert value.dtype == torch.float32
        np.testing.assert_array_equal(value.numpy(), source[pairs[name]])


def test_a_gguf_is_a_base_like_any_other_and_is_converted_once(file, tmp_path, monkeypatch):
    base = load_base(str(file), cache=tmp_path)
    assert (base.name, base.hidden_size, base.dtype) == ("tiny", WIDTH, torch.float32)
    assert base.tokenizer.decode(base.tokenizer("abc\n").input_ids, skip_special_tokens=True) == "abc\n"
    assert base.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False).startswith("<|im_s")
    assert base.eos_ids == (2,)
    monkeypatch.setattr(gguf, "_convert", None)
    again = load_base(str(file), cache=tmp_path)
    assert again.path == base.path
    assert again.weights == base.weights
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(base.model(ids).logits, again.model(ids).logits)
    load_base(base.path)  # the folder itself, as a run records it


def test_a_file_that_transformers_itself_dequantises_is_converted_too(file, tmp_path, monkeypatch):
    """As its newer loader does for Qwen3.5, where no kernels are."""
    monkeypatch.setattr(GgufConfig.__init__, "__defaults__", (None, True))
    folder = convert_gguf(file, tmp_path)
    assert LlamaForCausalLM.from_pretrained(folder).dtype == torch.float32


def test_the_content_is_the_key_and_what_lies_beside_the_file_is_not_read(file, tmp_path):
    first = convert_gguf(file, tmp_path / "cache")
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other" / "renamed.gguf")
    (tmp_path / "other" / "config.json").write_text("{}")
    assert convert_gguf(tmp_path / "other" / "renamed.gguf", tmp_path / "cache") == first
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache") != first
    (tmp_path / "new").mkdir()
    beside = shutil.copy(file, tmp_path / "new" / "renamed.gguf")
    (tmp_path / "new" / "config.json").write_text('{"model_type": "bert"}')
    assert load_base(str(beside), cache=tmp_path / "fresh").hidden_size == WIDTH


def test_bad_files_are_one_sentence_and_leave_nothing(file, tmp_path):
    whole, cache = file.read_bytes(), tmp_path / "cache"
    cases = {
        "no.gguf": (b"PK\x03\x04 something else", "is no GGUF file"),
        "empty.gguf": (b"", "is no GGUF file"),
        "header.gguf": (whole[:20], "cut short or damaged"),
        "fields.gguf": (whole[:500], "cut short or damaged"),
        "weights.gguf": (whole[: len(whole) // 2], "cut short or damaged"),
        "end.gguf": (whole[:-64], "cut short or damaged"),
    }
    for name, (content, sentence) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            load_base(str(tmp_path / name), cache=cache)
        assert left_in(cache) == [], name
    with pytest.raises(ValueError, match=r"nowhere\.gguf: no such file"):
        load_base(str(tmp_path / "nowhere.gguf"), cache=cache)


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", architecture="rwkv7")
    with pytest.raises(ValueError, match=r"architecture rwkv7 is not supported yet.*give the model as a folder"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_a_weight_that_is_not_there_is_not_drawn_at_random(tmp_path):
    write_gguf(tmp_path / "m.gguf", leave_out=["blk.1.ffn_up.weight"])
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(file, tmp_path, monkeypatch):
    def fill(self, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", fill)
        with pytest.raises(OSError, match=r"could not be written .*No space left .*: make room"):
            convert_gguf(file, tmp_path)
    assert left_in(tmp_path) == []
    assert convert_gguf(file, tmp_path).is_dir()


def _convert_and_count(file, cache, started, counts):
    inner = gguf._convert

    def counting(*words):
        counts.put("converted")
        inner(*words)

    gguf._convert = counting
    started.wait()
    counts.put(str(convert_gguf(file, cache)))


def test_of_two_processes_one_converts_and_the_other_takes_it(file, tmp_path):
    context = forks()
    started, counts = context.Barrier(2), context.Queue()
    words = (file, tmp_path, started, counts)
    processes = [context.Process(target=_convert_and_count, args=words) for _ in range(2)]
    for process in processes:
        process.start()
    found = [counts.get(timeout=120) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert found.count("converted") == 1
    assert len(set(found)) == 2
    assert len(left_in(tmp_path)) == 1


def test_what_a_killed_conversion_left_is_removed(file, tmp_path):
    folder = convert_gguf(file, tmp_path)
    left = tmp_path / f"unfinished-{folder.parent.name}-x"
    shutil.move(folder.parent, left)
    assert converted(tmp_path, "0" * 64) is None
    assert convert_gguf(file, tmp_path) == folder
    assert not left.exists()
