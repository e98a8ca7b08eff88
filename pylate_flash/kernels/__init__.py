"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU.

`plan` and its neighbours choose, from a problem and `tables`; `forward`, `backward` and others launch what they chose.
"""
