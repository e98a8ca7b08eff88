"""What the losses and the trainers of all hosts are made of.

options.py          what a loss is asked for, resolved once for a batch
contrast.py         the losses of a batch's embeddings, or hidden states
grad_cache.py       a loss whose texts are encoded twice, in the mini-batches of `mini_batches.py`
distributed.py      the documents of all ranks: gathered at once, or passed round a ring
token_budget.py     how many tokens a GPU encodes at once, found by trying
trainer_mixin.py    what the trainers of both libraries log and check
"""
