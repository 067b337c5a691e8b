"""Conversations that a base rewrites, and what came of it."""

import json
from contextlib import suppress

from ctcdraft.data.store import read_manifest
from ctcdraft.train.prepare import DataConfig
from ctcdraft.train.regenerate import RegenerateConfig


def conversations(count, turns=2):
    rows = []
    for i in range(count):
        said = [{"from": who, "value": f"{who} {i} {t}"} for t in range(turns) for who in ("human", "gpt")]
        rows.append({"conversations": said})
    return rows


def config_of(tmp_path, count=60, rows=None, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows or conversations(count)))
    rewriting = RegenerateConfig(**options.pop("regenerate", {}))
    sizes = {"max_new_tokens": 8, "holdout": 0.2, "batch_size": 4, "shard_rows": 16, **options}
    return DataConfig(kind="sharegpt", path=str(path), regenerate=rewriting, **sizes)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def kept(folder):
    return {k: v for k, v in read_manifest(folder).items() if k != "options"}


def all_equal(folder, other):
    assert kept(folder) == kept(other)
    assert files(folder) == files(other)
    return True


def lines(cache):
    """Answers in the journals; a shard that is finished removes its own while they are read."""
    count = 0
    for path in cache.glob("*.work/*.journal"):
        with suppress(FileNotFoundError):
            count += len(path.read_bytes().splitlines())
    return count


def done(cache):
    return len([path for path in cache.glob("*.work/?????") if path.is_dir()])
