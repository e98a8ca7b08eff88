"""The forward for compute capability 10.0, which has been compiled and has never run: only asked for by name.

`forward` scores, and `plan` says what it serves.
"""
