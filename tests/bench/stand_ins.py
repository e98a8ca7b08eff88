"""Stand-ins for functions of other packages, by the definition, so that they are called without being installed.

Where a package is installed, calls must match the signatures of its functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from pylate_flash import maxsim_cross_entropy
from pylate_flash.bench.exact import einsum_scores
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK, MAXSIM_CPU, Peer


def maxsim(Q, D, q_mask=None, d_mask=None, *, normalize=False, backward=None):
    # In float32, as kernels accumulate.
    return einsum_scores(Q.float(), F.normalize(D.float(), dim=-1) if normalize else D.float(), q_mask, d_mask)


def maxsim_forward(Q, D, d_mask=None):
    return maxsim(Q, D, None, d_mask), None


def maxsim_pairs(Q, D, q_mask=None, d_mask=None):
    return maxsim(Q, D.unsqueeze(1), q_mask, d_mask.unsqueeze(1)).squeeze(1)


def maxsim_varlen(Q, D, cu_seqlens_q, cu_seqlens_d, max_seqlen_q=None, max_seqlen_d=None):
    lengths = [bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_d)]
    assert (max_seqlen_q, max_seqlen_d) in ((None, None), tuple(map(max, lengths)))
    queries, documents = Q.split(lengths[0]), D.split(lengths[1])
    return torch.stack([torch.cat([maxsim(q[None], d[None])[0] for d in documents]) for q in queries])


def maxsim_from_hidden(Q, H_d, W, d_mask=None):
    return maxsim(Q, F.linear(H_d, W), None, d_mask, normalize=True)


def flash_maxsim_batched(Q, D, doc_lengths=None, shared_docs=True, query_lengths=None):
    assert shared_docs == (D.dim() == 3)
    mask = _prefix(doc_lengths, D.shape[-2]).view(D.shape[:-1])
    return maxsim(Q, D, None if query_lengths is None else _prefix(query_lengths, Q.shape[1]), mask)


def flash_maxsim(Q, D, doc_lengths=None, splitk=False):
    return flash_maxsim_batched(Q[None], D, doc_lengths)[0]


def flash_maxsim_persistent(Q, D, doc_lengths=None):
    return flash_maxsim_batched(Q.view(-1, *Q.shape[-2:]), D, doc_lengths)


def flash_maxsim_packed(Q, D, cu_seqlens, max_seqlen):
    assert Q.dtype == D.dtype
    assert max_seqlen == int(cu_seqlens.diff().max())
    return torch.cat([maxsim(Q[None], document[None])[0] for document in D.split(cu_seqlens.diff().tolist())])


def colbert_contrastive_step(Q, D):
    """Leave the gradients in both inputs; there is no temperature."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in (Q, D)]
    with torch.enable_grad():
        loss = maxsim_cross_entropy(*leaves)
    loss.backward()
    for tensor, leaf in zip((Q, D), leaves, strict=True):
        tensor.grad = leaf.grad.to(tensor.dtype)
    return loss.detach()


def maxsim_scores(query, documents):
    assert query.dtype == documents.dtype == np.float32
    assert query.ndim == 2
    return np.einsum("sd,ntd->nst", query, documents).max(-1).sum(-1)


def _prefix(lengths, longest):
    assert lengths.dtype == torch.int32
    return torch.arange(longest) < lengths.unsqueeze(1)


FUNCTIONS = {
    LIK: {
        **{"maxsim": maxsim, "maxsim_pairs": maxsim_pairs, "maxsim_varlen": maxsim_varlen},
        **{"forward.maxsim_forward": maxsim_forward, "fused_head.maxsim_from_hidden": maxsim_from_hidden},
    },
    FLASH_MAXSIM: {
        **{
            "flash_maxsim": flash_maxsim,
            "flash_maxsim_qreuse": flash_maxsim,
            "flash_maxsim_packed": flash_maxsim_packed,
        },
        **{"flash_maxsim_batched": flash_maxsim_batched, "flash_maxsim_batched_train": flash_maxsim_batched},
        "flash_maxsim_persistent": flash_maxsim_persistent,
        "flash_maxsim_contrastive.colbert_contrastive_step": colbert_contrastive_step,
    },
    MAXSIM_CPU: {"maxsim_scores": maxsim_scores},
}


def put_in_place(monkeypatch):
    """Replace the functions of the packages by these, on any device."""
    for peer, functions in FUNCTIONS.items():
        for path, function in functions.items():
            module_name, _, name = f"{peer.module}.{path}".rpartition(".")
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                module = ModuleType(module_name)
                monkeypatch.setitem(sys.modules, module_name, module)
            monkeypatch.setattr(module, name, _checked(function, getattr(module, name, None)), raising=False)
    own = Peer.unavailable
    monkeypatch.setattr(Peer, "unavailable", lambda peer, device: None if peer in FUNCTIONS else own(peer, device))


def _checked(function, declared):
    @functools.wraps(function)
    def call(*arguments, **options):
        if declared is not None:
            inspect.signature(declared).bind(*arguments, **options)
        return function(*arguments, **options)

    return call
