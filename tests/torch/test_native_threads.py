"""What an item of native work throws: it comes out of the call that ran it, and leaves the threads as they were."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHO = ("nobody", "leader", "other", "both", "nobody")


def _compiler():
    for command in (os.environ.get("CXX", "c++"), "g++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    pytest.skip("no C++ compiler was found")


def test_what_an_item_throws_on_any_thread_comes_out_of_its_job_and_the_next_job_runs(tmp_path):
    program = tmp_path / "threads"
    sources = (Path(__file__).with_name("threads_that_throw.cpp"), ROOT / "native" / "threads.cpp")
    command = [*_compiler(), "-std=c++17", "-O0", "-fopenmp", f"-I{ROOT / 'native'}", *map(str, sources)]
    built = subprocess.run([*command, "-o", str(program), "-ldl"], check=False, capture_output=True, text=True)
    if built.returncode and "openmp" in built.stderr.lower():
        pytest.skip("the compiler has no OpenMP runtime that could lend its threads")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)
    if ran.returncode == 3:
        pytest.skip("the compiler's OpenMP runtime lends no second thread")
    runtime, team, again = ([f"{where}, {who}: right" for who in WHO] for where in ("runtime", "team", "again"))
    assert ran.stdout.splitlines() == [*runtime, *team, "out of the team", *again], ran.stderr
    assert ran.returncode == 0
