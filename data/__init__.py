"""From raw rows to batches of anchors. In the order in which a row goes through:

sources                      raw rows of files and the Hub; generated: rows that are drawn
messages, records            their conversations, texts or tokens; duplicates: what repeats an evaluation question
template, unshown            tokens and loss mask by the chat template, and what it leaves out
end_of_turn, prompts         what is asked of a base
server                       answers of a base behind one (train/: shards, regenerate, examples, prepare)
store, features              sequences on disk, and the base's hidden states of them
batches                      what a step sees
"""
