"""``millrace bench``: its arguments, and what it does with them."""
