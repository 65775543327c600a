"""Runs code that nobody trusts: programs against hidden tests, and a Python interpreter. Imports nothing of postgrad but `errors`.

isolation (is there a sandbox, and may code run without one) · bubblewrap, seccomp, limits (what confines) · guest (a confined process) ·
examination (hidden tests) · interpreter (cells) · inside/ (what runs in the sandbox)
"""

from postgrad.sandbox.isolation import Isolation, SandboxError, allow_unsafe_exec, isolation, problem
from postgrad.sandbox.limits import Limits

__all__ = ["Isolation", "Limits", "SandboxError", "allow_unsafe_exec", "isolation", "problem"]
