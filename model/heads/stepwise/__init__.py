"""Heads that take a pass per depth, on what `beam` does for them all: eagle, mlp and glide."""
