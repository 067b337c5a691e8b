"""A real vLLM without HTTP, in a process of its own: `python engine_run.py <words of vllm serve>`, where vLLM is.

For each line of JSON that it is told, {"prompts": [[token, ...], ...], "batch", "sampling": {}}, it decodes these, so
many at once, and answers with a line: {"tokens", "log_p", "steps": of each, where a head drafts the forwards behind its
prompt, "seconds", "cpu_seconds": of all, "counted": by vLLM's own counters}.
"""

import json
import os
import sys
import time
from collections import Counter
from contextlib import redirect_stdout

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine


def engine_of(words):
    """The engine, and what counts the forwards of each of its requests."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine, forwards = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(words))), Counter()
    ours = sys.modules.get("ctcdraft.serve.vllm")  # not before: vLLM's CPU build would stumble over llvmlite
    if ours is not None:
        own = ours.Proposer.propose

        def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
            requests = self.runner.input_batch.req_ids
            forwards.update(r for r, tokens in zip(requests, sampled_token_ids, strict=False) if len(tokens))
            return own(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)

        ours.Proposer.propose = propose
    return engine, forwards


def decoded(engine, forwards, prompts, batch, sampling):
    chosen_by = SamplingParams(**{"temperature": 0, "output_kind": RequestOutputKind.FINAL_ONLY} | sampling)
    forwards.clear()
    before, start = counters(engine), (time.perf_counter(), time.process_time())
    waiting, done = [*enumerate(prompts)][::-1], {}
    while len(done) < len(prompts):
        while waiting and engine.get_num_unfinished_requests() < batch:
            number, ids = waiting.pop()
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), chosen_by)
        done |= {int(out.request_id): out.outputs[0] for out in engine.step() if out.finished}
    seconds, cpu_seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    steps = {int(request.split("-")[0]): count - 1 for request, count in forwards.items()}
    outs = [done[number] for number in range(len(prompts))]
    return {
        "tokens": [list(out.token_ids) for out in outs],
        "log_p": [out.cumulative_logprob for out in outs],
        "steps": [steps.get(number) for number in range(len(prompts))],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "counted": {name: value - before.get(name, 0) for name, value in counters(engine).items()},
    }


def counters(engine):
    return {metric.name.removeprefix("vllm:"): getattr(metric, "value", 0) for metric in engine.get_metrics()}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        engine, forwards = engine_of(sys.argv[1:])
    print("{}", flush=True)  # it is there
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            found = decoded(engine, forwards, **json.loads(line))
        print(json.dumps(found), flush=True)
