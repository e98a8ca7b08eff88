"""Measured constants that choose tiles and grids, each beside its reason; `plan` and its neighbours use them.

Tiles were measured on an H200 (compute capability 9.0) in bfloat16. Other architectures and wider dtypes use the same
tiles, with fewer stages where shared memory is smaller.
"""

from __future__ import annotations

import functools

import torch

from .tiles import HopperTile, Shares, Tile

# Rows that are summed together. A query is padded to a multiple of the first of `PADDINGS` that leaves few enough empty
# rows; if none does, each row's maximum may be stored, and summed afterwards.
GROUPS = (1, 8, 16, 32, 64, 128)
PADDINGS = (16, 8)
MOST_PADDING = 1 / 8
# Query rows x document tokens: for whole embeddings, and for embeddings read in blocks.
STACKED = Tile(256, 64, 8, 3)
STACKED_SPLIT = Tile(128, 256, 8, 3)
MIN_STACKED_ROWS = 64
# The same on Hopper, in half precision. Query rows stay in registers, which hold half as many rows of more than 128
# elements. The argmax doubles the time of the maxima, which four parts hide better than two: 1.68 ms against 1.91 at
# 64 x 64, 1024 x 1024; without it, 0.362 against 0.357 at 1 x 1000, 1024 x 1024.
HOPPER = HopperTile(256, 64, 2, 6)
HOPPER_ARGMAX = HopperTile(256, 64, 4, 6)
HOPPER_LONG = HopperTile(128, 64, 2, 5)
# 54 microseconds instead of 86 by `STACKED_IN_TWO` at 5 x 3000, 32 x 64, d = 320, and 123 instead of 406 at 8 x 2000,
# 32 x 180, d = 384; with 128 columns, 121 of d = 320.
HOPPER_LONGEST = HopperTile(128, 64, 2, 4)
# Padded documents are streamed, too: if masked or short, from this many similarities per SM on; otherwise, if more than
# this many query rows meet them, and from more similarities on. Short means at most this many tokens; of documents that
# leave more than half of a tile empty, all columns count: 0.025 and 0.015 at 13 x 367, 65 x 11, d = 192, 0.091 and
# 0.026 at 73 x 354, 36 x 7, d = 320. Milliseconds on an H200, 32 queries of 32 tokens in 16 bits, document by document
# and streamed: 0.0705 and 0.0563 with 1000 masked documents of 60 to 180 tokens, and 0.0741 and 0.0668 of 180; 0.0184
# and 0.0180 with 100 masked ones; 0.879 and 0.718 with 10000 of 100 to 300, and 1.167 and 0.994 of 300; for 4 queries
# 0.0446 and 0.0326 with 2000 of 60 to 180, but 0.0355 and 0.0372 of 180. Above 256 elements, with 333 documents: for 5
# queries 0.0250 and 0.0276 of 180 (d = 320), and for 4 queries 0.0232 and 0.0252 of 60 to 180 (d = 384).
STREAM_FEW_ROWS = 128, 64
STREAM_FEW_ROWS_OF_LONG = 256, 32
STREAM_LEAST = 1 << 16
STREAM_LEAST_ALIKE = 1 << 19
# Streams of 8-bit documents, packed or masked: columns of a tile, as many as in 16 bits, and the maximum mean number of
# tokens, padding included. 32 queries on an H200, in milliseconds, document by document and streamed, int8: 2.44 and
# 2.09 with 80,000 of 24 to 112 tokens, 1.98 and 1.81 with 40,000 of 64 to 192; by an earlier stream, 1.16 and 1.28 with
# 12,000 of 200 to 400, where the other tile has 128 columns; masked 0.0964 and 0.0719 with 3125 of 21 to 64, 0.0651 and
# 0.0606 with 1111 of 60 to 180, 0.0576 and 0.0609 with 666 of 100 to 300; and unmasked 0.0681 and 0.0759 with 1111 of
# 180.
STREAM_COLUMNS = 64
STREAM_QUANTIZED_MEAN_LENGTH = 192
# 8-bit documents of equal length are streamed if at most this long, or whole tiles take this many times the columns.
# Document by document and streamed, int8: 32 queries and 400,000 tokens in documents of 8, 24, 32, 48, 60, 72, 100 and
# 131 tokens 0.793 and 0.420, 0.256 and 0.204, 0.194 and 0.193, 0.193 and 0.169, 0.156 and 0.171, 0.190 and 0.158, 0.162
# and 0.152, 0.176 and 0.148; 4 queries and four times the tokens 0.164 and 0.137 of 32, 0.116 and 0.129 of 60.
STREAM_QUANTIZED_SHORT = 32
STREAM_QUANTIZED_SAVES = 1.2
# From this mean length on, four warp groups share the rows of int8 and fp8 in place of two: 2.02 and 1.90 with packed
# fp8 at 80,000 of 24 to 112, but 0.81 and 0.87 of 8 to 32, and 2.27 and 2.36 with uint8 of 64 to 192.
STREAM_QUANTIZED_IN_FOUR = 48
# Fewer rows leave half of the tile empty, and are memory bound. Microseconds by `STACKED`, and by this narrow tile:
#   3 x 2000, 32 x 333, d = 96: 51 and 46    2 x 4000, 32 x 180: 58 and 56    4 x 2000, 32 x 180, argmax: 48 and 36.
# Tiles of longer embeddings have 128 rows anyway: 74 and 59 at 2 x 2000, 32 x 180, d = 256, and 156 and 135 at
# 1 x 1000, 128 x 1024, where a wide one takes 166.
HOPPER_NARROW = HopperTile(128, 64, 2, 6)
HOPPER_NARROW_ROWS = 128
# Maximum embedding size of which 64 query rows fit into the registers of four warps.
HOPPER_MAX_SIZE = 384
# Longer embeddings, in blocks; one stage less where the products are summed in several steps, which takes shared
# memory. Milliseconds by `STACKED_SPLIT` and by it, d = 4096: 2.94 and 1.48 at 1 x 128, 1024 x 1024 (d = 1024: 0.414
# and 0.348), 1.23 and 0.634 at 32 x 100, 32 x 300, 0.133 and 0.114 at 2 x 200, 32 x 180. d = 384, by it and by
# `HOPPER_LONGEST`, 0.146 and 0.135 at the first, 0.331 and 0.185 at 32 x 1000, 32 x 180.
HOPPER_BLOCKS = HopperTile(128, 256, 2, 4)
HOPPER_BLOCKS_SUMMED = HopperTile(128, 256, 2, 3)
# The same for streams, and for few rows: for products of 256 columns, ptxas finds no registers beside its other warps.
# Padded documents of equal length are not streamed if whole tiles leave no more than this share of their columns empty.
# Milliseconds document by document and streamed: 2.47 and 0.241 at 8 x 16488, 30 x 9, d = 1024, 0.168 and 0.127, 0.155
# and 0.137, 0.124 and 0.138 at 8 x 1500, 8 x 1100 and 8 x 800, 32 x 128, 180 and 256, d = 768, 0.717 and 0.488 at 32 x
# 1000, 32 x 300, d = 512, 0.678 and 0.135 at 16 x 500, 32 x 40, d = 4096, 0.867 and 0.634 at 16 x 300, 32 x 300; packed
# 0.130 and 0.114 of 128 to 256 tokens, d = 768.
STREAM_BLOCKS = HopperTile(128, 128, 2, 6)
STREAM_BLOCKS_NARROW = HopperTile(64, 128, 1, 6)
STREAM_BLOCKS_SAVES = 1 / 10
# Columns of a document's last product, and the minimum share of all columns that it must save: 0.166 ms instead of
# 0.207 at 2 x 4000, 512 x 77. Packed documents, on an H100: 18.6 ms instead of 20.0 at 32 x 500000, 32 x 24..112, 18.3
# instead of 19.2 at 200 x 50000, 32 x 64..192; where all have 128 tokens and no tail, 2.64 instead of 2.59.
HOPPER_TAILS: dict[HopperTile, tuple[int, ...]] = {HOPPER: (16, 32), HOPPER_NARROW: (16, 32)}
HOPPER_TAILS |= {HOPPER_BLOCKS: (128,), HOPPER_BLOCKS_SUMMED: (128,)}
HOPPER_TAIL_SAVES = 1 / 8
# float32 as pairs of float16: tiles, and the maximum embedding size. Milliseconds by `SINGLE` and by it: 0.0130 and
# 0.0114 at 1 x 1 (32 x 180), 0.0149 and 0.0134 at 1 x 100; by `STACKED` 0.0230 and 0.0124 at 2 x 50. The wide one takes
# 0.149, the other 0.205 at 32 x 1024 (32 x 180), d = 64.
PAIRS = HopperTile(128, 64, 2, 5)
PAIRS_NARROW = HopperTile(64, 64, 1, 5)
PAIRS_WIDE = HopperTile(256, 64, 4, 5)
PAIRS_MAX_SIZE = 128
# One query with norms is streamed, too, unless embeddings have at most the first number of elements, documents more
# than the second of tokens, and all of them fewer than the third. Milliseconds of a query of 32 tokens by the single
# kernel and streamed: d = 128, 0.0212 and 0.0182 at 1 x 111 (of 180), 0.146 and 0.103 at 1 x 1000 (of 300), 0.971 and
# 0.311 at 1 x 33333 (of 30); d = 48, 0.0125 and 0.0142, 0.0901 and 0.0640 at the first two, 0.0210 and 0.0232 at
# 1 x 233 (of 300).
PAIRS_SINGLE_SIZE, PAIRS_SINGLE_LENGTH, PAIRS_SINGLE_TOKENS = 64, 128, 1 << 17
# Pairs replace TF32 products from this many query rows on, for embeddings longer than this. Milliseconds by TF32 and by
# pairs, 32 x 180: 0.377 and 0.399 at 1 x 10000 (of 300), 0.059 and 0.039 at 4 x 1024, 0.382 and 0.153 at 32 x 1024, but
# 0.090 and 0.111 there with d = 64.
PAIRS_TF32_ROWS = 65
PAIRS_TF32_SIZE = 64
# The fused projection of hidden states: two parts of 128 rows, and chunks of one swizzled row of shared memory. With
# more query rows, projecting to memory first is faster.
FUSED_ROWS = 256
FUSED_CHUNK = 64
FUSED_MAX_COLUMNS = 64
FUSED_MAX_BLOCKS = 2
# Shared memory for states, weight and queries; the rest holds barriers and what is exchanged between warps.
FUSED_SHARED_MEMORY = 220 << 10
# Document tokens x query tokens; the columns are capped by the query's length.
SINGLE = Tile(64, 64, 4, 3)
# For packed documents that are more than this many, or shorter on average: smaller programs, as each waits for its
# document, so that more share an SM. Microseconds by the larger tile and by this one, on an H200:
#   1 x 10000, 64..192: 93.5, 89.9    100 x 100 of its own, 40..180: 88, 82      32 x 100 of its own, 8..64: 26, 19
#   1 x 3000, 64..192: 37.5, 40.4     10 x 100 of its own, 20..300: 22.4, 28     1 x 60, 20..300: 8.5, 10.2.
# Not with norms, as below: 1 x 10000, 32 x 300 takes 0.769 ms by this tile and 0.202 by the larger one, 1 x 17566,
# 30 x 55 takes 0.311 and 0.143.
SINGLE_PACKED = Tile(32, 64, 2, 3)
SINGLE_PACKED_DOCUMENTS = 4096
SINGLE_PACKED_LENGTH = 64
SINGLE_SPLIT = Tile(64, 64, 4, 4)
# Longer embeddings are split into blocks of `SPLIT_ROW_BYTES`, one swizzled row of shared memory: d = 512 in blocks
# takes 0.210 ms at 1 x 128, 1024 x 1024, where d = 256 as a whole took 0.231.
MAX_ROW_BYTES = 256
SPLIT_ROW_BYTES = 128
# Half-precision embeddings between these sizes are held as two blocks where that needs less padding than one: 96
# elements as 64 and 32, 320 as 256 and 64. Above 128, the first of these tiles that fits into shared memory with all
# its stages is used.
MIN_IN_TWO = 65
MAX_IN_TWO = 511
STACKED_IN_TWO = Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 4, 3)
SINGLE_IN_TWO = Tile(32, 64, 4, 3)
# With norms, which load a tile from shared memory in another layout than its product does: with 32 rows, Triton
# swizzles no tile that two layouts read. 0.154 and 0.042 ms at 1 x 1000, 32 x 300, d = 192, 0.233 and 0.079 of 384.
SINGLE_IN_TWO_NORMS = Tile(64, 64, 4, 3)
# Tensor cores truncate their sums, by 4e-6 of a score at d = 4096. Partial sums of this many products are added up
# outside them, rounded.
SUMMED_EMBEDDING = 1024
# Bytes of shared memory available to a program, by compute capability major; 8 is the limit of 8.6 and 8.9.
SHARED_MEMORY = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10}
# Maximum size of points whose Chamfer distances are computed (differences or products) outside tensor cores.
DIRECT_SIZE = 8

