"""Parts of compiled functions: typed and lowered once, optimised and emitted where they are used only.

numba makes a library of machine code of every function, with all that the function calls in it, and links it into every
caller, where everything is optimised once more. With eighty functions that call each other ten deep that is most of
the compiling. A part's library holds its own code only, untouched; who calls it links it and whatever it needs.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import NativeLowering


class _PartLibrary(JITCodeLibrary):
    """Code for callers to link."""

    def finalize(self) -> None:
        """Leave everything to the callers."""
        self._finalized = True

    def with_needs(self) -> list[Any]:
        """Return the library and those that its code needs."""
        return list(dict.fromkeys([self, *self._linking_libraries]))


@register_pass(mutates_CFG=False, analysis_only=False)
class _OfferPart(LoweringPass):
    """Make a part known to its callers."""

    _name = "offer_part"

    def __init__(self) -> None:
        """Nothing to keep."""
        super().__init__()

    def run_pass(self, state: Any) -> bool:  # noqa: ANN401 - numba's types
        """Register the part under a function of its own, by which numba knows it and which Python would call.

        numba takes functions of C only. This one fails with a KeyError that says what the matter is.
        """
        refuse = f"{{{state.func_id.func_name} is a part of compiled functions; Python cannot call it}}".format
        state.targetctx.insert_user_function(refuse, state["cr"].fndesc, state.library.with_needs())
        state["cr"] = state["cr"]._replace(cfunc=refuse)
        return False


class PartCompiler(CompilerBase):
    """Compiles as numba does, up to the code that callers link."""

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes with a library of our own."""
        state = self.state
        state.flags.no_compile = True
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.add_pass_after(_OfferPart, NativeLowering)
        passes.finalize()
        return [passes]
