"""The frozen base LLM (llm) and what verifying with it takes: what rows see (context), cache, sliding windows (window),
packed weights (packed), and what rounding does to its logits (rounding)."""
