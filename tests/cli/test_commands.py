from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pylate_flash import __version__, indexes
from pylate_flash.cli import doctor
from pylate_flash.cli.common import UserError
from pylate_flash.cli.common import command as tidily
from pylate_flash.cli.files import check_file, writable_folder
from tests.cli.commands import assert_one_clear_sentence, invoke, succeed

COMMANDS = ("demo", "train", "mine", "evaluate", "index", "search", "bench", "doctor")


def test_help_names_every_command_and_every_command_explains_itself():
    overview = succeed("--help")
    for command in COMMANDS:
        assert command in overview
        assert "--help" in succeed(command, "--help") or command == "doctor"


def imported(*arguments):
    """Heavy libraries that a command imports, in a fresh process; the command must exit with 0."""
    code = (
        "import sys; from typer.testing import CliRunner; from pylate_flash.cli import app; "
        f"result = CliRunner().invoke(app, {arguments!r}); assert result.exit_code == 0, result.output; "
        f"print(*({{'torch', 'transformers', 'sentence_transformers', 'pylate', 'datasets'}} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return process.stdout.split()


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("train", "-h")])
def test_help_and_version_import_nothing_heavy(arguments):
    assert imported(*arguments) == []


def test_help_is_printed_where_the_locale_is_ascii():
    """Characters that stdout cannot encode are escaped, except surrogate-escaped bytes, which are written unchanged."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code = "from pylate_flash.cli import main; main()"
    run = [sys.executable, "-c", code, "bench", "--help"]
    process = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
    assert r"\u2022 forward: scores" in process.stdout
    code = "from pylate_flash.cli.common import print_any_text; print_any_text(); print('caf\\udcc3\\udca9 \\u2022')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert process.stdout == b"caf\xc3\xa9 \\u2022\n"


def test_a_command_ends_without_collecting_garbage():
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "from pylate_flash.cli import main; main()"
    )
    process = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"pylate-flash {__version__}", "True"]


def test_what_a_library_says_as_it_is_unloaded_stays_off_the_terminal():
    """For example the leak reports of nanobind bindings, Triton's included."""
    code = (
        "import ctypes; libc = ctypes.CDLL(None); libc.strdup.restype = ctypes.c_void_p; "
        "text = ctypes.c_void_p(libc.strdup(b'leaked')); "
        "libc.__cxa_atexit(ctypes.cast(libc.perror, ctypes.c_void_p), text, None); "
        "from pylate_flash.cli import main; main()"
    )
    process = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert (process.stdout, process.stderr) == (f"pylate-flash {__version__}\n", "")


def test_doctor_imports_torch_alone():
    assert imported("doctor") == ["torch"]


