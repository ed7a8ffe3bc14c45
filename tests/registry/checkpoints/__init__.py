"""Tests of a checkpoint's metadata, which is read before its weights."""
