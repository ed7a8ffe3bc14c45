"""Sentences in place of images and other content that no model here reads."""

from __future__ import annotations

import msgspec

_NAMES = {
    "audio": "An audio clip",
    "document": "A document",
    "file": "A file",
    "image": "An image",
    "image_url": "An image",
    "input_audio": "An audio clip",
    "input_file": "A file",
    "input_image": "An image",
    "video_url": "A video",
}


def sentence_for(kind: str) -> str:
    """Return the sentence that replaces content of the type ``kind``."""
    return f"[{_NAMES.get(kind, 'Content')} was here. This model reads text only.]"


class UnreadPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Part of an item of the Responses API that no model here reads. The model reads ``text`` in
    its place; the part's own fields are ignored."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def text(self) -> str:
        return f"\n{sentence_for(self.kind)}\n"


class InputImage(UnreadPart, frozen=True, kw_only=True, tag="input_image"):
    """Image in the history. The model reads a sentence in its place."""


class InputFile(UnreadPart, frozen=True, kw_only=True, tag="input_file"):
    """File in the history. The model reads a sentence in its place."""


class InputAudio(UnreadPart, frozen=True, kw_only=True, tag="input_audio"):
    """Audio clip in the history. The model reads a sentence in its place."""
