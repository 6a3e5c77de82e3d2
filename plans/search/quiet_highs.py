"""PuLP's in-process HiGHS without the banner that the solver's Python wrapper prints on standard output.

`highspy.Highs()` switches its callbacks on in the constructor, before any option can silence it, and that prints;
standard output belongs to the one JSON document of a command. The class below it has the same methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pulp


def quiet_highs(
    *, is_relaxed: bool = False, gap_fraction: float = 0.0, time_limit_s: float | None = None
) -> pulp.LpSolver:
    """Return a PuLP solver object on one thread that prints nothing.

    Args:
        is_relaxed: Ignore that variables are integers.
        gap_fraction: Relative gap at which a solution counts as optimal.
        time_limit_s: Seconds; None = no limit.

    Raises:
        ImportError: PuLP or highspy is not installed.
    """
    import pulp
    from highspy.highs import _Highs  # type: ignore[attr-defined]  # the base class, not exported by name

    options: dict[str, bool | float | int] = {
        "output_flag": False,
        "mip_rel_gap": gap_fraction,
        "mip_abs_gap": 1e-9,
        "threads": 1,
    }
    if time_limit_s is not None:
        options["time_limit"] = time_limit_s

    class QuietHighs(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no type hints
        """HiGHS through its base class."""

        def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802  PuLP's name
            """Make the solver silent before it can speak."""
            lp.solverModel = _Highs()
            for name, value in options.items():
                lp.solverModel.setOptionValue(name, value)

    return QuietHighs(mip=not is_relaxed, msg=False)