# Up to this many query tokens, one query is scored by the single kernel.
SINGLE_MAX_QUERY_LENGTH = 64
# A query may be summed row by row if documents have at least this many tokens, and the sums at most this many bytes.
UNPADDED_MIN_LENGTH = 64
UNPADDED_MEMORY = 1 << 28
# Splits of packed documents, see `kernels.forward.splits`. The cost of a document is its tokens plus this many: half an
# empty tile on average, and as much again for what follows it.
DOCUMENT_COST = 64
# The same in a stream: four empty columns on average, and the cost of summing.
STREAM_DOCUMENT_COST = 16
# Minimum work of a split, or finding it would cost more.
SMALLEST_SPLIT = 256
# Documents of up to this length are never split: merging their segments would take a launch.
LONGEST_WHOLE = 2048
# Where only the total bounds the longest document, its length is assumed to be this many times the mean: 0.977 ms in
# place of 2.238 at 32 x 40000, 32 x 24..112.
LIKELY_LENGTH = 4
# The single kernel then assumes a document of up to this many tokens, the most that current models read. One program
# takes 0.05 ms for it: 0.073 ms at 1 x 1000, 32 x 100..300, where segments take 0.030. Without such a document they
# take 0.029, whole documents 0.023.
SINGLE_LIKELY_LENGTH = 8192
HOPPER_SHARES = Shares(1, 64, 16384)
# Maximum extra waves of programs, used if the last wave is so empty that they cut what an SM walks to this share; and
# the cost of starting a program, in tokens that an SM could walk meanwhile. Milliseconds: 0.260 and 0.188 at 331 x 146,
# 103 x 57..115, d = 96, packed, 0.650 and 0.404 at 560 x 68, 32 x 1000, 0.331 and 0.313 at 400 x 400, 32 x 180.
MORE_WAVES, MORE_WAVES_SAVE = 16, 0.95
PROGRAM_COST = 512
STACKED_SHARES = Shares(2, 16, 4096, in_segments=True)
# Registers per SM.
REGISTERS = 1 << 16

