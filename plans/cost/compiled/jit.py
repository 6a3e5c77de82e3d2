"""How the functions of this package become machine code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from plans.errors import SearchError

try:
    from numba import njit
    from numba.core import event
    from numba.extending import intrinsic
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
    try:
        made: Any = njit(cache=True, error_model="numpy")(function)
        if made is not function:
            made._cache._cache_file._source_stamp = _STAMP  # numba has no public way to say it
        return cast("FunctionT", made)
    except RuntimeError:  # numba found no folder for its cache
        return cast("FunctionT", njit(error_model="numpy")(function))


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
    takes longer than the arithmetic.
    """

    def lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401 - numba's types
        view = context.make_array(signature.args[0])(context, builder, args[0])
        view.meminfo, view.parent = view.meminfo.type(None), view.parent.type(None)  # null: there is nothing to count
        return view._getvalue()

    return array(array), lowered


def _itself(array: Any) -> Any:  # noqa: ANN401 - stands for `_borrowed` where nothing is compiled
    return array


# Where somebody debugs, numba's settings turn compiling off: `njit` then gives back what it is given.
borrowed: Callable[[Any], Any] = _itself if njit(_itself) is _itself else intrinsic(_borrowed)
