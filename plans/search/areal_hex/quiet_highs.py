"""PuLP's in-process HiGHS without the banner that the solver's Python wrapper prints on standard output.

`highspy.Highs()` switches its callbacks on in the constructor, before any option can silence it, and that prints;
standard output belongs to the one JSON document of a command. The class below it has the same methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulp


def quiet_highs() -> pulp.LpSolver:
    """Return a PuLP solver object that proves optimality (no gap) and prints nothing; raises ImportError."""
    import pulp
    from highspy.highs import _Highs  # type: ignore[attr-defined]  # the base class, not exported by name

    class QuietHighs(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no type hints
        """HiGHS through its base class."""

        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802  PuLP's name
            """Make the solver silent before it can speak."""
            lp.solverModel = _Highs()
            lp.solverModel.setOptionValue("output_flag", False)
            lp.solverModel.setOptionValue("mip_rel_gap", 0.0)
            lp.solverModel.setOptionValue("threads", 1)

    return QuietHighs(msg=False)
