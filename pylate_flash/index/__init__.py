"""The files of an index: what is kept, how it is written, and which model it belongs to.

store.py          the documents of an index: reading, adding, removing, rewriting, verifying
catalog.py        `catalog.sqlite`, which says what the index consists of
state.py          what it is beside its documents, and a summary
parts.py          documents that were added together, and the segments that hold their rows
change.py         a change: rows appended, then committed
filters.py        metadata, and filters over them
layout.py         how a token's embedding is kept: in a floating type, in 8 bits with its scale, or as codes
columns.py        rows of fewer bits whose numbers lie apart where they are scored
codes.py          residual codes: their codec, and its rows
checksums.py      those of rows, compared when they are first read
documents.py      all parts put end to end: numbers, lengths and ids of documents in arrays, and their rows
ids.py            ids as bytes, and a table that finds them
loading.py        rows brought to a GPU by several threads
resident.py       the rows on the device that scores them: what stays there, and what streams through
files.py          opening, reading and writing a file, as the system lets it
recorded.py       which model made the embeddings, and which corpora they are of
arguments.py      ids and embeddings in PyLate's forms
search.py         exact search over a store, block by block
ranks.py          several processes that search together, each segments of its own
graphs.py         what a GPU computes for one query, captured and replayed
scorers.py        what scores a block, and says which tokens match: this package, or another one to compare
merging.py        the best of many scores

    folder/
      catalog.sqlite              state, parts, and the number and the metadata of every id
      segment-0f3c9a61c2d4.rows   rows of tokens, one after the other, and nothing else
      committed                   which generation was committed last, and which is known to be on the disk
      reserve                     nothing; it is given up for a removal that a full disk would not take

To a segment is only appended. An addition writes its rows behind the end and flushes them to the disk, then commits in
SQLite what counts: a process that is killed in between leaves bytes that no catalog counts. So a process killed at any
moment leaves either the state before or the state after. A power failure is the same, save for small additions that
follow one another within a fifth of a second, and are flushed together: the last of such a run may be lost, which the
next opening says in a warning.

Whoever opens an index keeps the state that was there then, whatever others write: he has the arrays of its parts in
memory and its segments open, and nothing of these is ever changed.

A removal marks documents, which takes next to no room; a segment of which more than a quarter is marked is written
anew. What opening reads is compared with its checksums then, and rows when they are first read, so that a damaged file
is an error that names it and never another answer. Metadata have checksums as well, which `verify` compares.
"""
