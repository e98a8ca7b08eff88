"""What the command line reads.

files.py            corpora and queries: JSON Lines, folders of texts
training.py         training data: triples, and candidates with a teacher's scores
"""
