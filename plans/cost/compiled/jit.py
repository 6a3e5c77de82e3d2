"""How the functions of this package become machine code.

Python calls the functions marked `compiled`; those marked `inner` are parts of them. Only what Python calls is
optimised and emitted, with everything in it, once: numba would do so for every inner function as well, with all that it
calls, though nobody ever calls it alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from plans.errors import SearchError

try:
    from numba import njit, types
    from numba.core import event
    from numba.extending import intrinsic

    from plans.cost.compiled.parts import PartCompiler
except ImportError as error:
    raise SearchError("searching needs numba, which is not installed; install motley[search].") from error

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def stamp_of(folder: Path) -> str:
    """Return the SHA-256 (hex) of all compiled packages below a folder: names and contents of their sources."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*/compiled/*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


_STAMP = stamp_of(Path(__file__).parents[2])


def compiled(function: FunctionT) -> FunctionT:
    """Return the function as machine code, made at its first call and kept beside the source for later processes.

    What was kept is good for exactly these sources of all compiled functions: a caller holds the code of what it calls,
    and numba would look at the caller's own file only. Where neither the folder of the source nor the user's cache
    folder can be written, every process compiles anew.
    """
    options = {"error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        made: Any = njit(cache=True, **options)(function)
        if made is not function:
            made._cache._cache_file._source_stamp = _STAMP  # numba has no public way to say it
        return cast("FunctionT", made)
    except RuntimeError:  # numba found no folder for its cache
        return cast("FunctionT", njit(**options)(function))


def inner(function: FunctionT) -> FunctionT:
    """Return the function as a part of compiled functions; Python cannot call it."""
    part = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=PartCompiler)
    return cast("FunctionT", part(function))


@contextmanager
def told_of_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` at once when something is compiled meanwhile that no earlier process left; once at most."""
    told: list[None] = []

    def on_start(_listener: object, _event: object) -> None:
        if not told:
            told.append(None)
            tell()

    methods = {"on_start": on_start, "on_end": lambda _listener, _event: None}
    with event.install_listener("numba:compile", type("FirstCompile", (event.Listener,), methods)()):
        yield


def _borrowed(_context: Any, array: Any) -> Any:  # noqa: ANN401 - numba's types
    """Return an array without the count of its references, which whoever called keeps alive.

    Compiled functions count the references of every array that they are given, at each call; with twenty arrays that
    takes longer than the arithmetic. An array that must not be written becomes like any other: parts of compiled
    functions would be compiled once more for it.
    """

    def lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401 - numba's types
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo, view.parent = view.meminfo.type(None), view.parent.type(None)  # null: there is nothing to count
        return view._getvalue()

    return types.Array(array.dtype, array.ndim, array.layout)(array), lowered


def _itself(array: Any) -> Any:  # noqa: ANN401 - stands for `_borrowed` where nothing is compiled
    return array


#: Whether anything is compiled: numba's settings turn it off for debugging, and `njit` then gives back what it gets.
COMPILES = njit(_itself) is not _itself
borrowed: Callable[[Any], Any] = intrinsic(_borrowed) if COMPILES else _itself
