"""Tokens that are proposed before they are drawn: what proposes them, how many, and what becomes of
them. A proposed token is computed beside others; what is drawn is the same with it and without."""
