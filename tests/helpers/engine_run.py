"""Decodes in a real vLLM, in its own environment: `python engine_run.py '<what to do, as JSON>'`; answers in JSON.

{"base", "head", "nodes", "prompts": [[token, ...], ...], "limit", "batch", "sampling": {}, "engine": {}}; head null:
plain decoding.
"""

import json
import os
import sys
from collections import Counter
from contextlib import redirect_stdout

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True}
ENGINE |= {"enable_prefix_caching": False}


def run(asked):
    options = ENGINE | {"model": asked["base"], "disable_log_stats": False} | asked.get("engine", {})
    if asked["head"] is not None:
        method = {"method": "custom_class", "model": "ctcdraft.serve.vllm.Proposer"}
        options["speculative_config"] = method | {"num_speculative_tokens": asked["nodes"]}
        options["additional_config"] = {"ctcdraft": {"head": asked["head"], "length": "fixed"}}
    engine, calls = LLM(**options), Counter()
    if asked["head"] is not None:
        from ctcdraft.serve.vllm import Proposer

        own = Proposer.propose

        def propose(self, sampled_token_ids, *arguments, **named):
            requests = self.step.runner.input_batch.req_ids
            calls.update(r for r, tokens in zip(requests, sampled_token_ids, strict=False) if len(tokens))
            return own(self, sampled_token_ids, *arguments, **named)

        Proposer.propose = propose
    chosen_by = SamplingParams(**{"temperature": 0, "max_tokens": asked["limit"]} | asked.get("sampling", {}))
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
    outs = []
    for first in range(0, len(prompts), asked["batch"]):
        outs += engine.generate(prompts[first : first + asked["batch"]], chosen_by, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    forwards = {request.rsplit("-", 1)[0]: count for request, count in calls.items()}
    return {
        "tokens": [list(out.outputs[0].token_ids) for out in outs],
        "steps": [forwards.get(out.request_id, calls.get(out.request_id, 0)) - 1 for out in outs],
        "log_p": [out.outputs[0].cumulative_logprob for out in outs],
        "preemptions": counted.get("vllm:num_preemptions", 0),
        "cached": counted.get("vllm:prefix_cache_hits", 0),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        found = run(json.loads(sys.argv[1]))
    print(json.dumps(found))
