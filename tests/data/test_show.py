from bases import tiny_tokenizer

from ctcdraft.data.show import shown
from ctcdraft.data.store import Example, load_corpus, save_corpus


def test_labels_are_painted(tmp_path):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab<a>cd").input_ids
    labels = [*ids[:-1], ids[0]]
    save_corpus(tmp_path / "train.safetensors", [Example(ids, [0, 0, 0, 1, 1], labels)] * 3)
    corpus = load_corpus(tmp_path, "train")
    assert shown(tokenizer, corpus, 1, colour=False) == "--- sequence 0: 5 tokens, 2 labels\nab<a>\u27e6cd\u27e7"
    assert "ab<a>\x1b[32mcd\x1b[0m" in shown(tokenizer, corpus, 1, colour=True)
    assert shown(tokenizer, corpus, 9, colour=False).count("---") == 3
