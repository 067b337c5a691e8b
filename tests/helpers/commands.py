"""A command in a process of its own that has its libraries before it begins.

Most of the four seconds of a short command go into importing torch, transformers and DeepSpeed. A fork server of
`multiprocessing` has them, and nothing of the project, imported once; a command begins in a fork of it as `python
<script> <option> ...` begins, with arguments, folder, environment and streams of its own. What torchrun and deepspeed
start, what is killed and what is read while it runs are started as users start them; and all of it where there is CUDA,
which no fork may use once it was asked for.
"""

import os
import runpy
import subprocess
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

LIBRARIES = ["torch", "deepspeed", "numba", "datasets", "hydra", "pydantic", "transformers"]
LIBRARIES += ["transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"]
BEFORE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read where the libraries are imported
FORKS = get_context("forkserver")


def run(words, *, cwd, timeout=300, **env):
    """`subprocess.run` of python with these words, its output captured; env: beside the environment of the tests."""
    words = [*map(str, words)]
    if torch.cuda.is_available():
        env, words = {**os.environ, "OMP_NUM_THREADS": "1", **env}, [sys.executable, *words]
        return subprocess.run(words, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)
    FORKS.set_forkserver_preload(LIBRARIES)
    with patch.dict(os.environ, BEFORE):
        forkserver.ensure_running()
    with TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        process = FORKS.Process(target=_begin, args=(words, str(cwd), {**os.environ, **BEFORE, **env}, said))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in said))


def _begin(words, folder, env, said):
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:], sys.path[:0] = words, [str(Path(words[0]).parent)]
    runpy.run_path(words[0], run_name="__main__")
