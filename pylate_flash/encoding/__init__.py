"""A common interface to the models of both libraries.

texts.py            encoding, and maximum text lengths
projection.py       hidden states and Dense layers, separately
model_record.py     identity of the model that made embeddings: its weights, lengths and prompts, for later comparison
weights.py          an error for weights that a checkpoint lacks and that would be initialized at random
"""
