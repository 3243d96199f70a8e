"""The compiled kernels as a loaded library. No torch here: `coterie doctor` asks for them too."""

from __future__ import annotations

import ctypes

from expert_pool.kernels.build import BuildError, library_path

BEST = "native"
"""The best instruction set of this processor."""


def load_library() -> ctypes.CDLL:
    """The library of the present sources. Raises BuildError where there is none or it is broken."""
    try:
        path = library_path()
    except OSError as error:
        raise BuildError(f"the sources of the native expert kernels are gone: {error}") from error
    if not path.is_file():
        raise BuildError(
            "the native expert kernels are not built, or from other sources than these: "
            "run make kernels (it needs a C++ compiler)"
        )
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"the native expert kernels do not load: {error}; run make kernels"
        ) from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.coterie_kernels.argtypes = [ctypes.c_char_p]
    library.coterie_kernels.restype = ctypes.c_void_p
    library.coterie_kernels_name.argtypes = [ctypes.c_void_p]
    library.coterie_kernels_name.restype = ctypes.c_char_p


def find_kernels(library: ctypes.CDLL, name: str) -> int:
    """Address of the kernels of an instruction set. Raises BuildError where it cannot run here."""
    address = library.coterie_kernels(name.encode())
    if not address:
        raise BuildError(f"this processor has no {name} kernels; use kernel native or torch")
    return int(address)


def instructions(name: str = BEST) -> str:
    """What the kernels called `name` use here: "avx512_bf16", "avx2" or "generic"."""
    library = load_library()
    found: bytes = library.coterie_kernels_name(find_kernels(library, name))
    return found.decode()
