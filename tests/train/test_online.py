"""A decoder that learns from its own answers: what it puts out does not change, what it drafts does."""

from dataclasses import replace

import pytest
import torch
from bases import write_base
from drafting import HEADS, prompts, random_head

from ctcdraft.data.batches import Sampler
from ctcdraft.model import CtcConfig, Decoder, DraftConfig, load_base
from ctcdraft.model.heads import DiffusionConfig, head_on
from ctcdraft.train.online import FRESH, RENEWED, SEQUENCES, WARMUP, OnlineConfig, OnlineDecoder, decoder_for

DRAFT = DraftConfig(nodes=8, prompt_lookup=0)
SMALL = CtcConfig(slots=4, rank=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base(str(write_base(tmp_path_factory.mktemp("base"))), dtype="fp64")


def fresh(base, config=SMALL):
    torch.manual_seed(0)
    return head_on(base, config).double().for_drafting(base, torch.float64)


def weights_of(decoder):
    return torch.cat([p.flatten() for p in decoder.task.head.parameters()])


@pytest.fixture(scope="module")
def plain(base):
    """By temperature, what plain decoding makes of six prompts."""
    asked, seeds = prompts(6), [*range(6)]
    return {t: Decoder(base).generate(asked, 12, temperature=t, seed=seeds) for t in (0.0, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("config", HEADS, ids=lambda config: f"{config.kind}-{getattr(config, 'transition', '')}")
def test_a_head_that_learning_destroys_changes_no_token(base, plain, config):
    head = random_head(config, base).for_drafting(base, torch.float64)
    decoder = OnlineDecoder(base, head, DRAFT, OnlineConfig(every=8, lr=10.0))
    before = weights_of(decoder)
    for number, prompt in enumerate(prompts(6)):
        for temperature, want in plain.items():
            out = decoder.generate(prompt, 12, temperature=temperature, seed=number)
            assert out.tokens == want[number].tokens
    assert decoder.steps >= 12
    assert (weights_of(decoder) - before).abs().median() > 10
    assert decoder.head is not head


def test_it_learns_in_inference_mode_too(base):
    found = []
    for mode in (False, True):
        head = fresh(base)
        with torch.inference_mode(mode):
            decoder = OnlineDecoder(base, head, DRAFT, OnlineConfig(every=16))
            decoder.generate(prompts(1)[0], 20)
        found.append(weights_of(decoder))
        assert decoder.steps == 1
    assert torch.equal(*found)


def test_what_it_learnt_is_what_it_drafts_with(base):
    head = fresh(base)
    begun = {name: weight.clone() for name, weight in head.state_dict().items()}
    decoder = OnlineDecoder(base, head, DRAFT, OnlineConfig(every=20 // (RENEWED - 1)))
    decoder.generate(prompts(1)[0], 20, eos=[])
    trained = decoder.task.head.state_dict()
    assert decoder.steps == RENEWED - 1
    for name, weight in decoder.head.state_dict().items():
        assert torch.equal(weight, begun[name]), name
    decoder.generate(prompts(1)[0], 8, eos=[])
    assert decoder.steps == RENEWED
    for name, weight in decoder.head.state_dict().items():
        assert torch.equal(weight, trained[name].to(weight.dtype)), name
        assert torch.equal(head.state_dict()[name], begun[name]), name  # the given head
    assert not torch.equal(trained["root_gain"], begun["root_gain"])
    want = decoder.head.transition.tables(decoder.vocabulary.tokens)
    for got, one in zip(decoder.vocabulary.tables, want, strict=True):
        assert (got == one).all()


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, DiffusionConfig(slots=4, layers=1, fills=2)], ids=lambda config: config.kind)
def test_the_same_stream_twice_gives_the_same_weights(base, config):
    """Whatever torch's own generator is at, and it is left there."""
    found = []
    for seed in range(2):
        decoder = OnlineDecoder(base, fresh(base, config), DRAFT, OnlineConfig(every=24, buffer=100))
        torch.manual_seed(seed)
        for prompt in prompts(8):
            decoder.generate(prompt, 16)
        found.append(weights_of(decoder))
        drawn = torch.rand(())
        assert drawn == torch.rand((), generator=torch.Generator().manual_seed(seed))
    assert decoder.steps >= 4
    assert torch.equal(*found)
    unlearnt = OnlineDecoder(base, fresh(base, config), DRAFT, OnlineConfig(every=24))
    assert not torch.equal(found[0], weights_of(unlearnt))


def test_a_step_learns_from_the_newest_answers_and_as_many_others(base, monkeypatch):
    seen = []

    class Recorded(Sampler):
        def __post_init__(self):
            super().__post_init__()
            seen.append([self.corpus[number].ids.tolist() for number in range(len(self.corpus))])

    monkeypatch.setattr("ctcdraft.train.online.Sampler", Recorded)
    decoder = OnlineDecoder(base, fresh(base), DRAFT, OnlineConfig(every=16))
    for prompt in prompts(8):
        decoder.generate(prompt, 16, eos=[])
        kept = [example.ids.tolist() for example, _ in decoder.finished]
        assert seen[-1][-FRESH:] == kept[-FRESH:]
        assert len(seen[-1]) == min(len(kept), SEQUENCES) == len({*map(tuple, seen[-1])})
        assert all(ids in kept for ids in seen[-1])
    assert len(seen) == decoder.steps == 8
    assert len({tuple(ids) for one in seen[4:] for ids in one[:-FRESH]}) > SEQUENCES - FRESH


@pytest.mark.slow
def test_the_rate_rises_over_the_first_steps(base):
    decoder = OnlineDecoder(base, fresh(base), DRAFT, OnlineConfig(every=8, lr=0.5))
    rates = []
    for prompt in prompts(20):
        decoder.generate(prompt, 8, eos=[])
        rates.append(decoder.optimizer.param_groups[0]["lr"])
    assert rates[: WARMUP + 1] == pytest.approx([0.5 * min(1, n / WARMUP) for n in range(1, WARMUP + 2)])


class Shuffled(OnlineDecoder):
    """Learns from what no answer says."""

    def _keep(self, request):
        super()._keep(request)
        example, hidden = self.finished[-1]
        labels = example.labels.copy()
        order = torch.randperm(len(request.tokens), generator=torch.Generator().manual_seed(self.steps)).numpy()
        labels[len(request.prompt) :] = labels[len(request.prompt) :][order]
        self.finished[-1] = example._replace(labels=labels), hidden


@pytest.mark.slow
def test_it_learns_to_draft_its_stream_and_nothing_from_permuted_labels(base):
    """Of chosen tokens alone: else the base's states say the labels too."""
    stream, accepted = prompts(4, seed=3), {}
    for kind in (OnlineDecoder, Shuffled):
        decoder = kind(base, fresh(base), DRAFT, OnlineConfig(every=24, lr=3e-3))
        decoder.task.objective = replace(decoder.task.objective, distill=0.0)
        for _ in range(12):
            outs = [decoder.generate(prompt, 24) for prompt in stream]
        accepted[kind] = sum(sum(out.accepted) / out.steps for out in outs) / len(outs)
    frozen = [Decoder(base, fresh(base), DRAFT).generate(prompt, 24) for prompt in stream]
    before = sum(sum(out.accepted) / out.steps for out in frozen) / len(frozen)
    assert accepted[OnlineDecoder] > before + 0.5
    assert accepted[Shuffled] < before + 0.1


def test_no_more_is_kept_than_the_buffer_holds(base):
    decoder = OnlineDecoder(base, fresh(base), DRAFT, OnlineConfig(every=40, buffer=90))
    for prompt in prompts(12, longest=40):
        decoder.generate(prompt, 10)
        lengths = [len(hidden) for _, hidden in decoder.finished]
        assert sum(lengths) <= 90
        assert lengths == [len(example.ids) for example, _ in decoder.finished]
    assert len(decoder.finished) > 1
    last, steps, due = decoder.finished[-1], decoder.steps, decoder.due
    decoder.generate([5] * 89, 10)  # longer than the buffer
    assert decoder.finished[-1] is last
    assert (decoder.steps, decoder.due) == (steps, due)


def test_streams_and_batches_are_learnt_from_and_their_seconds_shown(base):
    decoder = OnlineDecoder(base, fresh(base), DRAFT, OnlineConfig(every=10))
    *_, last = decoder.stream(prompts(1)[0], 12)
    assert decoder.steps == 1
    assert last.seconds["learn"] > 0
    outs = decoder.generate(prompts(3), 12)
    assert decoder.steps == 4
    assert outs[0].seconds["learn"] > last.seconds["learn"] / 100
    decoder.generate(prompts(1)[0], 1)  # a root without a label
    assert len(decoder.finished) == 4


def test_it_is_off_unless_asked_for(base):
    head = fresh(base)
    assert type(decoder_for(base, head, DRAFT, OnlineConfig())) is Decoder
    assert "learn" not in Decoder(base, head, DRAFT).generate([5, 6], 8).seconds
    assert type(decoder_for(base, head, DRAFT, OnlineConfig(every=1))) is OnlineDecoder
    with pytest.raises(ValueError, match="after how many tokens"):
        OnlineDecoder(base, head, DRAFT, OnlineConfig())