# Programs of the single kernel that the registers of an SM allow, and the shared memory of each besides operands.
SINGLE_PROGRAMS = 7
SINGLE_TAKES = 1536
# Short queries of more than 128 elements use the Hopper kernel instead: packed documents from this many tokens on; and
# packed documents, or norms, with at most this mean length. Milliseconds of a query of 32 tokens by both, d = 192, 384
# and 1024: 0.059 and 0.041, 0.084 and 0.068, 0.181 and 0.152 at 1 x 1000 (of 300), packed 0.049 and 0.037, 0.085 and
# 0.059, 0.148 and 0.128, but 0.0103 and 0.0119, 0.0142 and 0.0151, 0.0231 and 0.0232 at 1 x 100 (of 180). With norms,
# 1 x 5336 (50 x 21) take 0.087 and 0.041, 0.220 and 0.060, 0.339 and 0.130.
SINGLE_HOPPER_TOKENS = 1 << 16
SINGLE_HOPPER_MEAN_LENGTH = 32
# So do queries of more than 16 tokens and up to 128 elements if the mean length is at most the first; if packed (where
# `forward.short` does not serve) or masked, at most the second, or if there are as many tokens as above. d = 32 and
# 128: 0.466 and 0.177 with 100000 documents of 6, 0.086 and 0.056 with 16666 of 36, 0.051 and 0.050 with 8602 of 62;
# masked 0.588 and 0.250, 0.113 and 0.058, 0.064 and 0.051, 0.048 and 0.045 with 2000 of 300.
SINGLE_HOPPER_ALIKE_LENGTH, SINGLE_HOPPER_UNLIKE_LENGTH = 40, 16
# And with norms, if documents have at most as many tokens, on average, as a tile has columns: 0.753 and 0.486 with
# 100000 packed documents of 30, 2.77 and 0.888 with 375000 of 8, but 0.417 and 0.442 with 46875 of 64. Minimum number
# of tokens of documents that are packed or masked, and of others: 0.0268 and 0.0228 with 2333 packed documents of 30,
# 0.0176 and 0.0220 padded.
SINGLE_HOPPER_NORMS = 1 << 16, 1 << 18
# Maximum number of documents per program: where all programs run at once, and otherwise. Microseconds with 2 and 16:
# 34.3 and 31.2 at 1 x 1000, 32 x 300; 186 and 185 at 1 x 10000; 200 and 210 at 1 x 16000, 32 x 512, d = 48.
SINGLE_LONGEST = 16, 2
# Programs per SM, and the same limits, where documents differ in length, which short runs balance, or loops are two.
SINGLE_UNLIKE = 4, 2, 2

