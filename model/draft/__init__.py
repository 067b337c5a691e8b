"""From beliefs to a draft: the tree and its search (tree), copied tokens beside it (prompt_lookup), how many nodes pay
(budget), and what the base sees of it (mask)."""
