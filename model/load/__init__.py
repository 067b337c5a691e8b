"""A base from a folder, the Hub or a GGUF file (pretrained, gguf, smollm2), its precision and the date of its template,
and the trial that it can be verified (checks)."""
