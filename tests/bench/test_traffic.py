"""The expected loads and stores of kernels, and the parser of a profiler's table."""

from __future__ import annotations

import os
import re

import pytest
import torch

import traffic
from pylate_flash.kernels import plan, tables
from pylate_flash.kernels.backward import gather, lists, sums
from pylate_flash.problem import Options, Tensors, problem_of

# Output of `ncu --csv --page raw --print-units base`: messages, names, units, and a line for each launch.
COLUMNS = ('"ID"', '"Kernel Name"', *(f'"{metric}"' for metric in traffic.METRICS))
PRINTED = "\n".join(
    [
        "==PROF== Connected to process 7",
        "what the process prints",
        ",".join(COLUMNS),
        '"","","byte","byte","byte","sector","sector"',
        '"0","_sort_kernel","1,500","2,000","3","10","20"',
        '"1","_sort_kernel","500","1,000","1","30","40"',
        '"2","_sum_kernel","7","8","9","1,000","2"',
        "==PROF== Disconnected from process 7",
    ]
)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))


def problem(shape, dtype=torch.bfloat16):
    tensors = [
        torch.empty(size, dtype=dtype) for size in ((shape.Nq, shape.Lq, shape.d), (shape.Nd, shape.Ld, shape.d))
    ]
    return problem_of(Tensors(*tensors), Options(), shape.backward)


@pytest.mark.parametrize("shape", traffic.SHAPES, ids=lambda shape: shape.name)
def test_every_shape_is_counted(shape):
    """No kernel reads less than its inputs, or loads less than it reads."""
    random = torch.Generator().manual_seed(0)
    argmax = torch.randint(0, shape.Ld, (shape.Nd, shape.Nq * shape.Lq), generator=random) if shape.backward else None
    result = traffic.expected(problem(shape), argmax)
    inputs = 2 * shape.d * (shape.Nq * shape.Lq + shape.Nd * shape.Ld)
    assert result["_hopper_kernel"].read == inputs
    assert ("_sum_kernel" in result) == shape.backward
    for kernel, counted in result.items():
        assert counted.loaded >= counted.read > 0, kernel
        assert counted.stored >= counted.written > 0, kernel
    if shape.backward:
        # One bfloat16 row of a winner for each pair is a lower bound of what is gathered, and of what is summed.
        pairs = argmax.numel() * 2 * shape.d
        assert pairs < result["_gather_kernel"].loaded < 1.1 * pairs
        assert pairs < result["_sum_kernel"].loaded < 1.1 * pairs


def test_a_tail_is_not_loaded_as_a_whole_tile():
    rows, Nd = 300 * 32, 40
    for Ld, tokens in ((128, 128), (130, 128 + 16), (150, 128 + 32), (170, 192)):
        shape = traffic.Shape("", 300, Nd, 32, Ld, backward=False)
        chosen = plan.forward_plan(problem(shape))
        loaded = traffic.expected(problem(shape))["_hopper_kernel"].loaded
        assert loaded == 2 * 128 * (chosen.n_runs * rows + chosen.row_blocks * Nd * tokens)


def test_what_is_not_counted_is_an_error():
    for n, d, kernel in ((2, 256, "stacked"), (4, 256, "hopper"), (4, 128, "hopper")):
        with pytest.raises(ValueError, match=f"got one of the kernel '{kernel}' in torch.float32"):
            traffic.expected(problem(traffic.Shape("", n, 64, 32, 100, False, d), torch.float32))
    few = traffic.Shape("", 1, 2000, 128, 100, backward=True)
    with pytest.raises(ValueError, match="programs share"):
        traffic.expected(problem(few), torch.zeros(2000, 128, dtype=torch.long))
    listed_alone = traffic.Shape("", 16, 40, 32, 100, backward=True)
    with pytest.raises(ValueError, match="several programs sort"):
        traffic.expected(problem(listed_alone), torch.zeros(40, 512, dtype=torch.long))


def test_the_table_of_a_profile():
    result = traffic.parse(PRINTED)
    assert result == {
        "_sort_kernel": {
            "launches": 2, "memory_read": 2000, "memory_written": 3000, "l2_all": 4, "l2_read": 1280,
            "l2_written": 1920,
        },
        "_sum_kernel": {
            "launches": 1, "memory_read": 7, "memory_written": 8, "l2_all": 9, "l2_read": 32000, "l2_written": 64,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "must print a table, got: ==ERROR== ERR_NVGPUCTRPERM"),
        (PRINTED.replace('"1,500"', '"n/a"'), "must measure dram__bytes_read.sum by byte, got 'n/a'"),
        (PRINTED.replace('"byte"', '"Mbyte"'), "must measure dram__bytes_read.sum by byte, got '1,500' 'Mbyte'"),
    ],
)
def test_a_profile_that_lacks_something_is_an_error(printed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        traffic.parse(printed)


def test_the_profiler_gets_the_script_and_its_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "table").write_text(PRINTED, encoding="utf-8")
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {tmp_path}/table\n', encoding="utf-8")
    ncu.chmod(0o755)
    assert traffic.profiler() == str(ncu)
    assert traffic.measure(traffic.SHAPES[0]).keys() == {"_sort_kernel", "_sum_kernel"}
    arguments = (tmp_path / "arguments").read_text(encoding="utf-8")
    assert ",".join(traffic.METRICS) in arguments
    assert arguments.rstrip().endswith(f"traffic.py --profiled {traffic.SHAPES[0].name}")
    (kernels,) = re.findall(r"regex:(\S+)", arguments)
    for launched in (
        gather._gather_kernel,
        lists._sort_kernel,
        lists._scan_kernel,
        lists._place_kernel,
        sums._sum_kernel,
        sums._combine_kernel,
    ):
        assert re.search(kernels, launched.function.__name__)
    ncu.write_text("#!/bin/sh\necho no permission\nexit 9\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"failed \(9\): no permission"):
        traffic.measure(traffic.SHAPES[0])


def test_a_profiler_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    pattern = str(tmp_path / "version-*" / "ncu")
    with pytest.raises(FileNotFoundError, match="must be on PATH or in one of"):
        traffic.profiler((pattern,))
    for version in ("2025.1", "2025.3"):
        (tmp_path / f"version-{version}").mkdir()
        (tmp_path / f"version-{version}" / "ncu").touch()
    assert traffic.profiler((pattern,)) == str(tmp_path / "version-2025.3" / "ncu")


def test_a_shape_is_compared_with_what_was_measured(monkeypatch):
    shape = traffic.Shape("small", 40, 12, 32, 150, backward=True)
    argmax = torch.randint(0, 150, (12, 40 * 32))
    monkeypatch.setattr(traffic, "maxsim_forward", lambda problem, tensors: (None, argmax))
    names = ["_hopper_kernel", "_gather_kernel", "_sort_kernel", "_scan_kernel", "_place_kernel", "_sum_kernel"]
    monkeypatch.setattr(
        traffic, "measure", lambda shape: {name: {"launches": 1} for name in [*names, "_combine_kernel"]}
    )
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 10))
    result = traffic.compare(shape, torch.device("cpu"))
    assert result["shape"] == "40 x 12, 32 x 150"
    assert result["kernels"]["_combine_kernel"]["expected"] is None
    assert result["kernels"]["_sum_kernel"]["expected"]["loaded"] > 0
    monkeypatch.setattr(traffic, "measure", lambda shape: {name: {} for name in names[:-1]})
    with pytest.raises(RuntimeError, match="saw no launch of _sum_kernel"):
        traffic.compare(shape, torch.device("cpu"))
