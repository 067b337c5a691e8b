"""Decodes in a real SGLang on a CPU, with stand-ins for its kernels: `python sglang_run.py '<what to do, as JSON>'`.

{"base", "head", "rows", "prompts": [[token, ...], ...], "limit", "batch", "engine": {}}; head null: plain decoding. The
answer, in JSON: tokens and steps of each prompt. Its environment: SGLang without its dependencies (`pip install
--no-deps sglang==0.5.23`), the pure ones that it then misses, torch for CPUs, and ctcdraft, whose plugin it finds.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

ENGINE = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
ENGINE |= {"disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_server_warmup": True}
ENGINE |= {"max_total_tokens": 8192, "max_running_requests": 16, "context_length": 512, "log_level": "error"}
SITE = "import sglang_standins\nsglang_standins.install()\n"  # in each of SGLang's processes


def run(asked):
    from sglang.srt.entrypoints.engine import Engine

    options = ENGINE | {"model_path": asked["base"]} | asked.get("engine", {})
    if asked["head"] is not None:
        options |= {"speculative_algorithm": "CTCDRAFT", "speculative_num_draft_tokens": asked["rows"]}
        os.environ["CTCDRAFT_HEAD"] = asked["head"]
    engine = Engine(**options)
    outs, prompts, batch = [], asked["prompts"], asked["batch"]
    for first in range(0, len(prompts), batch):
        chosen_by = {"temperature": 0, "max_new_tokens": asked["limit"]}
        outs += engine.generate(input_ids=prompts[first : first + batch], sampling_params=chosen_by)
    engine.shutdown()
    return {
        "tokens": [out["output_ids"] for out in outs],
        "steps": [out["meta_info"].get("spec_verify_ct") for out in outs],
        "cached": sum(out["meta_info"]["cached_tokens"] for out in outs),
    }


def main():
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(SITE)
        here = str(Path(__file__).parent)
        path = os.pathsep.join([site, here, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {
            "PYTHONPATH": path,
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
        }
        words = [sys.executable, __file__, *sys.argv[1:], "--ready"]
        return subprocess.run(words, env=environment).returncode


if __name__ == "__main__":
    if "--ready" not in sys.argv:
        sys.exit(main())
    with redirect_stdout(sys.stderr):
        found = run(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)
