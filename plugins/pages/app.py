"""The pages as one FastAPI application: every route behind a guard, errors as sentences, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException as RoutingException

from plans.errors import PlanningError
from plugins.pages import cluster_routes, group_routes, plan_routes, rollout_routes, run_routes
from plugins.pages.access import Access
from plugins.pages.arriving import PATIENCE_S
from plugins.pages.faults import PageError, page_error
from plugins.pages.render import FOLDER, Pages
from plugins.pages.run_source import RunSource
from stages.errors import StageError
from stages.home import MotleyHome
from storage.errors import StorageError

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
_STATIC: Final = {"pages.css": "text/css", "pages.js": "text/javascript"}


def deployed_app(environment: Mapping[str, str]) -> FastAPI:
    """Return the pages of the deployment that an environment names, guarded by this process's Airflow."""
    from plugins.pages.airflow_access import airflow_access
    from plugins.store_connections import store_options

    return build_app(RunSource(MotleyHome.from_environment(environment), store_options), airflow_access())


def build_app(source: RunSource, access: Access, patience_s: float = PATIENCE_S) -> FastAPI:
    """Return the application.

    Args:
        source: Where runs are found.
        access: Who may see what.
        patience_s: How long a page waits for its facts before it is sent without them.
    """
    pages = Pages(source=source, access=access, patience_s=patience_s)
    app = FastAPI(title="Motley pages", docs_url=None, redoc_url=None, openapi_url=None)
    about_a_run = APIRouter(dependencies=[Depends(access.may_see_run)])
    for module in (run_routes, rollout_routes, group_routes, plan_routes):
        about_a_run.include_router(module.routes(pages))
    app.include_router(about_a_run)
    app.include_router(cluster_routes.routes(pages), dependencies=[Depends(access.may_see_cluster)])
    app.include_router(_static_routes(), dependencies=[Depends(access.is_signed_in)])
    app.middleware("http")(_with_headers)
    _add_error_pages(app, pages)
    return app


def _static_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/static/{file}", name="static")
    def static(file: str) -> FileResponse:
        if file not in _STATIC:
            raise PageError(f"There is no file {file!r}.")
        headers = {"Cache-Control": "max-age=300"}
        return FileResponse(FOLDER / "static" / file, media_type=_STATIC[file], headers=headers)

    return router


async def _with_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "private, no-store")
    return response


def _add_error_pages(app: FastAPI, pages: Pages) -> None:
    shown = pages.error

    def refused(request: Request, error: Exception) -> Response:
        """Send a person who is not signed in to where that is done, and come back."""
        status = HTTPStatus(getattr(error, "status_code", HTTPStatus.NOT_FOUND))
        if status is HTTPStatus.UNAUTHORIZED:
            if "text/html" in request.headers.get("accept", ""):
                back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(pages.access.login_url(back), HTTPStatus.FOUND)
            return PlainTextResponse("Sign in to Airflow to see this page.\n", HTTPStatus.UNAUTHORIZED)
        sentences = {
            HTTPStatus.FORBIDDEN: "Your Airflow account may not see this; ask an administrator for access to the DAG.",
            HTTPStatus.NOT_FOUND: "There is no such page.",
        }
        if status is HTTPStatus.FORBIDDEN:  # an account without rights gets no page of ours at all
            return PlainTextResponse(sentences[status] + "\n", status)
        return shown(request, PageError(sentences.get(status, f"{getattr(error, 'detail', status.phrase)}."), status))

    def unreadable(request: Request, error: Exception) -> Response:
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        said = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in faults)
        return shown(request, PageError(f"The address can't be read ({said}).", HTTPStatus.BAD_REQUEST))

    def below(request: Request, error: Exception) -> Response:
        found = page_error(error)
        if found is None:
            raise error
        return shown(request, found)

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RoutingException, refused)
    app.add_exception_handler(RequestValidationError, unreadable)
    for kind in (PageError, StorageError, PlanningError, StageError):
        app.add_exception_handler(kind, below)
