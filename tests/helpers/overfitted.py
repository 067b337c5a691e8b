"""A small trained base and a head that knows one conversation by heart: made in seconds, and drafts are accepted."""

from drafting import TRAINING

from ctcdraft.model import DraftConfig, export_head, load_base
from ctcdraft.model.heads import CtcConfig
from ctcdraft.train.engine import OptimConfig, ZeroConfig
from ctcdraft.train.overfit import OverfitCheck
from ctcdraft.train.prepare import DataConfig
from ctcdraft.train.step import Plan, TrainConfig
from ctcdraft.train.task import ObjectiveConfig
from ctcdraft.train.toy_base import ToyBaseConfig, toy_base

SMALL = ToyBaseConfig(
    batch_tokens=384,
    conversations=300,
    held_out_conversations=8,
    vocab_size=768,
    hidden_size=64,
    layers=2,
    heads=2,
    steps=400,
)


def overfit_head(cache, work, question):
    """The base's folder; the head is exported to work/head."""
    folder = toy_base(cache, SMALL)
    _, found = learnt_head(load_base(str(folder)), question, work / "head", steps=200)
    assert all(finding.agrees for finding in found), found[-1]
    return folder


def learnt_head(base, question, folder, steps):
    """A head that has learnt the base's answer, exported to a folder, and what was found on the way."""
    objective = ObjectiveConfig(kind="prefix_ctc", labels=12)
    plan = Plan(CtcConfig(slots=12), objective, OptimConfig(), ZeroConfig(), TrainConfig(), DraftConfig(), seed=0)
    messages = [{"role": "user", "content": question}]
    check = OverfitCheck(base, messages, plan, DataConfig(), answer_tokens=48, steps=steps)
    found, head = check.findings(), check.head.eval()
    export_head(head, base, folder, TRAINING)
    return head, found
