"""launch/chat.py, on a tiny base with a random head."""

import sys
from unittest.mock import Mock

import pytest
import torch
from bases import tiny_tokenizer, write_base
from drafting import TRAINING
from templates import SWITCHED, SWITCHED_SPECIALS

from ctcdraft.data.template import with_template_args
from ctcdraft.launch import chat
from ctcdraft.launch.cli import _quoted, compose, enter, typed
from ctcdraft.launch.schema import ChatEntry
from ctcdraft.model import load_base
from ctcdraft.model.export import export_head
from ctcdraft.model.heads import CtcConfig, head_on


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = write_base(tmp_path_factory.mktemp("chat") / "b")
    base = load_base(str(folder))
    torch.manual_seed(0)
    export_head(head_on(base, CtcConfig(slots=4)), base, folder.parent / "head", TRAINING)
    return [f"head.path={folder.parent / 'head'}", f"base.path={folder}", "max_new_tokens=12"]


def test_one_prompt_is_answered_and_counted(places, capsys):
    assert chat.main(typed(compose("chat", [*places, "prompt=hello"]), ChatEntry)) == 0
    out = capsys.readouterr().out
    assert "tokens per step (plain decoding: 1.00)" in out
    assert "\033[" not in out  # no colours where nobody looks


def test_a_head_that_learns_says_how_long_it_took(places, capsys):
    assert chat.main(typed(compose("chat", [*places, "prompt=hello", "online=on", "online.every=4"]), ChatEntry)) == 0
    assert " s of learning]" in capsys.readouterr().out


def test_a_conversation_goes_on_until_an_empty_line(places, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", Mock(side_effect=["hello", "and again", ""]))
    answer = Mock(wraps=chat.answer)
    monkeypatch.setattr(chat, "answer", answer)
    assert chat.main(typed(compose("chat", [*places, "temperature=0.5"]), ChatEntry)) == 0
    prompts = [call.args[1] for call in answer.call_args_list]
    assert len(prompts) == 2
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert capsys.readouterr().out.count("base forwards") == 2


def test_a_chat_that_outgrows_the_context_says_so(places):
    with pytest.raises(ValueError, match=r"the chat has \d+ tokens, .* takes 256: begin anew"):
        chat.main(typed(compose("chat", [*places, f"prompt={'word ' * 100}"]), ChatEntry))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("top_p=2.0", "top_p=2.0"),
        ("max_new_tokens=0", "max_new_tokens=0"),
        ("head.path=x", "head.path needs base.path"),
    ],
)
def test_bad_options_are_one_sentence(word, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat.py", word])
    with pytest.raises(SystemExit) as end:
        enter("chat", ChatEntry, chat.main)
    assert end.value.code == 1
    assert sentence in capsys.readouterr().err


def test_chat_gives_the_template_what_it_got_in_the_heads_training(tmp_path, monkeypatch):
    folder = write_base(tmp_path / "b", vocab_size=264)
    tiny_tokenizer(SWITCHED, SWITCHED_SPECIALS).save_pretrained(folder)
    base = with_template_args(load_base(str(folder)), {"enable_thinking": False})
    export_head(head_on(base, CtcConfig(slots=4)), base, tmp_path / "head", TRAINING)
    answer = Mock(wraps=chat.answer)
    monkeypatch.setattr(chat, "answer", answer)
    words = [f"head.path={tmp_path / 'head'}", f"base.path={folder}", "max_new_tokens=4", "prompt=hello"]
    assert chat.main(typed(compose("chat", words), ChatEntry)) == 0
    with pytest.warns(UserWarning, match="which it may fit less well"):
        chat.main(typed(compose("chat", [*words, "data.template_args={enable_thinking: true}"]), ChatEntry))
    ends = [base.tokenizer.decode(call.args[1])[-15:] for call in answer.call_args_list]
    assert ends[0] == "<think></think>"
    assert ends[1].endswith("<think>")


@pytest.mark.parametrize(("word", "what"), [("prompt=a\udcff", "the question"), ("system=a\udcff", "the system turn")])
def test_bytes_that_are_no_utf8_are_one_sentence(places, word, what):
    """As Python reads them from a terminal or a command line."""
    with pytest.raises(ValueError, match=f"{what} holds half a character"):
        chat.main(typed(compose("chat", [*places, "prompt=hello", _quoted(word)]), ChatEntry))
