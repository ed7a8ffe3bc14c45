"""Bus contract for programs outside Millrace: an AsyncAPI document."""
