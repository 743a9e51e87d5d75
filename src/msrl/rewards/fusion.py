"""A remote sandbox that speaks SandboxFusion's protocol (bytedance.github.io/SandboxFusion): `POST URL/run_code`, a call for each input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msrl.rewards.http import RemoteError, Server, post_json
from msrl.rewards.sandbox import Case, Limits, Status

_STATUS: dict[str, Status] = {"Finished": "ok", "TimeLimitExceeded": "timeout", "Error": "error"}


def run(url: str, program: str, inputs: Sequence[str], limits: Limits, *, stop: bool = False) -> tuple[Case, ...]:
    """As `sandbox.run`. Raises RemoteError when the server gives no answer, or reports that it is itself at fault."""
    end, cases = time.monotonic() + limits.total_s, list[Case]()
    for text in inputs:
        remaining = end - time.monotonic()
        cases.append(_run_one(url, program, text, limits, remaining) if remaining > 0 else Case("timeout", ""))
        if stop and cases[-1].status != "ok":
            break
    return tuple(cases)


def _run_one(url: str, program: str, text: str, limits: Limits, remaining_s: float) -> Case:
    job = {
        "code": program,
        "language": "python",
        "stdin": text,
        "run_timeout": limits.case_s,
        "memory_limit_MB": limits.memory_bytes >> 20,
    }
    server = Server(f"{url.rstrip('/')}/run_code", timeout_s=remaining_s + limits.case_s)
    answer, _ = post_json(server, job)
    if not isinstance(answer, dict) or answer.get("status") == "SandboxError" or not isinstance(answer.get("run_result"), dict):
        raise RemoteError(f"{server.url}: the sandbox failed: {str(answer)[:300]}", "error")
    result: dict[str, Any] = answer["run_result"]
    status = _STATUS.get(str(result.get("status")), "error")
    if status == "ok" and result.get("return_code") != 0:
        status = "error"
    return Case(status, str(result.get("stdout") or ""), str(result.get("stderr") or "")[-4000:])
