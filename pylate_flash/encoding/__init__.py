"""What the models of both libraries are asked alike.

texts.py            to encode, and how long texts may be
projection.py       hidden states and Dense layers, apart
model_record.py     which model made embeddings: its weights, lengths and prompts, to be compared later
weights.py          weights that a checkpoint lacks, and that are drawn at random, made an error
"""
