"""Building blocks of the losses and trainers of all hosts.

options.py          the options of a loss, resolved once per batch
contrast.py         the losses of a batch of embeddings, or of hidden states
grad_cache.py       losses that encode their texts twice, in the mini-batches of `mini_batches.py`
distributed.py      documents of all ranks: gathered at once, or passed around a ring
token_budget.py     how many tokens a GPU can encode at once, determined by trial
trainer_mixin.py    logging and checks of the trainers of both libraries
"""
