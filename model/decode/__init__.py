"""Lossless decoding: the loop (decoder) over an eager or a captured step (step, captured), requests and their text
(request, sampling, text), and the base's own answers to many prompts (generate)."""
