"""The operations of LoRA adapters, which administrators offer."""

from __future__ import annotations

from millrace.gateway.openapi.operation import TEXT, get, post
from millrace.schemas.models.adapters import (
    AdapterList,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)

ADAPTERS = (
    get(
        "/v1/adapters",
        "listAdapters",
        "All LoRA adapters, for administrators",
        AdapterList,
    ),
    post(
        "/v1/load_lora_adapter",
        "loadLoraAdapter",
        "Offer a LoRA adapter, for administrators",
        TEXT,
        body=LoadLoraAdapterRequest,
        example={"lora_name": "sql", "lora_path": "/srv/adapters/sql"},
        own_errors=(404, 409, 500),
    ),
    post(
        "/v1/unload_lora_adapter",
        "unloadLoraAdapter",
        "Offer a LoRA adapter no more, for administrators; what runs with it goes on",
        TEXT,
        body=UnloadLoraAdapterRequest,
        example={"lora_name": "sql"},
        own_errors=(404,),
    ),
)
