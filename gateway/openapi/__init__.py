"""The gateway's contract as an OpenAPI document."""
