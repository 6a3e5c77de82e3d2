from __future__ import annotations

from pathlib import Path

import pytest

from stages.errors import ContractError
from stages.settings import DeploymentSettings, read_settings, settings_file

TEXT = """
format: motley.settings/1
alerts:
  notifiers:
    - call: airflow.providers.smtp.notifications.smtp.SmtpNotifier
      with: {to: team@example.org, subject: "{{ alert.kind }}"}
  min_free_gb: 20
redaction: {call: our_company.redaction.clean}
"""


def test_settings_come_from_the_home_or_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    home = {"MOTLEY_HOME": str(tmp_path)}
    assert settings_file(home) is None
    assert read_settings(home) == DeploymentSettings()

    (tmp_path / "settings.yaml").write_text(TEXT)
    found = read_settings(home)
    assert found.alerts.notifiers[0].arguments == {"to": "team@example.org", "subject": "{{ alert.kind }}"}
    assert (found.alerts.min_free_gb, found.redaction and found.redaction.call) == (20, "our_company.redaction.clean")

    other = tmp_path / "other.yaml"
    other.write_text("alerts: {repeat_s: 5}")
    assert read_settings({**home, "MOTLEY_SETTINGS": str(other)}).alerts.repeat_s == 5


def test_settings_that_can_not_be_used_are_never_taken_for_none(tmp_path: Path) -> None:
    """Else what was to be hidden would be shown."""
    with pytest.raises(ContractError, match=r"gone\.yaml, can't be read: No such file.*correct MOTLEY_SETTINGS"):
        read_settings({"MOTLEY_SETTINGS": str(tmp_path / "gone.yaml")})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alerts: [", "is no YAML"),
        ("redact: {}", "redact: Extra inputs"),
        ("alerts: {notifiers: [{call: Smtp}], repeat_s: 0}", "alerts.notifiers.0.call: .*alerts.repeat_s: "),
        ("redaction: {call: 'os.system(1)'}", "redaction.call: "),
        ("[1]", "document: "),
    ],
)
def test_faults_are_said_together_with_the_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ContractError, match=words) as refused:
        read_settings({"MOTLEY_HOME": str(tmp_path)})
    assert str(file) in str(refused.value)
