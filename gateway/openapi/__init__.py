"""OpenAPI document of the gateway."""
