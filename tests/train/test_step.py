"""Batches that are read while the one before is trained on."""

import threading

import pytest
import torch

MAIN = threading.main_thread()


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_each_micro_batch_is_read_once_ahead_and_is_the_one_that_the_step_asks_for(small, tmp_path, micro):
    stepper = small(tmp_path, "train.batch=4", f"train.micro_batch={micro}").step
    collate, trained_on, read = stepper.sampler.collate, [], []

    def reading(step, members):
        read.append((step, members.start, threading.current_thread() is MAIN))
        return collate(step, members)

    def engine(hidden, roots, batch):
        trained_on.append(batch)
        return forward(hidden, roots, batch)

    forward, stepper.sampler.collate = stepper.engine.forward, reading
    stepper.engine.forward = engine
    steps = stepper.sampler.steps_per_epoch + 2  # beyond an epoch's end, where the order is drawn anew
    for step in range(steps):
        stepper(step)
    asked = [(step, start) for step in range(steps) for start in range(0, 4, micro)]
    stepper._reader.shutdown()
    assert [row[:2] for row in read] == [*asked, (steps, 0)]
    assert [at for at, row in enumerate(read) if row[2]] == [0]  # nothing is ahead of the first
    for (step, start), batch in zip(asked, trained_on, strict=True):
        wanted = collate(step, slice(start, start + micro))
        assert torch.equal(batch.ids_BL, wanted.ids_BL)
        assert torch.equal(batch.labels_NU, wanted.labels_NU)


def test_a_step_out_of_turn_gets_its_own_batch(small, tmp_path):
    stepper = small(tmp_path, "train.batch=4").step
    stepper(0)
    for step in (5, 2):
        assert torch.equal(stepper._next_batch(step, 0).ids_BL, stepper.batch(step, 0).ids_BL)


def test_what_goes_wrong_in_reading_ahead_is_an_error_of_the_step_that_needs_it(small, tmp_path):
    stepper = small(tmp_path, "train.batch=4").step
    collate = stepper.sampler.collate

    def damaged(step, members):
        if step == 1:
            raise ValueError("00000.safetensors is damaged in sequence 3")
        return collate(step, members)

    stepper.sampler.collate = damaged
    stepper(0)
    with pytest.raises(ValueError, match="damaged in sequence 3"):
        stepper(1)
