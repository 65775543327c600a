"""Speed and memory of postgrad beside TRL, and how both grow: see docs/benchmarks.md and docs/scaling.md."""
