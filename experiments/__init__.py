"""Command-line entry points: parse flags, build, call."""
