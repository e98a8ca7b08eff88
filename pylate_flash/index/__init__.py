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

Token embeddings of many documents, packed, on disk: safetensors shards, a journal, one JSON manifest. No pickle.

    folder/
      manifest.json                      what the store holds: format version, dtype, embedding size, shards, journal
      shard-00000-3f9a61c2.safetensors   values [T, d], lengths [N] (int64), ids (a JSON list in UTF-8)
      journal-00001-77d0a1be             the last small additions, see `journal.py`
      lock                               held by the process that is writing; its content means nothing
      reserve                            as little; it is given up for a manifest that a full disk would not take

Values in 8 bits are rows that begin with their scales (`layout.py`).

A shard is never changed once written. A write first writes new shards and flushes them to the disk, then replaces
`manifest.json` in one atomic step, and only then deletes the files that the new manifest no longer names. Before its
first shard an index gets a manifest of no documents: shards without any have lost theirs, which is an error. A small
addition is appended to the journal, which is atomic as well; what it holds comes after all shards. A process killed at
any moment therefore leaves either the state before or the state after, and at worst some files that no manifest names,
which the next write deletes. A power failure is the same, save for additions that follow one another within a fifth
of a second: the last of such a run may be lost, which the next opening says in a warning.

What opening reads in full (manifest, ids, lengths, journal) is compared with its checksums then, and values when they
are first read, so that a damaged file is an error that names it and never another answer.

When the journal is full it becomes a shard, and shards of similar sizes become one, so that there are few files
whatever the sizes of the additions, and a document is written some log2(SHARD_BYTES / ADDITION_BYTES) times in all.

A removal rewrites the shards that held the removed documents. The alternative, marking them as removed in the
manifest, would make removals cheaper, but leaves what was removed on the disk: so it is done on a full disk only. The
file `reserve` keeps room for that manifest, and for an empty one. Shards of marked documents are written anew by the
next write that merges shards or removes documents, and by `compact`, one after the other.

Tokens that no search reads take no memory, except those of the journal.
"""
