"""From a request to its worst case, in tokens. What a token costs in bytes is in `k3/cache/layout.py`.

Admission reserves the worst case of a request, so an allocation in mid-flight cannot fail.
Golden: helix/capacity.json, helix/admission.json.
"""

from __future__ import annotations

from decode_svc.ledger import Ledger


def worst_len(prompt_len: int, max_tokens: int, draft_tokens: int, in_flight: int) -> int:
    """Tokens for which a request must hold pages.

    in_flight: steps launched before the last result is known (depth - 1). The first output token comes from prefill;
    the last one is never written.
    """
    if max_tokens <= 1:
        return prompt_len
    return prompt_len + max_tokens - 2 + (in_flight + 1) * (draft_tokens + 1)


def table_width(ledger: Ledger, max_model_len: int, draft_tokens: int, in_flight: int) -> int:
    """Columns of the page table: the worst case of the longest request."""
    return max(1, ledger.pages(max_model_len - 2 + (in_flight + 1) * (draft_tokens + 1)))
