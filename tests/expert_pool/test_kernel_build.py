"""How the native kernels are built, and what happens where they cannot be."""

import ctypes
import platform
import shutil
import sys

import pytest

from expert_pool.kernels import build as building
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.library import open_kernels
from tests.expert_pool.native_layers import kernels_or_skip


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """An environment without a library, and kernels that are opened anew."""
    monkeypatch.setattr(building, "folder", lambda: tmp_path)
    open_kernels.cache_clear()
    yield tmp_path
    open_kernels.cache_clear()


def compiler_or_skip():
    if not shutil.which("g++"):
        pytest.skip("no g++")


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_unknown_instructions_are_refused():
    kernels_or_skip()
    with pytest.raises(BuildError, match="sse9"):
        open_kernels("sse9")


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "folder", lambda: tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        building.build()
    monkeypatch.setattr(sys, "argv", ["build", "--optional"])
    with pytest.raises(SystemExit) as ended:
        building.main()
    assert ended.value.code == 0


def test_a_library_of_other_sources_is_not_loaded(monkeypatch):
    monkeypatch.setattr(building, "fingerprint", lambda: "other")
    open_kernels.cache_clear()
    with pytest.raises(BuildError, match="make kernels"):
        open_kernels()
    open_kernels.cache_clear()


def test_a_compiler_that_is_badly_quoted_is_no_reason_to_fail(elsewhere, monkeypatch, capsys):
    monkeypatch.setenv("CXX", 'g++ "')
    monkeypatch.setattr(sys, "argv", ["build", "--optional"])
    with pytest.raises(SystemExit) as ended:
        building.main()
    assert ended.value.code == 0
    assert "$CXX" in capsys.readouterr().err


def test_a_compiler_that_fails_says_why_and_leaves_nothing(elsewhere, monkeypatch):
    # Not all compilers speak UTF-8.
    monkeypatch.setenv("CXX", script(elsewhere / "cxx", "printf 'bad \\377 flag' >&2; exit 1"))
    with pytest.raises(BuildError, match=r"bad .* flag"):
        building.build()
    assert [path.name for path in elsewhere.iterdir()] == ["cxx"]


def test_a_compiler_that_does_not_know_the_newest_instructions_goes_without(elsewhere, monkeypatch):
    compiler_or_skip()
    old = 'case "$*" in *avx512bf16*) echo unknown >&2; exit 1;; esac; exec g++ "$@" -O0'
    monkeypatch.setenv("CXX", script(elsewhere / "cxx", old))
    building.build()
    assert open_kernels("generic").name == "generic"
    assert open_kernels("native").name in ("avx2", "generic")


@pytest.mark.parametrize("content", [b"", b"not a library", None])
def test_a_library_that_is_broken_is_an_error_that_says_what_to_do(elsewhere, content):
    if content is None:
        # A whole one of something else.
        compiler_or_skip()
        source = elsewhere / "empty.cpp"
        source.write_text("int nothing;")
        target = str(building.library_path())
        building._run(["g++", "-shared", "-fPIC", str(source), "-o", target])
    else:
        building.library_path().write_bytes(content)
    with pytest.raises(BuildError, match="make kernels"):
        open_kernels()


def test_make_kernels_compiles_again_what_is_broken(elsewhere, monkeypatch):
    compiler_or_skip()
    path = building.library_path()
    path.write_bytes(b"broken")
    assert building.build() == path and path.read_bytes() == b"broken"
    monkeypatch.setenv("CXX", script(elsewhere / "cxx", 'exec g++ "$@" -O0'))
    monkeypatch.setattr(sys, "argv", ["build"])
    building.main()
    assert ctypes.CDLL(str(path)).coterie_kernels_name


@pytest.mark.parametrize("source", ["avx2", "avx512_bf16", "dispatch", "generic"])
def test_the_sources_compile_without_warnings(source):
    compiler_or_skip()
    path = building.SOURCES / f"{source}.cpp"
    here = platform.machine() == "x86_64"
    flags = building._X86_FLAGS.get(path.name, ()) if here else ()
    warnings = ("-Wall", "-Wextra", "-Wno-psabi", "-Werror")
    building._run(["g++", "-std=c++17", *flags, *warnings, "-fsyntax-only", str(path)])


def test_what_an_editor_leaves_beside_the_sources_is_no_source(monkeypatch, tmp_path):
    copied = tmp_path / "native"
    shutil.copytree(building.SOURCES, copied)
    monkeypatch.setattr(building, "SOURCES", copied)
    before = building.fingerprint()
    (copied / ".tiles.h.swp").write_text("")
    (copied / "tiles.h~").write_text("")
    assert building.fingerprint() == before
    (copied / "tiles.h").write_text("")
    assert building.fingerprint() != before


def test_without_sources_the_kernels_are_not_there(elsewhere, monkeypatch):
    monkeypatch.setattr(building, "SOURCES", elsewhere / "gone")
    with pytest.raises(BuildError, match="sources"):
        open_kernels()
    with pytest.raises(BuildError, match="gone"):
        building.build()


def test_an_environment_that_cannot_be_written_says_so(elsewhere, monkeypatch):
    compiler_or_skip()
    (elsewhere / "file").write_text("")
    monkeypatch.setattr(building, "folder", lambda: elsewhere / "file" / "coterie")
    with pytest.raises(BuildError, match=r"cannot write the kernels to .*file"):
        building.build()
