"""Makes `sample_verifiers` importable here and, through the inherited path, in the verifier processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