# Quantized documents.

# Query rows x document tokens. Every block of rows reads all documents out of L2, so blocks are tall. Few rows, as of
# one short query, use a wider tile.
QUANTIZED_TILE = Tile(256, 64, 8, 4)
QUANTIZED_FEW_ROWS = Tile(64, 128, 4, 4)
# Minimum block of an 8-bit tensor core product, in elements.
QUANTIZED_MIN_BLOCK = 32
# Maximum documents per program, or work of its split; programs per SM, by the warps of a tile.
QUANTIZED_LONGEST_RUN = 16
QUANTIZED_LARGEST_SPLIT = 4096
QUANTIZED_PER_SM = {QUANTIZED_TILE.num_warps: 2, QUANTIZED_FEW_ROWS.num_warps: 3}
# Tiles of the Hopper kernel for 8-bit products. A tile of 256 x 128 at d = 128 takes the tensor cores 1024 cycles, and
# its loop has 902 instructions per scheduler with int8 and 646 with fp8: 0.267 and 0.263 ms at 1 x 1000, 1024 x 1024.
# One of 256 x 64 takes 0.304 and 0.278, in four parts 0.340 and 0.340, `QUANTIZED_TILE` 0.451 and 0.421. Registers hold
# half as many rows of longer embeddings, and shared memory 5 tiles of 256 elements.
QUANTIZED_HOPPER = HopperTile(256, 128, 2, 6)
QUANTIZED_HOPPER_NARROW = HopperTile(128, 128, 2, 6)
QUANTIZED_HOPPER_LONG = HopperTile(128, 128, 2, 5)
# Up to 384 elements, fewer tiles fit: milliseconds by `QUANTIZED_TILE` and by it with int8, 2.76 and 1.17 at 90 x
# 237, 482 x 156, d = 320, 0.306 and 0.140 at 32 x 1024, 32 x 180, d = 384. Affine ones get their signs while more tiles
# are copied: 0.258 and 0.194 with uint8 by the other tile and by theirs, at 32 x 1024, 32 x 180, d = 320.
QUANTIZED_HOPPER_LONGEST = HopperTile(128, 128, 2, 3)
QUANTIZED_HOPPER_AFFINE_LONGEST = HopperTile(128, 64, 2, 6)
QUANTIZED_HOPPER_MAX_SIZE = 384
# Minimum query rows for this kernel: a part multiplies 64. Fewer rows qualify if all meet at least this many tokens:
# milliseconds with int8 by `QUANTIZED_FEW_ROWS` and by it, one query of 32 tokens, d = 128, masked: 0.622 and 0.260
# with 100000 documents of 6, 0.147 and 0.058 with 16666 of 36, 0.018 and 0.014 with 400 of 140; d = 320 without masks
# 1.20 and 0.192, 0.227 and 0.082, 0.118 and 0.067 with 2000 of 300.
QUANTIZED_HOPPER_MIN_ROWS = 65
QUANTIZED_HOPPER_FEW_TOKENS = 1 << 15
# From this many tokens on it does not serve one query of up to 128 elements if documents are masked and too long for a
# stream (0.250 and 0.328 with 20000 of 300, but 0.524 and 0.498 with 50000 of 180, 1.29 and 0.673 with 200000 of 36),
# or unmasked and the query has more than 32 tokens (by `forward.short` and by it 0.316 and 0.464 with 50000 of 180).
QUANTIZED_MANY_TOKENS = 1 << 20
# (Maximum mean length of documents without masks, columns of the tile). The product of the next document is in flight
# while one is summed, whatever their length. 32 queries on an H100, in milliseconds before and since: 13.6 and 8.7 with
# int8 and documents of 8 to 32 tokens, 4.95 and 4.7 of 64 to 192.
QUANTIZED_HOPPER_COLUMNS = ((48, 32), (128, 64))
QUANTIZED_HOPPER_STAGES = 8
# Up to this many similarities, programs quantize the query rows that they score, which saves the host a launch: with
# int8, 32 x 1000 (32 x 180) takes 83.2 us in place of 85.9, and 4 x 1000 34.1 in place of 41.5; GPU time alone, 63.1 in
# place of 62.0, and 16.0 in place of 17.6. 1 x 1000 (1024 x 1024) would take 277 in place of 258.
QUANTIZED_HOPPER_OWN = 1 << 28

