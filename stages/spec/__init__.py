"""The job file's execution sections: typed, frozen, light to import (no engine, no torch)."""
