"""A Trainer in this process, without the launcher: small and quick, and its parts within reach."""

import os
from unittest import mock

import pytest
import torch
from bases import tiny_tokenizer, write_base
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """make(folder, *options) -> Trainer on a tiny base and its data. This process is one rank from then on, but what
    it starts must not think that it is: the environment says so only while an engine is built."""
    from trainers import Trainers, write_inputs

    from ctcdraft.train import engine as ds

    work = tmp_path_factory.mktemp("small")
    write_inputs(work)
    make = Trainers(work)
    with mock.patch.dict(os.environ):
        ds.init_distributed()
        rank = {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

    os.environ["LOCAL_RANK"] = "0"  # ZeRO-3 asks for it now and then

    def make_here(folder, *options):
        with mock.patch.dict(os.environ, rank):
            return make(folder, *options)

    yield make_here
    del os.environ["LOCAL_RANK"]
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def talking_base(tmp_path_factory):
    """A base that says letters only, and ends about half of its answers: text and tokens tell the same."""
    folder = write_base(tmp_path_factory.mktemp("chat") / "b", eos_token_id=1, initializer_range=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    letters = tiny_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[[i for i in range(len(weight)) if i not in {*letters, 1}]] = 0.0
        weight[1] *= 1.5
    model.save_pretrained(folder)
    return folder
