"""`settings.yaml` of a deployment: whom it tells of alarms, and what it hides before rollouts leave it.

Written by whoever runs the deployment, never by the author of a job: it names Python classes and functions that are
imported. Each process that needs it reads it anew, so a change is in force at once.

```yaml
format: motley.settings/1
alerts:
  notifiers:
    - call: airflow.providers.smtp.notifications.smtp.SmtpNotifier
      with: {to: team@example.org, subject: "Motley: {{ alert.kind }}", html_content: "{{ alert.sentence }}"}
redaction:
  call: our_company.redaction.clean
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.errors import ContractError
from stages.home import MotleyHome

SETTINGS_VARIABLE: Final = "MOTLEY_SETTINGS"
"""Environment variable that names the file; absent means `settings.yaml` in the home, which need not exist."""

DOTTED_PATH: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"
"""A module and a name in it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class NotifierSettings(_Section):
    """One of Airflow's notifiers."""

    call: str = Field(pattern=DOTTED_PATH)
    """Class, a subclass of `airflow.sdk.BaseNotifier`."""
    arguments: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Its keyword arguments. Those that the class renders as templates see the alert as `alert` (`storage.alerts`).
    Passwords belong in an Airflow connection that an argument names."""


class AlertSettings(_Section):
    """Who is told, and from when on."""

    notifiers: tuple[NotifierSettings, ...] = ()
    """All of them are told; without any, an alert is a line in the task's log and an event of the run."""
    repeat_s: float = Field(default=86_400.0, gt=0)
    """Seconds after which a matter that goes on is told again."""
    min_free_gb: float = Field(default=2.0, ge=0)
    """Free space, GB, of the disks under the control machine's state and the run's local store below which there is an
    alarm."""


class RedactionSettings(_Section):
    """What is hidden before rollouts are shown or exported."""

    call: str = Field(pattern=DOTTED_PATH)
    """Function of a text and the name of its column that returns what may be seen of the text."""


class DeploymentSettings(_Section):
    """The document."""

    format: Literal["motley.settings/1"] = "motley.settings/1"
    alerts: AlertSettings = AlertSettings()
    """Alerts."""
    redaction: RedactionSettings | None = None
    """Redaction; null shows everything."""


def settings_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file that a process with this environment reads; None if there is none."""
    if named := environment.get(SETTINGS_VARIABLE):
        return Path(named).expanduser().absolute()
    file = MotleyHome.from_environment(environment).settings_file
    return file if file.exists() else None


def read_settings(environment: Mapping[str, str]) -> DeploymentSettings:
    """Return the settings of the deployment to which a process with this environment belongs.

    Raises:
        ContractError: the file can't be used; names every fault. Nothing is assumed in its place: what was to be
            hidden would be shown.
    """
    file = settings_file(environment)
    return DeploymentSettings() if file is None else load_settings(file)


def load_settings(file: Path) -> DeploymentSettings:
    """Return the settings that a file holds. Raises `ContractError` with every fault."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(
            f"settings of the deployment, {file}, can't be read: {error.strerror}; correct {SETTINGS_VARIABLE} or "
            "restore the file."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ContractError(f"{file} is no YAML: {' '.join(str(error).split())}; correct it.") from error
    try:
        return DeploymentSettings.model_validate(document or {})
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}" for fault in error.errors()
        )
        raise ContractError(f"{file} can't be used: {faults}; correct it.") from error
