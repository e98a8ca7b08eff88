"""`indexes.Flat` on a GPU, resident and streamed, against the same index on the CPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from pylate_flash import indexes
from pylate_flash.index import search
from pylate_flash.indexes import Flat

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("free", [0, 1 << 40], ids=["streamed", "resident"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_search_equals_the_cpu(tmp_path: Path, dtype: str, free: int) -> None:
    # Small integers: every type and every order of summation gives the same scores, and many are equal.
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 60, (200,), generator=generator).tolist()
    documents = [torch.randint(-1, 2, (length, 64), generator=generator).float() for length in lengths]
    queries = [torch.randint(-1, 2, (length, 64), generator=generator).float() for length in (32, 5, 17)]
    ids = [str(i) for i in range(len(documents))]
    Flat(tmp_path, "index", dtype=dtype, device="cpu", show_progress=False).add_documents(ids[:150], documents[:150])
    with (
        mock.patch.object(indexes, "_free_memory", return_value=free),
        mock.patch.object(search, "_BLOCK_BYTES_CUDA", 1000 * 64 * 2),
    ):
        gpu = Flat(tmp_path, "index", device="cuda", show_progress=False)
        gpu(queries)
        gpu.add_documents(ids[150:], [document.cuda() for document in documents[150:]]).remove_documents(["3", "160"])
        cpu = Flat(tmp_path, "index", device="cpu", show_progress=False)
        for subset in (None, ids[20:180], [ids[:50], [], ids[100:]]):
            for scorer in ("pylate_flash", "torch"):
                gpu.scorer = scorer
                assert gpu(queries, k=30, subset=subset) == cpu(queries, k=30, subset=subset)
        assert (gpu._store.kept_on.type == "cuda") == bool(free)
        assert (gpu._store.bytes_to_copy(gpu.device) == 0) == bool(free)
