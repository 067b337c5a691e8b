"""A Trainer in this process, without the launcher: small and quick, and its parts within reach."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from bases import write_base


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """make(folder, *options) -> Trainer on a tiny base and its data. This process is one rank from then on, but what
    it starts must not think that it is: the environment says so only while an engine is built."""
    from ctcdraft.launch.door import _quoted, compose, typed
    from ctcdraft.launch.schema import TrainEntry
    from ctcdraft.model import load_base
    from ctcdraft.train import engine as ds
    from ctcdraft.train.features import FeatureStore
    from ctcdraft.train.loop import Trainer
    from ctcdraft.train.prepare import prepare

    work: Path = tmp_path_factory.mktemp("small")
    base = load_base(str(write_base(work / "base", initializer_range=0.05)))
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(24)]
    (work / "rows.json").write_text(json.dumps(rows))
    words = ["experiment=smoke", "base=local", f"base.path={work}/base", "data=sharegpt", f"data.path={work}/rows.json"]
    sizes = ["head.width=32", "head.mixer_width=16", "head.heads=2", "head.mixer_heads=2", "data.max_new_tokens=16"]
    rate = ["train.steps=6", "train.save_every=2", "train.eval_every=6", "train.log_every=1", "train.eval_anchors=16"]
    with mock.patch.dict(os.environ):
        ds.init_distributed()
        rank = {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

    os.environ["LOCAL_RANK"] = "0"  # ZeRO-3 asks for it now and then

    def make(folder, *options):
        config = typed(compose("train", [*words, *sizes, *rate, *map(_quoted, options)]), TrainEntry)
        data, features = prepare(base, config.data, config.seed, work / "cache"), None
        if config.data.features:
            store = FeatureStore(base, data, config.data.features, work / "cache")
            store.fill()
            features = store.open()
        with mock.patch.dict(os.environ, rank):
            return Trainer(config.plan, base, data, folder, features)

    yield make
    del os.environ["LOCAL_RANK"]
    torch.distributed.destroy_process_group()
