"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU.

`select` makes every choice from a problem; `forward`, `backward`, `hidden` and `losses` launch what it chose.
"""
