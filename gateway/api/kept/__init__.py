"""Answers and conversations that are kept, and the endpoints over them."""
