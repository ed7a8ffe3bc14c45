"""Why a row has no token."""

from __future__ import annotations

from millrace.schemas.errors import MillraceError


class NoTokenAllowedError(MillraceError, code="no_token_allowed", http_status=400):
    """Everything is forbidden that could come next."""

    def __init__(self, token_index: int) -> None:
        super().__init__(
            f"Nothing may come as token {token_index} of the completion: bad_words, min_tokens, "
            f"logit_bias, allowed_token_ids and the grammar together forbid every token. Ask for "
            f"less of them."
        )
        self.token_index = token_index
