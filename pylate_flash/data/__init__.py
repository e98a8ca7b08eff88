"""Input files of the command line.

files.py            corpora and queries: JSON Lines, folders of texts
training.py         training data: triples, and candidates with teacher scores
"""
