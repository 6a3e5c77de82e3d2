"""The page *Rollouts*: the completions of one iteration, filtered and page by page, and their download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, RedirectResponse
from starlette.background import BackgroundTask

from plugins.pages.arriving import ArrivingPage
from plugins.pages.iteration_rows import IterationRows
from plugins.pages.render import Pages, link
from plugins.pages.rollout_query import PAGE_ROWS, STATUSES, RolloutQuery, iteration_of, read_query
from plugins.pages.run_source import PageRun
from plugins.pages.token_colours import signed_kind
from stages.redaction import Redactor
from storage.layout import Split
from storage.rollout_queries import Order, RolloutFilter, Row, matching_batches, page_of_rows, summary
from storage.rollout_schema import FinishReason

_EXCERPT_CHARS: Final = 240
"""Length to which texts are cut in the list."""

_WHOLE_CHARS: Final = 10_000_000
"""Length to which no text comes."""


def routes(pages: Pages) -> APIRouter:
    """Return the routes of this page."""
    router = APIRouter()

    @router.get("/dags/{dag_id}/rollouts", name="rollouts")
    def rollouts(request: Request, dag_id: str) -> ArrivingPage:
        redactor, named, query = pages.redactor(), pages.source.named(dag_id), read_query(request.query_params)
        regions = dict.fromkeys([*named.entry.regions, *([query.region] if query.region else [])])
        return pages.page(
            request, "rollouts", lambda: _facts(pages, pages.source.find(named), query, redactor), run=named,
            heading="Rollouts", query=query, orders=list(Order), statuses=STATUSES, finishes=list(FinishReason),
            splits=list(Split), regions=list(regions),
        )  # fmt: skip

    @router.get("/dags/{dag_id}/rollouts.parquet", name="download")
    def download(request: Request, dag_id: str) -> FileResponse:
        redactor, query = pages.redactor(), read_query(request.query_params)
        run = pages.source.find(pages.source.named(dag_id))
        wanted = _wanted(run, query, redactor)
        file = write_rows(pages.rows, run, wanted, query.order, redactor)
        name = f"{run.name}-{wanted.split.value}-{wanted.iteration}.parquet"
        return FileResponse(
            file, media_type="application/vnd.apache.parquet", filename=name, background=BackgroundTask(file.unlink)
        )

    @router.get("/dags/{dag_id}/dag_runs/{dag_run_id}/rollouts", name="dag_run_rollouts")
    def of_dag_run(request: Request, dag_id: str, dag_run_id: str) -> RedirectResponse:
        run = pages.source.named(dag_id)
        iteration = pages.access.iteration_of(run.dag_id, dag_run_id)
        return RedirectResponse(link(request, "rollouts", {"iteration": iteration}, dag_id=dag_id))

    return router


def _facts(pages: Pages, run: PageRun, query: RolloutQuery, redactor: Redactor | None) -> dict[str, Any]:
    wanted = _wanted(run, query, redactor)
    start = (query.page - 1) * PAGE_ROWS
    # A text is redacted whole: half a secret at the end of an excerpt could not be told from a harmless word.
    chars = _EXCERPT_CHARS if redactor is None else _WHOLE_CHARS
    with pages.rows.opened(run, wanted.split, wanted.iteration) as connection:
        found = summary(connection, wanted)
        rows = page_of_rows(connection, wanted, query.order, offset=start, limit=PAGE_ROWS, chars=chars)
    if redactor is not None:
        rows = [_excerpt(redactor.row(row)) for row in rows]
    num_pages = max(1, -(-found.matching // PAGE_ROWS))
    return {"wanted": wanted, "found": found, "rows": rows, "num_pages": num_pages, "signed_kind": signed_kind}


def _wanted(run: PageRun, query: RolloutQuery, redactor: Redactor | None) -> RolloutFilter:
    """Return the filter that a query asks for; raises `PageError` where there are no rollouts."""
    iteration = iteration_of(query.iteration, run, query.split)
    run.check_rollouts(iteration, query.split)
    return query.filter(iteration, is_text_hidden=redactor is not None)


def _excerpt(row: Row) -> Row:
    """Return a row of the list with its texts cut short."""
    cut = {name: (row[name] or "")[:_EXCERPT_CHARS] for name in ("prompt_text", "completion_text")}
    return {**row, **cut}


def write_rows(
    rows: IterationRows, run: PageRun, wanted: RolloutFilter, order: Order, redactor: Redactor | None = None
) -> Path:
    """Write the rows that a filter asks for, with every column, to a temporary Parquet file; the caller deletes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.NamedTemporaryFile(prefix="motley-", suffix=".parquet", delete=False) as target:
        file = Path(target.name)
    try:
        with rows.opened(run, wanted.split, wanted.iteration) as connection:
            schema, batches = matching_batches(connection, wanted, order)
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for batch in batches:
                    table = pa.Table.from_batches([batch])
                    writer.write_table(table if redactor is None else redactor.table(table).cast(schema))
    except BaseException:
        file.unlink()
        raise
    return file
