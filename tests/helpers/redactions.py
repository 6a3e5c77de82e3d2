"""Functions that settings of tests name for redaction."""

from __future__ import annotations


def hide_answer(text: str, column: str) -> str:
    """Hide the word that pages of `page_runs` spell as a token, wherever it is."""
    return text.replace("answer", f"[hidden in {column}]")


def hide_sums(text: str, column: str) -> str:
    """Hide prompts with a sum."""
    return "hidden" if column == "prompt_text" and "+" in text else text
