"""What shared keys are worth on a CPU: with transformers' SDPA, which repeats keys for each query of a group, and with
model/base/attention.py.

python bench/attention.py --base <model> [--dtype fp32] [--rows 1 13] [--prompts 200 1000] [--requests 4 16]
    [--rounds 15]

One forward over so many rows behind a prompt, logits included; and 16 tokens of so many requests, decoded plainly
together behind prompts of the first of these lengths, reading included.
"""

import argparse

import torch
from measure import interleaved, machine, spread
from packed import forward_of

from ctcdraft.eval.report import markdown_table
from ctcdraft.model import Decoder, load_base
from ctcdraft.model.base.attention import NAME

TOKENS = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 13])
    parser.add_argument("--prompts", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base, table = load_base(options.base, options.dtype, device="cpu"), []

    def side(name, forward):
        def call():
            base.model.set_attn_implementation(name)
            forward()

        return call

    def measure(what, prompt, forward):
        calls = {name: side(name, forward) for name in ("sdpa", NAME)}
        seconds = [spread(times)["median"] for times in interleaved(calls, options.rounds).values()]
        table.append([what, prompt, *(f"{1e3 * median:.0f}" for median in seconds), f"{seconds[0] / seconds[1]:.2f}x"])

    for prompt in options.prompts:
        for rows in options.rows:
            measure(f"{rows} rows", prompt, forward_of(base, rows, prompt))
    prompt = options.prompts[0]
    for count in options.requests:
        asked = torch.randint(base.token_count, (count, prompt)).tolist()
        measure(f"{count} requests", prompt, lambda asked=asked: Decoder(base).generate(asked, TOKENS, eos=[]))
    heads = ["", "prompt", "repeated keys, ms", "shared keys, ms", "faster"]
    print(f"{machine()}, {options.dtype}; medians of {options.rounds} interleaved rounds\n")
    print(markdown_table(heads, table))


if __name__ == "__main__":
    main()
