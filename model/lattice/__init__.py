"""What a head believes: which alignments count (topology), the candidates of every slot (candidates), and the compiled
prefix recursion that opens the likeliest first (best_first)."""