# Residual codes.

# Query rows x document tokens. A tile of tokens is decompressed for each block of rows, so blocks are tall. With more
# tokens, a thread would need more than the 128 registers that two programs per SM leave it, or the 96 of five.
RESIDUAL_TILE = Tile(256, 32, 8, 3)
RESIDUAL_FEW_ROWS = Tile(64, 32, 4, 3)
# Minimum elements of a block: what four threads unpack, 8 each.
RESIDUAL_MIN_BLOCK = 32
# Maximum candidates per program, and programs per SM, by the warps of a tile.
RESIDUAL_LONGEST_RUN = 16
RESIDUAL_LARGEST_SPLIT = 4096
RESIDUAL_PER_SM = {RESIDUAL_TILE.num_warps: 2, RESIDUAL_FEW_ROWS.num_warps: 5}
# From this many query rows on, codes are decompressed once, to memory, this many bytes of embeddings at a time:
# 0.098 ms in place of 0.265 at 32 x 1024, 32 x 180, on Hopper.
RESIDUAL_MANY_ROWS = 256
RESIDUAL_SCRATCH = 256 << 20
# Embedding sizes, and the range of query rows, for which the Hopper kernel decompresses codes as it copies them, once
# per 256 rows; and its tile. Milliseconds with and without on an H100 with 4 bits, 32 queries of 32 tokens: 4.4 and 4.8
# with 100000 documents of 24 to 112, 3.6 and 4.0 with 50000 of 64 to 192, 1.43 and 1.76 with 10000 of 300, 0.102 and
# 0.105 with 1024 of 180; for 5 queries 3.24 and 7.43 with 250000 of 24 to 112, before two workers took turns. The
# current state, on an H200, with 40000 documents of 24 to 112: for 64 queries 2.59 and 2.81 (2 bits 2.60 and 2.77), for
# 96 4.01 and 3.74, for 128 5.30 and 4.84; for 64 with 8000 of 250 to 350, 2.20 and 2.50. For one query of 128 tokens
# with 600 documents of 540 0.048 and 0.113, of 100 with 10000 of 300 0.331 and 0.795.
RESIDUAL_COPIED_SIZES = 64, 128
RESIDUAL_COPIED_ROWS = 65, 2048
RESIDUAL_COPIED_TILE = HopperTile(256, 64, 2, 8)
# Rows per program of the gradient, and programs per SM from which on the documents are not split further.
RESIDUAL_GRADIENT_ROWS = 32
RESIDUAL_GRADIENT_PROGRAMS = 8
# Minimum documents of a share.
RESIDUAL_SMALLEST_SHARE = 8

