"""From beliefs to a draft: the tree, its search and its attention mask (tree), copied tokens beside it (prompt_lookup),
how many nodes pay, alone (budget) and in a batch (length)."""
