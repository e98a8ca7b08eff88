"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU."""
