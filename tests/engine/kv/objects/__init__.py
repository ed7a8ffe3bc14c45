"""Blocks in object stores: in memory, in a folder, and behind a real S3 server."""
