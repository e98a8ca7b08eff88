"""What the command line reads, and how it compares what two scorers find.

files.py            corpora and queries: JSON Lines, folders of texts
training.py         training data: triples, and candidates with a teacher's scores
agreement.py        two evaluations of one collection, compared
"""