# Short queries against few-bit or short documents.

# Document tokens of a step, registers per thread of its 32 threads, the programs per SM that this allows, and steps in
# flight including the current one, for 8 bits and for codes. 10000 documents of 300 tokens and one query of 32 take
# 0.107 ms with int8 and 0.109 with 4 bits. With 12 programs of 168 registers, 0.111 and 0.112, and larger queries
# spill: d = 256 takes 0.106 in place of 0.086 (5000 of 180, int8), 60 tokens 0.085 in place of 0.056. With a step less,
# 40000 documents take 0.284 ms in place of 0.271 with 2 bits.
SHORT_ROWS = 32
SHORT_REGISTERS = 248
SHORT_PER_SM = 8
SHORT_STAGES = 3
SHORT_STAGES_OF_CODES = 4
# Maximum query tokens, embedding size, for which sums of products stay below 2**22, and elements of a query that fit
# into registers with the rest.
SHORT_MAX_LENGTH = 64
SHORT_MAX_SIZE = 256
SHORT_MAX_ELEMENTS = 8192
# Minimum tokens of 8-bit documents, also for a query of more than 32 tokens: programs of one warp, if they are few,
# hide little of each other's latency. 0.0107 ms in place of 0.0094 at 1 x 100 (32 x 180, int8), 0.0115 of 0.0122 at
# 1 x 300; with 60 query tokens 0.0276 of 0.0244 at 1 x 1000, 0.056 of 0.060 at 1 x 5000. Unpacked fp8 documents, which
# are multiplied as float16, meet at most 32 query tokens: 60 take 0.063 in place of 0.058 there.
SHORT_QUANTIZED_TOKENS = 50_000
SHORT_QUANTIZED_WIDE = 500_000
# Where the Hopper kernel serves as well: the maximum mean length for queries of more than 32 tokens, and for more than
# 128 elements, of which there must be this many tokens in all. By both, int8, 32 tokens and d = 192: 0.101 and 0.177
# with 100000 documents of 6, 0.060 and 0.061 with 16666 of 36, 0.055 and 0.047 with 2000 of 300, 0.026 and 0.017 with
# 5000 of 12; 56 and 128: 0.101 and 0.184, 0.048 and 0.055, 0.045 and 0.035. But uint8, padded: 0.064 and 0.081 of 36.
SHORT_QUANTIZED_WIDE_LENGTH = 48
SHORT_QUANTIZED_LONG, SHORT_QUANTIZED_LONG_LENGTH = 1 << 18, 16
# (Maximum mean length, minimum total tokens) of packed 16-bit documents for one query: no part of a tile is empty.
# Milliseconds by it and by `forward.single`, 32 tokens: 0.596 and 1.244 with 500000 documents of 8 to 32, 0.0238 and
# 0.0278 with 8000 (d = 96: 0.0672 and 0.1413 with 50000); 0.404 and 0.433 with 100000 documents of 24 to 112, but 0.051
# and 0.049 with 8000; 0.383 and 0.367 with 50000 documents of 64 to 192.
SHORT_MEAN_LENGTHS = (40, 100_000), (80, 1_000_000)
# Maximum queries that meet the same codes: more of them decompress them together.
SHORT_MAX_QUERIES = 4
# Minimum tokens per centroid that a query meets, or the table of centroids takes longer than it saves.
SHORT_TOKENS_PER_CENTROID = 2

