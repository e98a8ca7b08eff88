"""The files of an index: what they store, how they are written, and which model they belong to.

store.py          the documents of an index: reading, adding, removing, rewriting, verifying
catalog.py        `catalog.sqlite`, the record of what the index consists of
state.py          the properties of an index besides its documents, and a summary
parts.py          documents that were added together, and the segments that hold their rows
change.py         a change: rows appended, then committed
filters.py        metadata, and filters over them
layout.py         how a token's embedding is stored: in a floating dtype, in 8 bits with its scale, or as codes
columns.py        quantized rows, with each field in a tensor of its own where they are scored
codes.py          residual codes: their codec, and its rows
checksums.py      checksums of rows, verified when they are first read
documents.py      the documents of all parts, concatenated: their numbers, lengths and ids in arrays, and their rows
ids.py            ids as bytes, and a lookup table for them
loading.py        rows copied to a GPU by several threads
resident.py       the rows on the device that scores them: which are resident, and which are streamed
files.py          opening, reading and writing regular files
recorded.py       which model made the embeddings, and which corpora they are from
arguments.py      ids and embeddings in PyLate's forms, checked and converted
search.py         exact search over a store, block by block
ranks.py          a search by several processes, each over its own segments
graphs.py         CUDA graphs of searches of one query, captured and replayed
scorers.py        scoring of a block, and its matching tokens: by this package, or by another one for comparison
merging.py        the best of many scores

    folder/
      catalog.sqlite              state, parts, and the number and the metadata of every id
      segment-0f3c9a61c2d4.rows   rows of tokens, concatenated, and nothing else
      committed                   the last committed generation, and the last one known to be on the disk
      reserve                     zeros; deleted to make room for a removal on a full disk

Segments are append-only. An addition appends its rows and flushes them to the disk, then commits in SQLite what counts:
a process that is killed in between leaves bytes that no catalog counts. So a process killed at any moment leaves either
the state before or the state after. The same holds for a power failure, except for small additions that follow one
another within a fifth of a second and are flushed together: the last of such a run may be lost, which the next opening
reports in a warning.

A reader keeps the state at the time of its opening, whatever others write: it holds the arrays of the parts in memory
and the segments open, and neither is ever changed.

A removal marks documents, which takes almost no space; a segment of which more than a quarter is marked is rewritten.
Opening verifies the checksums of what it reads, and rows are verified when they are first read, so that a damaged file
raises an error that names it and never gives another result. Metadata have checksums as well, which `verify` compares.
"""
