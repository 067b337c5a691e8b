"""What is installed without the extra `train`: it decodes and serves, and needs nothing that trains."""

import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from bases import write_base
from drafting import HEADS, random_head

from ctcdraft.model import load_base
from ctcdraft.model.export import export_head

ROOT = Path(__file__).parents[2]
TRAINING = {"objective": "ctc", "step": 1, "tokens": 1, "tokens_per_step": 1.0}
TRAINERS = ("datasets", "pyarrow", "deepspeed", "wandb", "hydra", "omegaconf", "gguf", "matplotlib", "pytest")
DECODES = """
import importlib.util, json, sys
from ctcdraft.model import Decoder, DraftConfig, load_base, load_head
import ctcdraft.serve.base, ctcdraft.serve.state, ctcdraft.serve.vllm, ctcdraft.serve.sglang
assert not [name for name in sys.argv[3:] if importlib.util.find_spec(name)]
base = load_base(sys.argv[1])
out = Decoder(base, load_head(sys.argv[2], base), DraftConfig()).generate([5, 6, 7], 12)
print(json.dumps({"tokens": out.tokens, "from": ctcdraft.serve.__file__}))
"""


def needed(names):
    """The installed packages of that name, and what they need in turn."""
    found, queue = {}, list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = package
        queue += [re.match(r"[\w.-]+", one)[0] for one in package.requires or [] if "extra ==" not in one]
    return found.values()


@pytest.mark.slow
def test_the_wheel_decodes_and_serves_where_nothing_trains(tmp_path):
    """In an environment of links to the packages that the wheel itself asks for."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=left_out)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}", str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ctcdraft-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", f"--target={packages}", str(wheel)], check=True)
    (info,) = packages.glob("ctcdraft-*.dist-info")
    asked = metadata.PathDistribution(info).requires
    assert not {name for one in asked for name in TRAINERS if one.startswith(name) and "extra ==" not in one}
    for package in needed(re.match(r"[\w.-]+", one)[0] for one in asked if "extra ==" not in one):
        for top in {file.parts[0] for file in package.files if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(package.locate_file(top))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    base = load_base(str(write_base(tmp_path / "base")))
    export_head(random_head(HEADS[1], base), base, tmp_path / "head", TRAINING)
    python = tmp_path / "env" / "bin" / "python"
    words = [python, "-c", DECODES, tmp_path / "base", tmp_path / "head", *TRAINERS]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen["tokens"]) == 12
    assert str(packages) in seen["from"]
    refused = subprocess.run([python, "-m", "ctcdraft.launch.main", "train"], capture_output=True, text=True)
    assert re.search(r"^ctcdraft train needs the package \w+: pip install 'ctcdraft\[train\]'$", refused.stderr, re.M)