# Soft MaxSim.

# Maximum bytes of a padded embedding that a tile holds whole, by element size; longer ones are read in blocks. Exact
# float32 products are computed outside tensor cores, unrolled: longer rows would leave no registers.
SOFT_MAX_BYTES = {2: 512, 4: 128}
# Elements of a gradient that a program sums where embeddings are read in parts, by element size.
SOFT_SPLIT_OWNED = {2: 128, 4: 64}
# Query rows x document tokens of the forward. Two programs share an SM, so that the exponentials of one overlap the
# products of the other.
SOFT_FORWARD = Tile(128, 64, 4, 3)
SOFT_FORWARD_WIDE = Tile(64, 32, 4, 2)
# Tokens or rows whose gradient a program keeps in registers, and those that it walks at once. With twice as many rows,
# fewer programs hide each other's latency: gradients of documents and queries at 64 x 64, 1024 x 1024, take 3.62 and
# 3.69 ms with three programs per SM, and with 128 rows 3.98 and 3.74 with two.
SOFT_GRADIENT = Tile(64, 64, 4, 3)
SOFT_GRADIENT_WIDE = Tile(64, 32, 4, 2)
SOFT_GRADIENT_PER_SM = 3
# Minimum query rows for the Hopper kernel: the rows of one part. Columns of its narrowest product.
SOFT_HOPPER_MIN_ROWS = 64
SOFT_NARROWEST = 16
# Programs that fill an SM, also for the gradient of the queries; maximum documents per program of the forward.
SOFT_PER_SM = 2
SOFT_SHARES = Shares(SOFT_PER_SM, 16, 0)
# Minimum tiles of documents per program of the queries' gradient.
SOFT_SMALLEST_SHARE = 8

# Chosen query tokens.

# Document tokens x chosen query tokens, in columns padded to a power of two: a document is read again for the next
# columns. float32 products are computed outside tensor cores, where the sums of a tile take registers; so do embeddings
# of more than 256 bytes.
SPARSE_TILE = Tile(64, 128, 8, 3)
SPARSE_TILE_WIDE = Tile(32, 32, 4, 2)
# Maximum columns for which four warps hold a tile's maxima, also for embeddings that are read in blocks.
SPARSE_FEW_COLUMNS = 64

# Losses.

# Memory of a chunk of queries in bytes, unless the documents take more.
CHUNK_SCRATCH = 256 << 20
# Chunks that large are multiples of this many queries, so that slices of aligned tensors are aligned.
CHUNK_MULTIPLE = 16

# XTR search.

