"""The operations of the Conversations API, and of what front ends keep of conversations."""

from __future__ import annotations

from millrace.gateway.api.kept.chats import MAX_PAGE_CHATS
from millrace.gateway.openapi.operation import ORDER, delete, get, page, post
from millrace.schemas.chat.chats import (
    Chat,
    ChatDeleted,
    ChatInfo,
    ChatList,
    ChatUpdate,
    Conversation,
    ConversationDeleted,
    ConversationRequest,
    ConversationUpdate,
    NewItems,
)
from millrace.schemas.responses.items import Item, ItemList

_ONE = "/v1/conversations/{conversation_id}"
_HELLO = {"type": "message", "role": "user", "content": "Hello!"}

CONVERSATIONS = (
    post(
        "/v1/conversations",
        "createConversation",
        "Begin a conversation that answers are added to",
        Conversation,
        body=ConversationRequest,
        example={"items": [_HELLO], "metadata": {"topic": "mills"}},
        own_errors=(404,),
    ),
    get(_ONE, "getConversation", "A conversation without its items", Conversation),
    post(
        _ONE,
        "updateConversation",
        "Give a conversation other metadata",
        Conversation,
        body=ConversationUpdate,
        example={"metadata": {"topic": "rivers"}},
    ),
    delete(_ONE, "deleteConversation", "Forget a conversation", ConversationDeleted),
    get(
        f"{_ONE}/items",
        "listConversationItems",
        "The items of a conversation, in pages",
        ItemList,
        query=page(100, ORDER),
    ),
    post(
        f"{_ONE}/items",
        "createConversationItems",
        "Add items to a conversation",
        ItemList,
        body=NewItems,
        example={"items": [_HELLO]},
    ),
    get(
        f"{_ONE}/items/{{item_id}}",
        "getConversationItem",
        "An item of a conversation",
        Item,
    ),
    delete(
        f"{_ONE}/items/{{item_id}}",
        "deleteConversationItem",
        "Forget an item of a conversation",
        Conversation,
    ),
)

_CHAT = "/v1/chats/{chat_id}"

CHATS = (
    get(
        "/v1/chats",
        "listChats",
        "The tenant's chats, the last changed first, in pages",
        ChatList,
        query=page(MAX_PAGE_CHATS),
    ),
    get(_CHAT, "getChat", "A chat with its document", Chat),
    post(
        _CHAT,
        "putChat",
        "Keep a new chat, or another revision of it",
        ChatInfo,
        body=ChatUpdate,
        example={"revision": 0, "title": "Mills", "document": {"turns": []}},
        own_errors=(409,),
    ),
    delete(_CHAT, "deleteChat", "Forget a chat", ChatDeleted),
)