def test_loading_a_model_imports_little_more_than_pylate_does(pylate):
    """Slow imports that a single command needs, such as ranx or matplotlib, are deferred to that command."""
    code = (
        "import sys; import pylate.models; before = set(sys.modules); "
        "from pylate_flash import indexes, models, retrieve; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(process.stdout.split()) <= {"pylate", "pylate_flash", "packaging", "filelock", "safetensors"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["doctor", "--help"]], ids=" ".join)
def test_a_full_disk_behind_help_and_version_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        call = [sys.executable, "-m", "pylate_flash", *arguments]
        process = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert process.returncode == 2
    assert process.stderr.splitlines() == ["pylate-flash: reading or writing failed: No space left on device"]


@pytest.mark.parametrize("printing", ["print('x')", "Console().print('x')"], ids=["print", "rich"])
def test_output_that_is_not_read_to_its_end_has_an_exit_code_of_its_own(printing):
    """As by `head`: not the code of a failed check, and without a word on standard error."""
    code = (
        "from rich.console import Console; from pylate_flash import cli; "
        f"cli.app.command('write')(cli.command(lambda: [{printing} for _ in range(100_000)] and None)); cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "write"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"x\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(120) == 141


def test_help_that_nobody_reads_has_the_same_exit_code():
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-m", "pylate_flash", "train", "--help"]
    process = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


def test_version():
    assert succeed("--version") == f"pylate-flash {__version__}\n"


def test_train_evaluate_search(output, tiny_colbert_path, tmp_path):
    trained, index, record = tmp_path / "trained", tmp_path / "index", tmp_path / "metrics.json"
    printed = succeed(
        *("train", "--data", output / "data" / "train.jsonl", "--model", tiny_colbert_path, "--output", trained),
        *("--batch-size", 8, "--max-steps", 2, "--lr", "1e-3", "--temperature", "0.5", "--device", "cpu"),
    )
    assert "32 lines (query, positive), contrastive loss, scorer pylate_flash, cpu" in printed
    assert json.loads((trained / "config_sentence_transformers.json").read_text())["scorer"] == "pylate_flash"

    printed = succeed(
        *("evaluate", "--data", output / "data", "--model", trained, "--compare-torch", "--index", index),
        *("--json", record, "--device", "cpu"),
    )
    metrics = json.loads(record.read_text())
    assert f"{metrics['ndcg@10']:.4f}" in printed
    assert list(metrics["timings"]) == [
        *("encode_queries", "encode_documents", "index", "search", "prepare_metrics", "metrics", "search_by_torch"),
    ]
    assert f"search by torch {metrics['timings']['search_by_torch']:.1f} s\n" in printed
    assert metrics["agreement"]["holds"]
    assert metrics["torch"]["map"] == pytest.approx(metrics["map"], abs=1e-4)
    assert {"ndcg@10", "map", "recall@100", "mrr@10"} <= metrics.keys()

    corpus = [json.loads(line) for line in (output / "data" / "corpus.jsonl").read_text().splitlines()]
    printed = succeed(
        "search", corpus[0]["text"], "--index", index, "--model", trained, "--data", output / "data", "-k", 2
    )
    results = [line.split("\t") for line in printed.splitlines()]
    assert [rank for rank, *_ in results] == ["1", "2"]
    assert {id_ for _, _, id_, _ in results} <= {document["_id"] for document in corpus}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it computes on a GPU")
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_scorer_that_cannot_compute_here_is_one_sentence(command, beir, pairs, tiny_colbert_path, tmp_path):
    arguments = ("--data", pairs, "--output", tmp_path / "out") if command == "train" else ("--data", beir)
    result = invoke(command, *arguments, "--model", tiny_colbert_path, "--scorer", "flash")
    assert_one_clear_sentence(result, "--scorer flash cannot compute on cpu")


def test_doctor_says_what_is_here_and_what_serves_what(pylate):
    printed = succeed("doctor")
    for part in (__version__, "pylate", "1.6", "float32", "bfloat16", "blocked", "maxsim_varlen"):
        assert part in printed
    assert f"register(): PyLate {pylate.__version__} is supported" in printed


def test_doctor_says_which_hosts_are_supported(monkeypatch):
    versions = {"pylate": "1.6.0", "colpali_engine": "0.3.18"}
    monkeypatch.setattr("pylate_flash.cli.doctor._version_of", lambda module, host: versions.get(module))
    printed = " ".join(succeed("doctor").split())
    assert "register(): PyLate 1.6.0 and colpali-engine 0.3.18 are supported" in printed


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"pylate": "1.6.0"}, "PyLate loads its own models and plain encoders; a MultiVectorEncoder needs pip install"),
        (
            {"sentence_transformers": "6.2.0"},
            "sentence-transformers loads a MultiVectorEncoder, PyLate's models and plain encoders.",
        ),
        (
            {"pylate": "1.6.0", "sentence_transformers": "6.2.0"},
            "PyLate loads its own models and plain encoders, sentence-transformers loads a MultiVectorEncoder.",
        ),
        (
            {"pylate": "1.6.0", "sentence_transformers": "5.3.0"},
            "PyLate loads its own models and plain encoders; a MultiVectorEncoder needs",
        ),
        ({}, "none can be loaded"),
    ],
)
def test_doctor_says_which_library_loads_models(versions, expected, monkeypatch):
    monkeypatch.setattr("pylate_flash.cli.doctor._version_of", lambda module, host: versions.get(module))
    assert f"Models: {expected}" in " ".join(invoke("doctor").stdout.split())


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        # As in a container, which only sees its own group's folder.
        ("0::/of/the/host\n", {"cpu.max": "50000 100000"}, 1),
        ("3:cpu,cpuacct:/a\n2:pids:/\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("", {}, 4),
    ],
)
def test_doctor_counts_the_cores_that_may_be_used(groups, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 5, 7}, raising=False)
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert doctor._free_cores(tmp_path / "groups", tmp_path) == cores


