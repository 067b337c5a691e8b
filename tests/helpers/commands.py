"""A command in a process of its own that has its libraries before it begins.

Most of the four seconds of a short command go into importing torch, transformers and DeepSpeed. A fork server of
`multiprocessing` has them, and nothing of the project, imported once; a command begins in a fork of it as `python
<script> <option> ...` begins, with arguments, folder, environment and streams of its own; several ranks do, told what
torchrun tells them. What a launcher does, what is killed and what is read while it runs are started as users start
them; and all of it where there is CUDA, which no fork may use once it was asked for.
"""

import os
import runpy
import socket
import subprocess
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

LIBRARIES = ["torch", "deepspeed", "numba", "datasets", "hydra", "pydantic", "transformers"]
LIBRARIES += ["transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "httpx"]
LIBRARIES += ["matplotlib.figure", "matplotlib.style", "numba.np.linalg", "numba.typed"]  # loaded where first used
LIBRARIES += ["matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "first_uses"]
BEFORE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read where the libraries are imported
FORKS = get_context("forkserver")


def run(words, *, cwd, timeout=300, ranks=1, **env):
    """`subprocess.run` of python with these words, its output captured, that of all ranks together; env: beside the
    environment of the tests."""
    words = [*map(str, words)]
    if torch.cuda.is_available():
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        env, words = {**os.environ, "OMP_NUM_THREADS": "1", **env}, [sys.executable, *launcher, *words]
        return subprocess.run(words, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)
    env = {**os.environ, **BEFORE, **env}
    if ranks > 1:
        env |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
        processes = [forks().Process(target=_begin, args=(words, str(cwd), env | place, said)) for place in places]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        if any(process.is_alive() for process in processes):
            for process in processes:
                process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        codes = [process.exitcode for process in processes]
        return subprocess.CompletedProcess(words, max(codes, key=abs), *(path.read_text() for path in said))


def forks():
    """The context of `multiprocessing` whose processes have the libraries."""
    FORKS.set_forkserver_preload(LIBRARIES)
    with patch.dict(os.environ, BEFORE):
        forkserver.ensure_running()
    return FORKS


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _begin(words, folder, env, said):
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if words[0] == "-m":
        sys.argv[:], sys.path[:0] = words[1:], [folder]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[:0] = words, [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")
