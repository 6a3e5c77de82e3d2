"""Templates to answers: one environment, everything escaped, every address below the place where the pages hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plugins.pages.access import Access
from plugins.pages.arriving import PATIENCE_S, ArrivingPage
from plugins.pages.faults import PageError
from plugins.pages.iteration_rows import IterationRows
from plugins.pages.run_source import NamedRun, RunSource
from plugins.pages.token_texts import TokenTexts
from stages.redaction import Redactor, deployed_redactor

FOLDER: Final = Path(__file__).parent

_END: Final = "</main>\n</body>\n</html>\n"
"""End of the frame that `start.html` begins."""


def number(value: float | None) -> str:
    """Return a number as a person reads it: whole ones whole, fractions with four significant digits, none as a dash.

    >>> number(0.123456), number(1200), number(None)
    ('0.1235', '1,200', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def moment(value: datetime | None) -> str:
    """Return a time in UTC, to the second; a dash for none."""
    return "-" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= {"number": number, "moment": moment}
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """What all routes share."""

    source: RunSource
    """The runs."""
    access: Access
    """What Airflow allows and knows."""
    tokens: TokenTexts = field(default_factory=TokenTexts)
    """Tokenizers."""
    templates: Environment = field(default_factory=_environment)
    """Templates."""
    rows: IterationRows = field(default_factory=IterationRows)
    """Rows of iterations."""
    redactor: Callable[[], Redactor | None] = deployed_redactor
    """Returns what hides texts, by the settings as they are now; raises `ContractError`, and nothing is shown."""
    patience_s: float = PATIENCE_S
    """How long a page waits for its facts before it is sent without them."""

    def page(
        self,
        request: Request,
        page: str,
        facts: Callable[[], Mapping[str, Any]],
        *,
        heading: str,
        run: NamedRun | None = None,
        **early: Any,  # noqa: ANN401 - facts of a template
    ) -> ArrivingPage:
        """Return a page: a frame that is known at once, and content that needs facts.

        Args:
            request: The request, for addresses.
            page: Name of the page: its content is the template of that name; a template `<name>_start.html` takes the
                place of the frame.
            facts: Returns what the content shows; runs in a thread, may read stores, may raise a `PageError`.
            heading: The page's heading.
            run: Run that the page is about.
            early: What the frame shows besides; the content may show it too.
        """
        shown = {"link": address_of(request), "run": run, "page": page, "heading": heading, **early}
        return ArrivingPage(
            start=self.templates.select_template([f"{page}_start.html", "start.html"]).render(shown),
            waiting=self.templates.get_template("waiting.html").render(shown),
            content=lambda: self.templates.get_template(f"{page}.html").render({**shown, **facts()}),
            sentence=lambda error: self._sentence(str(error)),
            end=_END,
            patience_s=self.patience_s,
        )

    def error(self, request: Request, error: PageError) -> HTMLResponse:
        """Return the page that says why another one can't be shown."""
        shown = {"link": address_of(request), "run": None, "page": "error", "heading": error.status.phrase}
        start = self.templates.get_template("start.html").render(shown)
        return HTMLResponse(start + self._sentence(str(error)) + _END, status_code=error.status)

    def _sentence(self, sentence: str) -> str:
        return self.templates.get_template("error.html").render(sentence=sentence)


def address_of(request: Request) -> Callable[..., str]:
    """Return the function with which templates make addresses: :func:`link` for a request."""
    return partial(link, request)


def link(request: Request, name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:  # noqa: ANN401 - path parts
    """Return the address of a route, with what a query has of values that are not None or empty."""
    path = str(request.scope.get("root_path", "")) + request.app.url_path_for(name, **parts)
    wanted = {key: value for key, value in (query or {}).items() if value is not None and value != ""}
    return f"{path}?{urlencode(wanted)}" if wanted else path
