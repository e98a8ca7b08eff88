"""The files of an index: what is kept, how it is written, and which model it belongs to.

store.py          the documents of an index: reading, adding, removing, merging, verifying
opening.py        its files opened, as the manifest names them
folder.py         its folder: the manifest that makes a write take effect, and whose turn it is (`turns.py`)
manifest.py       manifest.json, checked in full before anything of it is used
layout.py         how a token's embedding is kept: in a floating type, or in 8 bits with its scale
shards.py         one safetensors file of many documents
checksums.py      those of values, compared when they are first read
journal.py        one file to which small additions are appended
pieces.py         the embeddings, put end to end from shards and journal, or from copies on a GPU
files.py          opening, reading and writing a file, as the system lets it
tables.py         ids, lengths and places of documents, in tables that grow
model_record.py   which model made the embeddings
info.py           a summary
arguments.py      ids and embeddings in PyLate's forms
search.py         exact search over a store, block by block
"""
