"""Measured constants that choose the kernels of the backward and their tiles, like `tables` for the others.

Times are milliseconds on an H200 in bfloat16 at d = 128, at 1024 x 1024 (32 x 180 tokens), 512 x 512 (32 x 180) and
64 x 64 (1024 x 1024), in this order, with uniform argmax.
"""

from __future__ import annotations

# If at most this many query rows choose tokens of a document, argmax entries are compared; otherwise they are listed,
# which takes a program for every token, chosen or not: 0.220 by lists and 0.066 at 128 rows and 1024 documents of 300
# tokens, 0.222 and 0.347 at 512 rows, 0.055 each at 128 rows and documents of 40 tokens.
FEW_ROWS = 128
# Rows that pull per program, at d = 128 of one warp, and entries that they are compared with at once. Two rows in
# flight for each of them take 168 registers instead of 105, so that two thirds as many programs run side by side.
COMPARE_ROWS = 8
COMPARED = 32

# Query rows x documents in flight in a gather, 8 rows to a warp, at d = 128: 1.23, 0.39, 0.18. The first of these that
# gives every SM `GATHER_PROGRAMS` is used. 32 rows: 1.22, 0.66, 0.17.
GATHERS = ((64, 1), (64, 4), (32, 4))
GATHERS_OF_ONE = ((64, 1), (32, 1))
GATHER_PROGRAMS = 2
# Programs of the first that fit on an SM. With norms, the compiler would use 79 registers per thread where 64 are left:
# 2.69 ms at 1024 x 1024 instead of 0.96. If there are fewer programs, but at least this many documents for each of up
# to four, they split the documents.
GATHER_ROOM, GATHER_SHARES = 4, 4
GATHER_SHARE = 1024
# Registers of a thread with four documents in flight, by the bytes of an element. Without a limit, ptxas takes about as
# many and issues one to three of the four loads (or eight, of float32) before the first multiply-add, with these limits
# all: a step takes 1.40 instead of 1.56 at 512 x 512 (32 x 180), a third of it by the sums below.
GATHER_REGISTERS = {2: 72, 4: 96}
# Programs per SM from which on the documents of a gather are split no further, and minimum documents of a split.
SPLIT_PROGRAMS = 8
SPLIT_DOCUMENTS = 32
# Maximum number of documents that are listed by the launch that gathers, no more than there are SMs.
GATHERED_BESIDE = 128

# Memory of the lists of a block of documents: at least this many bytes, or half of what the argmax takes.
LISTS_MEMORY = 12 << 20
# Bytes that tensors placed in a gradient's memory, aligned to 16, may leave unused.
SLACK = 128
# Rows that one program, of one warp, sorts, as a power of two. Sort, scan and place: 0.59, 0.20, 0.16; 2048 rows
# 1.13, 0.30, 0.28. 512 rows take as long, and need twice the counts.
LIST_CHUNK_BITS = 10
# Counts that one program scans at a time, tokens x chunks: all chunks of these tokens.
LIST_BLOCK_TOKENS = 256
LIST_BLOCK_CHUNKS = 16
# Maximum query rows that one program lists, and keys that each warp of it sorts. With 512 rows and 264 documents of 300
# tokens, the gradient takes 0.059 instead of 0.071; with 1024 and 1024 of 180, 0.174 instead of 0.147. With an SM for
# every document, the limit is higher: both gradients of 32 x 32 (32 x 180) take 0.028 instead of 0.035, of
# 64 x 64 0.054 instead of 0.050 but two launches less. 4096 rows: 0.124 instead of 0.086 at 128 x 128.
ALONE_ROWS = 512
ALONE_ROWS_OF_FEW = 2048
ALONE_KEYS = 256
ALONE_TOKENS = 2048
# Minimum query rows on one token that one program sums; the maximum is twice as many: 1.18, 0.35, 0.18, and 1.62,
# 0.66, 0.31 with skewed argmax; 256 rows 1.27, 0.37, 0.20, and 1.50, 0.56, 0.33.
LIST_SEGMENT = 512
# The same with at most this many rows of all documents, but more than this many times as many of each as it has tokens:
# lists are long then, and few programs would sum them. A masked step takes 0.128 instead of 0.153 at 13 x 367,
# 65 x 1..11, d = 192, 0.113 instead of 0.227 at 128 x 128, 32 x 5..20.
LIST_SEGMENT_OF_FEW, LIST_FEW_ROWS, LIST_LONG = 128, 1 << 20, 64
# Rows in flight in a program that sums (half as many above 256 elements), and elements of a warp: 1.18, 0.35, 0.18; 16
# rows in one warp 1.66, 0.48, 0.26, in two 1.29, 0.40, 0.23.
SUM_ROWS, SUM_ELEMENTS = 8, 1024
# Registers of a thread that sums more than 128 and at most 512 elements. Without a limit, ptxas 13.4, of Triton 3.9,
# takes 96 of them and loads one row after the other: a step takes 28.5 instead of 23.5 at 73 x 1480 (586 x 8,
# d = 384), 6.11 instead of 5.76 at 64 x 64 (1024 x 1024, d = 320), and 4.72 instead of 4.31 at 512 x 512 (32 x 180,
# d = 384). With Triton 3.6, d = 256 takes 2.53 instead of 2.79, and others as long; in float32, sums take 3 to 20 %
# less. Up to 128 elements, it is 1 % faster, with norms 2 % slower, and 6 % slower in float32; with 768, level.
SUM_REGISTERS = 128
# And of 128 elements of 16 bits: 304 us instead of 356 at 512 x 512 (32 x 180), as all rows are loaded at once.
SUM_REGISTERS_OF_128 = 64
