"""The control below float32: shapes, bounds and what a divergence is said to be."""

import pytest
import torch

from ctcdraft.eval.bench import Setting
from ctcdraft.eval.control import Control, bound_in_words, scores
from ctcdraft.model import Decoder
from ctcdraft.model.base.rounding import bound_of, forced_logits

PROMPT = [5, 9, 77, 30, 12]
GREEDY, WARM = Setting(), Setting(1.0, 3)


def plain(base, setting, count=40):
    return Decoder(base).generate(PROMPT, count, temperature=setting.temperature, seed=setting.seed).tokens


@pytest.mark.parametrize("setting", [GREEDY, WARM])
@pytest.mark.parametrize("name", ["exact", "rough"])
def test_one_row_at_a_time_repeats_plain_decoding(request, name, setting):
    """In bf16 too, bit for bit: the shape is the same."""
    base = request.getfixturevalue(name)
    tokens = plain(base, setting)
    found = Control(base, 1).flips(PROMPT, tokens, setting)
    assert (found.positions, found.flips, found.turns, found.largest_gap) == (40, 0, 0, 0.0)


def test_in_float64_no_shape_changes_a_choice_and_a_wrong_token_shows(exact):
    tokens = plain(exact, GREEDY)
    assert Control(exact, 9).flips(PROMPT, tokens, GREEDY).flips == 0
    logits_V = list(forced_logits(exact, PROMPT, tokens, 1))[7]
    wrong = int(logits_V.argsort()[-5])
    found = Control(exact, 9).flips(PROMPT, [*tokens[:7], wrong], GREEDY)
    assert (found.flips, found.turns) == (1, 1)
    assert found.largest_gap == pytest.approx(float(logits_V.max() - logits_V[wrong]))


def test_positions_where_a_wrong_token_could_hide_are_counted(rough):
    tokens = plain(rough, GREEDY)
    gaps = [(logits.topk(2).values.double(), bound_of(logits)) for logits in forced_logits(rough, PROMPT, tokens, 1)]
    want = sum(float(best - second) <= bound for (best, second), bound in gaps)
    assert 0 < want < 40
    assert Control(rough, 1).flips(PROMPT, tokens, GREEDY).near == want


def test_reports_say_what_the_bound_is():
    assert bound_in_words(torch.bfloat16) == "8 spacings of bfloat16 at the largest logit"
    assert bound_in_words(torch.float32) == "1e-05"


@pytest.mark.parametrize("setting", [GREEDY, WARM])
def test_a_divergence_is_explained_by_the_logits_at_its_place(exact, setting):
    told = plain(exact, setting)
    logits_V = list(forced_logits(exact, PROMPT, told, 1))[6]
    scores_V = scores(logits_V, setting, len(PROMPT) + 6)
    assert int(scores_V.argmax()) == told[6]
    second, fifth = (int(scores_V.argsort()[-k]) for k in (2, 5))
    found = Control(exact, 9).explain(PROMPT, told, [*told[:6], fifth, 0, 0], setting)
    assert found.position == 6
    assert found.top2_gap == pytest.approx(float(scores_V[told[6]] - scores_V[second]))
    assert found.other_gap == pytest.approx(float(scores_V[told[6]] - scores_V[fifth]))
    assert found.shape_change < 1e-12
    assert not found.within_bound


def test_below_float32_the_shape_moves_logits_within_the_bound(rough):
    told = plain(rough, GREEDY)
    found = Control(rough, 9).explain(PROMPT, told, [*told[:20], (told[20] + 1) % 260], GREEDY)
    assert found.shape_change <= found.bound


def test_an_output_that_ends_is_never_within_the_bound(exact):
    told = plain(exact, GREEDY)
    found = Control(exact, 9).explain(PROMPT, told, told[:4], GREEDY)
    assert (found.position, found.other_gap, found.within_bound) == (4, None, False)
