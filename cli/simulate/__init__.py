"""``millrace simulate``: its arguments, and what it does with them."""
