"""`motley export RUN --to DIR`: a policy version as a model directory, or as the PEFT adapter that it is."""

from __future__ import annotations

import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.deployment import HomeOption, JsonOption, home_of
from cli.errors import InputError
from cli.output import Output
from cli.run_control import RunArgument
from cli.run_lookup import FoundRun, find_run
from storage.adapter_policies import base_of, prove_adapter
from storage.policies import Policy, resolve_policy
from storage.policy_fetch import fetch_policy

app = typer.Typer()


class PolicyForm(StrEnum):
    """What is written."""

    MODEL = "model"
    ADAPTER = "adapter"


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder that is made; it must not exist.")],
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; default the newest committed.")] = None,
    form: Annotated[
        PolicyForm,
        typer.Option("--form", help="model: whole weights; adapter: a LoRA version as PEFT has it, exactly."),
    ] = PolicyForm.MODEL,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Write a policy version in Hugging Face format; an adapter is added to its base's weights unless asked for alone.

    Example: motley export quickstart --to /data/model, then AutoModelForCausalLM.from_pretrained("/data/model").
    """
    output, found = Output(is_json=json), find_run(run, home_of(home))
    policy = resolve_policy(found.store, found.name, version)
    text = export_policy(found, policy, to, form)
    facts = {"run": found.name, "version": policy.version, "folder": str(to), "form": form.value}
    output.result(facts, f"Policy version {policy.version} of run {found.name} {text} {to}.")


def export_policy(found: FoundRun, policy: Policy, to: Path, form: PolicyForm) -> str:
    """Write a version; return in words what was written. The folder appears complete or not at all.

    Raises:
        InputError: the folder exists, or the version is no adapter.
        CorruptObjectError: what is stored is damaged.
    """
    if to.exists():
        raise InputError(f"--to {to} exists already; name a folder that does not.")
    if form is PolicyForm.ADAPTER and policy.adapter is None:
        raise InputError(
            f"Policy version {policy.version} of run {found.name} has whole weights and is no adapter; export it with "
            "--form model."
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".motley-export-", dir=to.parent) as place:
        folder = Path(place)
        own = fetch_policy([found.store], policy, folder / "own").local
        made, text = own.folder, "is written to"
        if policy.adapter is not None:
            prove_adapter(own)
            base = policy.adapter.base_version
            text = f"is written as an adapter on version {base} (export that with --version {base}) to"
        if policy.adapter is not None and form is PolicyForm.MODEL:
            made, text = _merged(found, policy, folder)
        shutil.move(made, to)
    return text


def _merged(found: FoundRun, policy: Policy, folder: Path) -> tuple[Path, str]:
    from stages.adapter_merge import merge_adapter  # numpy

    base = fetch_policy([found.store], base_of(found.store, policy), folder / "base").local
    facts = merge_adapter(base.folder, folder / "own", folder / "merged")
    share = facts.num_changed / max(facts.num_elements, 1)
    below = f"version {base.policy.version}"
    text = f"is added to {below}, which changed {share:.1%} of {facts.num_elements} adapted weights, and written to"
    return folder / "merged", text
