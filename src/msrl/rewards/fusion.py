"""Client of a remote SandboxFusion server (bytedance.github.io/SandboxFusion).

Each input is one `POST URL/run_code`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msrl.http_requests import Server, post_json
from msrl.rewards.sandbox import Case, Limits, Status

_STATUS: dict[str, Status] = {"Finished": "ok", "TimeLimitExceeded": "timeout", "Error": "error"}


def run(
    url: str, program: str, inputs: Sequence[str], limits: Limits, *, stop: bool = False
) -> tuple[Case, ...]:
    """Run a program once per input, as `sandbox.run` does.

    Raises:
        RemoteError: The server does not respond, or reports an internal error.
    """
    end = time.monotonic() + limits.total_s
    cases: list[Case] = []
    for text in inputs:
        remaining_s = end - time.monotonic()
        if remaining_s > 0:
            cases.append(_run_case(url, program, text, limits, remaining_s))
        else:
            cases.append(Case("timeout", ""))
        if stop and cases[-1].status != "ok":
            break
    return tuple(cases)


def _run_case(url: str, program: str, text: str, limits: Limits, remaining_s: float) -> Case:
    job = {
        "code": program,
        "language": "python",
        "stdin": text,
        "run_timeout": limits.case_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    server = Server(f"{url.rstrip('/')}/run_code", timeout_s=remaining_s + limits.case_s)
    answer, _ = post_json(server, job)
    result = _run_result(answer)
    if result is None:
        raise server.error(f"the sandbox failed: {str(answer)[:300]}", "error")
    status = _STATUS.get(str(result.get("status")), "error")
    if status == "ok" and result.get("return_code") != 0:
        status = "error"
    return Case(status, str(result.get("stdout") or ""), str(result.get("stderr") or "")[-4000:])


def _run_result(answer: Any) -> dict[str, Any] | None:
    """Return the result of a run, or None if the server failed."""
    if not isinstance(answer, dict) or answer.get("status") == "SandboxError":
        return None
    result = answer.get("run_result")
    return result if isinstance(result, dict) else None
