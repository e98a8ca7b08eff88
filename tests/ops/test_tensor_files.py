"""Tensor containers as files: bitwise round trips, atomic writes, and other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pylate_flash import QuantizedEmbeddings, ResidualCodes, pack, quantize
from pylate_flash.ops import tensor_files
from pylate_flash.ops.quantization import PRECISIONS
from pylate_flash.ops.tensor_files import TensorContainer
from tests.ops.residual_cases import residual_codes

NUMBERS = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
TOKENS, BOUNDS = pack([NUMBERS[0, :3], NUMBERS[1, :0], NUMBERS[2, :2]])


def views(precision: str) -> QuantizedEmbeddings:
    """Embeddings that are views of larger tensors, which safetensors does not take as they are."""
    full = quantize(NUMBERS, precision)
    offsets = None if full.offsets is None else full.offsets[:, :3]
    return QuantizedEmbeddings(full.values[:, :3], full.scales[:, :3], offsets)


CONTAINERS = {
    **{precision: quantize(TOKENS, precision, cu_seqlens=BOUNDS) for precision in PRECISIONS},
    **{f"{precision}, views": views(precision) for precision in PRECISIONS},
    **{f"{n} bits": residual_codes([3, 0, 2], 8, n, torch.bfloat16, seed=1) for n in (2, 4)},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "documents.safetensors"


@pytest.mark.parametrize("name", CONTAINERS)
def test_saved_and_loaded_to_the_bit(name: str, path: Path) -> None:
    container = CONTAINERS[name]
    for _ in range(2):
        container.save(path)
    result = type(container).load(path)
    assert result.nbytes == container.nbytes
    for field, tensor in vars(container).items():
        read = getattr(result, field)
        assert (read is None) == (tensor is None)
        if tensor is not None:
            assert read.dtype == tensor.dtype
            assert torch.equal(read.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert os.listdir(path.parent) == [path.name]


def test_a_write_that_fails_leaves_the_file_before_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CONTAINERS["int8"].save(path)
    before = path.read_bytes()

    def half(tensors: dict, name: str, metadata: dict) -> None:
        Path(name).write_bytes(before[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        CONTAINERS["uint8"].save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("container", "what"), [(CONTAINERS["int8"], "quantized embeddings"), (CONTAINERS["4 bits"], "residual codes")]
)
def test_other_files_are_refused(container: TensorContainer, what: str, path: Path) -> None:
    container.save(path)
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path.name} holds no {what}"):
            type(container).load(path)
    save_file({"values": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="its metadata are None"):
        type(container).load(path)
    with pytest.raises(FileNotFoundError):
        type(container).load(path.with_name("missing"))


def test_codes_without_a_centroid_are_refused(path: Path) -> None:
    """They would index memory beyond the centroids."""
    documents = residual_codes([3], 8, 4)
    object.__setattr__(documents, "codes", documents.codes + 7)
    documents.save(path)
    with pytest.raises(ValueError, match="holds no residual codes: codes must be from 0 to 6"):
        ResidualCodes.load(path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe holds no .*: it is a pipe"):
        QuantizedEmbeddings.load(tmp_path / "pipe")


def test_permissions_and_links_are_those_of_before(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    quantized = quantize(torch.ones(1, 2, 4))
    quantized.save(link)
    target.chmod(0o640)
    quantized.save(link)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640


def test_tensors_of_other_names_are_named(tmp_path: Path) -> None:
    quantized = quantize(torch.ones(1, 2, 4))
    for tensors in ({"values": quantized.values}, {**quantized._tensors(), "more": torch.ones(1)}):
        save_file(tensors, tmp_path / "file", metadata=QuantizedEmbeddings._metadata())
        with pytest.raises(ValueError, match="its tensors are .*, expected values, scales, offsets, cu_seqlens"):
            QuantizedEmbeddings.load(tmp_path / "file")
