"""Named tuples of arrays as words in memory, which compiled functions read at an address.

A call that is given twenty arrays begins late, and hands some 170 words down to every function that it calls: slow, and
slow to compile. An address is one word. Field by field, the words hold the address and the sizes of an array, a whole
number, or the words of another named tuple. Fields are declared as `Annotated[<array>, <dimensions>]`, `int` or the
named tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import as_dtype

from plans.cost.compiled.jit import COMPILES
from plans.cost.compiled.tables import IntArray

#: Bytes of a word, and of an element of every array.
WORD_BYTES = 8


class Words(types.Type):
    """The address of the words of a named tuple; `fields`: first word and type of each field; `dtypes`: of arrays."""

    def __init__(self, kind: type) -> None:
        """Place the fields one after the other."""
        super().__init__(name=f"Words({kind.__module__}.{kind.__qualname__})")
        self.fields: dict[str, tuple[int, Any]] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.size = 0
        for name, hint in get_type_hints(kind, include_extras=True).items():
            field = _type_of(hint)
            self.fields[name] = (self.size, field)
            self.size += _num_words(field)
            if isinstance(field, types.Array):
                self.dtypes[name] = as_dtype(field.dtype)


words_type = lru_cache(Words)


def _type_of(hint: Any) -> Any:  # noqa: ANN401 - a declared type
    if hint is int:
        return types.int64
    if get_origin(hint) is Annotated:
        array, ndim = get_args(hint)
        (scalar,) = get_args(get_args(array)[1])
        return types.Array(from_dtype(np.dtype(scalar)), ndim, "C")
    return words_type(hint)


def _num_words(field: Any) -> int:  # noqa: ANN401 - numba's types
    if isinstance(field, Words):
        return field.size
    return 1 + field.ndim if isinstance(field, types.Array) else 1


def words_of(values: Any) -> IntArray:  # noqa: ANN401 - a named tuple
    """Return the words of a named tuple, which has to outlive them; where nothing is compiled, the tuple itself."""
    return np.array(_words_in(values), dtype=np.int64) if COMPILES else values


def _words_in(values: Any) -> list[int]:  # noqa: ANN401 - a named tuple
    words: list[int] = []
    kind = words_type(type(values))
    for value, (name, (_, field)) in zip(values, kind.fields.items(), strict=True):
        dtype = kind.dtypes.get(name)
        if dtype is not None:
            if value.dtype != dtype or value.ndim != field.ndim:
                raise TypeError(f"{name}: {value.dtype} with {value.ndim} dimensions; declared is {field}.")
            if not value.flags.c_contiguous:
                raise TypeError(f"{name}: its elements do not lie one after the other; copy the array.")
            words += [value.ctypes.data, *value.shape]
        elif isinstance(field, Words):
            words += _words_in(value)
        else:
            words.append(value)
    return words


def reader_of(kind: type) -> Callable[[IntArray], Any]:
    """Return the function by which compiled code reads the words of a named tuple: by the names of its fields."""

    def at_words(_context: Any, words: Any) -> Any:  # noqa: ANN401 - numba's types
        def lowered(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401 - numba's types
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.bitcast(array.data, cgutils.voidptr_t)

        return words_type(kind)(words), lowered

    found: Callable[[IntArray], Any] = intrinsic(at_words) if COMPILES else lambda words: words
    return found


register_model(Words)(models.OpaqueModel)


@infer_getattr
class _Fields(AttributeTemplate):
    """Types of the fields."""

    key = Words

    def generic_resolve(self, words: Words, name: str) -> Any:  # noqa: ANN401 - numba's types
        """Return the type of a field; None where there is no such field."""
        return words.fields.get(name, (0, None))[1]


@lower_getattr_generic(Words)
def _read_field(context: Any, builder: Any, words: Words, address: Any, name: str) -> Any:  # noqa: ANN401 - numba's types
    """Return a field: a number, the address of its words, or an array whose references nobody counts."""
    first, field = words.fields[name]
    slot = builder.gep(address, [cgutils.intp_t(first * WORD_BYTES)])
    if isinstance(field, Words):
        return slot
    if not isinstance(field, types.Array):
        return _load(builder, slot, 0, context.get_value_type(field))
    shape = [_load(builder, slot, 1 + axis, cgutils.intp_t) for axis in range(field.ndim)]
    strides = [cgutils.intp_t(WORD_BYTES)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    array = context.make_array(field)(context, builder)
    data = _load(builder, slot, 0, array.data.type)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=WORD_BYTES, meminfo=None)
    return array._getvalue()


def _load(builder: Any, slot: Any, word: int, kind: Any) -> Any:  # noqa: ANN401 - llvmlite's types
    """Return a word, which nothing changes during a call."""
    address = builder.gep(slot, [cgutils.intp_t(word * WORD_BYTES)])
    found = builder.load(builder.bitcast(address, kind.as_pointer()))
    found.set_metadata("invariant.load", builder.module.add_metadata([]))
    return found