def test_doctor_says_when_there_are_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(doctor, "_free_cores", lambda: 2)
    for threads, arguments, expected in (
        (2, "2", "Threads: torch uses 2, and this process may use 2 cores.\n"),
        (8, "8", "ten times slower. Set OMP_NUM_THREADS=2 instead of 8.\n"),
        (8, "", "ten times slower. Set OMP_NUM_THREADS=2, which is not set.\n"),
    ):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        monkeypatch.setenv("OMP_NUM_THREADS", arguments)
        assert expected in invoke("doctor").stdout


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    tidily(lambda: print("0.5 ± 0.1, café"))()
    assert written.getvalue() == rb"0.5 \xb1 0.1, caf\xe9" + os.linesep.encode()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals of this kind")
def test_no_word_is_broken_on_a_terminal(tmp_path):
    """At 60 columns, a path stays on one line; output that is not a terminal gets a single line."""
    import fcntl
    import termios

    folder = tmp_path / "a-folder-of-a-name-that-alone-is-longer-than-a-whole-line-of-this-narrow-terminal"
    arguments = [sys.executable, "-m", "pylate_flash", "index", "info", "--index", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    terminal, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    options = {"env": environment, "stdin": screen, "stdout": screen, "timeout": 300}
    process = subprocess.run(arguments, stderr=screen, **options)
    shown = os.read(terminal, 10_000).decode().replace("\r\n", "\n")
    piped = subprocess.run(arguments, stderr=subprocess.PIPE, **options)
    os.close(screen)
    os.close(terminal)
    assert process.returncode == piped.returncode == 2
    (line,) = piped.stderr.decode().splitlines()
    assert shown.split() == line.split()
    assert [part for part in shown.splitlines() if len(part) > 60] == [str(folder) + ";"]


@pytest.mark.parametrize("command", [*COMMANDS, "index build", "index add", "index remove"])
def test_help_breaks_no_value_of_an_option(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = succeed(*command.split(), "--help").splitlines()
    lines = [re.sub("[<>]=", "", line) for line in lines]
    assert [line for line in lines if line.startswith("│") and line.count("<") != line.count(">")] == []


def test_doctor_tries_register_if_asked(pylate, monkeypatch):
    assert "register(): works with what is installed." in succeed("doctor", "--check")
    monkeypatch.setattr(pylate, "__version__", "2.0")
    result = invoke("doctor", "--check")
    assert result.exit_code == 1
    assert "register(): does not work: " in result.stdout


@pytest.mark.parametrize(("version", "part"), [("2.0", "PyLate 2.0 is not supported"), (None, "no host is installed")])
def test_doctor_names_a_pylate_that_is_not_supported(pylate, monkeypatch, version, part):
    monkeypatch.setattr("pylate_flash.cli.doctor.installed_version", lambda name: version)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert part in result.stdout


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_bench_takes_the_options_of_the_suite(option):
    assert "--quick" in succeed("bench", option)


def test_demo_leaves_other_folders_alone(pylate, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert_one_clear_sentence(invoke("demo", "--output", tmp_path), tmp_path, "not the output of an earlier demo")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_interruption_is_tidy(pylate, monkeypatch, tmp_path):
    monkeypatch.setattr("pylate_flash.demo.job.run", fail(KeyboardInterrupt()))
    result = invoke("demo", "--output", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr == "pylate-flash: interrupted\n"


def fail(error):
    def raise_(*arguments, **options):
        raise error

    return raise_


class PanicException(BaseException):
    """As raised by Rust libraries."""


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_an_error_that_nobody_foresaw_is_one_sentence_with_a_code_of_its_own(pylate, monkeypatch, tmp_path, kind):
    monkeypatch.setattr("pylate_flash.demo.job.run", fail(kind("a\nb" + " word" * 500)))
    result = invoke("demo", "--output", tmp_path / "out")
    assert result.exit_code == 70
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"pylate-flash: unexpected {kind.__name__}: a b word")
    assert line.endswith("...; PYLATE_FLASH_TRACEBACK=1 shows where")
    assert len(line) < 500


def test_a_gpu_without_memory_is_one_sentence_in_every_command(pylate, monkeypatch, tmp_path):
    monkeypatch.setattr("pylate_flash.demo.job.run", fail(torch.OutOfMemoryError("tried to allocate 2 GiB")))
    result = invoke("demo", "--output", tmp_path / "out")
    assert_one_clear_sentence(result, "a GPU is out of memory: ", "tried to allocate 2 GiB", "--device cpu")


def test_the_traceback_of_an_error_comes_if_asked_for(pylate, monkeypatch, tmp_path):
    monkeypatch.setenv("PYLATE_FLASH_TRACEBACK", "1")
    monkeypatch.setattr("pylate_flash.demo.job.run", fail(KeyError("a")))
    result = invoke("demo", "--output", tmp_path / "out")
    assert result.exit_code == 70
    assert "Traceback (most recent call last)" in result.stderr
    result = invoke("train", "--data", "no.jsonl", "--model", "m", "--output", tmp_path / "o")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr


def test_the_installed_program_has_no_traceback_either(pylate, tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "pylate_flash", "train", "--data", "no.jsonl", "--model", "m", "--output", "o"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "pylate-flash: there is no file no.jsonl\n"


def test_what_is_written_to_standard_output_stands_between_what_is_printed(tmp_path):
    code = (
        "from pathlib import Path; from pylate_flash.cli.files import check_new_file, write_file; "
        "print('before'); path = Path('/dev/stdout'); check_new_file(path, '--json'); "
        "write_file(path, 'written\\n', '--json'); print('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nwritten\nafter\n"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == "before\nwritten\nafter\n"


def test_standard_output_is_no_file_to_be_replaced(tmp_path):
    code = (
        "from pathlib import Path; from pylate_flash.cli.files import check_new_file; "
        "check_new_file(Path('/dev/stdout'), '--output', overwrite=False)"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_takes_nothing_of_the_other(closed, tmp_path):
    flat = indexes.Flat(tmp_path, "index", device="cpu").add_documents(["a"], [torch.eye(2)])
    del flat
    arguments = [sys.executable, "-m", "pylate_flash", "index", "verify", "--index", str(tmp_path / "index")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = ["sh", "-c", f'exec "$@" {1 if closed == "stdout" else 2}>&-', "sh", *arguments]
    proc = subprocess.run(run, **streams, text=True, timeout=120)
    expected = {"stdout": f"{tmp_path / 'index'} is intact: 1 document\n"}
    expected["stderr"] = f"Loading the index in {tmp_path / 'index'} ...\n"
    assert (proc.returncode, proc.stdout, proc.stderr) == (0, *(expected[name] * (name != closed) for name in streams))


def test_a_pipe_is_a_file_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_file(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a folder; expected a file"):
        check_file(tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        check_file(tmp_path / ("a" * 300))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    error = PermissionError(13, "Permission denied", str(tmp_path / ".a-temporary-file"))
    monkeypatch.setattr("tempfile.NamedTemporaryFile", fail(error))
    with pytest.raises(UserError) as caught, writable_folder(tmp_path, "--index"):
        pass
    assert str(caught.value) == f"--index: {tmp_path} cannot be written to: Permission denied"