# Maximum bytes of an embedding that is padded to one block where the forward uses two. Longer ones are split.
XTR_MOST_ROW_BYTES = 512
# Bins of a step, as a power of two, and the number of steps that narrow 32 bits down to 1 value.
XTR_BIN_BITS = 11
XTR_STEPS = 3
# Maxima that bound a threshold, per retrieved token: the more, the fewer tokens lie above the bound. If there are fewer
# documents, they are split into groups of tokens; the maximum number of groups per tile, and of maxima in all.
XTR_MAXIMA_PER_TOKEN = 4
XTR_MAX_GROUPS = 4
XTR_MOST_MAXIMA = 4096
# Tokens above a row's bound that are collected, per retrieved token.
XTR_COLLECTED_PER_TOKEN = 4
# Maximum slots of a row for the tokens above its bound. If 1.5 times the retrieved tokens lie above the bound, all but
# one column in a million has enough of them.
XTR_MOST_SLOTS = 8192

# float32 decomposed beforehand.

# Minimum query rows of a group, also in place of pairs; maximum bytes of the halves. Milliseconds at 32 x 180, by
# `STACKED` and decomposed: 0.256 and 0.197 for 3 queries with 1000 documents, d = 256, but where TF32 is allowed 0.089
# and 0.100. By pairs and decomposed, d = 128: 0.134 and 0.171 for 16 queries, 0.251 and 0.273 for 32, 0.485 and 0.465
# for 64, 0.131 and 0.121 at 128 x 128, 1.93 and 1.63 at 512 x 512; TF32 0.082 and 0.090, 0.153 and 0.135 for 16 and 32.
DECOMPOSED_ROWS = {3: 65, 1: 129}
DECOMPOSED_PAIRS_ROWS = {"tf32x3": 4096, "tf32": 1024}
DECOMPOSED_MEMORY = 1 << 30

# The best of many scores.

# Scores per program, at most and at least, and per warp. With more registers it spills: the 100 best of 1 x 50000 take
# 41 us, with 8192 in 16 warps 91.
BEST_BLOCK, BEST_LEAST_BLOCK = 2048, 1024
BEST_PER_WARP = 256
# Maximum k, and maximum number of scores. Microseconds by torch's sorts and by it, for the 100 best: 90 and 27 of
# 1 x 5183, 88 and 41 of 1 x 50000, 144 and 95 of 1 x 1000000, 95 and 29 of 32 x 5183, 106 and 55 of 128 x 5183, but 102
# and 120 of 32 x 50000, 315 and 354 of 1000 x 5183.
BEST_MOST, BEST_SCORES = 256, 1 << 20

# Chamfer distances.

# Points of x and of y in a tile, as many as leave the two maxima of each element in registers.
CHAMFER_DIRECT = Tile(64, 128, 4, 1)
CHAMFER_DIRECT_LONG = Tile(32, 128, 4, 1)
CHAMFER_HALF = Tile(128, 64, 4, 3)
CHAMFER_HALF_LONG = Tile(64, 64, 4, 2)
CHAMFER_FLOAT = Tile(128, 32, 4, 2)
# Maximum size of a point, padded to a power of two, that a tile holds whole, by element size; longer ones are read this
# many bytes at a time.
CHAMFER_MAX_WHOLE = {2: 256, 4: 64}
CHAMFER_PART_BYTES = 128
# Distance of the columns of a group, which has a maximum of its own: a group lies in one thread.
CHAMFER_DIRECT_GROUPS = 32
CHAMFER_GROUPS = 8
# Programs that fit on an SM, and maximum tiles per program.
CHAMFER_PER_SM = 2
CHAMFER_LONGEST_SHARE = 16


def registers_of(programs: int, num_warps: int) -> int:
    """Registers available to a thread if this many programs are to share an SM; they are allocated in units of 8."""
    return REGISTERS // (programs * 32 * num_warps) & -8


def shared_memory(capability: int) -> int:
    """Bytes of shared memory available to a program; an unknown capability is assumed to have the smallest."""
    return SHARED_MEMORY.get(capability, SHARED_MEMORY[8])


@functools.lru_cache(maxsize=1024)
def power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def architecture(device: torch.device) -> tuple[int, int]:
    """Compute capability major and number of SMs of `device` (8, 1 outside CUDA, for the interpreter)."""
    if device.type != "cuda":
        return 8, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


@functools.cache
def kernels_run_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the Triton kernels run on `device` with elements of `dtype`, else the reason why they do not."""
    try:
        from triton import knobs
    except ImportError:
        return "triton is not installed"
    if knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device, and the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA GPUs, and this PyTorch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
    if dtype == torch.float8_e4m3fn and capability < (8, 9):
        return f"the Triton kernels need compute capability 8.9 for fp8, and {device} has 8.{capability[1]}"
    return None
