"""Templates to answers: one environment, everything escaped, every address below the place where the pages hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from plugins.pages.access import Access
from plugins.pages.run_source import RunSource
from plugins.pages.token_texts import TokenTexts
from stages.redaction import Redactor, deployed_redactor

FOLDER: Final = Path(__file__).parent


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
        lstrip_blocks=True,
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
    redactor: Callable[[], Redactor | None] = deployed_redactor
    """Returns what hides texts, by the settings as they are now; raises `ContractError`, and nothing is shown."""

    def render(
        self,
        request: Request,
        template: str,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        **facts: Any,  # noqa: ANN401 - facts of a template
    ) -> HTMLResponse:
        """Return a page.

        Args:
            request: The request, for addresses.
            template: File name of the template.
            status: Status of the answer.
            facts: What the template shows; `run` is None on pages about no run.
        """

        def address(name: str, query: Mapping[str, Any] | None = None, **parts: Any) -> str:  # noqa: ANN401 - path parts
            return link(request, name, query, **parts)

        text = self.templates.get_template(template).render(link=address, **facts)
        return HTMLResponse(text, status_code=status)


def link(request: Request, name: str, query: Mapping[str, Any] | None = None, /, **parts: Any) -> str:  # noqa: ANN401 - path parts
    """Return the address of a route, with what a query has of values that are not None or empty."""
    path = str(request.scope.get("root_path", "")) + request.app.url_path_for(name, **parts)
    wanted = {key: value for key, value in (query or {}).items() if value is not None and value != ""}
    return f"{path}?{urlencode(wanted)}" if wanted else path
