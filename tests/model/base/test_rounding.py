"""The same tokens in forwards of other shapes."""

import pytest
import torch

from ctcdraft.model import Decoder, load_base
from ctcdraft.model.base.rounding import bound_of, forced_logits, shape_noise

PROMPT = [5, 9, 77, 30, 12]


@pytest.mark.parametrize("width", [1, 4, 100])
def test_forced_logits_are_the_models_own(exact, width):
    tokens = (
        Decoder(exact).generate(PROMPT, 59).tokens
    )  # to the end of the context, where the last block is mostly padding
    got = torch.stack(list(forced_logits(exact, PROMPT, tokens, width)))
    want = exact.model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert got.shape == (59, 260)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("dtype", "least", "most"), [("fp64", 0.0, 1e-13), ("fp32", 0.0, 1e-5), ("bf16", 1e-7, 0.1)])
def test_the_noise_of_a_shape_is_as_large_as_the_dtype_is_rough(exact, dtype, least, most):
    base = load_base(exact.path, dtype)
    tokens = Decoder(base).generate(PROMPT, 40).tokens
    noise = shape_noise(base, PROMPT, tokens, 9)
    assert least <= noise < most
    assert shape_noise(base, PROMPT, tokens, 1) == 0.0


def test_the_bound_is_eight_spacings_of_the_largest_logit():
    logits = torch.tensor([-18.25, 3.0, 7.5])
    assert bound_of(logits.bfloat16()) == 8 * 2.0**-3  # between 16 and 32 bf16 has steps of 1/8
    assert bound_of(torch.tensor([0.3, 1.0]).bfloat16()) == 8 * 2.0**-7
    assert bound_of(torch.zeros(3).bfloat16()) == 0.0
    assert bound_of(logits) == bound_of(logits.double()) == 1e-5
    step = torch.tensor(18.25).bfloat16().nextafter(torch.tensor(99.0).bfloat16()) - 18.25
    assert float(step) == 2.0**-3
