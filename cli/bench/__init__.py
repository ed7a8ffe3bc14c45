"""``millrace bench``: its arguments and its calls of ``bench``. Imports ``bench``."""
