"""Followers of calls while these are being written, one for each way to write them. Called by the
parser; imports the types of arguments and nothing else of the registry."""
