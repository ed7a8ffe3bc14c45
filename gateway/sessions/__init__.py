"""Conversations that are kept between requests."""
