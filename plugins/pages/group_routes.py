"""One prompt with all its completions, token by token, alone or beside the same prompt in another iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plugins.pages.arriving import ArrivingPage
from plugins.pages.faults import PageError
from plugins.pages.render import Pages
from plugins.pages.rollout_query import iteration_of
from plugins.pages.run_source import PageRun
from plugins.pages.text_diff import Piece, diff
from plugins.pages.token_colours import Colour, Token, signed_kind, tokens_of
from stages.redaction import Redactor
from storage.layout import Split
from storage.prompt_search import iterations_with_prompt
from storage.rollout_queries import Row, first_prompt, group_rows


class GroupQuery(BaseModel):
    """The query of an address about one prompt."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    iteration: int | None = Field(default=None, ge=0, le=10**9)
    """RL iteration; absent is the newest one that is committed."""
    split: Split = Split.TRAIN
    """Train or eval."""
    prompt: str | None = Field(default=None, max_length=1000)
    """Prompt id; absent is the prompt with the lowest mean reward."""
    other: int | None = Field(default=None, ge=0, le=10**9)
    """Iteration to put beside it."""
    colour: Colour = Colour.SAMPLER
    """What the colour of a token says."""
    find: bool = False
    """Whether to look which other iterations have the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A completion, with its tokens, and the one of the same number in another iteration."""

    row: Row
    """All columns."""
    tokens: list[Token]
    """Tokens in their colours."""
    other: Row | None
    """The other iteration's completion, if there is one."""
    pieces: list[Piece]
    """What differs from it; empty without one."""


def routes(pages: Pages) -> APIRouter:
    """Return the routes of this page."""
    router = APIRouter()

    @router.get("/dags/{dag_id}/group", name="group")
    def group(request: Request, dag_id: str) -> ArrivingPage:
        redactor = pages.redactor()
        named, query = pages.source.named(dag_id), _read(request.query_params)
        heading = "Prompt with the lowest mean reward" if query.prompt is None else f"Prompt {query.prompt}"

        def facts() -> dict[str, Any]:
            return _facts(pages, pages.source.find(named), query, redactor)

        return pages.page(request, "group", facts, run=named, heading=heading, query=query)

    return router


def _facts(pages: Pages, run: PageRun, query: GroupQuery, redactor: Redactor | None) -> dict[str, Any]:
    iteration = iteration_of(query.iteration, run, query.split)
    run.check_rollouts(iteration, query.split)
    prompt, rows, others = _rows(pages, run, query, iteration)
    if redactor is not None:
        rows = [redactor.row(row) for row in rows]
        others = {sample: redactor.row(row) for sample, row in others.items()}
    tokenizer = pages.tokens.of_run(run)
    found = None
    if query.find:
        last = run.done + (query.split is Split.EVAL)
        found = iterations_with_prompt(
            run.rows_store, run.name, range(run.entry.first_iteration, last), query.split, prompt
        )
    return {
        "iteration": iteration, "prompt": prompt, "first": rows[0], "colours": list(Colour),
        "pairs": [_pair(row, others, tokenizer, query.colour) for row in rows], "has_texts": tokenizer is not None,
        "found": found, "signed_kind": signed_kind, "others": others,
    }  # fmt: skip


def _read(given: Mapping[str, str]) -> GroupQuery:
    try:
        return GroupQuery.model_validate({name: value for name, value in given.items() if value != ""})
    except ValidationError as error:
        faults = "; ".join(
            f"{fault['loc'][0]} is {str(fault['input'])[:60]!r}: {fault['msg']}" for fault in error.errors()
        )
        raise PageError(f"The address can't be used: {faults}.", HTTPStatus.BAD_REQUEST) from error


def _rows(pages: Pages, run: PageRun, query: GroupQuery, iteration: int) -> tuple[str, list[Row], dict[int, Row]]:
    """Return the prompt, its completions, and those of the other iteration by sample."""
    if query.other is not None:
        run.check_rollouts(query.other, query.split)
    wanted = dict.fromkeys([iteration] if query.other is None else [iteration, query.other])
    with pages.rows.opened(run, query.split, *wanted, is_listed=query.prompt is None) as connection:
        prompt = query.prompt or first_prompt(connection, iteration, query.split, is_worst=True)
        rows = [] if prompt is None else group_rows(connection, iteration, query.split, prompt)
        if prompt is None or not rows:
            raise PageError(
                f"Iteration {iteration} of run {run.name} has no prompt {query.prompt!r}; the list of its rollouts "
                "shows those there are."
            )
        others = [] if query.other is None else group_rows(connection, query.other, query.split, prompt)
    if query.other is not None and not others:
        raise PageError(f"Iteration {query.other} of run {run.name} did not sample prompt {prompt!r}.")
    return prompt, rows, {row["sample_index"]: row for row in others}


def _pair(row: Row, others: Mapping[int, Row], tokenizer: Any, colour: Colour) -> Pair:  # noqa: ANN401 - see TokenTexts
    other = others.get(row["sample_index"])
    pieces = [] if other is None else diff(row["completion_text"] or "", other["completion_text"] or "")
    return Pair(row=row, tokens=tokens_of(row, tokenizer, colour), other=other, pieces=pieces)
