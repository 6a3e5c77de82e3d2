"""A layout of one task with what it costs alone."""

from __future__ import annotations

from dataclasses import dataclass

from plans.search.layouts import Recipe, TaskLayout


@dataclass(frozen=True, slots=True)
class RankedLayout:
    """A layout, not built before somebody chooses it."""

    seconds: float
    """Seconds of the task."""
    share: float
    """Largest share of a GPU's usable memory that its model fills."""
    recipe: Recipe
    """The recipe that it came from."""
    gpus: tuple[int, ...]
    """GPU of each tasklet."""

    @property
    def layout(self) -> TaskLayout:
        """The layout."""
        return self.on(self.gpus)

    def on(self, gpus: tuple[int, ...]) -> TaskLayout:
        """Return the layout on other GPUs, as many of them."""
        pp, tp = self.recipe.pp, self.recipe.tp
        return TaskLayout(len(gpus) // (pp * tp), pp, tp, gpus, recipe=self.recipe)
