"""From slot states to the loss: objective, top to bottom; below it kernels (the public functions), linear_lse and
triton_* (fast), reference (plain, the oracle); negatives, a sampled vocabulary."""
