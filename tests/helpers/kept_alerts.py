"""A notifier that writes what it was told to a file, and settings that name notifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from airflow.sdk import BaseNotifier


class FileNotifier(BaseNotifier):
    """Appends its rendered text, one JSON line per alert."""

    template_fields = ("text",)

    def __init__(self, *, file: str, text: str) -> None:
        super().__init__()
        self.file = file
        self.text = text

    def notify(self, context: Any) -> None:
        with Path(self.file).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([self.text, sorted(context)]) + "\n")


class BrokenNotifier(BaseNotifier):
    """Has no server."""

    def notify(self, context: Any) -> None:
        raise ConnectionError("no route to the mail server")


def write_settings(home: Path, *calls: str, repeat_s: float = 86_400.0) -> Path:
    """Write settings that tell notifiers of this module; return the file of `FileNotifier`."""
    file = home / "told.jsonl"
    arguments = {
        "FileNotifier": {"file": str(file), "text": "{{ alert.kind }} of {{ alert.run }}: {{ alert.sentence }}"}
    }
    notifiers = [{"call": f"tests.helpers.kept_alerts.{call}", "with": arguments.get(call, {})} for call in calls]
    home.mkdir(parents=True, exist_ok=True)
    document = {"format": "motley.settings/1", "alerts": {"notifiers": notifiers, "repeat_s": repeat_s}}
    (home / "settings.yaml").write_text(yaml.safe_dump(document))
    return file


def told(file: Path) -> list[str]:
    """Return the texts that were told."""
    return [json.loads(line)[0] for line in file.read_text().splitlines()] if file.exists() else []
